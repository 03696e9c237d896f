"""What a dataset card says of environments: the paper's statistics (A.1.2) and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from synthesis.core.records import ToolEnvironment, World


def statistics_of(environments: Sequence[ToolEnvironment]) -> dict[str, Any]:
    """JSON statistics. Shares are fractions of 1; a step is `parallel` when it shares its hop level with another."""
    n = len(environments)
    if not n:
        return {"samples": 0}
    steps = [len(one.sub_questions) for one in environments]
    calls = [len(one.reference_calls) for one in environments]
    levels = [Counter(step.hop for step in one.sub_questions) for one in environments]
    parallel = sum(count for level in levels for count in level.values() if count > 1)
    tools = [tool for one in environments for tool in one.tools]
    plain = [one for one in environments if not isinstance(one.world, World)]
    merged_of = sum(len(one.reference_calls) for one in plain)
    return {
        "samples": n,
        "languages": _shares(one.language for one in environments),
        "structures": _shares(one.structure for one in environments),
        "domains": _shares(one.domain for one in environments),
        "sub_questions": {
            "total": sum(steps),
            "mean": round(mean(steps), 4),
            "median": median(steps),
            "range": [min(steps), max(steps)],
            "histogram": _histogram(steps),
            "share_needing_tool": round(sum(calls) / sum(steps), 4),
            "share_parallel": round(parallel / sum(steps), 4),
            "share_serial": round(1 - parallel / sum(steps), 4),
        },
        "hops": {
            "mean": round(mean(map(max, levels)), 4),
            "median": median(map(max, levels)),
            "histogram": _histogram(map(max, levels)),
        },
        "tool_calls": {"mean": round(mean(calls), 4), "histogram": _histogram(calls)},
        "tools": {
            "total": len(tools),
            "unique_names": len({tool.spec.name for tool in tools}),
            # A world is offered whole, whatever its task needs.
            "share_merged": round(1 - sum(len(one.tools) for one in plain) / merged_of, 4) if merged_of else 0.0,
            "share_with_optional_parameters": round(
                sum(len(t.spec.parameters["properties"]) > len(t.spec.parameters["required"]) for t in tools)
                / len(tools),
                4,
            ),
        },
        "distractors": {
            band: round(mean(len(one.distractors.get(band, [])) for one in environments), 4)
            for band in sorted({band for one in environments for band in one.distractors})
        },
        "modes": _shares(one.mode for one in environments),
        "rules": _shares(call.rule for one in environments for call in one.reference_calls),
        "quality": _mean(one.quality.mean for one in environments if one.quality),
        "distractor_closeness": _mean(one.difficulty.distractor_closeness for one in environments if one.difficulty),
        "solve_rate": _mean(
            one.difficulty.solve_rate
            for one in environments
            if one.difficulty and one.difficulty.solve_rate is not None
        ),
        "signatures": len({one.signature for one in environments}),
        "entities": len({entity for one in environments for entity in one.entities}),
        **({"worlds": _worlds(environments)} if len(plain) < n else {}),
    }


def _worlds(environments: Sequence[ToolEnvironment]) -> dict[str, Any]:
    """Of the environments with state: how many of each domain, and what their tasks ask for."""
    stateful = [one for one in environments if isinstance(one.world, World)]
    states = [sum(step.asks_state for step in one.sub_questions) for one in stateful]
    rows = [sum(map(len, one.world.rows.values())) for one in stateful if isinstance(one.world, World)]
    return {
        "samples": len(stateful),
        "domains": dict(sorted(Counter(one.domain for one in stateful).items())),
        "states_asked_for": {"mean": round(mean(states), 4), "histogram": _histogram(states)},
        "tools": {"mean": round(mean(len(one.tools) for one in stateful), 4)},
        "rows": {"mean": round(mean(rows), 4)},
    }


def _mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    known = list(values)
    return round(mean(known), 4) if known else None


def table_rows(statistics: Mapping[str, Any]) -> dict[str, str]:
    """The paper's table (A.1.2) of `statistics_of`, also as a card has them: name → text."""
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


def _shares(values: Iterable[str]) -> dict[str, float]:
    counts = Counter(values)
    return {value: round(n / counts.total(), 4) for value, n in counts.most_common()}


def _histogram(values: Iterable[int]) -> dict[str, int]:
    return {str(value): n for value, n in sorted(Counter(values).items())}
