"""Charts as inline SVG, each with a text alternative: curves, ratios, and arcs between names.

They take their style from the page (`palette.css`: light and dark, `charts.css`); `standalone` makes a file of one,
with the same. What they are drawn from is escaped.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from synthesis.core.terminal import printable

FONT = 12
"""Of a chart's text, pixels; `charts.css` has to agree."""
_NARROW, _BROAD = frozenset("fijlrtI.,:;'|!()[]{}\"/\\- "), frozenset("mwMW@%&")
_COLOURS, _MOST_POINTS = 6, 300
_ROW, _GAP = 20, 6


def em(text: str) -> float:
    """The width of a text by estimate, rather too wide than too narrow, in font sizes."""
    return sum(_character_em(one) for one in text)


def _character_em(character: str) -> float:
    if character.isascii():
        if character in _NARROW:
            return 0.42
        return 0.98 if character in _BROAD else 0.72 if character.isupper() else 0.64
    if unicodedata.combining(character):
        return 0.0
    return 1.05 if unicodedata.east_asian_width(character) in "WFA" else 0.75


def cut(text: str, width: float) -> str:
    """A text on one line of at most `width` em, with an ellipsis where it is longer."""
    text = printable(text, lines=False)
    if em(text) <= width:
        return text
    kept, size = "", 1.0
    for one in text:
        size += _character_em(one)
        if size > width:
            break
        kept += one
    return f"{kept}…"


def figure(value: float) -> str:
    """A number as charts write it: 0.0123, 12.3, 1,234, 1.2e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3g}"
    return f"{value:.3g}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within an interval, at most so many; the interval's ends where there is no room between them."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= most:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


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
    """Lines over one axis. What is None or not finite is a gap; of many points each drawn one is the mean of several.

    Args:
        series: (place, value) pairs in the order of places, by the name that the legend gives to them.
        across: what the places are, such as "update".
        low, high: ends of the values' axis; by default those of the values.

    Returns:
        The chart, `width` by `height` pixels, scaled down where there is less room; a line that says so where there
        are no values yet.
    """
    lines = {name: _thinned(list(points)) for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if any(value is not None for _, value in points)}
    if not lines:
        return Markup('<p class="muted">{}: no figures yet</p>').format(title)
    known = [(x, value) for points in lines.values() for x, value in points if value is not None]
    x0, x1 = min(x for x, _ in known), max(x for x, _ in known)
    y0 = min(value for _, value in known) if low is None else low
    y1 = max(value for _, value in known) if high is None else high
    if y1 <= y0:
        y0, y1 = y0 - (abs(y0) * 0.1 or 1.0), y1 + (abs(y1) * 0.1 or 1.0)
    marks = ticks(y0, y1)
    names = [_mark(mark) for mark in marks]
    left = _GAP + FONT * max(map(em, names))
    legend, head = _legend(list(lines), width)
    foot = FONT * 3 + 4
    if head + foot + 60 > height:
        height = head + foot + 60
    right = width - _GAP

    def across_at(x: float) -> float:
        return left + (right - left) * ((x - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def up_at(y: float) -> float:
        return height - foot - (height - foot - head) * (y - y0) / (y1 - y0)

    parts = [*legend]
    for mark, name in zip(marks, names, strict=True):
        parts.append(_tag("path", kind="grid", d=f"M{left:.1f} {up_at(mark):.1f}H{right}"))
        parts.append(_tag("text", name, kind="faint end", x=left - 5, y=up_at(mark) + FONT / 3))
    whole = all(float(x).is_integer() for x, _ in known)
    for mark in ticks(x0, x1):
        if whole and not float(mark).is_integer():
            continue
        half = FONT * em(_mark(mark)) / 2
        place = min(max(across_at(mark), left + half), right - half)
        parts.append(_tag("text", _mark(mark), kind="faint middle", x=place, y=height - foot + FONT + 3))
    parts.append(_tag("path", kind="base", d=f"M{left:.1f} {height - foot}H{right}"))
    parts.append(_tag("text", across, kind="faint end", x=right, y=height - 5))
    for place, points in enumerate(lines.values()):
        colour = f"s{place % _COLOURS}"
        path, pen = [], "M"
        for x, value in points:
            if value is None:
                pen = "M"
                continue
            path.append(f"{pen}{across_at(x):.1f} {up_at(min(max(value, y0), y1)):.1f}")
            pen = "L"
        parts.append(_tag("path", kind=f"curve {colour}", d="".join(path)))
        x, last = next((x, value) for x, value in reversed(points) if value is not None)
        parts.append(_tag("circle", kind=f"dot {colour}", cx=across_at(x), cy=up_at(min(max(last, y0), y1)), r=3))
    return _drawing(f"{title}. {_told(lines, across)}", width, height, parts)


def _thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    clean = [(x, value if value is not None and math.isfinite(value) else None) for x, value in points]
    each = -(-len(clean) // _MOST_POINTS)
    if each <= 1:
        return clean
    groups = [clean[start : start + each] for start in range(0, len(clean), each)]
    found: list[tuple[float, float | None]] = []
    for group in groups:
        values = [value for _, value in group if value is not None]
        found.append((group[len(group) // 2][0], sum(values) / len(values) if values else None))
    return found


def _told(lines: Mapping[str, Sequence[tuple[float, float | None]]], across: str) -> str:
    told = []
    for name, points in lines.items():
        known = [(x, value) for x, value in points if value is not None]
        (first_x, first), (last_x, last) = known[0], known[-1]
        values = [value for _, value in known]
        told.append(
            f"{name}: {figure(first)} at {across} {figure(first_x)}, {figure(last)} at {figure(last_x)}, "
            f"between {figure(min(values))} and {figure(max(values))}"
        )
    return "; ".join(told)


def _legend(names: Sequence[str], width: int) -> tuple[list[Markup], int]:
    """Names with their colours, in as many lines as they need; and how high they are. One line needs none."""
    if len(names) < 2:
        return [], _GAP + FONT // 2
    parts, x, y = [], 0.0, float(FONT)
    for place, name in enumerate(names):
        name = cut(name, (width - 20) / FONT)
        size = 14 + FONT * em(name) + 10
        if x and x + size > width:
            x, y = 0.0, y + FONT + 5
        parts.append(
            Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="4"/>').format(place % _COLOURS, x + 5, y - 4)
        )
        parts.append(Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(x + 14, y, name))
        x += size
    return parts, int(y) + _GAP + FONT // 2


def ratios(title: str, rows: Sequence[tuple[str, float, float | None]], *, about: str, width: int = 720) -> Markup:
    """Bars from 1 on a logarithmic axis, so that left is behind and right ahead; a goal is a mark.

    Args:
        rows: name, ratio (more than 0) and goal of each.
        about: what the axis is.
    """
    if not rows:
        return Markup('<p class="muted">{}: no figures yet</p>').format(title)
    every = [value for _, ratio, goal in rows for value in (ratio, goal) if value]
    low, high = math.log2(min([*every, 0.5])), math.log2(max([*every, 2.0]))
    label = min(FONT * max(em(name) for name, *_ in rows) + _GAP, width / 2)
    right, height = width - FONT * 4, _ROW * len(rows) + 2 * _ROW

    def at(value: float) -> float:
        return label + (right - label) * (math.log2(value) - low) / (high - low)

    parts = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        x, foot = at(2.0**power), _ROW * len(rows) + 4
        parts.append(_tag("path", kind="grid" if power else "base", d=f"M{x:.1f} 0V{foot}"))
        parts.append(_tag("text", figure(2.0**power), kind="faint middle", x=x, y=foot + FONT + 2))
    for index, (name, ratio, goal) in enumerate(rows):
        y = _ROW * index
        start, end = sorted((at(1.0), at(ratio)))
        parts.append(_tag("text", cut(name, label / FONT), kind="end", x=label - _GAP, y=y + 14))
        kind = "bar" if ratio >= 1 else "bar short"
        parts.append(_tag("rect", kind=kind, x=start, y=y + 4, width=end - start, height=12))
        parts.append(_tag("text", figure(ratio), x=end + 4, y=y + 14))
        if goal:
            parts.append(_tag("path", kind="goal", d=f"M{at(goal):.1f} {y + 2}v16"))
    parts.append(_tag("text", about, kind="faint end", x=width, y=height - 4))
    told = "; ".join(f"{name} {figure(one)}{f' of {figure(goal)} wanted' if goal else ''}" for name, one, goal in rows)
    return _drawing(f"{title}. {told}", width, height, parts)


def panels(title: str, charts: Sequence[tuple[str, Markup]], *, columns: int, width: int, height: int) -> Markup:
    """Several charts in one, each with its name above it.

    Args:
        charts: name and chart of each, all of one size.
        columns: how many stand beside each other.
        width, height: of a chart, pixels.
    """
    head, gap, parts = _ROW + _GAP, 2 * _ROW, []
    for index, (name, chart) in enumerate(charts):
        x, y = index % columns * (width + gap), index // columns * (height + head + _ROW)
        parts.append(_tag("text", cut(name, width / FONT), x=x, y=y + FONT + 2))
        parts.append(Markup(str(chart).replace("<svg ", f'<svg x="{x}" y="{y + head}" ', 1)))
    lines = -(-len(charts) // columns)
    return _drawing(title, columns * (width + gap) - gap, lines * (height + head + _ROW), parts)


def arcs(title: str, names: Sequence[str], weights: Mapping[tuple[str, str], float], *, width: int = 340) -> Markup:
    """Names below each other, and an arc for each pair, as wide as it weighs: down on the right is one way, and back
    (in another colour) the other.

    Args:
        weights: by (from, to); pairs of names that are not there are left out.
    """
    room = width * 0.62
    label = min(FONT * max((em(printable(name, lines=False)) for name in names), default=0.0) + 8, room)
    place = {name: index for index, name in enumerate(names)}
    pairs = {pair: weight for pair, weight in weights.items() if pair[0] in place and pair[1] in place}
    heaviest = max(pairs.values(), default=1.0) or 1.0
    farthest = max((abs(place[a] - place[b]) for a, b in pairs), default=1) or 1
    parts = []
    for (start, end), weight in sorted(pairs.items(), key=lambda one: one[1]):
        y0, y1 = (_ROW * place[one] + _ROW / 2 for one in (start, end))
        reach = label + 10 + (width - label - 16) * max(1, abs(place[start] - place[end])) / farthest
        kind = "arc" if place[start] <= place[end] else "arc back"
        if start == end:
            y0, y1 = y0 - 5, y1 + 5
        curve = f"M{label + 4:.1f} {y0}C{reach:.1f} {y0} {reach:.1f} {y1} {label + 4:.1f} {y1}"
        parts.append(_tag("path", kind=kind, stroke_width=0.8 + 2.6 * weight / heaviest, d=curve))
    for name in names:
        shown = escape(cut(name, (label - 4) / FONT))
        whole = _tag("title", printable(name, lines=False))
        parts.append(_tag("text", whole + shown, x=0, y=_ROW * place[name] + _ROW / 2 + 4))
    most = sorted(pairs.items(), key=lambda one: -one[1])[:5]
    told = "; ".join(f"{a} to {b} {figure(weight)}" for (a, b), weight in most)
    about = f"{title}: {len(names)} names, {len(pairs)} arrows; {told}"
    return _drawing(about, width, _ROW * max(1, len(names)), parts)


def _tag(tag: str, content: str = "", *, kind: str = "", **attributes: str | float) -> Markup:
    """An element, with its texts escaped; what is Markup is not escaped again."""
    named = {"class": kind} if kind else {}
    for name, value in attributes.items():
        named[name.replace("_", "-")] = f"{value:.1f}" if isinstance(value, float) else str(value)
    written = Markup("").join(Markup(' {}="{}"').format(name, value) for name, value in named.items())
    return Markup("<{}{}>{}</{}>").format(Markup(tag), written, content, Markup(tag))


def _mark(value: float) -> str:
    """A round number of an axis."""
    return f"{value:,.6g}"


def _drawing(label: str, width: float, height: float, parts: Sequence[Markup]) -> Markup:
    told, box = printable(label, lines=False), f"0 0 {width} {height}"
    drawn = Markup("\n").join(parts)
    return _tag("svg", drawn, kind="drawing", viewBox=box, width=width, height=height, role="img", aria_label=told)


_STYLE = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("palette.css", "charts.css"))


def standalone(chart: Markup) -> str:
    """A chart as a file of its own, as documents show it; light and dark as its reader wants it."""
    head, _, rest = str(chart).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{escape(_STYLE)}</style>{rest}\n'
