"""What one run of one item came to: the record that an evaluation writes."""

from __future__ import annotations

from typing import Any

import msgspec


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """A scored item.

    Attributes:
        suite: name of the benchmark.
        category: name of the column.
        item: id in the category.
        trial: from 0.
        score: 0 to 1; the benchmark's own, and what the table averages.
        metrics: further scores of the benchmark, by name.
        finish: why the run ended: `answered`, or a limit that the benchmark knows.
        problem: one line of what the benchmark found wrong; "" where nothing was.
        sub_tasks: parts that the item asks for, >= 1 (a multi-turn item: its user turns).
        steps: completions of the scored model.
        calls: tool calls that it made.
        prompt_tokens: of all its completions, as the endpoint counts.
        completion_tokens: the same.
        messages: the conversation in OpenAI's form, for people.
    """

    suite: str
    category: str
    item: str
    trial: int
    score: float
    finish: str
    sub_tasks: int
    steps: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    metrics: dict[str, float] = {}
    problem: str = ""
    messages: list[dict[str, Any]] = []
