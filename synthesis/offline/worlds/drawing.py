"""Draws a world and a task of a description: rows by chance, the rows that the task is about, its texts and checks."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synthesis.core.records import Answer, Cell, Rows
from synthesis.environments.dependency_graph import signature_of
from synthesis.environments.teacher_answers import (
    Parameter,
    ToolDocumentAnswer,
    WorldAnswer,
    WorldColumn,
    WorldRow,
    WorldStep,
    WorldTable,
    argument_list,
)
from synthesis.environments.worlds import intent_of
from synthesis.offline.worlds.descriptions import (
    PRELUDE,
    Added,
    Gone,
    Has,
    Look,
    Pick,
    TableText,
    TaskText,
    ToolText,
    WorldText,
)

_TRIES = 60
_PATH = re.compile(r"\{([a-z_.]+)\}")
_NAMES = ("name", "title", "label", "plate", "guest")
"""Columns whose values name something: what of them a question says are its entities."""
_TELLING = tuple(f".{column}}}" for column in ("id", *_NAMES))
"""How a text ends that says which of several things is meant."""


@dataclass(frozen=True)
class View:
    """A row, as texts see it: `view.member.name` follows a reference."""

    id: str
    table: str
    rows: Rows
    tables: Mapping[str, TableText]

    def __getattr__(self, column: str) -> Any:
        cells = self.rows[self.table][self.id]
        if column not in cells:
            raise AttributeError(f"{self.table} has no column {column}")
        other = self.tables[self.table].columns[column].refers
        return View(str(cells[column]), other, self.rows, self.tables) if other else cells[column]


Views = Mapping[str, Any]


def drawn_world(world: WorldText, task: TaskText, keep: Callable[[str], bool], rng: random.Random) -> WorldAnswer:
    """A world and a task, with entities of which `keep` holds.

    Raises:
        ValueError: none was found in a bounded number of draws.
    """
    for _ in range(_TRIES):
        rows = drawn_rows(world, rng)
        for _ in range(_TRIES):
            mine, theirs = (_picked(world, task, rows, rng) for _ in range(2))
            if mine is None or theirs is None or not _differ(task, mine, theirs):
                continue
            if all(map(keep, entities_of(task, mine))):
                return _answer(world, task, rows, mine, theirs, rng)
    raise ValueError(f"world {world.name}: no task of such entities in {_TRIES} times {_TRIES} draws")


def drawn_rows(world: WorldText, rng: random.Random) -> Rows:
    rows: Rows = {}
    for name, table in world.tables.items():
        ids = [f"{table.prefix}{n}" for n in sorted(rng.sample(range(101, 990), table.rows))]
        columns: dict[str, Sequence[Cell]] = {}
        for column, of in table.columns.items():
            if of.refers:
                columns[column] = [rng.choice(list(rows[of.refers])) for _ in ids]
            elif of.pool:
                columns[column] = rng.sample(of.pool, len(ids))
            else:
                columns[column] = [of.draw(rng) for _ in ids]
        rows[name] = {id: {column: columns[column][n] for column in columns} for n, id in enumerate(ids)}
    world.settle(rows, rng)
    return rows


def _picked(world: WorldText, task: TaskText, rows: Rows, rng: random.Random) -> Views | None:
    picked: dict[str, Any] = {}
    for name, pick in task.picks.items():
        if isinstance(pick, Pick):
            every = [View(id, pick.table, rows, world.tables) for id in rows[pick.table]]
            fitting = [one for one in every if pick.where(one)]
            if not fitting:
                return None
            picked[name] = rng.choice(fitting)
        else:
            picked[name] = pick(rng)
    return picked if task.holds(picked) else None


def _differ(task: TaskText, mine: Views, theirs: Views) -> bool:
    """Whether no call of the one is any of the other, and every look-up has another answer."""
    calls = [(step.tool, _arguments(step.arguments, mine)) for step in task.steps]
    for step in task.steps:
        named = [one for one in step.arguments.values() if str(one).endswith(_TELLING)]
        if any(resolved(one, mine) == resolved(one, theirs) for one in named):
            return False
        if (step.tool, _arguments(step.arguments, theirs)) in calls:
            return False
        if isinstance(step, Look) and resolved(step.answer, mine) == resolved(step.answer, theirs):
            return False
    return True


def resolved(template: Any, views: Views) -> Any:
    """A text with what it names filled in; one that is a name alone, as it is typed."""
    if not isinstance(template, str):
        return template
    if alone := _PATH.fullmatch(template):
        return _followed(alone[1], views)
    return _PATH.sub(lambda found: str(_followed(found[1], views)), template)


def _followed(path: str, views: Views) -> Any:
    first, *others = path.split(".")
    value = views[first]
    for one in others:
        value = getattr(value, one)
    return value.id if isinstance(value, View) else value


def _arguments(given: Mapping[str, Any], views: Views) -> dict[str, Any]:
    return {name: resolved(value, views) for name, value in given.items()}


def entities_of(task: TaskText, views: Views) -> list[str]:
    """What a question of the task names."""
    paths = dict.fromkeys(path for one in task.phrasings for path in _PATH.findall(one))
    named = [path for path in paths if path.split(".")[-1] in _NAMES]
    return [str(_followed(path, views)) for path in named]


def _answer(
    world: WorldText, task: TaskText, rows: Rows, mine: Views, theirs: Views, rng: random.Random
) -> WorldAnswer:
    tables = [
        WorldTable(name, [WorldColumn(column, of.type) for column, of in table.columns.items()])
        for name, table in world.tables.items()
    ]
    return WorldAnswer(
        question=resolved(rng.choice(task.phrasings), mine),
        domain=world.name,
        tables=tables,
        rows=[WorldRow(name, id, argument_list(dict(cells))) for name in rows for id, cells in rows[name].items()],
        tools=[_document(tool) for tool in world.tools],
        code=code_of(world),
        sub_questions=steps_of(world, task, mine, theirs),
        open=list(world.open),
    )


def signature(world: WorldText, task: TaskText) -> str:
    """Of every question of the task."""
    return signature_of(_linked(world, task))


def steps_of(world: WorldText, task: TaskText, mine: Views, theirs: Views) -> list[WorldStep]:
    """The steps of a task, each with the call that it takes and another."""
    found = []
    entities = entities_of(task, mine)
    for step, text in zip(_linked(world, task), task.steps, strict=True):
        given, other = _arguments(text.arguments, mine), _arguments(text.arguments, theirs)
        about = ", ".join(map(str, given.values()))
        looks = isinstance(text, Look)
        asked = f"What does {text.tool} say of {about}?" if looks else f"Has {text.tool} been done for {about}?"
        found.append(
            WorldStep(
                id=step.id,
                question=asked,
                answer=Answer(resolved(text.answer, mine)) if isinstance(text, Look) else Answer(True),
                depends_on=step.depends_on,
                hop=step.hop,
                intent=step.intent,
                domain=world.name,
                subjects=entities,
                tool=text.tool,
                arguments=argument_list(given),
                other_arguments=argument_list(other),
                check="" if isinstance(text, Look) else _check(text.check, mine),
            )
        )
    return found


def _linked(world: WorldText, task: TaskText) -> list[WorldStep]:
    """The steps as a graph: who is called with what another has found, or waits for the act before, depends on it."""
    found: list[WorldStep] = []
    for place, step in enumerate(task.steps):
        given = set(map(str, step.arguments.values()))
        needed = [
            n + 1 for n, other in enumerate(task.steps[:place]) if isinstance(other, Look) and other.answer in given
        ]
        if not isinstance(step, Look) and step.after:
            needed.append(max(n + 1 for n, other in enumerate(task.steps[:place]) if not isinstance(other, Look)))
        hop = 1 + max((found[n - 1].hop for n in needed), default=0)
        found.append(
            WorldStep(
                id=place + 1, question="", answer=Answer(True), depends_on=needed, hop=hop,
                intent=intent_of(world.name, step.tool), domain=world.name, subjects=[], tool=step.tool, arguments=[],
                other_arguments=[], check="",
            )
        )  # fmt: skip
    return found


def _check(check: Added | Has | Gone, views: Views) -> str:
    if isinstance(check, Gone):
        holds = f"{resolved(check.id, views)!r} not in after[{check.table!r}]"
    elif isinstance(check, Added):
        cells = ", ".join(f"{name}={value!r}" for name, value in _arguments(check.cells, views).items())
        holds = f"added(before, after, {check.table!r}, {cells}) == 1"
    else:
        row = f"after[{check.table!r}].get({resolved(check.id, views)!r}, {{}})"
        wanted = _arguments(check.cells, views)
        holds = " and ".join(f"{row}.get({name!r}) == {value!r}" for name, value in wanted.items())
    return f"def check(before, after):\n    return {holds}\n"


def _document(tool: ToolText) -> ToolDocumentAnswer:
    parameters = [
        Parameter(
            name, "integer" if text.startswith("integer:") else "string", text.removeprefix("integer:").strip(), True
        )
        for name, text in tool.parameters.items()
    ]
    return ToolDocumentAnswer(tool.name, tool.description, parameters)


def code_of(world: WorldText) -> str:
    """The module of all worlds of a description."""
    parts = [PRELUDE]
    for tool in world.tools:
        body = textwrap.indent(textwrap.dedent(tool.body).strip(), "    ")
        parts.append(f"def {tool.name}({', '.join(tool.parameters)}):\n{body}\n")
    claims = "".join(f"        ({words!r}, {holds}),\n" for words, holds in world.invariants.items())
    parts.append(
        f"def broken():\n    claims = [\n{claims}    ]\n    return [words for words, holds in claims if not holds]\n"
    )
    return "\n\n".join(parts)
