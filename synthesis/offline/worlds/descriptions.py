"""What a world of the offline teacher is described by, and the Python that its tools share.

Texts in braces name what a task is about: `{loan.member.name}` follows a reference from the loan that was picked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from synthesis.core.records import Cell, ColumnType, Rows

Draw = Callable[[random.Random], Cell]


@dataclass(frozen=True)
class ColumnText:
    """A column: its type and how its cells are drawn.

    Attributes:
        refers: the table whose ids it holds.
        pool: values of which no two rows have the same one.
    """

    type: ColumnType
    draw: Draw = lambda rng: ""
    refers: str = ""
    pool: Sequence[str] = ()


@dataclass(frozen=True)
class TableText:
    """A table; its ids are the prefix and three digits, which nobody can guess."""

    prefix: str
    rows: int
    columns: Mapping[str, ColumnText]


@dataclass(frozen=True)
class ToolText:
    """A tool: its document, and the body of its function.

    Attributes:
        parameters: name → description; one that begins with `integer:` is a number. All are required.
    """

    name: str
    description: str
    parameters: Mapping[str, str]
    body: str


@dataclass(frozen=True)
class Pick:
    """A row that a task is about, of those for which `where` holds."""

    table: str
    where: Callable[[Any], bool] = lambda row: True


@dataclass(frozen=True)
class Look:
    """A call that looks something up: the answer is in what it returns."""

    tool: str
    arguments: Mapping[str, Any]
    answer: str


@dataclass(frozen=True)
class Added:
    """That one row was added with these cells."""

    table: str
    cells: Mapping[str, Any]


@dataclass(frozen=True)
class Has:
    """That a row has these cells now."""

    table: str
    id: str
    cells: Mapping[str, Any]


@dataclass(frozen=True)
class Gone:
    """That a row is there no more."""

    table: str
    id: str


@dataclass(frozen=True)
class Act:
    """A call that changes the state.

    Attributes:
        after: whether it must wait for the act before it, which makes room for it.
    """

    tool: str
    arguments: Mapping[str, Any]
    check: Added | Has | Gone
    after: bool = False


@dataclass(frozen=True)
class TaskText:
    """A kind of task.

    Attributes:
        picks: what it is about, by name: rows, or values that are drawn.
        holds: what must be true of all of them together.
    """

    phrasings: Sequence[str]
    picks: Mapping[str, Pick | Draw]
    steps: Sequence[Look | Act]
    holds: Callable[[Mapping[str, Any]], bool] = lambda picked: True


@dataclass(frozen=True)
class WorldText:
    """A world.

    Attributes:
        invariants: what must hold, in words → a Python expression over `STATE`.
        settle: puts drawn rows in order where columns follow from each other.
        open: columns (`table.column`) that follow from others.
    """

    name: str
    tables: Mapping[str, TableText]
    tools: Sequence[ToolText]
    invariants: Mapping[str, str]
    tasks: Sequence[TaskText]
    settle: Callable[[Rows, random.Random], None] = lambda rows, rng: None
    open: Sequence[str] = field(default=())


# ---------------------------------------------------------------------------------------------------------------------
# Columns

_FIRST = (
    "Alma", "Bruno", "Carla", "Derek", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Leon", "Maren",
    "Nils", "Olga", "Pavel", "Ruth", "Simon", "Tilda", "Victor",
)  # fmt: skip
_LAST = (
    "Abbott", "Becker", "Conway", "Dalton", "Ekberg", "Foster", "Garner", "Holm", "Ivers", "Jansen", "Keller", "Lund",
    "Moreau", "Norton", "Osborn", "Parker", "Quist", "Rossi", "Sander", "Tanner",
)  # fmt: skip
PEOPLE = tuple(f"{first} {last}" for first in _FIRST for last in _LAST)
DAYS = tuple(f"2026-03-{day:02d}" for day in range(2, 28))
HOURS = tuple(range(9, 18))


def named(pool: Sequence[str] = PEOPLE) -> ColumnText:
    """A name that no other row of the table has."""
    return ColumnText("string", pool=pool)


def refers(table: str) -> ColumnText:
    """The id of some row of another table, which stands before this one."""
    return ColumnText("string", refers=table)


def one_of(*values: str) -> ColumnText:
    return ColumnText("string", lambda rng: rng.choice(values))


def number(least: int, most: int) -> ColumnText:
    return ColumnText("integer", lambda rng: rng.randint(least, most))


def fixed(value: Cell) -> ColumnText:
    kind: ColumnType = "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "string"
    return ColumnText(kind, lambda rng: value)


def a_day(rng: random.Random) -> str:
    return rng.choice(DAYS)


def an_hour(rng: random.Random) -> int:
    return rng.choice(HOURS)


# ---------------------------------------------------------------------------------------------------------------------
# Tools that most worlds have


def finder(name: str, table: str, column: str, thing: str) -> ToolText:
    """Finds the one row by a column that names it."""
    return ToolText(
        name,
        f"Find a {thing} by its exact {column}. Gives the {thing}'s id and what is known of it.",
        {column: f"The {thing}'s {column}, in full."},
        f"return find({table!r}, {column}={column})",
    )


def lister(name: str, table: str, column: str, of: str, thing: str, owner: str) -> ToolText:
    """Lists the rows that refer to another."""
    return ToolText(
        name,
        f"List the {thing}s of a {owner}, each with its id.",
        {f"{column}_id": f"Id of the {owner}."},
        f"row({of!r}, {column}_id)\nreturn every({table!r}, {column}={column}_id)",
    )


def mover(name: str, description: str, thing: str, before: str, after: str, otherwise: str) -> ToolText:
    """Takes a row from one status to the next, once.

    Args:
        otherwise: why it is refused where the row has another status; the text of an f-string over the tool's names.
    """
    return ToolText(
        name,
        description,
        {f"{thing}_id": f"Id of the {thing}."},
        f'{thing} = row("{thing}s", {thing}_id)\n'
        f'require({thing}["status"] == "{before}", f"{otherwise}")\n'
        f'{thing}["status"] = "{after}"\n'
        f'return {{"id": {thing}_id, **{thing}}}',
    )


def only_once(table: str, key: str, where: str) -> str:
    """That no two of the rows for which something holds have the same key."""
    keys = f"[{key} for one in STATE[{table!r}].values() if {where}]"
    return f"len({keys}) == len(set({keys}))"


PRELUDE = """import datetime


def require(holds, message):
    if not holds:
        raise ValueError(message)


def row(table, id):
    require(id in STATE[table], f"{table}: there is no id {id!r}")
    return STATE[table][id]


def every(table, **wanted):
    rows = sorted(STATE[table].items())
    return [{"id": id, **one} for id, one in rows if all(one[name] == value for name, value in wanted.items())]


def find(table, **wanted):
    def same(one):
        return all(one[name].casefold() == value.strip().casefold() for name, value in wanted.items())

    found = [{"id": id, **one} for id, one in sorted(STATE[table].items()) if same(one)]
    require(len(found) == 1, f"{table}: {len(found)} are called {', '.join(map(repr, wanted.values()))}")
    return found[0]


def add(table, prefix, **cells):
    id = prefix + str(max([int(one[len(prefix):]) for one in STATE[table]], default=100) + 1)
    STATE[table][id] = cells
    return {"id": id, **cells}


def text(value):
    require(0 < len(value.strip()) <= 80 and value.isprintable(), "a text has 1 to 80 printable characters")
    return value.strip()


def day(value):
    try:
        known = datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        known = False
    require(known and value.startswith("2026-"), f"{value!r} is no day of 2026, such as 2026-01-31")
    return value


def hour(value):
    require(8 <= value <= 20, "the hour is from 8 to 20")
    return value


def added(before, after, table, **cells):
    new = [one for id, one in after[table].items() if id not in before[table]]
    return sum(all(one[name] == value for name, value in cells.items()) for one in new)
"""
