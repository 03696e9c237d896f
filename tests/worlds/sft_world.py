"""A small trajectory dataset of real capitals, and its tokenizer: what the data and SFT tests are made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from astra_jax.run.hooks import Hook
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Message, ToolCall, ToolSpec, Trajectory

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Burkina Faso": "Ouagadougou",
    "中国": "北京",
}
TOOL = ToolSpec(
    "capital_of",
    "Capital of a country.",
    {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
)


class AfterUpdate(Hook):
    """Call a function with the number and the metrics of each logged step, before its checkpoint."""

    def __init__(self, function: Callable[[int, dict[str, float]], object]) -> None:
        self._function = function

    def after_update(self, run, state, batch, row) -> None:
        self._function(state.step, row)


def trajectory(index: int, countries: list[str]) -> Trajectory:
    """One question about each country in turn, each answered by a call."""
    messages = []
    for country in countries:
        messages += [
            Message("user", f"What is the capital of {country}?"),
            Message(
                "assistant",
                "",
                reasoning=f"I look {country} up.",
                tool_calls=[ToolCall("call_0", "capital_of", {"country": country})],
            ),
            Message("tool", f'{{"result": "{CAPITALS[country]}"}}'),
            Message("assistant", CAPITALS[country]),
        ]
    return Trajectory(f"trajectory_{index}", f"task_{index}", "facts", "geography", "en", [TOOL], messages, 0, {}, 1.0)


def trajectories(count: int, *, longest: int = 3) -> list[Trajectory]:
    rng = random.Random(0)
    return [trajectory(i, rng.choices(list(CAPITALS), k=rng.randint(1, longest))) for i in range(count)]


def make_dataset(path: Path, records: list[Trajectory]) -> Path:
    write_dataset(path, Trajectory, records, card={"made_by": "tests"})
    return path


def starting(params: Any) -> Callable[[], Any]:
    """A training's start: copies, which it takes over."""
    return lambda: jax.tree.map(jnp.copy, params)


def make_tokenizer(path: Path) -> ChatTokenizer:
    texts = ["".join(s.text for s in QWEN3.render(t.messages, t.tools)) for t in trajectories(30)]
    return ChatTokenizer.train(texts, 400, path)
