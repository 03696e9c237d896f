"""Measure trajectories from an endpoint with deliberate errors: yield, faults in the stored records, and cost.

The model is the tests' (`tests/worlds/emulated_model.py`) with seeded errors: unreadable bodies, refusals, questions or
results in Chinese, and questions that name a tool. Its agent answers from memory, or with markup and unfinished
reasoning, and some HTTP 200 responses have half an answer and an error. It also makes correct results with names from
many countries, which no check may reject. The audit finds the faults again from the stored records alone. Prints a row;
`--save` appends it.

    python -m benchmarks.imperfect_endpoint --workdir=DIR
    python -m benchmarks.imperfect_endpoint --workdir=DIR --checkout=FOLDER     # the program of another commit
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from astra_jax.base.settings import Count
from astra_jax.base.versions import commit
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag
from synthesis.core.datasets import read_dataset
from synthesis.core.records import Trajectory
from synthesis.pipeline.languages import strays
from synthesis.trajectories.tasks import named_tool

sys.path.append(str(rows.ROOT / "tests" / "worlds"))
from emulated_model import EmulatedModel, words_of, write_registry  # noqa: E402

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; it must be empty.", required=True)
_CHECKOUT = flags.DEFINE_string("checkout", "", "Folder of the code whose program runs; empty: this one.")
_COUNT = number_flag("count", 60, Count, "Trajectories that are asked for.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/imperfect_endpoint.jsonl.")

_BODIES, _REFUSALS, _CHINESE, _NAMED, _MEMORY = 0.15, 0.03, 0.15, 0.1, 0.3
"""Shares: of all answers, of all answers, of questions and results, of questions, of tasks."""
_MARKUP, _HALVES, _PEOPLE = 0.1, 0.05, 0.5
"""Shares: of the agent's final answers, of the agent's final answers, of right results."""
_LEAKS = (
    "<think>I look once more at {}", "{}</think>", "{}<|im_end|>", "[TOOL_CALLS]{}", "<tool_call>{}</tool_call>",
    "<｜DSML｜function_calls>{}", "<|channel|>analysis{}", "[THINK]{}", "<|python_tag|>{}", "{}<|eot_id|>",
)  # fmt: skip
_TAGS = ("think>", "<|", "|>", "[TOOL_CALLS]", "tool_call>", "｜", "[THINK]")
_CUSTOMERS = (
    "Katarzyna Nowak", "Jürgen Müller", "João da Conceição", "Zoë van der Merwe", "Siobhán Ní Bhriain",
    "Nguyễn Thị Hoa", "Çağla Öztürk", "Søren Østergård", "Björn Þorvaldsson", "Giuseppe Dell'Acqua",
    "María José Núñez", "Ştefan Ionescu",
)  # fmt: skip
_HAN = "请在月底之前告诉我这件物品的记录，分公司的同事正在等它的编号："


class ImperfectModel(EmulatedModel):
    """Counts what it spoilt in `spoilt`, and the tokens of all answers in `tokens`."""

    def __init__(self) -> None:
        super().__init__(memory=_MEMORY)
        self.spoilt: Counter[str] = Counter()

    def message(self, kind: str, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        message = super().message(kind, body, rng)
        if kind == "agent" and not message.get("tool_calls"):
            return self._final(message, rng)
        if kind in ("agent", "probe"):
            return message
        text, drawn = str(message["content"]), rng.random()
        if kind in ("chain_task", "server_task", "task_variation"):
            text = self._question(text, rng)
        if kind == "emulated_result":
            text = self._result(text, rng)
        if drawn < _BODIES:
            self.spoilt["body"] += 1
            text = rng.choice((text[: len(text) // 2], f"Of course! Here it is: {text[:-2]}", "I would say yes."))
        elif drawn < _BODIES + _REFUSALS:
            self.spoilt["refusal"] += 1
            text = "I am sorry, but I cannot help with that."
        return {**message, "content": text}

    def _final(self, message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        drawn = rng.random()
        if drawn < _MARKUP:
            self.spoilt["markup"] += 1
            return {**message, "content": rng.choice(_LEAKS).format(message["content"])}
        if drawn < _MARKUP + _HALVES:
            self.spoilt["half"] += 1
            half = message["content"][: len(message["content"]) // 2]
            return {**message, "content": half, "error": {"code": 502, "message": "provider disconnected"}}
        return message

    def _result(self, text: str, rng: random.Random) -> str:
        drawn = rng.random()
        if drawn >= _CHINESE + _PEOPLE:
            return text
        self.spoilt["chinese" if drawn < _CHINESE else "names"] += 1
        answer = json.loads(text)
        value: dict[str, Any] = {"record": _HAN}
        if drawn >= _CHINESE:
            value = {**json.loads(answer["result"]), "customer": rng.choice(_CUSTOMERS), "status": "shipped"}
        return json.dumps({**answer, "result": json.dumps(value, ensure_ascii=False)})

    def _question(self, text: str, rng: random.Random) -> str:
        answer, drawn = json.loads(text), rng.random()
        if drawn < _CHINESE:
            self.spoilt["chinese"] += 1
            answer["question"] = _HAN + answer["question"][-30:]
        elif drawn < _CHINESE + _NAMED:
            self.spoilt["names a tool"] += 1
            answer["question"] += f" Use find_{words_of(answer['question'])[0]} for it."
        return json.dumps(answer)

    def _agent_turn(self, prompt: str, rng: random.Random) -> Any:
        """Return an agent's turn for versions that request text about its calls."""
        messages = [{"role": "user", "content": re.findall(r"^\[user\] (.*)$", prompt, re.M)[0]}]
        messages += [{"role": "tool", "content": text} for text in re.findall(r"^\[tool \S+\] (.*)$", prompt, re.M)]
        made = self.agent(messages, rng)
        calls = [one["function"] for one in made.get("tool_calls", ())]
        return {"reasoning": made["reasoning_content"], "tool_calls": calls, "content": made["content"] or ""}


def faults(trajectory: Trajectory) -> list[str]:
    """Return the faults of a stored trajectory that the record alone shows."""
    found = []
    users = [message.content for message in trajectory.messages if message.role == "user"]
    said = [message.content for message in trajectory.messages if message.role == "assistant" and message.content]
    results = [message.content for message in trajectory.messages if message.role == "tool"]
    calls = [call.name for message in trajectory.messages for call in message.tool_calls]
    offered = {tool.name for tool in trajectory.tools}
    if any(strays(text, trajectory.language) is not None for text in users):
        found.append("question in another language")
    if any(strays(text, trajectory.language) is not None for text in (*said, *results)):
        found.append("answer or result in another language")
    if any(tag in text for text in said for tag in _TAGS):
        found.append("markup in an answer")
    if not said or said[-1].rstrip()[-1:] not in (".", "!", "?", "。"):
        found.append("half an answer")
    if any(named_tool(text, name) for text in users for name in offered):
        found.append("question names a tool")
    if not calls and trajectory.needs != []:
        found.append("no call")
    if set(calls) - offered:
        found.append("call of a tool that is not there")
    if trajectory.needs and set(trajectory.needs) - set(calls):
        found.append("a needed tool was not called")
    return found


async def _run(model: ImperfectModel, folder: Path, checkout: Path) -> int:
    registry = write_registry(folder / "registry.jsonl")
    tools = "tools" if (checkout / "synthesis/servers/tool_sources.py").exists() else "registries"
    settings = {
        "trajectories": _COUNT.value, "languages": {"en": 1.0}, "sources": [], "mcp_share": 0.0, "walks": 20,
        tools: [str(registry)], "fact_servers": ["numbers"], "server_weights": {"numbers": 1e-9}, "proposals": 2,
    }  # fmt: skip
    async with model as url:
        command = [sys.executable, "-m", "launch.trajectories", f"--workdir={folder / 'run'}", f"--teacher_url={url}"]
        command += ["--teacher_model=m", *(f"--config.{name}={json.dumps(value)}" for name, value in settings.items())]
        for setting in ("behaviours", "conducts"):  # by checkout; earlier ones know neither flag
            if (checkout / f"synthesis/trajectories/{setting}.py").exists():
                command += ["--judge_own_text", f"--config.{setting}={{}}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        process = await asyncio.create_subprocess_exec(*command, cwd=checkout, env=environment)
        return await process.wait()


def figures(stored: Sequence[Trajectory], model: ImperfectModel, tokens: int) -> dict[str, Any]:
    """Return the numbers of a finished run."""
    wrong = [faults(one) for one in stored]
    return {
        "asked": _COUNT.value,
        "stored": len(stored),
        "stored_with_faults": sum(map(bool, wrong)),
        "faults": dict(Counter(name for names in wrong for name in names).most_common()),
        "requests": len(model.requests),
        "spoilt": dict(model.spoilt.most_common()),
        "tokens": tokens,
        "tokens_per_stored": round(tokens / max(1, len(stored))),
        "tokens_per_good": round(tokens / max(1, sum(not names for names in wrong))),
        "share_of_requests": {name: round(n / len(model.requests), 3) for name, n in model.kinds.most_common(6)},
    }


def main() -> None:
    folder = cli.local_folder(_WORKDIR)
    folder.mkdir(parents=True, exist_ok=True)
    checkout = Path(_CHECKOUT.value or rows.ROOT).absolute()
    model = ImperfectModel()
    code = asyncio.run(_run(model, folder, checkout))
    data = folder / "run" / "trajectories"
    if not data.exists():
        raise cli.UsageError(f"the program of {checkout} wrote nothing to {data}, and ended with {code}")
    row = figures(read_dataset(data, Trajectory), model, model.tokens)
    rows.report("imperfect_endpoint", {"program": commit(checkout) or checkout.name, **row}, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
