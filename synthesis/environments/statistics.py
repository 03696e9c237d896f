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

    Each environment is read once; memory holds its figures (40 bytes), its entities and its tools' names.
    """
    (languages, structures, domains, modes, rules, steps, calls, hops, bands, states, of_domains) = (
        Counter[Any]() for _ in range(11)
    )
    names, signatures, entities = set[str](), set[str](), set[str]()
    qualities, closenesses, solve_rates = array("d"), array("d"), array("d")
    n = parallel = tools = optional = plain_tools = plain_calls = worlds = world_tools = world_rows = 0
    for one in environments:
        n += 1
        languages[one.language] += 1
        structures[one.structure] += 1
        domains[one.domain] += 1
        modes[one.mode] += 1
        rules.update(call.rule for call in one.reference_calls)
        steps[len(one.sub_questions)] += 1
        calls[len(one.reference_calls)] += 1
        levels = Counter(step.hop for step in one.sub_questions)
        hops[max(levels)] += 1
        parallel += sum(count for count in levels.values() if count > 1)
        tools += len(one.tools)
        for tool in one.tools:
            parameters = tool.spec.parameters
            optional += len(parameters["properties"]) > len(parameters["required"])
        names.update(tool.spec.name for tool in one.tools)
        bands.update({band: len(drawn) for band, drawn in one.distractors.items()})
        signatures.add(one.signature)
        entities.update(one.entities)
        if one.quality:
            qualities.append(one.quality.mean)
        if one.difficulty:
            closenesses.append(one.difficulty.distractor_closeness)
            if one.difficulty.solve_rate is not None:
                solve_rates.append(one.difficulty.solve_rate)
        if isinstance(one.world, World):
            worlds += 1
            of_domains[one.domain] += 1
            states[sum(step.asks_state for step in one.sub_questions)] += 1
            world_tools += len(one.tools)
            world_rows += sum(map(len, one.world.rows.values()))
        else:
            plain_tools += len(one.tools)
            plain_calls += len(one.reference_calls)
    if not n:
        return {"samples": 0}
    every_step = _sum(steps)
    return {
        "samples": n,
        "languages": _shares(languages),
        "structures": _shares(structures),
        "domains": _shares(domains),
        "sub_questions": {
            "total": every_step,
            "mean": _ratio(every_step, n),
            "median": median(array("I", steps.elements())),
            "range": [min(steps), max(steps)],
            "histogram": _histogram(steps),
            "share_needing_tool": round(_sum(calls) / every_step, 4),
            "share_parallel": round(parallel / every_step, 4),
            "share_serial": round(1 - parallel / every_step, 4),
        },
        "hops": {
            "mean": _ratio(_sum(hops), n),
            "median": median(array("I", hops.elements())),
            "histogram": _histogram(hops),
        },
        "tool_calls": {"mean": _ratio(_sum(calls), n), "histogram": _histogram(calls)},
        "tools": {
            "total": tools,
            "unique_names": len(names),
            # A world is offered whole, whatever its task needs.
            "share_merged": round(1 - plain_tools / plain_calls, 4) if plain_calls else 0.0,
            "share_with_optional_parameters": round(optional / tools, 4),
        },
        "distractors": {band: _ratio(bands[band], n) for band in sorted(bands)},
        "modes": _shares(modes),
        "rules": _shares(rules),
        "quality": _mean(qualities),
        "distractor_closeness": _mean(closenesses),
        "solve_rate": _mean(solve_rates),
        "signatures": len(signatures),
        "entities": len(entities),
        # Of the environments with state: how many of each domain, and what their tasks ask for.
        **(
            {
                "worlds": {
                    "samples": worlds,
                    "domains": dict(sorted(of_domains.items())),
                    "states_asked_for": {"mean": _ratio(_sum(states), worlds), "histogram": _histogram(states)},
                    "tools": {"mean": _ratio(world_tools, worlds)},
                    "rows": {"mean": _ratio(world_rows, worlds)},
                }
            }
            if worlds
            else {}
        ),
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
