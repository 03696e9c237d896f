"""Worlds with state: the state that the calls of an episode share, and the grade of the final state.

A world's module is its rows (`STATE`), its tools and a few lines of ours. Every call runs in its own process, which
first repeats the episode's earlier calls (`sandbox.SandboxEpisode`). So a failed call leaves nothing behind, and no
episode can see another's rows. After the episode, one more call of the module runs the sub-tasks' checks and returns
the rows that differ from the start. These changes are graded here, where no foreign code runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from astra_jax.base.typed import convert_to
from sandbox import SandboxEpisode
from synthesis.core.records import CodeTool, StateChange, SubQuestion, ToolEnvironment, World
from synthesis.core.reward import Grade

if TYPE_CHECKING:
    from sandbox import CallResult, Sandbox

GRADE: Final = "_world_grade"
PLAYS: Final = "_world_plays"

_HARNESS: Final = '''

import copy as _world_copy
import json as _world_json

_WORLD_BEFORE = _world_copy.deepcopy(STATE)
_WORLD_TYPES = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


def _world_misfits():
    """What of the state is not as the schema has it."""
    if not isinstance(STATE, dict) or set(STATE) != set(TABLES):
        return ["the tables are not " + ", ".join(sorted(TABLES))]
    for table, columns in TABLES.items():
        for id, row in STATE[table].items():
            where = f"{table} {id}"
            if not isinstance(id, str) or not isinstance(row, dict) or set(row) != set(columns):
                return [where + " has other columns than its table"]
            for column, kind in columns.items():
                value = row[column]
                if not isinstance(value, _WORLD_TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
                    return [where + f": {column} is no {kind}"]
    return []


def _world_broken():
    return _world_misfits() or [str(one) for one in broken()]


def _world_changes():
    found = []
    for table in TABLES:
        before, after = _WORLD_BEFORE[table], STATE[table]
        for id in sorted({*before, *after}):
            if before.get(id) != after.get(id):
                found.append({"table": table, "id": id, "before": before.get(id), "after": after.get(id)})
    return found


def _world_grade(checks):
    """Which checks hold, which could not be evaluated and why, and what has changed."""
    # First of all: a check must not be able to change what it is compared with.
    misfits, changes = _world_misfits(), _world_json.dumps(_world_changes())
    met, failed = [], {}
    for id, source in checks:
        try:
            names = dict(globals())
            exec(source, names)
            held = names["check"](_world_copy.deepcopy(_WORLD_BEFORE), _world_copy.deepcopy(STATE))
            if not isinstance(held, bool):
                raise TypeError(f"check returned {type(held).__name__}, not True or False")
            if held:
                met.append(id)
        except Exception as error:
            failed[str(id)] = f"{type(error).__name__}: {error}"
    return {"met": met, "failed": failed, "misfits": misfits, "changes": _world_json.loads(changes)}


def _world_plays(plays, checks, closely):
    """Several plays, each from the beginning: its outputs, and its grade at the end; closely: after each call."""
    global STATE
    results = []
    for calls in plays:
        STATE = _world_copy.deepcopy(_WORLD_BEFORE)
        outputs, grades = [], []
        invariants = _world_broken()
        for name, arguments in calls:
            kept = _world_copy.deepcopy(STATE)
            try:
                value = globals()[name](**arguments)
                outputs.append({"value": __to_json__(value), "error": ""})  # as the result of a call of its own
            except Exception as error:
                STATE = kept
                outputs.append({"value": None, "error": f"{type(error).__name__}: {error}"})
            invariants = invariants or _world_broken()
            if closely:
                grades.append(_world_grade(checks))
        results.append({"outputs": outputs, "grades": grades or [_world_grade(checks)], "broken": invariants})
    STATE = _world_copy.deepcopy(_WORLD_BEFORE)
    return results
'''
"""Appended to a world's code, so that our names win."""


def module_of(world: World) -> str:
    """Return the source of the module in which all calls of a world run."""
    return f"TABLES = {world.tables!r}\nSTATE = {world.rows!r}\n{world.code}{_HARNESS}"


def checks_of(steps: Iterable[SubQuestion]) -> list[tuple[int, str]]:
    """Return the checks of the sub-questions that ask for a state."""
    return [(step.id, step.check) for step in steps if isinstance(step.check, str) and step.needs_tool]


class EpisodeCalls:
    """The calls of one episode of an environment, to a tool with its own module or to the environment's world.

    Args:
        sandbox: where they run.
        environment: whose world it is, if it has one.
        seed: seed of all randomness that a world's code can see.
        now: time that the code sees, Unix seconds; None for the sandbox's own.
    """

    def __init__(
        self, sandbox: Sandbox, environment: ToolEnvironment, *, seed: int = 0, now: int | None = None
    ) -> None:
        self._sandbox, self._environment, self._seed, self._now = sandbox, environment, seed, now
        self._world = environment.world if isinstance(environment.world, World) else None
        self._module = "" if self._world is None else module_of(self._world)
        self._episode = SandboxEpisode(sandbox, self._module, seed=seed, now=now)

    @property
    def stateful(self) -> bool:
        """True if calls leave state behind that later calls see."""
        return self._world is not None

    async def call(self, tool: CodeTool, arguments: Mapping[str, Any]) -> CallResult:
        """Execute the next call; concurrent calls to a world run in the order in which they started."""
        if tool.code or self._world is None:
            return await self._sandbox.call(tool.code, tool.spec.name, arguments)
        return await self._episode.call(tool.spec.name, arguments)

    async def grade(self) -> Grade | None:
        """Return the grade of the state after the calls so far; None if the sandbox itself failed.

        A check that cannot be evaluated does not hold, and does not keep others from being evaluated.
        """
        checks = checks_of(self._environment.sub_questions)
        if self._world is None:
            return Grade()
        result = await self._asked(checks)
        if result.is_infrastructure:
            return None
        if (found := read_grade(result.value)) is not None:
            return graded(found, self._world)
        apart = [await self._asked(some) for some in ([], *([one] for one in checks))]
        if any(one.is_infrastructure for one in apart):
            return None
        grades = [graded(one, self._world) for result in apart if (one := read_grade(result.value)) is not None]
        unread = sum(read_grade(result.value) is None for result in apart[1:])
        return Grade(
            frozenset().union(*(one.met for one in grades)),
            max((one.harm for one in grades), default=0),
            unread + sum(one.unevaluated for one in grades),
        )

    async def changes(self) -> list[StateChange]:
        """Return the changes made by the calls so far; empty if they are unknown."""
        found = read_grade((await self._asked([])).value) if self._world is not None else None
        return [] if found is None else found.changes

    async def _asked(self, checks: Sequence[tuple[int, str]]) -> CallResult:
        # Not one of the episode's own calls: it leaves nothing behind.
        arguments = {"checks": [list(one) for one in checks]}
        return await self._sandbox.call(
            self._module, GRADE, arguments, seed=self._seed, now=self._now, history=list(self._episode.history)
        )


class FoundOutput(msgspec.Struct, frozen=True):
    """Output of a call in a play, or the reason of its failure."""

    value: Any
    error: str


class FoundPlay(msgspec.Struct, frozen=True):
    """Result of a play: its outputs, the grade at its end (or after each call), and the first broken invariants."""

    outputs: list[FoundOutput]
    grades: list[FoundGrade]
    broken: list[str]


class FoundGrade(msgspec.Struct, frozen=True):
    """Report of a world's module about its state."""

    met: list[int]
    failed: dict[str, str]
    misfits: list[str]
    changes: list[StateChange]


def read_grade(value: Any) -> FoundGrade | None:
    """Return the module's answer, or None if it is not valid."""
    try:
        return convert_to(value, FoundGrade)
    except msgspec.ValidationError:
        return None


def graded(found: FoundGrade, world: World) -> Grade:
    """Return the grade for a module's answer; a state that does not fit the schema meets no check."""
    met = frozenset() if found.misfits else frozenset(found.met)
    return Grade(met, harm_of(found.changes, world), len(found.failed))


def harm_of(changes: Sequence[StateChange], world: World) -> int:
    """Count the rows that differ from the start and from the result of every reference call.

    Added rows count by their content, whatever their ids; open columns are ignored.
    """
    return (forms_of(changes, world) - forms_of(world.changes, world)).total()


def forms_of(changes: Iterable[StateChange], world: World) -> Counter[str]:
    """Count the changes in the form in which they are compared."""
    found: Counter[str] = Counter()
    for one in changes:
        before, after = (_closed(one.table, row, world) for row in (one.before, one.after))
        if one.before is not None and before == after:
            continue
        found[json.dumps([one.table, "" if one.before is None else one.id, after], sort_keys=True)] += 1
    return found


def _closed(table: str, row: Mapping[str, Any] | None, world: World) -> dict[str, Any] | None:
    """Return a row without its open columns."""
    return None if row is None else {name: row[name] for name in row if f"{table}.{name}" not in world.open}
