"""Shape of the data beside the paper's: sizes, variety and shares."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from synthesis.audit import agent_phrases
from synthesis.audit import text_claims as texts
from synthesis.audit.conversations import calls_of, is_failure
from synthesis.core.records import ToolEnvironment, ToolSpec, Trajectory

_PLACE: Final = "…"


@dataclass(frozen=True)
class ShapeRow:
    """One measure of a dataset.

    Attributes:
        name: what it measures, with its unit.
        value: None: nothing to measure.
        paper: the paper's value, or "".
        goal: range that we aim at, for people, or "".
        meets: value is in the goal's range; None without one.
    """

    name: str
    value: float | None
    paper: str = ""
    goal: str = ""
    meets: bool | None = None


def _row(
    name: str, value: float | None, paper: str = "", least: float | None = None, most: float | None = None
) -> ShapeRow:
    if least is None and most is None or value is None:
        return ShapeRow(name, value, paper)
    goal = " to ".join(f"{one:g}" for one in (least, most) if one is not None)
    goal = goal if least is not None and most is not None else f"{'at least' if most is None else 'at most'} {goal}"
    return ShapeRow(name, value, paper, goal, (least is None or value >= least) and (most is None or value <= most))


@dataclass
class Shape:
    """Counts of a dataset, filled by `add`."""

    records: int = 0
    numbers: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, record: Trajectory | ToolEnvironment) -> None:
        """Count a record."""
        self.records += 1
        self._count("domain", record.domain or "unknown")
        self._count("language", record.language)
        if isinstance(record, ToolEnvironment):
            self._add_environment(record)
        else:
            self._add_trajectory(record)

    def _count(self, name: str, value: str) -> None:
        self.counts.setdefault(name, Counter())[value] += 1

    def _measure(self, name: str, value: float) -> None:
        self.numbers.setdefault(name, []).append(value)

    def _opens(self, text: str) -> None:
        units = texts.words(text) if len(text.split()) > 1 else list(text[:6])
        self._count("opening", " ".join(units[:6]))

    def _tools(self, tools: Iterable[ToolSpec]) -> None:
        for tool in tools:
            self._measure("required", float(len(tool.parameters.get("required") or ()) >= 2))

    def _add_trajectory(self, record: Trajectory) -> None:
        calls = calls_of(record)
        users = [one.content for one in record.messages if one.role == "user"]
        self._measure("messages", len(record.messages))
        self._measure("calls", len(calls))
        self._measure("one_to_five", float(1 <= len(calls) <= 5))
        self._measure("several_turns", float(len(users) > 1))
        self._tools(record.tools)
        self._opens(users[0] if users else "")
        self._count("system", next((one.content for one in record.messages if one.role == "system"), "(none)"))
        self._measure("failed", float(any(call.failed for call in calls)))
        for call in calls:
            if call.failed and call.result:
                self._count("error", call.result)
        for message in record.messages:
            if message.role == "assistant" and message.reasoning:
                self._measure("thinking", len(texts.words(message.reasoning)))
        self._count("calls", repr(sorted({call.key for call in calls if not call.failed})))
        if texts.has_script_of_its_own(record.language):
            self._measure("latin", float(any(re.search(r"[A-Za-z]{4,}", one) for one in users)))
        last = record.messages[-1] if record.messages else None
        if last is not None and last.role == "assistant" and last.content:
            own = [call for call in calls if call.result is not None]
            self._count("skeleton", _skeleton(last.content, " ".join(call.result or "" for call in own)))
            gives_up = bool(agent_phrases.admits_failure(last.content, record.language))
            self._measure("honest", float(bool(own) and is_failure(own[-1].result or "") and gives_up))

    def _add_environment(self, record: ToolEnvironment) -> None:
        steps = record.sub_questions
        levels = Counter(step.hop for step in steps)
        self._measure("steps", len(steps))
        self._measure("calls", len(record.reference_calls))
        for step in steps:
            self._measure("parallel", float(levels[step.hop] > 1))
            self._measure("no_tool", float(not step.needs_tool))
        if "multi_hop" in record.structure:
            self._measure("combines", float(any(len(step.depends_on) > 1 for step in steps)))
        self._tools(tool.spec for tool in record.tools)
        self._opens(record.question)
        if texts.has_script_of_its_own(record.language):
            self._measure("latin", float(re.search(r"[A-Za-z]{4,}", record.question) is not None))
        self._count("calls", repr(sorted((one.tool, texts.canonical(one.arguments)) for one in record.reference_calls)))

    def _mean(self, name: str) -> float | None:
        values = self.numbers.get(name)
        return statistics.fmean(values) if values else None

    def _largest(self, name: str) -> float | None:
        counter = self.counts.get(name)
        return max(counter.values()) / counter.total() if counter else None

    def _repeated(self, name: str) -> float | None:
        counter = self.counts.get(name)
        return 1 - len(counter) / counter.total() if counter else None

    def rows(self, similar: int, *, environments: bool) -> list[ShapeRow]:
        """Return the measures.

        Args:
            similar: records that are exact or near duplicates.
            environments: the records are environments, not trajectories.
        """
        shared = [
            _row("share of tools with two or more required parameters", self._mean("required"), "", 0.4),
            _row("share of the largest domain", self._largest("domain"), "", most=0.2),
            _row("share of the most common first six words", self._largest("opening"), "", most=0.01),
            _row(
                "share of exact and near duplicates (0.5)",
                similar / self.records if self.records else None,
                "",
                most=0.03,
            ),
            _row("share with the same distinct calls as another record", self._repeated("calls")),
            _row("share with Latin words, in scripts of their own", self._mean("latin")),
        ]
        if environments:
            return [
                _row("sub-questions", self._mean("steps"), "4.37"),
                _row("reference calls", self._mean("calls")),
                _row("share of parallel steps", self._mean("parallel"), "0.442"),
                _row("share of sub-questions without a tool", self._mean("no_tool"), "", 0.05, 0.15),
                _row("share of multi-hop records with a step that combines", self._mean("combines"), "", 0.4),
                *shared,
            ]
        thinking = self.numbers.get("thinking")
        return [
            _row("messages", self._mean("messages"), "10.59"),
            _row("calls", self._mean("calls"), "4.42"),
            _row("share with one to five calls", self._mean("one_to_five"), "0.722"),
            _row("share with several user messages", self._mean("several_turns"), "", 0.3),
            *shared,
            _row("share of the most common answer skeleton", self._largest("skeleton"), "", most=0.05),
            _row("different system prompts", float(len(self.counts.get("system", ()))), "", 30),
            _row("words of thinking, median", statistics.median(thinking) if thinking else None),
            _row("share with a failed call", self._mean("failed")),
            _row("different error texts", float(len(self.counts.get("error", ())))),
            _row("share that ends in an honest failure", self._mean("honest")),
        ]


def _skeleton(answer: str, results: str) -> str:
    """Return an answer with a mark in place of numbers, and of words that results have."""
    held = set(texts.words(results))
    kept = [_PLACE if word in held or any(sign.isdigit() for sign in word) else word for word in texts.words(answer)]
    return " ".join(word for number, word in enumerate(kept) if word != _PLACE or kept[number - 1 : number] != [_PLACE])
