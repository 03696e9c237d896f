"""Result of one run of one item: the record that an evaluation writes."""

from __future__ import annotations

from typing import Any

import msgspec


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """A scored item.

    Attributes:
        suite: name of the benchmark.
        category: name of the column.
        item: id in the category.
        trial: number of the trial, from 0.
        score: the benchmark's own score, 0 to 1, which the table averages.
        metrics: further scores of the benchmark, by name.
        finish: why the run ended: `answered`, or a limit that the benchmark knows.
        problem: the benchmark's first complaint, in one line; "" if there is none.
        sub_tasks: number of parts that the item asks for, at least 1 (in a multi-turn item its user turns).
        steps: completions of the scored model.
        calls: tool calls of the scored model.
        prompt_tokens: prompt tokens of all its completions, as the endpoint counts them.
        completion_tokens: completion tokens, as the endpoint counts them.
        messages: the conversation in OpenAI's format, for readers.
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
