"""Bar charts as numbers, ready for inline SVG: columns for what has an order, rows for what has names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_MOST_COLUMNS, _MOST_ROWS = 40, 20
_COLUMNS_HEIGHT, _HEAD, _FOOT = 110, 16, 20
ROW_WIDTH = 160
"""Of the longest bar of named numbers, pixels."""


@dataclass(frozen=True)
class Bar:
    """One bar in pixels, the text at its end, and its label: at (`label_x`, the chart's foot), "" where there is no
    room for it."""

    label: str
    name: str
    text: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Columns:
    """A histogram, whose bars stand on `base`; `name` of a bar is its whole label, for the tooltip."""

    width: float
    height: float
    base: float
    foot: float
    bars: list[Bar]


@dataclass(frozen=True)
class ChartRow:
    """A named number; `bar` is its length in pixels, of at most `ROW_WIDTH`."""

    name: str
    text: str
    part: str
    bar: float


@dataclass(frozen=True)
class Whisker:
    """A percentage with its interval: the bar's length, and where the interval is, in pixels of `ROW_WIDTH`."""

    name: str
    text: str
    bar: float
    low: float
    high: float


def whisker(name: str, text: str, percent: float, low: float, high: float) -> Whisker:
    """A bar of 0 to 100 % with its interval."""
    return Whisker(name, text, *(ROW_WIDTH * value / 100 for value in (percent, low, high)))


def is_histogram(value: object) -> bool:
    """Whether a value of a card is numbers by name."""
    return isinstance(value, Mapping) and bool(value) and all(_is_number(one) for one in value.values())


def has_order(value: Mapping[str, float]) -> bool:
    """Whether the names of a histogram are numbers themselves."""
    return all(_number(name) is not None for name in value)


def columns(histogram: Mapping[str, float], *, bins: tuple[float, float, float] | None = None) -> Columns:
    """A histogram of numbers. Whole numbers that do not occur get a column too, so that gaps show.

    Args:
        histogram: number as text → how often.
        bins: (first, last, step) of the columns where the numbers are no whole ones.
    """
    counts = {number: count for name, count in histogram.items() if (number := _number(name)) is not None}
    labelled = _binned(counts, bins)
    gap, base = 2.0, float(_HEAD + _COLUMNS_HEIGHT)
    width = max(9.0, min(34.0, 370 / max(1, len(labelled))))
    tallest = max((count for _, _, count in labelled), default=0) or 1
    every = max(1, math.ceil(24 / width))
    bars = []
    for index, (label, name, count) in enumerate(labelled):
        height = _COLUMNS_HEIGHT * count / tallest
        shown = label if index % every == 0 else ""
        # A number over each column wants room for it.
        text = f"{count:,}" if count and 7 * len(f"{count:,}") <= width else ""
        bars.append(
            Bar(shown, f"{name}: {count:,}", text, index * width + gap / 2, _HEAD + _COLUMNS_HEIGHT - height,
                width - gap, height)
        )  # fmt: skip
    return Columns(max(width * len(labelled), 40), base + _FOOT, base, base + 14, bars)


def chart_rows(values: Mapping[str, float], *, shares: bool = False) -> list[ChartRow]:
    """Named numbers, the largest first; the smallest of many are summed up in one row.

    Args:
        shares: they are shares of 1, not counts.
    """
    ranked = sorted(values.items(), key=lambda one: (-one[1], one[0]))
    if len(ranked) > _MOST_ROWS:
        rest = ranked[_MOST_ROWS - 1 :]
        ranked = [*ranked[: _MOST_ROWS - 1], (f"{len(rest):,} others", sum(count for _, count in rest))]
    whole = sum(values.values())
    largest = max((count for _, count in ranked), default=0) or 1
    return [
        ChartRow(
            name,
            "" if shares else f"{count:,}",
            f"{count if shares else count / whole if whole else 0:.1%}",
            ROW_WIDTH * max(0.0, count) / largest,
        )
        for name, count in ranked
    ]


def _binned(counts: Mapping[float, float], bins: tuple[float, float, float] | None) -> list[tuple[str, str, float]]:
    """(label, whole label, count) of each column."""
    if not counts:
        return []
    if bins is not None:
        first, last, step = min(bins[0], *counts), max(bins[1], *counts), bins[2]
        if (last - first) / step <= _MOST_COLUMNS:  # one far-off number must not make a million
            found: list[float] = [0] * (round((last - first) / step) + 1)
            for number, count in counts.items():
                found[round((number - first) / step)] += count
            names = [f"{first + index * step:.4g}" for index in range(len(found))]
            return [(name, name, count) for name, count in zip(names, found, strict=True)]
    if bins is not None or any(not number.is_integer() for number in counts):
        return [(f"{number:g}", f"{number:g}", counts[number]) for number in sorted(counts)]
    least, most = int(min(counts)), int(max(counts))
    each = math.ceil((most - least + 1) / _MOST_COLUMNS)
    binned = []
    for start in range(least, most + 1, each):
        end = start + each - 1
        count = sum(n for number, n in counts.items() if start <= number <= end)
        binned.append((str(start), str(start) if each == 1 else f"{start} to {end}", count))
    return binned


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
