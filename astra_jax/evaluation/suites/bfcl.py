"""BFCL v3, multi-turn: users with one request after another, and simulators whose state is compared after every turn.

Data, simulators, tool documents and checker are those of `bfcl-eval`; its four multi-turn categories are the same in
its files of version 4. The loop between them and the model is ours (`synthesis/core/agent_loop.py`). It follows the
harness's `BaseHandler.inference_multi_turn_FC` with `OpenAICompletionsHandler`; `INFO.notes` lists the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from astra_jax.evaluation.endpoint_agent import EndpointAgent
from astra_jax.evaluation.harness import HarnessEnvironment, WorkerProcess, WorkerProgram, check_files
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Category, Decoding, EvalItem, SuiteContext, SuiteInfo
from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call

VERSION = "2026.3.23"
ENVIRONMENT = HarnessEnvironment(
    name="bfcl",
    # Of the harness's forty dependencies, what its loading, simulators, conversion of calls and checker import.
    requirements=(
        f"bfcl-eval=={VERSION}",
        "mpmath==1.3.0",
        "filelock==3.20.0",
        "tenacity==9.1.2",
        "tree-sitter==0.21.3",
        "tree-sitter-java==0.21.0",
        "tree-sitter-javascript==0.21.4",
    ),
    python=(11, 13),  # later ones have no wheels of this tree-sitter
)
CPU_SECONDS = 60
"""CPU time of one item's simulators and checker. Gold needs less than one; a power of two large integers has no
limit."""

_PAPER = Decoding(temperature=0.6, trials=4)
_CHECKS = (
    "empty_turn_model_response",
    "instance_state_mismatch",
    "execution_response_mismatch",
    "force_terminated",
    "inference_error",
)
"""Error types of the harness: the check that an entry failed first."""

INFO = SuiteInfo(
    name="bfcl_v3_mt",
    title="BFCL v3 multi-turn",
    harness=f"bfcl-eval {VERSION}",
    license="Apache-2.0",
    data_sha256={
        "data/BFCL_v4_multi_turn_base.json": "1a21a995d06fd6f20ba55de7bced30ef953ec35e998f502ec2ecf4d66ef1c43a",
        "data/BFCL_v4_multi_turn_long_context.json": "78c3268c5cc8e97c0f4ec6c811b3b9a2bba14323b1830b7a874b06d822749324",
        "data/BFCL_v4_multi_turn_miss_func.json": "87d28ce10e37d864b72de85d5732eef2a867b241d6c1c99b4ae682c9e3ea921c",
        "data/BFCL_v4_multi_turn_miss_param.json": "f0c66dda3795f5f53e3e1c0cc8ba0246b6761c8f58bdba8317203bf451ab8838",
        "data/possible_answer/BFCL_v4_multi_turn_base.json": (
            "1fee67823b317571649177dd89d63969feaae4e810cc7448ee55ba797fb7c8fc"
        ),
        "data/possible_answer/BFCL_v4_multi_turn_long_context.json": (
            "e82aa0e839c39d23c64a05834f7ae024d7c9738ec21738ecee78dc876e3d0d18"
        ),
        "data/possible_answer/BFCL_v4_multi_turn_miss_func.json": (
            "69e679b806d1c871b05393a4b95583bb973248e5b8d96c2d7f4ca05e29fc32e6"
        ),
        "data/possible_answer/BFCL_v4_multi_turn_miss_param.json": (
            "59c442901779e2c31c33abcd566d032e03736e5ad8069de2fe05489873046ecf"
        ),
        "data/multi_turn_func_doc/gorilla_file_system.json": (
            "c4c1b741c71e2a17c97a5dc9c4a91d89978c4eaece56494d14272d5df6c650e9"
        ),
        "data/multi_turn_func_doc/math_api.json": "83fa31708c89442bdcf12ac4dfbe3be8663ec9183a1b1524a9fda98164bc7e0b",
        "data/multi_turn_func_doc/message_api.json": "4d58ea933a5d2b280d7a52366617fb47fecd333d7b0e08e724db6fa12fb5f847",
        "data/multi_turn_func_doc/posting_api.json": "87f9fc404a06e4107d7c366f1399c596440e84c16cb119faf374b2f532d86e8b",
        "data/multi_turn_func_doc/ticket_api.json": "31324e0380782664fe82ba05bd23517808ad55692b45a5fe7c3d4d395fe4f0f8",
        "data/multi_turn_func_doc/trading_bot.json": "1a7933fd8f0cb8fbec38aeae05cb8c24132747cad4904fe1c13ac3d01fc22c2d",
        "data/multi_turn_func_doc/travel_booking.json": (
            "f17b950c13adddf41d0848077df58788252e4c2e7cad5cfa71c8c4bf04f57b26"
        ),
        "data/multi_turn_func_doc/vehicle_control.json": (
            "0c8a66292844874ef7b168f343bc394d8615d2d9e1f4387999a9ee23011eac78"
        ),
    },
    categories=(
        Category(name="base", title="Base", decoding=_PAPER),
        Category(name="miss_func", title="MissFunc", decoding=_PAPER),
        Category(name="miss_param", title="MissParam", decoding=_PAPER),
        Category(name="long_context", title="Long", decoding=_PAPER),
    ),
    # The others are made from the conversations of the first: entry n of each is the same user with the same wish.
    shared_questions=True,
    headline={
        "BFCL": ("base", "miss_func", "miss_param", "long_context"),
    },
    notes=(
        "The harness evaluates the text of calls, and a call's name may be any code that passes a list of eight words. "
        "Here only names of the entry's own tools and arguments that are identifiers get there, in a process locked by "
        "Landlock and seccomp; other calls are answered as unknown functions are, and counted (`refused_calls`).",
        "The harness keeps simulators in module globals by model and entry, so that a second evaluation under one name "
        "is wrong. Here each trial of each item has a process of its own.",
        "The harness puts a simulator's name before all that looks like a call of its functions, also in the text of "
        "arguments: who writes `ls (` into a file finds it altered. Left as it is.",
        "A turn ends with a message without calls, or with calls whose arguments are no JSON object: the harness then "
        "shows the model nothing. Servers refuse a call without output, so here it has one that says what was wrong.",
        "A turn cut off by `max_tokens` ends; its calls are not carried out, not even those that are complete.",
        "After 21 steps of a turn the harness stops the entry and fails it; where that is the last turn, it scores it.",
        "Function names are not checked against the turn's: a function that is still missing can be called, and the "
        "harness carries that out (the reference of miss_func_49 does so). In its current version it does not require "
        "that nothing is called in a turn that cannot be fulfilled; how often the model does abstain is `abstained`.",
        "Tool documents go over the wire as the harness compiles them, with its extra key `response`.",
        "A conversation that outgrows the model's context fails its entry, as in the harness. Any other refusal of the "
        "endpoint fails the evaluation; the harness counts it as a wrong answer.",
        f"Simulators that use more than {CPU_SECONDS} s of processor time on what the model asks for fail the entry; "
        "the harness would wait.",
        "The harness's temperature is 0.001 with one trial; the paper's is 0.6, and one run of 200 entries moves by "
        "five points, so that here four are averaged.",
    ),
)


def _of_harness(category: str) -> str:
    return f"multi_turn_{category}"


class BFCL:
    """The four multi-turn categories. Implements `Suite`."""

    info = INFO

    def __init__(self, context: SuiteContext) -> None:
        self._context = context
        self._ids: dict[str, list[str]] = {}
        self._workers: WorkerProgram | None = None

    async def prepare(self) -> None:
        interpreter = await ENVIRONMENT.make(self._context.harnesses)
        folder = interpreter.parent.parent
        packages = sorted(folder.glob("lib/python3.*/site-packages/bfcl_eval"))
        check_files(packages[0] if packages else folder, dict(INFO.data_sha256), f"remove {folder}; it is made anew")
        names = [category.name for category in INFO.categories]
        self._workers = WorkerProgram(
            interpreter,
            "bfcl.py",
            [VERSION, str(CPU_SECONDS), *map(_of_harness, names)],
            env={"TZ": "UTC"},  # simulators say local times
            log=self._context.logs / "bfcl.log",
        )
        await self._workers.start()
        async with self._workers.open() as harness:
            self._ids = {name: await harness.call("ids", category=_of_harness(name)) for name in names}

    def ids(self, category: str) -> Sequence[str]:
        return self._ids[category]

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        assert self._workers is not None, "prepare comes first"
        async with self._workers.open() as harness:
            entry = await harness.call("begin", category=_of_harness(item.category), entry=item.id)
            agent = EndpointAgent(self._context.endpoint, self._context.policy, decoding, seed=item.seed)
            run = _Run(harness, agent)
            finish = await run.through(entry["turns"], entry["steps"])
            verdict = await run.verdict(finish)
        error = str(verdict.get("error_type") or "").removeprefix("multi_turn:")
        metrics = {check: float(check == error) for check in _CHECKS}
        metrics |= {"refused_calls": float(run.refused), "undecodable_steps": float(run.undecodable)}
        if "abstained" in verdict:
            metrics["abstained"] = float(verdict["abstained"])
        metrics |= _by_turn(verdict.get("called", ()), verdict.get("able", ()))
        return ItemResult(
            suite=INFO.name,
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=float(verdict["valid"]),
            finish=finish,
            sub_tasks=len(entry["turns"]),
            steps=agent.steps,
            calls=agent.calls,
            prompt_tokens=agent.prompt_tokens,
            completion_tokens=agent.completion_tokens,
            metrics=metrics,
            problem=": ".join(filter(None, (error, verdict.get("error_message")))),
            messages=agent.messages,
        )

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()


class _TurnOver(Exception):
    """A step has calls that cannot be decoded, which ends the user's turn."""


class _Crashed(Exception):
    """The model's calls ended the process of the simulators."""


class _Run:
    """A model on one entry."""

    def __init__(self, harness: WorkerProcess, agent: EndpointAgent) -> None:
        self._harness, self._agent = harness, agent
        self._turn = 0
        self._crash = ""
        self.refused = self.undecodable = 0

    async def through(self, turns: Sequence[dict[str, Any]], steps: int) -> str:
        """Run all turns of the user. Return why the run ended."""
        agent = self._agent
        for self._turn, turn in enumerate(turns):
            agent.messages += turn["messages"]
            agent.tools = turn["tools"] or agent.tools
            try:
                finish = await run_agent(agent, self._execute, max_turns=steps)
            except _TurnOver:
                continue
            except _Crashed as crash:
                self._crash = str(crash)
                return "crashed"
            if finish == "token_limit":
                if agent.overflowed:
                    return "context_limit"
                why = "This call was cut off by the token limit and was not executed."
                await agent.observe([why] * len(_written(agent)))
            if finish == "turn_limit":
                return "step_limit"
        return "answered"

    async def verdict(self, finish: str) -> dict[str, Any]:
        """Return the harness's verdict, or its equivalent for an entry that cannot be finished."""
        if finish == "context_limit":
            return _failed("the conversation is longer than the model's context")
        if finish != "crashed":
            verdict: dict[str, Any] = await self._harness.call("score", turns=self._turn + 1)
            if "died" not in verdict:
                return verdict
            self._crash = verdict["died"]
        return _failed(self._crash)

    async def _execute(self, step: int, calls: Sequence[Call]) -> Sequence[str]:
        written = _written(self._agent)
        done = await self._harness.call("act", turn=self._turn, calls=written)
        if "died" in done:
            raise _Crashed(done["died"])
        if problem := done.get("undecodable"):
            self.undecodable += 1
            await self._agent.observe(
                [f"The step was not executed, its arguments are not a JSON object: {problem}"] * len(calls)
            )
            raise _TurnOver
        self.refused += done["refused"]
        outputs: list[str] = done["outputs"]
        return outputs


def _by_turn(called: Sequence[bool], able: Sequence[bool]) -> dict[str, float]:
    """Return two shares of turns: of turns that can be fulfilled, with a call; of the others, without a call."""
    pairs = list(zip(called, able, strict=True))
    right = {
        "called_when_able": [did for did, can in pairs if can],
        "quiet_when_unable": [not did for did, can in pairs if not can],
    }
    return {name: sum(turns) / len(turns) for name, turns in right.items() if turns}


def _failed(why: str) -> dict[str, Any]:
    return {"valid": False, "error_type": "multi_turn:inference_error", "error_message": why}


def _written(agent: EndpointAgent) -> list[tuple[str, Any]]:
    """Return names and arguments of the last step's calls, as the endpoint gave them: the harness decodes them
    itself."""
    functions = [call.get("function") or {} for call in agent.reply.get("tool_calls") or []]
    return [(str(function.get("name") or ""), function.get("arguments")) for function in functions]
