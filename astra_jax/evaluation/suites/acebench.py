"""ACEBench's agent items: several turns with a simulated user, and several steps towards one request.

The model writes its calls as text, [Name(key=value)]. The harness runs them on simulated phones, shops and airlines. It
compares the final states (end-to-end accuracy, the score) and the calls on the way (process accuracy). All of this is
the harness's own code (`workers/acebench.py`). This module samples its completions, and checks its clone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astra_jax.evaluation.endpoint_agent import EndpointAgent, endpoint_of, spoken
from astra_jax.evaluation.harness import Checkout, HarnessEnvironment, WorkerProgram
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Category, Decoding, EvalItem, SuiteContext, SuiteInfo
from synthesis.core.endpoint import Endpoint
from synthesis.core.stages import Transient, rng_for

REPOSITORY = "https://github.com/chenchen0103/ACEBench"
COMMIT = "56dd66cf6439b0d9655ee1b353e4cd745c6f664e"
_CODE = ("category.py", "eval_main.py", "model_eval/**/*.py", "model_inference/**/*.py")
_DATA = ("data_all/data_{}/data_agent_*.json", "data_all/data_{}/possible_answer/data_agent_*.json")
_SHA256 = {
    "code": "6968bd04ddec22f8b290ab29f5790efc3f6bfd58b203ec46fccaa7792b482019",
    "en": "81ef9db3a721d5636da2985fcde5cf4008487b3e5135a3c05445e75a76bb5c07",
    "zh": "770fb1f6a0dffaa6684ff56a4bd5ea484bb793d73cffeee0c0cec1552d7e2c2f",
}
_USER = Decoding(temperature=0.001, trials=1)
"""Temperature of the user simulator in the harness."""

_NOTES = (
    "The paper's 50 items are 30 of several turns and 20 of several steps in one language (its figures are multiples "
    "of 1/120 and 1/80 at four trials); both languages have that many. `acebench` is English, `acebench_zh` Chinese.",
    "The score is end-to-end accuracy; process accuracy is the metric `process`.",
    "The harness gives several-step items a Chinese system prompt in English too (its client is made without the "
    "language), and shows the model what its calls returned, not the calls. Left as it is.",
    "Its clients sample at temperature 0.001 with at most 1,000 tokens. Here the decoding of the table is used, and no "
    "cap but the endpoint's; the simulated user keeps temperature 0.001.",
    "A reply has to begin with its call, so reasoning up to `</think>` and the white space behind it are taken away.",
    "Gold states of four items in each language misspell a class (several turns 7 and 9, several steps 0 and 1): the "
    "harness passes it whatever the model did. Such items say so in `problem`.",
    "Milestones are texts, not all of them calls that work: whoever plays them gets end-to-end 0.20 (English) and 0.40 "
    "(Chinese) on the several-step items, and process 1.00. There is no 100 % self-check.",
    "What a model writes is evaluated by the harness, so it runs in a locked process without files and network "
    "(sandbox.confine); arguments must be values, and only APIs that the item lists or its milestones use are called.",
    "What the harness raises on a reply, which would end its whole run, is a score of 0 and named in `problem`; so is "
    "a conversation that no longer fits the model's context.",
    "The simulated user's own past messages have the role `system`, as the harness has it; its endpoint must take it.",
)


@dataclass(frozen=True)
class _Case:
    item: Mapping[str, Any]
    answer: Mapping[str, Any]

    @property
    def paths(self) -> list[list[str]]:
        """Return its milestones, in each of the accepted orders."""
        stones = self.answer["mile_stone"]
        return stones if isinstance(stones[0], list) else [stones]

    @property
    def allowed(self) -> list[str]:
        """Return the names of APIs that it lists, and the names that its milestones use without listing (two Chinese
        items)."""
        used = {stone.strip("[ ").partition("(")[0] for path in self.paths for stone in path}
        return sorted({function["name"] for function in self.item["function"]} | used)

    @property
    def never_compared(self) -> list[str]:
        """Return the classes of the gold state that no item's state can have."""
        states = self.answer["ground_truth"]
        names = {name for state in (states if isinstance(states, list) else [states]) for name in state}
        return sorted(names - set(self.item["involved_classes"]))


class AceBench:
    """The agent items in one language. Implements `Suite`.

    Needs `sources["acebench"]`, a clone of its repository at the pinned commit, and a model for the user.
    """

    LANGUAGE = "en"

    def __init__(self, context: SuiteContext) -> None:
        self._context = context
        self._environment = HarnessEnvironment(name="acebench", requirements=(), python=(11, 14))
        self._cases: dict[str, dict[str, _Case]] = {}
        self._workers: WorkerProgram | None = None
        self._user: Endpoint | None = None

    @property
    def info(self) -> SuiteInfo:
        """Return its declaration; the paper has temperature 0.6 and four trials, and gives no token limit."""
        decoding = Decoding(temperature=0.6, trials=4)
        ending = "" if self.LANGUAGE == "en" else " (zh)"
        return SuiteInfo(
            name="acebench" if self.LANGUAGE == "en" else f"acebench_{self.LANGUAGE}",
            title=f"ACEBench{ending}",
            harness=f"ACEBench {COMMIT[:7]}",
            license="MIT",
            data_sha256={part: _SHA256[part] for part in ("code", self.LANGUAGE)},
            categories=(
                Category(name="multi_turn", title=f"ACE multi-turn{ending}", decoding=decoding),
                Category(name="multi_step", title=f"ACE multi-step{ending}", decoding=decoding),
            ),
            headline={f"ACEBench{ending}": ("multi_turn", "multi_step")},
            needs=frozenset({"user"}),
            notes=_NOTES,
        )

    async def prepare(self) -> None:
        parts = {"code": _CODE, self.LANGUAGE: tuple(pattern.format(self.LANGUAGE) for pattern in _DATA)}
        checkout = Checkout(repository=REPOSITORY, commit=COMMIT, parts=parts, sha256=_SHA256)
        folder = checkout.check("acebench", self._context.sources.get("acebench"))
        data = folder / "data_all" / f"data_{self.LANGUAGE}"
        for category in self.info.categories:
            name = f"data_agent_{category.name}.json"
            items, answers = _lines(data / name), _lines(data / "possible_answer" / name)
            self._cases[category.name] = {
                item["id"]: _Case(item, answer) for item, answer in zip(items, answers, strict=True)
            }
        interpreter = await self._environment.make(self._context.harnesses)
        log = self._context.logs / f"{self.info.name}.log"
        self._workers = WorkerProgram(interpreter, "acebench.py", [str(folder)], log=log)
        await self._workers.start()
        user, seconds = self._context.models["user"], self._context.timeout_seconds
        self._user = endpoint_of(user, concurrency=256, timeout_seconds=seconds)

    def ids(self, category: str) -> Sequence[str]:
        return list(self._cases[category])

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        assert self._workers is not None and self._user is not None, "prepare() comes first"
        case = self._cases[item.category][item.id]
        models = _Models(self._context, self._user, decoding, item.seed)
        played: dict[str, Any] = {"history": [], "calls": 0, "failed": "", "errors": []}
        played["scores"] = {"end_to_end": 0.0, "process": 0.0}
        try:
            async with self._workers.open({"complete": models.complete}) as worker:
                played = await worker.call(
                    "run",
                    case=case.item,
                    answer=case.answer,
                    category=f"agent_{item.category}",
                    language=self.LANGUAGE,
                    allowed=case.allowed,
                )
        except _OutOfContext:
            finish = "token_limit"
        else:
            finish = _finish(played)
        problems = list(played["errors"])
        if finish == "token_limit":
            problems.append("the conversation no longer fits the model's context")
        elif played["failed"]:
            problems.append(f"the harness broke on a reply: {played['failed']}")
        if never := case.never_compared:
            problems.append(f"{', '.join(never)} of the gold state is never compared")
        if models.cut:
            problems.append(f"{models.cut} replies were cut off by the token limit")
        return ItemResult(
            suite=self.info.name,
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=played["scores"]["end_to_end"],
            metrics={"process": played["scores"]["process"]},
            finish=finish,
            problem="; ".join(problems),
            sub_tasks=max(1, len(case.paths[0])),
            steps=models.steps,
            calls=played["calls"],
            prompt_tokens=models.prompt_tokens,
            completion_tokens=models.completion_tokens,
            messages=[_message(entry) for entry in played["history"]],
        )

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        if self._user is not None:
            await self._user.close()


class AceBenchZh(AceBench):
    """The agent items in Chinese. Implements `Suite`."""

    LANGUAGE = "zh"


class _OutOfContext(Exception):
    """The scored model's context is full."""


class _Models:
    """Answers requests of an item's process: completions of the scored model, and of the simulated user."""

    def __init__(self, context: SuiteContext, user: Endpoint, decoding: Decoding, seed: int) -> None:
        self.steps = self.prompt_tokens = self.completion_tokens = self.cut = 0
        self._context, self._user, self._decoding, self._seed = context, user, decoding, seed
        self._asked = 0

    async def complete(self, role: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a reply without its reasoning. Raises `Transient`, `_OutOfContext`."""
        self._asked += 1
        seed = rng_for(self._seed, role, self._asked).getrandbits(31)
        if role == "user":
            served = self._context.models["user"]
            agent = EndpointAgent(self._user, served, _USER, seed=seed, messages=messages)
            if await agent.act() is None:
                raise Transient(f"the simulated user {served.model} at {served.url} was cut off by a token limit")
            return spoken(agent)
        context = self._context
        agent = EndpointAgent(context.endpoint, context.policy, self._decoding, seed=seed, messages=messages)
        whole = await agent.act() is not None
        self.steps += agent.steps
        self.prompt_tokens += agent.prompt_tokens
        self.completion_tokens += agent.completion_tokens
        if not agent.steps:
            raise _OutOfContext
        self.cut += not whole
        return spoken(agent)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def _finish(played: Mapping[str, Any]) -> str:
    if played["failed"]:
        return "failed"
    return "answered" if "finish conversation" in str(played["history"][-1]["message"]) else "turn_limit"


_ROLES = {"user": "user", "agent": "assistant", "execution": "tool"}


def _message(entry: Mapping[str, Any]) -> dict[str, Any]:
    said = entry["message"]
    return {
        "role": _ROLES[entry["sender"]],
        "content": said if isinstance(said, str) else json.dumps(said, ensure_ascii=False),
    }
