"""What people see of an evaluation's results: their list, the trials of an item, and OpenAI's messages as they were."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from astra_jax.evaluation.results import ItemResult
from launch.viewer.conversations import TOO_DEEP, Asked, Said, Turn, arguments_text, arranged, result_of
from launch.viewer.listing import Page, part
from launch.viewer.listing import arranged as in_order
from synthesis.core.datasets import DatasetError, each_record, read_card, read_record
from synthesis.core.refusals import InputError
from synthesis.core.typed import decode_json

SCORES = ("0", "between", "1")
_SHORT_CHARACTERS = 300


@dataclass(frozen=True)
class Name:
    """Which run of which item; `trial` is a whole number as text, as addresses have it."""

    suite: str
    category: str
    item: str
    trial: str

    @classmethod
    def of(cls, result: ItemResult) -> Name:
        """The name of a result."""
        return cls(result.suite, result.category, result.item, str(result.trial))


NAME_FIELDS = tuple(field.name for field in fields(Name))


@dataclass(frozen=True)
class ResultFilter:
    """Which results to list; what is empty lets all pass.

    Attributes:
        text: in the question, the item's id or what was wrong, whatever its case.
        score: one of `SCORES`.
        sort: one of `RESULT_KEYS`, or with a minus; "": the dataset's order.
    """

    text: str = ""
    suite: str = ""
    category: str = ""
    score: str = ""
    finish: str = ""
    trial: str = ""
    sort: str = ""

    def passes(self, entry: ResultEntry) -> bool:
        """Whether a result is one of those."""
        return (
            self.suite in ("", entry.name.suite)
            and self.category in ("", entry.name.category)
            and self.trial in ("", entry.name.trial)
            and self.finish in ("", entry.finish)
            and self.score in ("", "0" if entry.score == 0 else "1" if entry.score == 1 else "between")
            and self.text.strip().casefold() in entry.searched
        )


FILTERS = tuple(field.name for field in fields(ResultFilter))


@dataclass(frozen=True)
class ResultEntry:
    """A line of the list. `question` is what the user says first, it and `problem` are cut where they are long;
    `searched` is the text that a filter looks in."""

    name: Name
    question: str
    score: float
    finish: str
    problem: str
    steps: int
    calls: int
    tokens: int
    searched: str


RESULT_KEYS: Mapping[str, Callable[[ResultEntry], Any]] = {
    "question": lambda one: one.question.casefold(),
    "item": lambda one: one.name.item,
    "category": lambda one: one.name.category,
    "score": lambda one: one.score,
    "finish": lambda one: one.finish,
    "calls": lambda one: one.calls,
    "tokens": lambda one: one.tokens,
}
"""What the list can be sorted by."""


class Evaluated:
    """The results of an evaluation, in its order. Only what the list shows is held; a conversation is read when it is
    asked for.

    Attributes:
        model: the scored one, "" where the card does not say.
        suites: those that occur, in the dataset's order.
        categories: the same.
        finishes: those that occur, sorted.
        trials: those that occur, in their order.

    Raises:
        DatasetError: the dataset cannot be read, or is corrupt.
        ValueError: two of them are of one trial.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._entries: list[ResultEntry] = []
        self._index: dict[Name, int] = {}
        self._trials: dict[tuple[str, str, str], list[ResultEntry]] = {}
        for index, one in enumerate(each_record(path, ItemResult)):
            entry = _entry(one)
            name = entry.name
            if self._index.setdefault(name, index) != index:
                where = f"{name.suite}, {name.category}, {name.item!r}"
                raise InputError(f"two results are trial {name.trial} of {where}; evaluate again")
            self._entries.append(entry)
            self._trials.setdefault((name.suite, name.category, name.item), []).append(entry)
        self.model = str(read_card(path).get("model", ""))
        self.suites = list(dict.fromkeys(one.suite for one in self._index))
        self.categories = list(dict.fromkeys(one.category for one in self._index))
        self.finishes = sorted({one.finish for one in self._entries})
        self.trials = sorted({one.trial for one in self._index}, key=int)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: Name) -> ItemResult | None:
        """The result of a name, or None.

        Raises:
            DatasetError: the dataset was replaced or removed in the meantime.
        """
        index = self._index.get(name)
        if index is None:
            return None
        found = read_record(self._path, ItemResult, index)
        if Name.of(found) != name:
            raise DatasetError("its records are others now")
        return found

    def trials_of(self, name: Name) -> list[ResultEntry]:
        """All trials of a result's item, itself among them."""
        return self._trials.get((name.suite, name.category, name.item), [])

    def chosen(self, wanted: ResultFilter) -> list[ResultEntry]:
        """What passes a filter, in its order."""
        return in_order(filter(wanted.passes, self._entries), wanted.sort, RESULT_KEYS)

    def page(self, wanted: ResultFilter, number: int, size: int = 50) -> Page[ResultEntry]:
        """Page `number`, from 1, of those; the last one where there are not so many."""
        return part(self.chosen(wanted), number, size)


def _entry(one: ItemResult) -> ResultEntry:
    question = next((_text(said.get("content")) for said in one.messages if said.get("role") == "user"), "")
    return ResultEntry(
        name=Name.of(one),
        question=_short(question),
        score=one.score,
        finish=one.finish,
        problem=_short(one.problem),
        steps=one.steps,
        calls=one.calls,
        tokens=one.completion_tokens,
        # A line break stands in no form's field: nothing matches across two of these.
        searched=f"{question}\n{one.item}\n{one.problem}".casefold(),
    )


def _short(text: str) -> str:
    return f"{text[:_SHORT_CHARACTERS]}…" if len(text) > _SHORT_CHARACTERS else text


# ---------------------------------------------------------------------------------------------------------------------
# Messages, which are whatever an endpoint answered and a harness made of it


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """A conversation in OpenAI's form. Nothing is mended or left out: who reads it wants to know what went wrong."""
    said = [_said(message) for message in messages]
    return arranged(said, {index: result_of(one.content) for index, one in enumerate(said) if one.role == "tool"})


def _said(message: Mapping[str, Any]) -> Said:
    calls = message.get("tool_calls")
    return Said(
        role=_text(message.get("role")) or "(no role)",
        content=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        calls=[_asked(call) for call in calls] if isinstance(calls, list) else (),
        call_id=_text(message.get("tool_call_id")),
        name=_text(message.get("name")),
    )


def _asked(call: Any) -> Asked:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    id, name, written = _text(call.get("id")), _text(function.get("name")), function.get("arguments")
    if isinstance(written, dict):
        return Asked(id, name, arguments_text(written))
    text = _text(written)
    try:
        return Asked(id, name, arguments_text(decode_json(text, dict[str, Any]) if text else {}))
    except (ValueError, RecursionError):  # msgspec's are ValueErrors
        return Asked(id, name, text, unreadable=True)


def _text(value: Any) -> str:
    """A string, the texts of a list of parts, or what else stands in its place as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        texts = [one.get("text") if isinstance(one, dict) else one for one in value]
        return "\n".join(text if isinstance(text, str) else _json(one) for text, one in zip(texts, value, strict=True))
    return _json(value)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return TOO_DEEP
