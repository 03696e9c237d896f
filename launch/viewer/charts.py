"""Curves as inline SVG with a text alternative.

The page's style colours them (`palette.css` and `charts.css` of `astra_jax/pages`). All texts are escaped.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from markupsafe import Markup

from astra_jax.base.terminal import printable
from astra_jax.pages.html import figure

FONT = 12
"""Pixels of a chart's text, as in `charts.css`."""
_COLOURS, _MAX_POINTS = 6, 300
_GAP = 6
_NO_LINES: Mapping[str, Iterable[tuple[float, float | None]]] = MappingProxyType({})

Points = Sequence[tuple[float, float | None]]


# ---------------------------------------------------------------------------------------------------------------------
# Elements


def em(text: str) -> float:
    """Estimate the width of a text in font sizes, rather too wide than too narrow."""
    return sum(1.05 if unicodedata.east_asian_width(one) in "WFA" else 0.7 for one in text)


def cut(text: str, width: float) -> str:
    """Return a text on one line of at most `width` em, with an ellipsis where it is longer."""
    text = printable(text, lines=False)
    if em(text) <= width:
        return text
    while text and em(text) > width - 1:
        text = text[:-1]
    return f"{text}…"


def element(tag: str, content: str = "", *, kind: str = "", **attributes: str | float) -> Markup:
    """Write an element. Texts are escaped, Markup is not escaped again; `kind` is its class."""
    named = {"class": kind} if kind else {}
    for name, value in attributes.items():
        named[name.replace("_", "-")] = f"{value:.1f}" if isinstance(value, float) else str(value)
    written = Markup("").join(Markup(' {}="{}"').format(name, value) for name, value in named.items())
    return Markup("<{}{}>{}</{}>").format(Markup(tag), written, content, Markup(tag))


def drawing(label: str, width: float, height: float, parts: Iterable[Markup]) -> Markup:
    """Put elements into an SVG of so many pixels, scaled down where there is less room; `label` is its alternative."""
    box, told = f"0 0 {width} {height}", printable(label, lines=False)
    content = Markup("\n").join(parts)
    return element("svg", content, kind="drawing", viewBox=box, width=width, height=height, role="img", aria_label=told)


def without_values(title: str) -> Markup:
    """Return the line that stands in place of a chart without values."""
    return Markup('<p class="muted">{}: no values yet</p>').format(title)


# ---------------------------------------------------------------------------------------------------------------------
# Curves


def curves(
    title: str,
    series: Mapping[str, Iterable[tuple[float, float | None]]],
    *,
    across: str,
    low: float | None = None,
    high: float | None = None,
    beside: Mapping[str, Iterable[tuple[float, float | None]]] = _NO_LINES,
    smoothing: float = 0.0,
    width: int = 360,
    height: int = 200,
) -> Markup:
    """Plot lines over one axis. None and values that are not finite are gaps; many points are averaged in groups.

    Args:
        series: (place, value) pairs in the order of places, by the name that the legend gives them.
        across: name of the places, such as "step".
        low, high: ends of the values' axis; by default those of the values.
        beside: further lines, dashed, each in the colour of the line at its place in `series`.
        smoothing: weight of earlier values in the plotted moving average, from 0 (none) to below 1. The values
            themselves are plotted faintly below it.
    """
    colours = {name: number % _COLOURS for names in (series, beside) for number, name in enumerate(names)}
    raw = {name: _thinned(list(points)) for name, points in (*series.items(), *beside.items())}
    raw = {name: points for name, points in raw.items() if any(value is not None for _, value in points)}
    if not raw:
        return without_values(title)
    lines = {name: smoothed(points, smoothing) for name, points in raw.items()} if smoothing else raw
    known = [(x, value) for points in raw.values() for x, value in points if value is not None]
    x0, x1 = min(x for x, _ in known), max(x for x, _ in known)
    y0 = min(value for _, value in known) if low is None else low
    y1 = max(value for _, value in known) if high is None else high
    if y1 <= y0:
        y0, y1 = y0 - (abs(y0) * 0.1 or 1.0), y1 + (abs(y1) * 0.1 or 1.0)
    legend, head = _legend(list(lines), colours, beside, width)
    foot, right = FONT * 3 + 4, width - _GAP
    height = max(height, head + foot + 60)
    left = _GAP + FONT * max(em(_mark(mark)) for mark in ticks(y0, y1))

    def across_at(x: float) -> float:
        return left + (right - left) * ((x - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def up_at(y: float) -> float:
        return height - foot - (height - foot - head) * (min(max(y, y0), y1) - y0) / (y1 - y0)

    parts = [*legend]
    for mark in ticks(y0, y1):
        parts.append(element("path", kind="grid", d=f"M{left:.1f} {up_at(mark):.1f}H{right}"))
        parts.append(element("text", _mark(mark), kind="faint end", x=left - 5, y=up_at(mark) + FONT / 3))
    whole = all(float(x).is_integer() for x, _ in known)
    for mark in ticks(x0, x1):
        if not whole or mark.is_integer():
            half = FONT * em(_mark(mark)) / 2
            place = min(max(across_at(mark), left + half), right - half)
            parts.append(element("text", _mark(mark), kind="faint middle", x=place, y=height - foot + FONT + 3))
    parts.append(element("path", kind="base", d=f"M{left:.1f} {height - foot}H{right}"))
    parts.append(element("text", across, kind="faint end", x=right, y=height - 5))

    def path_of(points: Points) -> str:
        path, pen = "", "M"
        for x, value in points:
            if value is not None:
                path += f"{pen}{across_at(x):.1f} {up_at(value):.1f}"
            pen = "M" if value is None else "L"
        return path

    if smoothing:
        parts += [element("path", kind=f"curve raw s{colours[name]}", d=path_of(raw[name])) for name in lines]
    for name, points in lines.items():
        kind = " beside" if name in beside else ""
        parts.append(element("path", kind=f"curve s{colours[name]}{kind}", d=path_of(points)))
        x, last = next((x, value) for x, value in reversed(points) if value is not None)
        parts.append(element("circle", kind=f"dot s{colours[name]}", cx=across_at(x), cy=up_at(last), r=3))
    told = "; ".join(_told(name, points, across) for name, points in lines.items())
    return drawing(f"{title}. {told}", width, height, parts)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most so many round numbers in an interval; its end where none lies in it."""
    if not high > low:
        return [float(low)]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)] or [float(low)]


def _thinned(points: Points) -> Points:
    clean = [(x, value if value is not None and math.isfinite(value) else None) for x, value in points]
    each = -(-len(clean) // _MAX_POINTS)
    if each <= 1:
        return clean
    found: list[tuple[float, float | None]] = []
    for group in (clean[start : start + each] for start in range(0, len(clean), each)):
        values = [value for _, value in group if value is not None]
        found.append((group[len(group) // 2][0], sum(values) / len(values) if values else None))
    return found


def smoothed(points: Points, weight: float) -> Points:
    """Return the exponential moving average of values, without its bias to 0 at the start; gaps stay gaps.

    Args:
        weight: of earlier values, from 0 to below 1.
    """
    found: list[tuple[float, float | None]] = []
    total = norm = 0.0
    for x, value in points:
        if value is not None:
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        found.append((x, None if value is None else total / norm))
    return found


def _told(name: str, points: Points, across: str) -> str:
    known = [(x, value) for x, value in points if value is not None]
    (first_x, first), (last_x, last) = known[0], known[-1]
    low, high = min(value for _, value in known), max(value for _, value in known)
    return (
        f"{name}: {figure(first)} at {across} {figure(first_x)}, {figure(last)} at {figure(last_x)}, "
        f"between {figure(low)} and {figure(high)}"
    )


def _legend(
    names: Sequence[str], colours: Mapping[str, int], beside: Collection[str], width: int
) -> tuple[list[Markup], int]:
    """Return names with their colours in as many lines as needed, and their height. One curve needs no legend."""
    parts, x, y = [], 0.0, FONT
    if len(names) < 2:
        return [], _GAP + FONT // 2
    for name in names:
        kind = f"s{colours[name]}{' beside' if name in beside else ''}"
        name = cut(name, (width - 30) / FONT)
        size = 34 + FONT * em(name)
        if x and x + size > width:
            x, y = 0.0, y + FONT + 5
        parts.append(element("path", kind=f"curve {kind}", d=f"M{x:.1f} {y - 4}H{x + 18:.1f}"))
        parts.append(element("text", name, x=x + 24, y=y))
        x += size
    return parts, y + _GAP + FONT // 2


def _mark(value: float) -> str:
    return f"{value:,.6g}"
