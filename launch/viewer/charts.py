"""Charts as inline SVG with a text alternative: curves, arcs between names, and the numbers of bars.

The page's style colours them (`palette.css` and `charts.css` of `astra_jax/pages`). All texts are escaped.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from astra_jax.base.terminal import printable
from astra_jax.pages.html import figure

FONT = 12
"""Pixels of a chart's text, as in `charts.css`."""
_COLOURS, _MAX_POINTS, _MAX_COLUMNS, _MAX_BARS = 6, 300, 40, 20
_ROW, _GAP = 20, 6

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
    width: int = 360,
    height: int = 200,
) -> Markup:
    """Plot lines over one axis. None and values that are not finite are gaps; many points are averaged in groups.

    Args:
        series: (place, value) pairs in the order of places, by the name that the legend gives them.
        across: name of the places, such as "step".
        low, high: ends of the values' axis; by default those of the values.
    """
    lines = {name: _thinned(list(points)) for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if any(value is not None for _, value in points)}
    if not lines:
        return without_values(title)
    known = [(x, value) for points in lines.values() for x, value in points if value is not None]
    x0, x1 = min(x for x, _ in known), max(x for x, _ in known)
    y0 = min(value for _, value in known) if low is None else low
    y1 = max(value for _, value in known) if high is None else high
    if y1 <= y0:
        y0, y1 = y0 - (abs(y0) * 0.1 or 1.0), y1 + (abs(y1) * 0.1 or 1.0)
    legend, head = _legend(list(lines), width)
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
    for number, points in enumerate(lines.values()):
        path, pen = "", "M"
        for x, value in points:
            if value is not None:
                path += f"{pen}{across_at(x):.1f} {up_at(value):.1f}"
            pen = "M" if value is None else "L"
        parts.append(element("path", kind=f"curve s{number % _COLOURS}", d=path))
        x, last = next((x, value) for x, value in reversed(points) if value is not None)
        parts.append(element("circle", kind=f"dot s{number % _COLOURS}", cx=across_at(x), cy=up_at(last), r=3))
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


def _told(name: str, points: Points, across: str) -> str:
    known = [(x, value) for x, value in points if value is not None]
    (first_x, first), (last_x, last) = known[0], known[-1]
    low, high = min(value for _, value in known), max(value for _, value in known)
    return (
        f"{name}: {figure(first)} at {across} {figure(first_x)}, {figure(last)} at {figure(last_x)}, "
        f"between {figure(low)} and {figure(high)}"
    )


def _legend(names: Sequence[str], width: int) -> tuple[list[Markup], int]:
    """Return names with their colours in as many lines as needed, and their height. One curve needs no legend."""
    parts, x, y = [], 0.0, FONT
    if len(names) < 2:
        return [], _GAP + FONT // 2
    for number, name in enumerate(names):
        name = cut(name, (width - 20) / FONT)
        size = 24 + FONT * em(name)
        if x and x + size > width:
            x, y = 0.0, y + FONT + 5
        parts.append(element("circle", kind=f"dot s{number % _COLOURS}", cx=x + 5, cy=y - 4, r=4))
        parts.append(element("text", name, x=x + 14, y=y))
        x += size
    return parts, y + _GAP + FONT // 2


def _mark(value: float) -> str:
    return f"{value:,.6g}"


# ---------------------------------------------------------------------------------------------------------------------
# Arcs


def arcs(title: str, names: Sequence[str], weights: Mapping[tuple[str, str], float], *, width: int = 340) -> Markup:
    """Plot names below each other and an arc for each pair, as wide as its weight; arcs upwards in another colour.

    Args:
        weights: by (from, to); pairs of names that are not there are left out.
    """
    label = min(FONT * max((em(printable(name, lines=False)) for name in names), default=0.0) + 8, width * 0.62)
    place = {name: index for index, name in enumerate(names)}
    pairs = {pair: weight for pair, weight in weights.items() if pair[0] in place and pair[1] in place}
    heaviest = max(pairs.values(), default=1.0) or 1.0
    farthest = max((abs(place[a] - place[b]) for a, b in pairs), default=1) or 1
    parts = []
    for (start, end), weight in sorted(pairs.items(), key=lambda one: one[1]):
        y0, y1 = (_ROW * place[one] + _ROW / 2 for one in (start, end))
        reach = label + 10 + (width - label - 16) * max(1, abs(place[start] - place[end])) / farthest
        if start == end:
            y0, y1 = y0 - 5, y1 + 5
        path = f"M{label + 4:.1f} {y0}C{reach:.1f} {y0} {reach:.1f} {y1} {label + 4:.1f} {y1}"
        kind = "arc" if place[start] <= place[end] else "arc back"
        parts.append(element("path", kind=kind, stroke_width=0.8 + 2.6 * weight / heaviest, d=path))
    for name in names:
        text = element("title", printable(name, lines=False)) + cut(name, (label - 4) / FONT)
        parts.append(element("text", text, x=0, y=_ROW * place[name] + _ROW / 2 + 4))
    heavy = sorted(pairs.items(), key=lambda one: -one[1])[:5]
    told = "; ".join(f"{a} to {b} {figure(weight)}" for (a, b), weight in heavy)
    about = f"{title}: {len(names)} names, {len(pairs)} arrows; {told}"
    return drawing(about, width, _ROW * max(1, len(names)), parts)


# ---------------------------------------------------------------------------------------------------------------------
# Bars


@dataclass(frozen=True)
class Bar:
    """Horizontal bar: `length` is 1 for the longest; `count` and `share` are texts."""

    name: str
    count: str
    share: str
    length: float


def bars(values: Mapping[str, float], *, shares: bool = False) -> list[Bar]:
    """Rank named numbers, the largest first; the smallest of many are added up in one bar.

    Args:
        shares: the numbers are shares of 1, not counts.
    """
    ranked = sorted(values.items(), key=lambda one: (-one[1], one[0]))
    if len(ranked) > _MAX_BARS:
        rest = ranked[_MAX_BARS - 1 :]
        ranked = [*ranked[: _MAX_BARS - 1], (f"{len(rest):,} others", sum(count for _, count in rest))]
    total = 1.0 if shares else sum(values.values()) or 1.0
    largest = max((count for _, count in ranked), default=0) or 1
    return [
        Bar(name, "" if shares else f"{count:,}", f"{count / total:.1%}", max(0.0, count) / largest)
        for name, count in ranked
    ]


def columns(histogram: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the columns of a histogram as (range of numbers, count). Numbers that do not occur have a column too.

    Whole numbers are put together where there are many, shares of 1 by tenths or twentieths; other numbers stand alone.

    Args:
        histogram: number as text → count.
    """
    counts = {float(name): count for name, count in histogram.items()}
    if not counts:
        return []
    first, last, step = min(counts), max(counts), 1.0
    if not any("." in name for name in histogram) and all(number.is_integer() for number in counts):
        step = math.ceil((last - first + 1) / _MAX_COLUMNS)
    elif first >= 0 and last <= 1:
        first, last, step = 0.0, 1.0, 0.1 if all(round(10 * number, 6).is_integer() for number in counts) else 0.05
    else:
        return [(f"{number:g}", counts[number]) for number in sorted(counts)]
    places = {number: int((number - first) // step) if step >= 1 else round(number / step) for number in counts}
    found = [0.0] * (int((last - first) // step) + 1 if step >= 1 else round(1 / step) + 1)
    for number, count in counts.items():
        found[places[number]] += count
    starts = [first + index * step for index in range(len(found))]
    names = [f"{start:.12g} to {start + step - 1:.12g}" if step > 1 else f"{start:.10g}" for start in starts]
    return list(zip(names, found, strict=True))
