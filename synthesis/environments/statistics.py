"""Statistics of environments for dataset cards: the paper's (A.1.2) and further numbers."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from synthesis.core.records import ToolEnvironment, World


def statistics_of(environments: Iterable[ToolEnvironment]) -> dict[str, Any]:
    """JSON statistics. Shares are fractions of 1; a step is `parallel` when it shares its hop level with another.

    Each environment is read once. Memory holds its figures (40 bytes), its entities and the names of its tools.
    """
    questions, tools, scores, worlds = _Questions(), _Tools(), _Scores(), _Worlds()
    for one in environments:
        for subject in (questions, tools, scores, worlds):
            subject.add(one)
    if not questions.samples:
        return {"samples": 0}
    return questions.numbers() | tools.numbers(questions.samples) | scores.numbers() | worlds.numbers()


class _Questions:
    """Languages, structures, domains and steps of questions."""

    def __init__(self) -> None:
        self.languages, self.structures, self.domains, self.modes = (Counter[str]() for _ in range(4))
        self.steps, self.calls, self.hops = (Counter[int]() for _ in range(3))
        self.signatures, self.entities = set[str](), set[str]()
        self.samples = self.parallel = 0

    def add(self, one: ToolEnvironment) -> None:
        self.samples += 1
        self.languages[one.language] += 1
        self.structures[one.structure] += 1
        self.domains[one.domain] += 1
        self.modes[one.mode] += 1
        self.steps[len(one.sub_questions)] += 1
        self.calls[len(one.reference_calls)] += 1
        levels = Counter(step.hop for step in one.sub_questions)
        self.hops[max(levels)] += 1
        self.parallel += sum(count for count in levels.values() if count > 1)
        self.signatures.add(one.signature)
        self.entities.update(one.entities)

    def numbers(self) -> dict[str, Any]:
        n, steps, hops, every_step = self.samples, self.steps, self.hops, _sum(self.steps)
        return {
            "samples": n,
            "languages": _shares(self.languages),
            "structures": _shares(self.structures),
            "domains": _shares(self.domains),
            "sub_questions": {
                "total": every_step,
                "mean": _ratio(every_step, n),
                "median": median(array("I", steps.elements())),
                "range": [min(steps), max(steps)],
                "histogram": _histogram(steps),
                "share_needing_tool": round(_sum(self.calls) / every_step, 4),
                "share_parallel": round(self.parallel / every_step, 4),
                "share_serial": round(1 - self.parallel / every_step, 4),
            },
            "hops": {
                "mean": _ratio(_sum(hops), n),
                "median": median(array("I", hops.elements())),
                "histogram": _histogram(hops),
            },
            "tool_calls": {"mean": _ratio(_sum(self.calls), n), "histogram": _histogram(self.calls)},
            "modes": _shares(self.modes),
            "signatures": len(self.signatures),
            "entities": len(self.entities),
        }


class _Tools:
    """Needed and irrelevant tools, and the rules by which reference calls are read."""

    def __init__(self) -> None:
        self.rules, self.bands = Counter[str](), Counter[str]()
        self.names = set[str]()
        self.tools = self.optional = self.plain_tools = self.plain_calls = 0

    def add(self, one: ToolEnvironment) -> None:
        self.rules.update(call.rule for call in one.reference_calls)
        self.bands.update({band: len(drawn) for band, drawn in one.distractors.items()})
        self.names.update(tool.spec.name for tool in one.tools)
        self.tools += len(one.tools)
        for tool in one.tools:
            parameters = tool.spec.parameters
            self.optional += len(parameters["properties"]) > len(parameters["required"])
        if not isinstance(one.world, World):
            self.plain_tools += len(one.tools)
            self.plain_calls += len(one.reference_calls)

    def numbers(self, samples: int) -> dict[str, Any]:
        return {
            "tools": {
                "total": self.tools,
                "unique_names": len(self.names),
                # A world is offered whole, whatever its task needs.
                "share_merged": round(1 - self.plain_tools / self.plain_calls, 4) if self.plain_calls else 0.0,
                "share_with_optional_parameters": round(self.optional / self.tools, 4),
            },
            "distractors": {band: _ratio(self.bands[band], samples) for band in sorted(self.bands)},
            "rules": _shares(self.rules),
        }


class _Scores:
    """Quality, and difficulty."""

    def __init__(self) -> None:
        self.qualities, self.closenesses, self.solve_rates = array("d"), array("d"), array("d")

    def add(self, one: ToolEnvironment) -> None:
        if one.quality:
            self.qualities.append(one.quality.mean)
        if one.difficulty:
            self.closenesses.append(one.difficulty.distractor_closeness)
            if one.difficulty.solve_rate is not None:
                self.solve_rates.append(one.difficulty.solve_rate)

    def numbers(self) -> dict[str, Any]:
        return {
            "quality": _mean(self.qualities),
            "distractor_closeness": _mean(self.closenesses),
            "solve_rate": _mean(self.solve_rates),
        }


class _Worlds:
    """Environments with state: their domains, and the states that their tasks ask for."""

    def __init__(self) -> None:
        self.domains, self.states = Counter[str](), Counter[int]()
        self.tools = self.rows = 0

    def add(self, one: ToolEnvironment) -> None:
        if isinstance(one.world, World):
            self.domains[one.domain] += 1
            self.states[sum(step.asks_state for step in one.sub_questions)] += 1
            self.tools += len(one.tools)
            self.rows += sum(map(len, one.world.rows.values()))

    def numbers(self) -> dict[str, Any]:
        if not (samples := self.domains.total()):
            return {}
        return {
            "worlds": {
                "samples": samples,
                "domains": dict(sorted(self.domains.items())),
                "states_asked_for": {"mean": _ratio(_sum(self.states), samples), "histogram": _histogram(self.states)},
                "tools": {"mean": _ratio(self.tools, samples)},
                "rows": {"mean": _ratio(self.rows, samples)},
            }
        }


def _sum(counts: Mapping[int, int]) -> int:
    """Return the sum of counted values."""
    return sum(value * times for value, times in counts.items())


def _ratio(total: int, n: int) -> float:
    """Return a mean as cards have it: a whole one without a fraction."""
    return round(total / n, 4) if total % n else total // n


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return round(mean(values), 4) if values else None


def table_rows(statistics: Mapping[str, Any]) -> dict[str, str]:
    """Return the paper's table (A.1.2) of `statistics_of`, also as a card has them: name → text."""
    if not statistics["samples"]:
        return {"samples": "0"}

    def shares(of: Mapping[str, float], most: int = 4) -> str:
        first = sorted(of.items(), key=lambda one: (-one[1], one[0]))[:most]  # a card sorts by name
        return ", ".join(f"{name} {share:.1%}" for name, share in first)

    steps, calls, hops = statistics["sub_questions"], statistics["tool_calls"], statistics["hops"]
    return {
        "samples": f"{statistics['samples']:,}",
        "languages": shares(statistics["languages"]),
        "scenarios": shares(statistics["structures"]),
        "top domains": shares(statistics["domains"]),
        "sub-questions": f"{steps['total']:,}; a sample {steps['mean']:.2f}, median {steps['median']:g}, "
        f"{steps['range'][0]} to {steps['range'][1]}",
        "hops": f"mean {hops['mean']:.2f}, median {hops['median']:g}",
        "sub-questions needing tools": f"{steps['share_needing_tool']:.1%}",
        "tool calls a sample": f"{calls['mean']:.2f}",
        "steps parallel / serial": f"{steps['share_parallel']:.1%} / {steps['share_serial']:.1%}",
        "tools, merged": f"{statistics['tools']['total']:,}, {statistics['tools']['share_merged']:.1%}",
        "irrelevant tools a sample": ", ".join(f"{band} {n:.2f}" for band, n in statistics["distractors"].items()),
        **({"worlds with state": _worlds_row(statistics["worlds"])} if "worlds" in statistics else {}),
    }


def _worlds_row(worlds: Mapping[str, Any]) -> str:
    domains = ", ".join(f"{name} {count}" for name, count in worlds["domains"].items())
    return f"{worlds['samples']:,}: {domains}"


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {value: round(n / counts.total(), 4) for value, n in counts.most_common()}


def _histogram(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): n for value, n in sorted(counts.items())}
