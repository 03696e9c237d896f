"""What a dataset card says of environments: the paper's statistics (A.1.2) and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any

from synthesis.records import ToolEnvironment


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
        "hops": {"mean": round(mean(max(level) for level in levels), 4), "histogram": _histogram(map(max, levels))},
        "tool_calls": {"mean": round(mean(calls), 4), "histogram": _histogram(calls)},
        "tools": {
            "total": len(tools),
            "unique_names": len({tool.spec.name for tool in tools}),
            "share_merged": round(1 - len(tools) / sum(calls), 4),
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
        "signatures": len({one.signature for one in environments}),
        "entities": len({entity for one in environments for entity in one.entities}),
        # Nothing is stored whose reference calls did not all give their answers once more, as stored.
        "replay_pass_rate": 1.0,
    }


def _shares(values: Iterable[str]) -> dict[str, float]:
    counts = Counter(values)
    return {value: round(n / counts.total(), 4) for value, n in counts.most_common()}


def _histogram(values: Iterable[int]) -> dict[str, int]:
    return {str(value): n for value, n in sorted(Counter(values).items())}
