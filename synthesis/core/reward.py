"""The trajectory-level reward (paper eq. 30-31): F1 of sub-task recall and call precision.

Rules decide it from the sandbox's outputs alone; the words of the final answer are not rewarded. A sub-task is solved
if its typed answer, and no other sub-task's, appears in the output of a successful call to its own tool. So a call
solves one sub-task at most, and both parts and the reward lie in [0, 1]. A call that lists everything a tool knows
solves nothing: otherwise a call that ignores the question would pay. Nor does a call whose arguments state the answer
(`synthesis.core.echoes`).

A sub-task that asks for a state (`SubQuestion.check`) is solved if its check holds for the episode's final state
(`synthesis.core.worlds`). Other changes are harm: a row that no reference call leaves so counts in the precision as one
more call. So an episode that reaches the goal and does damage gets less than 1, and less than one that reads too much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.echoes import form_of, is_evidence, values_of, without_values
from synthesis.core.matching import contains
from synthesis.core.readings import NormalizedOutput
from synthesis.core.records import SubQuestion, ToolEnvironment, World


class Reward(msgspec.Struct, frozen=True):
    """A scored episode: `value` is trained on.

    `recall` = solved/needed, `precision` = solved/(calls + harm + epsilon). `unevaluated`: sub-tasks whose check could
    not be evaluated; they count as not solved. `needed` is 0 if the counts are unknown: in environments that are not
    records of ours. `parts`: the named rewards that `value` is the weighted sum of (`synthesis.core.rewards`).
    A penalty or bonus is a named reward there; the F1 here stays the paper's.
    """

    value: float
    recall: float
    precision: float
    solved: int
    needed: int
    calls: int
    harm: int = 0
    unevaluated: int = 0
    parts: dict[str, float] = {}

    @property
    def f1(self) -> float:
        """Return the F1 reward of the same counts, whatever `value` is."""
        return f1_reward(solved=self.solved, needed=self.needed, calls=self.calls, harm=self.harm).value


class SubTask(SubQuestion, frozen=True, kw_only=True):
    """A sub-question that needs a tool, and the arguments of its reference call."""

    given: Mapping[str, Any]


class Grade(NamedTuple):
    """Grade of an episode's final state; see `synthesis.core.worlds`.

    Attributes:
        met: ids of the sub-questions whose check holds.
        harm: number of rows that differ from the result of every reference call.
        unevaluated: number of checks that raised, did not finish or could not run.
    """

    met: frozenset[int] = frozenset()
    harm: int = 0
    unevaluated: int = 0


STATELESS: Final = Grade()
"""Grade of an episode without a world."""


def f1_reward(
    *,
    solved: int,
    needed: int,
    calls: int,
    harm: int = 0,
    unevaluated: int = 0,
    epsilon: float = 1e-6,
) -> Reward:
    """Score an episode from its counts.

    Args:
        solved: distinct sub-tasks solved.
        needed: sub-tasks that need a tool, >= 1.
        calls: all calls the policy made: failed, malformed and irrelevant ones too.
        harm: rows that it left in a wrong state, >= 0.
        unevaluated: only recorded.
        epsilon: keeps the precision of an episode without calls finite; >= 0.

    Returns:
        The reward, in [0, 1] as are its parts; all are 0 when nothing is solved.

    Raises:
        ValueError: counts that no episode can have, or a negative or infinite `epsilon`.
    """
    if needed < 1:
        raise ValueError(f"needed is {needed}: an environment without tool sub-questions cannot be scored; drop it")
    if not 0 <= solved <= needed:
        raise ValueError(f"solved is {solved}, which is not in 0..{needed} (needed)")
    if solved > calls:
        raise ValueError(f"solved is {solved} with {calls} calls; a call solves one sub-task at most")
    if harm < 0:
        raise ValueError(f"harm is {harm}; use a count of rows")
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon is {epsilon}; use a finite number from 0 on")
    recall = solved / needed
    precision = solved / (calls + harm + epsilon) if solved else 0.0
    f1 = 2 * recall * precision / (recall + precision) if solved else 0.0
    return Reward(f1, recall, precision, solved, needed, calls, harm, unevaluated)


def graded_reward(
    sub_tasks: Mapping[str, Sequence[SubQuestion]],
    found: Iterable[int],
    calls: int,
    grade: Grade = STATELESS,
    *,
    epsilon: float = 1e-6,
) -> Reward:
    """Return the reward of an episode whose calls found these sub-tasks' answers and left a state of this grade.

    A call solves one sub-task at most, even if its state satisfies two.
    """
    needed = sum(map(len, sub_tasks.values()))
    solved = min(len({*found, *grade.met}), calls)
    return f1_reward(
        solved=solved, needed=needed, calls=calls, harm=grade.harm, unevaluated=grade.unevaluated, epsilon=epsilon
    )


def sub_tasks_by_tool(environment: ToolEnvironment) -> dict[str, list[SubTask]]:
    """Return, by the name of each tool, the sub-questions that its reference calls answer.

    Raises:
        InputError: a sub-question needs a tool but no reference call answers it, or no sub-question needs one; such an
            environment cannot be scored.
    """
    calls = {call.sub_question: call for call in environment.reference_calls}
    by_tool: dict[str, list[SubTask]] = {}
    for sub in environment.sub_questions:
        if not sub.needs_tool:
            continue
        if sub.id not in calls:
            raise InputError(
                f"environment {environment.id}: sub-question {sub.id} needs a tool but has no reference call; "
                "drop the environment or synthesise it again"
            )
        call = calls[sub.id]
        task = SubTask(**msgspec.structs.asdict(sub), given=call.arguments)
        by_tool.setdefault(call.tool, []).append(task)
    if not by_tool:
        raise InputError(f"environment {environment.id}: no sub-question needs a tool, nothing can be scored; drop it")
    return by_tool


def answered_by(
    sub_tasks: Mapping[str, Sequence[SubQuestion]],
    tool: str,
    output: Any,
    language: str = "en",
    arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of the called tool's sub-questions whose answers its output contains, whatever their source.

    A reference call whose output repeats its arguments answers its own sub-question alone, although one of these
    arguments may be the answer of an earlier one: `next(5)` gives `{"number": 5, "next": 7}`.

    Args:
        arguments: of the call; None: they are not left out.
    """
    asked = [sub for sub in sub_tasks.get(tool, ()) if not sub.asks_state]
    reading = NormalizedOutput(output, language) if asked else None
    found = [sub for sub in asked if contains(reading, sub.answer)]
    if len(found) > 1 and arguments:
        made = set(map(form_of, values_of(arguments)))
        given = {sub.id: list(values_of(sub.given)) for sub in found if isinstance(sub, SubTask)}
        own = {id for id, values in given.items() if values and made.issuperset(map(form_of, values))}
        if own:
            rest = NormalizedOutput(without_values(output, (one for id in own for one in given[id])), language)
            found = [sub for sub in found if sub.id in own or contains(rest, sub.answer)]
    return [sub.id for sub in found]


def solved_by(
    sub_tasks: Mapping[str, Sequence[SubTask]],
    tool: str,
    output: Any,
    language: str = "en",
    *,
    arguments: Mapping[str, Any] | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the id of the sub-question that a successful call solves, or none.

    An output with several answers is a list and solves none, nor does one that repeats what the policy wrote.

    Args:
        sub_tasks: from `sub_tasks_by_tool`.
        tool: the called tool.
        output: the JSON value that the call returned, whole (not the text the model is shown, which may be truncated).
        language: of the environment; see `matching.match`.
        arguments: of the call; None for a call that has none.
        earlier: in a world, the arguments of the episode's earlier calls, which it may have stored.
    """
    found = answered_by(sub_tasks, tool, output, language, arguments)
    if len(found) != 1:
        return []
    [task] = (one for one in sub_tasks[tool] if one.id == found[0])
    stored: list[Any] = []
    if earlier:
        given = {form_of(one) for tasks in sub_tasks.values() for sub in tasks for one in values_of(sub.given)}
        stored = [one for one in values_of(list(earlier)) if form_of(one) not in given]
    return found if is_evidence(output, task.answer, arguments or {}, task.given, language, stored) else []


class MadeCall(NamedTuple):
    """A call of a policy and its result: its output, or the text of its error."""

    tool: str
    ok: bool
    output: Any = None
    arguments: Mapping[str, Any] = {}


def score(
    environment: ToolEnvironment, calls: Sequence[MadeCall], grade: Grade = STATELESS, *, epsilon: float = 1e-6
) -> Reward:
    """Return the F1 reward of an episode that made these calls and left a state of this grade.

    Raises:
        InputError: the environment cannot be scored, see `sub_tasks_by_tool`.
    """
    sub_tasks = sub_tasks_by_tool(environment)
    solved: set[int] = set()
    earlier: list[Mapping[str, Any]] = []
    for call in calls:
        if not call.ok:
            continue
        solved.update(
            solved_by(
                sub_tasks,
                call.tool,
                call.output,
                environment.language,
                arguments=call.arguments,
                earlier=earlier if isinstance(environment.world, World) else (),
            )
        )
        earlier.append(call.arguments)
    return graded_reward(sub_tasks, solved, len(calls), grade, epsilon=epsilon)
