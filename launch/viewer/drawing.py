"""A dependency graph as boxes, lines of text and arrows, ready for inline SVG: one column for each hop level.

SVG breaks no lines by itself, so texts are wrapped here by estimated widths of their characters, which are rather too
wide than too narrow. An arrow that skips levels gets a lane of its own in the columns between: it crosses no box.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from synthesis.core.records import Answer, SubQuestion
from synthesis.core.svg import em

FONT_SIZE = 13
"""Of a box's text, pixels; the page's style has to agree."""

_LINE, _PADDING, _BOX_WIDTH = 18, 10, 260
_BETWEEN_COLUMNS, _BETWEEN_BOXES, _HEADING = 60, 24, 26
_LANE_HEIGHT = 12
_BETWEEN_TIPS = 14

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_OPENING, _CLOSING = r"（「『《〈【“‘", r"，。、；：？！）」』》〉】”’…"
# Chinese may break between any two characters, but closing marks do not begin a line and opening ones do not end it.
_UNIT = re.compile(
    rf"\s+|[{_OPENING}]*[{_CJK}][{_CLOSING}]*|[{_OPENING}]*[^\s{_CJK}{_OPENING}{_CLOSING}]+[{_CLOSING}]*|[{_OPENING}]++|\S"
)


@dataclass(frozen=True)
class Line:
    """One line of text; `kind` is `number`, `tool`, `question` or `answer`, `x` and `y` are its baseline's start."""

    text: str
    kind: str
    x: float
    y: float


@dataclass(frozen=True)
class Box:
    """A sub-question, all in pixels."""

    sub_question: int
    x: float
    y: float
    width: float
    height: float
    lines: list[Line]


@dataclass(frozen=True)
class Arrow:
    """From a dependency to what depends on it, as the `d` of an SVG path."""

    source: int
    target: int
    path: str


@dataclass(frozen=True)
class Drawing:
    """A whole graph. `headings` are the names of the columns."""

    width: float
    height: float
    headings: list[Line]
    boxes: list[Box]
    arrows: list[Arrow]


@dataclass
class _Item:
    """What takes room in a column: a box, or a lane for an arrow that passes."""

    height: float
    before: list[_Item] = field(default_factory=list)
    x: float = 0.0
    middle: float = 0.0


def shown_answer(answer: Answer) -> str:
    """An answer as people write it: `3.5 km`, `Oslo, Bergen`, `true`."""
    value = answer.value
    text = ", ".join(value) if isinstance(value, list) else str(value)
    if isinstance(value, bool):
        text = text.lower()  # as JSON has it
    return f"{text} {answer.unit}".strip()


def draw_graph(sub_questions: Sequence[SubQuestion], tools: Mapping[int, str]) -> Drawing:
    """Lay a dependency graph out. Dependencies that do not exist are left out.

    Args:
        tools: sub-question id -> the tool that answers it.

    Returns:
        One box a sub-question, in their order, and one arrow a dependency.
    """
    hops = sorted({sub.hop for sub in sub_questions})
    columns: list[list[_Item]] = [[] for _ in hops]
    column_of = {sub.id: hops.index(sub.hop) for sub in sub_questions}
    wrapped = [_text(sub, tools.get(sub.id, "")) for sub in sub_questions]
    boxes = [_Item(2 * _PADDING + _LINE * len(lines)) for lines in wrapped]
    item_of = {sub.id: box for sub, box in zip(sub_questions, boxes, strict=True)}
    for sub, box in zip(sub_questions, boxes, strict=True):
        columns[column_of[sub.id]].append(box)
    routes: list[tuple[int, int, list[_Item]]] = []
    for sub in sub_questions:
        for source in dict.fromkeys(sub.depends_on):
            if source in item_of:
                between = range(column_of[source] + 1, column_of[sub.id])
                route = [item_of[source], *(_Item(_LANE_HEIGHT) for _ in between), item_of[sub.id]]
                for column, lane in zip(between, route[1:-1], strict=True):
                    columns[column].append(lane)
                for first, second in zip(route, route[1:], strict=False):
                    second.before.append(first)
                routes.append((source, sub.id, route))
    height = _place(columns)
    return Drawing(
        width=max(1, len(hops)) * (_BOX_WIDTH + _BETWEEN_COLUMNS) - _BETWEEN_COLUMNS + 2,
        height=height + 2,
        headings=[
            Line(f"hop {hop}", "hop", index * (_BOX_WIDTH + _BETWEEN_COLUMNS), 14) for index, hop in enumerate(hops)
        ],
        boxes=[_box(sub.id, item, lines) for sub, item, lines in zip(sub_questions, boxes, wrapped, strict=True)],
        arrows=_arrows(routes),
    )


def _text(sub: SubQuestion, tool: str) -> list[tuple[str, str]]:
    """(text, kind) of each line of a box."""
    width = _BOX_WIDTH - 2 * _PADDING
    used = tool or ("no reference call" if sub.needs_tool else "no tool needed")
    answer = "a state of the world" if sub.asks_state else shown_answer(sub.answer)
    parts = ((f"sub-question {sub.id}", "number"), (sub.question, "question"), (answer, "answer"))
    return [(line, kind) for text, kind in (*parts, (used, "tool")) for line in wrap(text, width / FONT_SIZE)]


def _place(columns: Sequence[Sequence[_Item]]) -> float:
    """Give every item its place: columns are centred, and ordered by what items depend on. Returns the height."""
    heights = [sum(item.height + _BETWEEN_BOXES for item in column) - _BETWEEN_BOXES for column in columns]
    tallest = max(heights, default=0.0)
    for index, (column, height) in enumerate(zip(columns, heights, strict=True)):
        y = _HEADING + (tallest - height) / 2
        for item in sorted(column, key=_mean_before):
            item.x = 1 + index * (_BOX_WIDTH + _BETWEEN_COLUMNS)
            item.middle = y + item.height / 2
            y += item.height + _BETWEEN_BOXES
    return _HEADING + tallest


def _mean_before(item: _Item) -> float:
    return sum(one.middle for one in item.before) / len(item.before) if item.before else 0.0


def _box(id: int, item: _Item, lines: Sequence[tuple[str, str]]) -> Box:
    top = item.middle - item.height / 2
    drawn = [
        Line(text, kind, item.x + _PADDING, top + _PADDING + _LINE * (index + 0.75))
        for index, (text, kind) in enumerate(lines)
    ]
    return Box(id, item.x, top, _BOX_WIDTH, item.height, drawn)


def _arrows(routes: Sequence[tuple[int, int, list[_Item]]]) -> list[Arrow]:
    arrows = []
    for source, target, route in routes:
        # The tips at one box stand apart, in the order in which the arrows come.
        incoming = sorted((one[2][-2].middle, index) for index, one in enumerate(routes) if one[1] == target)
        own = next(index for index, one in enumerate(routes) if one[2] is route)
        rank = [index for _, index in incoming].index(own) - (len(incoming) - 1) / 2
        tips = min(_BETWEEN_TIPS, route[-1].height / (len(incoming) + 1))
        x, y = route[0].x + _BOX_WIDTH, route[0].middle
        path = f"M{x:.1f} {y:.1f}"
        for item in route[1:]:
            end = item.middle + (rank * tips if item is route[-1] else 0)
            bend = _BETWEEN_COLUMNS / 2
            path += f"C{x + bend:.1f} {y:.1f} {item.x - bend:.1f} {end:.1f} {item.x:.1f} {end:.1f}"
            x, y = item.x + _BOX_WIDTH, end
            if item is not route[-1]:
                path += f"H{x:.1f}"
        arrows.append(Arrow(source, target, path))
    return arrows


# ---------------------------------------------------------------------------------------------------------------------
# Text


def wrap(text: str, width: float) -> list[str]:
    """The text in lines of at most `width` em by estimate, as long words allow; at least one line."""
    lines, line, length = [], "", 0.0
    for unit in _UNIT.findall(text.strip()):
        unit = " " if unit.isspace() else unit
        size = em(unit)
        if line and length + size > width:
            lines.append(line.rstrip())
            line, length = "", 0.0
        if not line and unit == " ":
            continue
        if size > width:  # a word longer than a line
            *whole, unit = _broken(unit, width)
            lines += whole
            size = em(unit)
        line, length = line + unit, length + size
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def _broken(word: str, width: float) -> list[str]:
    """A word in pieces as wide as a line allows, of a character at least."""
    pieces, size = [""], 0.0
    for one in word:
        size += em(one)
        if pieces[-1] and size > width:
            kept = max(pieces[-1].rfind(mark) for mark in "_-/.") + 1  # an id is broken behind its separators
            rest = pieces[-1][kept:] if kept else ""
            pieces[-1:] = [pieces[-1][: len(pieces[-1]) - len(rest)], rest]
            size = em(rest + one)
        pieces[-1] += one
    return pieces
