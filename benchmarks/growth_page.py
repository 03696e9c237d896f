"""How cost grows, as a table and a figure of the newest row of each part: for `benchmarks.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
WIDE = 3
"""Panels beside each other."""


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
    """A panel for each curve, with its ideal line; both axes logarithmic, but for places that are words."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "astra"  # the same rows, the same file
    panels = [(row, name, curve) for row in found for name, curve in row["curves"].items()]
    tall = -(-len(panels) // WIDE)
    plot, axes = plt.subplots(tall, WIDE, figsize=(3.2 * WIDE, 2.5 * tall), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (row, name, curve) in zip(axes.flat, panels, strict=False):
        at = [str(one) for one in row["at"]]
        words = not all(isinstance(one, int) for one in row["at"])
        places = range(len(at)) if words else row["at"]
        axis.plot(places, curve["ideal"], color="0.6", ls="--", label="ideal")
        axis.plot(places, curve["measured"], color="C0", marker="o", ms=3, label="measured")
        low, high = (bound(bound(side) for side in curve.values()) for bound in (min, max))
        if words:
            axis.set(ylim=(0, 1.2 * high))
        else:
            axis.set(xscale="log", yscale="log", ylim=(low / 1.5, high * 1.5))  # a tenth more is no cliff
        axis.set_xticks(places, at, fontsize=7)
        axis.minorticks_off()
        axis.set_yticks([low, high], [f"{low:,.4g}", f"{high:,.4g}"])
        axis.tick_params(axis="y", labelsize=7)
        axis.set_xlabel(row["axis"], fontsize=8)
        axis.set_title(name, fontsize=8)
    axes.flat[0].legend(frameon=False, fontsize=7)
    plot.tight_layout()
    plot.savefig(path, metadata={"Date": None})
    plt.close(plot)
