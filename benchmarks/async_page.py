"""The table of docs/performance.md that is of real runs with `async_rollouts`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

HEADS = (
    *("steps ahead", "a sync", "seeds", "updates an hour", "beside 0", "step, s", "wait", "update", "publish, sync"),
    *("updates old", "F1 before", "F1 after", "answers before", "after"),
)


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """An arm a line: means over the seeds' newest rows, and of F1 after it each seed's, in their order."""
    newest = {(row["async_steps"], row["drained"], row["seed"]): row for row in found}
    arms = sorted({(steps, drained) for steps, drained, _ in newest})
    lines = ["| " + " | ".join(HEADS) + " |", "| --- " * len(HEADS) + "|"]
    for arm in arms:
        its = [row for (*key, _), row in sorted(newest.items()) if tuple(key) == arm]
        online = [newest.get((0, False, row["seed"])) for row in its]
        beside = [row["updates_an_hour"] / one["updates_an_hour"] for row, one in zip(its, online, strict=True) if one]
        cells = [str(arm[0]), _sync(*arm), str(len(its)), f"{_mean(its, 'updates_an_hour'):,.0f}"]
        cells.append(f"{statistics.fmean(beside):.2f} x" if beside else "")
        steps = [row["step_seconds"] for row in its]
        cells += [f"{_mean(steps, name):.1f}" for name in ("step", "wait", "update")]
        cells.append(f"{_mean(steps, 'publish') + _mean(steps, 'sync'):.1f}")
        cells.append(f"{_mean(its, 'mean_age'):.2f}")
        each = ", ".join(f"{row['f1']:.2f}" for row in its)
        cells += [f"{_mean(its, 'f1_before'):.2f}", f"{_mean(its, 'f1'):.2f} ({each})"]
        cells += [f"{_mean(its, name):.2f}" for name in ("answer_accuracy_before", "answer_accuracy")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _sync(steps: int, drained: bool) -> str:
    if not steps:
        return "between batches"
    return "after a drain" if drained else "in flight"


def _mean(found: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean(row[name] for row in found)
