"""The table of docs/performance.md that is of the simulation's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """docs/performance.md's: the newest row of each case."""
    newest = {(row["servers"], row["async_steps"]): row for row in found if "step_seconds" in row}
    heads = ["servers", "`async_steps`", "step, s", "wait", "update", "publish, sync", "trainer idle", "updates old"]
    text = ["| " + " | ".join([*heads, "busy", "bound by", "over its lower bound"]) + " |", "| --- " * 11 + "|"]
    for (servers, k), row in sorted(newest.items()):
        parts = row["seconds"]
        cells = [
            str(servers),
            str(k),
            f"{row['step_seconds']:,.0f}",
            f"{parts['wait']:,.0f}",
            f"{parts['update']:,.0f}",
        ]
        cells += [f"{parts['publish'] + parts['sync']:,.0f}", f"{row['idle_share']:.0%}", f"{row['mean_age']:.2f}"]
        over = f"{row['of_lower_bound']:.2f} x" if "of_lower_bound" in row else ""
        text.append("| " + " | ".join([*cells, f"{row['servers_busy']:.0%}", row["bound_by"], over]) + " |")
    return "\n".join(text) + "\n"
