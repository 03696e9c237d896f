"""Charts of the benchmarks' pages: ratios to a peer, several charts in one, and a chart as a file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from astra_jax.pages.html import CHART_STYLE, figure
from launch.viewer.charts import FONT, cut, drawing, element, em, without_values

_ROW, _GAP = 20, 6


def ratios(title: str, rows: Sequence[tuple[str, float, float | None]], *, about: str, width: int = 720) -> Markup:
    """Plot bars from 1 on a logarithmic axis, so that left is behind and right ahead; a goal is a mark.

    Args:
        rows: name, ratio (more than 0) and goal of each.
        about: name of the axis.
    """
    if not rows:
        return without_values(title)
    every = [value for _, ratio, goal in rows for value in (ratio, goal) if value]
    low, high = math.log2(min([*every, 0.5])), math.log2(max([*every, 2.0]))
    label = min(FONT * max(em(name) for name, *_ in rows) + _GAP, width / 2)
    right, height = width - FONT * 4, _ROW * len(rows) + 2 * _ROW

    def at(value: float) -> float:
        return label + (right - label) * (math.log2(value) - low) / (high - low)

    parts = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, foot = at(2.0**power), _ROW * len(rows) + 4
        parts.append(element("path", kind="grid" if power else "base", d=f"M{x:.1f} 0V{foot}"))
        parts.append(element("text", figure(2.0**power), kind="faint middle", x=x, y=foot + FONT + 2))
    for index, (name, ratio, goal) in enumerate(rows):
        y = _ROW * index
        start, end = sorted((at(1.0), at(ratio)))
        parts.append(element("text", cut(name, label / FONT), kind="end", x=label - _GAP, y=y + 14))
        kind = "bar" if ratio >= 1 else "bar short"
        parts.append(element("rect", kind=kind, x=start, y=y + 4, width=end - start, height=12))
        parts.append(element("text", figure(ratio), x=end + 4, y=y + 14))
        if goal:
            parts.append(element("path", kind="goal", d=f"M{at(goal):.1f} {y + 2}v16"))
    parts.append(element("text", about, kind="faint end", x=width, y=height - 4))
    told = "; ".join(f"{name} {figure(one)}{f' of {figure(goal)} wanted' if goal else ''}" for name, one, goal in rows)
    return drawing(f"{title}. {told}", width, height, parts)


def panels(title: str, charts: Sequence[tuple[str, Markup]], *, columns: int, width: int, height: int) -> Markup:
    """Put several charts of one size into one, each with its name above it.

    Args:
        columns: charts beside each other.
        width, height: of a chart, pixels.
    """
    head, gap, parts = _ROW + _GAP, 2 * _ROW, []
    for index, (name, chart) in enumerate(charts):
        x, y = index % columns * (width + gap), index // columns * (height + head + _ROW)
        parts.append(element("text", cut(name, width / FONT), x=x, y=y + FONT + 2))
        parts.append(Markup(str(chart).replace("<svg ", f'<svg x="{x}" y="{y + head}" ', 1)))
    lines = -(-len(charts) // columns)
    return drawing(title, columns * (width + gap) - gap, lines * (height + head + _ROW), parts)


def standalone(chart: Markup) -> str:
    """Return a chart as a file of its own, in the light or dark look that its reader wants."""
    head, _, rest = str(chart).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{escape(CHART_STYLE)}</style>{rest}\n'
