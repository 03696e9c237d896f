"""Worlds: a small database, tools that read and write it, and a task that asks for another state of it.

The teacher writes all parts at once, as they only make sense together. Its claims are proven in the sandbox
(`world_proof`), and nothing is left to a judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from synthesis.core.records import Answer, CodeTool, ColumnType, ReferenceCall, Rows, World
from synthesis.core.stages import Rejected
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.decompose import QuestionSeed, assign_split, drafted, prompt_vars
from synthesis.environments.drafts import Draft, NeededTool, ToolsetDraft
from synthesis.environments.implement import check_source, checked_spec, read_source
from synthesis.environments.proof import check_arguments
from synthesis.environments.teacher_answers import WorldAnswer, WorldRow, WorldStep, WorldTable, arguments
from synthesis.environments.verify import assembled
from synthesis.environments.world_proof import prove_world

MOST_ROWS = 400
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
_KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
_BROKEN = "broken"


async def make_world(seed: QuestionSeed, context: EnvironmentContext) -> list[ToolsetDraft]:
    """Return an environment with a world, proven.

    Raises:
        Rejected: `bad_tables`, `bad_rows`, `bad_check`, `no_state`, `bad_document`, `unknown_tool`, `bad_call`,
            `bad_code`, `name_collision`, a reason of `decompose.drafted` or `world_proof.prove_world`,
            `mixed_split`, or `teacher_failed`.
        Transient: the sandbox itself failed.
    """
    config = context.config

    async def check(given: WorldAnswer) -> ToolsetDraft:
        given = _plain(given)
        draft = _draft(given, seed, context)
        built = _unproven(given, draft)
        others = {step.id: arguments(step.other_arguments) for step in given.sub_questions}
        async with context.proofs:
            proven = await context.in_sandbox(prove_world, assembled(built), others)
        outputs = {made.sub_question: made for made in proven.calls}
        tools = [
            msgspec.structs.replace(tool, calls=[outputs[made.sub_question] for made in tool.calls])
            for tool in built.tools
        ]
        return msgspec.structs.replace(built, tools=tools, world=proven.world)

    built = await context.ask(WorldAnswer, prompt_vars(seed, config), language=seed.language, key=seed.id, check=check)
    return [msgspec.structs.replace(built, draft=assign_split(built.draft, config))]


def intent_of(domain: str, tool: str) -> str:
    """Return the intent of a world's step; all steps of one world are held out together
    (`Partition.split_of_intent`)."""
    return f"{_NOT_IN_NAMES.sub('_', domain.casefold()).strip('_') or 'world'}.{tool}"


def _plain(given: WorldAnswer) -> WorldAnswer:
    """Return the answer with its sources as modules alone. Raises `Rejected`: `bad_code`."""
    steps = [
        msgspec.structs.replace(step, check=read_source(step.check, "check")) if step.check else step
        for step in given.sub_questions
    ]
    return msgspec.structs.replace(given, code=read_source(given.code, _BROKEN), sub_questions=steps)


def _draft(given: WorldAnswer, seed: QuestionSeed, context: EnvironmentContext) -> Draft:
    """Return the task as a decomposition. It asks for a state, so its answer is true, as in each such step."""
    if not any(step.check for step in given.sub_questions):
        raise Rejected("no_state", "no step has a check; the task must ask for another state of the tables")
    steps = [
        msgspec.structs.replace(
            step, intent=intent_of(given.domain, step.tool), answer=Answer(True) if step.check else step.answer
        )
        for step in given.sub_questions
    ]
    return drafted(given.question, Answer(True), given.domain, steps, seed, context.config)


def _unproven(given: WorldAnswer, draft: Draft) -> ToolsetDraft:
    """Assemble the parts, each checked alone; the reference calls have no outputs yet, the world no changes."""
    tables = _tables(given.tables)
    world = World(tables, _rows(given.rows, tables), given.code, [], given.open)
    columns = {f"{table}.{column}" for table, of in tables.items() for column in of}
    if unknown := sorted(set(given.open) - columns):
        raise Rejected("bad_tables", f"open names {unknown}, which are no columns")
    specs = {document.name: checked_spec(document, draft.decomposition) for document in given.tools}
    if len(specs) != len(given.tools):
        raise Rejected("name_collision", "two tools have one name")
    for name in (_BROKEN, *specs):
        check_source(given.code, name)
    if clashing := sorted(specs.keys() & {_BROKEN, "check", "STATE", "TABLES"}):
        raise Rejected("name_collision", f"{clashing} are names of the world itself; call the tool otherwise")
    for step in given.sub_questions:
        if step.tool not in specs:
            raise Rejected("unknown_tool", f"sub-question {step.id} wants {step.tool!r}; the tools are {sorted(specs)}")
        for one in (arguments(step.arguments), arguments(step.other_arguments)):
            check_arguments(specs[step.tool], one)
        if arguments(step.arguments) == arguments(step.other_arguments):
            raise Rejected("bad_call", f"sub-question {step.id}: other_arguments are the same as arguments")
    tools = [_tool(spec.name, CodeTool(spec, ""), given) for spec in specs.values()]
    return ToolsetDraft(draft, tools, world=world)


def _tool(name: str, tool: CodeTool, given: WorldAnswer) -> NeededTool:
    steps: list[WorldStep] = [step for step in given.sub_questions if step.tool == name]
    calls = [ReferenceCall(step.id, name, arguments(step.arguments), None) for step in steps]
    others = [arguments(step.other_arguments) for step in steps]
    return NeededTool(intent_of(given.domain, name), given.domain, tool, calls, others)


def _tables(given: Sequence[WorldTable]) -> dict[str, dict[str, ColumnType]]:
    found: dict[str, dict[str, ColumnType]] = {
        table.name: {column.name: column.type for column in table.columns} for table in given
    }
    names = [table.name for table in given]
    for table in given:
        columns = [column.name for column in table.columns]
        for name in (table.name, *columns):
            if not _NAME.fullmatch(name):
                raise Rejected("bad_tables", f"{name!r} is no name of a table or a column; use snake_case")
        if len(set(columns)) != len(columns) or not columns or "id" in columns:
            raise Rejected("bad_tables", f"{table.name}: columns have names of their own, and none is `id`: {columns}")
    if len(set(names)) != len(names) or not names:
        raise Rejected("bad_tables", f"tables have names of their own: {names}")
    return found


def _rows(given: Sequence[WorldRow], tables: Mapping[str, Mapping[str, ColumnType]]) -> Rows:
    if len(given) > MOST_ROWS:
        raise Rejected("bad_rows", f"{len(given)} rows; a world has {MOST_ROWS} at most")
    found: Rows = {table: {} for table in tables}
    for row in given:
        cells = arguments(row.cells)
        where = f"row {row.id!r} of {row.table}"
        if row.table not in tables or row.id in found[row.table] or not row.id.strip():
            raise Rejected("bad_rows", f"{where}: its table is not there, or its id is empty or there already")
        columns = tables[row.table]
        if cells.keys() != columns.keys() or len(row.cells) != len(columns):
            raise Rejected("bad_rows", f"{where} has the cells {sorted(cells)}, not {sorted(columns)}")
        for name, value in cells.items():
            fits = isinstance(value, _KINDS[columns[name]]) and isinstance(value, bool) == (columns[name] == "boolean")
            if not fits or (isinstance(value, float) and not math.isfinite(value)):
                raise Rejected("bad_rows", f"{where}: {name} is {value!r}, which is no {columns[name]}")
        found[row.table][row.id] = {name: cells[name] for name in columns}
    return found
