"""Table and figure of how cost grows, from the newest row of each part, for `benchmarks.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import drawings
from launch.viewer.charts import curves

Row = Mapping[str, Any]
WIDE = 3
"""Panels beside each other."""
WIDTH, HEIGHT = 280, 180
"""Size of a panel, in pixels."""


def newest(found: Sequence[Row]) -> list[Row]:
    """The newest row of each part, in the order in which parts were first measured."""
    return list({row["part"]: row for row in found}.values())


def table(found: Sequence[Row]) -> str:
    """Each curve's values, and what its last point is of the ideal line."""
    text = ["| what | by | values | measured | ideal | last of ideal | processor, load | date | commit |"]
    text.append("| --- " * 9 + "|")
    for row in found:
        for name, curve in row["curves"].items():
            series = [", ".join(f"{one:,.4g}" for one in curve[side]) for side in ("measured", "ideal")]
            at = ", ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in row["at"])
            share = f"{curve['measured'][-1] / curve['ideal'][-1]:.2f} x"
            cells = [name, row["axis"], at, *series, share, f"{row['hardware']}, {row['load']:g}"]
            text.append("| " + " | ".join([*cells, row["date"], row["commit"]]) + " |")
    return "\n".join(text) + "\n"


def figure(found: Sequence[Row], path: Path) -> None:
    """A panel for each curve, with its ideal line."""
    charts = []
    for row in found:
        words = not all(isinstance(one, int) for one in row["at"])
        places = range(len(row["at"])) if words else row["at"]
        across = f"{row['axis']}: {', '.join(map(str, row['at']))}" if words else row["axis"]
        for name, curve in row["curves"].items():
            lines = {side: list(zip(places, curve[side], strict=True)) for side in ("measured", "ideal")}
            charts.append((name, curves(name, lines, across=across, low=0, width=WIDTH, height=HEIGHT)))
    drawn = drawings.panels("How cost grows", charts, columns=WIDE, width=WIDTH, height=HEIGHT)
    path.write_text(drawings.standalone(drawn), encoding="utf-8")
