"""The trajectory-level reward (paper eq. 30-31): F1 of sub-task recall and call precision.

Decided by rules from the sandbox's outputs alone. A sub-task is solved when its typed answer, and that of no other
sub-task, appears in the output of a successful call to its own tool; the words of the final answer are not rewarded. So
a call solves one sub-task at most, and both parts and the reward lie in [0, 1]. Who makes a tool list what it knows has
not found anything: to count one of the listed answers, or all, would pay for a call that needs none of the question.

A sub-task that asks for a state (`SubQuestion.check`) is solved when its check holds of the state that the episode
leaves (`synthesis.core.worlds`). What else the episode changed is harm: a row that no reference call leaves so counts
in the precision as one more call, beside the call that changed it. So whoever reaches the goal and does damage has less
than 1, and less than whoever reads too much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from synthesis.core.matching import contains
from synthesis.core.readings import Reading
from synthesis.core.records import SubQuestion, ToolEnvironment
from synthesis.core.refusals import InputError


class Reward(msgspec.Struct, frozen=True):
    """A scored episode: `value` is trained on.

    `recall` = solved/needed, `precision` = solved/(calls + harm + epsilon). `unevaluated`: sub-tasks whose check could
    not be evaluated; they count as not solved. `needed` is 0 where nothing of this is known: in environments that are
    no records of ours. `parts`: the named rewards that `value` is the weighted sum of (`synthesis.core.rewards`).
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
        """The F1 reward of the same counts, whatever `value` is."""
        return f1_reward(solved=self.solved, needed=self.needed, calls=self.calls, harm=self.harm).value


class Grade(NamedTuple):
    """What the state that an episode left says: see `synthesis.core.worlds`.

    Attributes:
        met: ids of the sub-questions whose check holds.
        harm: rows that are otherwise than any reference call leaves them.
        unevaluated: checks that raised, came to no end or could not be asked.
    """

    met: frozenset[int] = frozenset()
    harm: int = 0
    unevaluated: int = 0


STATELESS: Final = Grade()
"""Of an episode without a world."""


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
        harm: rows that it left otherwise than it should, >= 0.
        unevaluated: only noted.
        epsilon: keeps the precision of an episode without calls finite; >= 0.

    Returns:
        The reward, in [0, 1] as are its parts; all are 0 when nothing is solved.

    Raises:
        ValueError: counts that no episode can have, or a negative or endless `epsilon`.
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
    """The reward of an episode whose calls found these sub-tasks' answers and left a state of this grade.

    A call solves one sub-task at most, also one that leaves what two of them ask for.
    """
    needed = sum(map(len, sub_tasks.values()))
    solved = min(len({*found, *grade.met}), calls)
    return f1_reward(
        solved=solved, needed=needed, calls=calls, harm=grade.harm, unevaluated=grade.unevaluated, epsilon=epsilon
    )


def sub_tasks_by_tool(environment: ToolEnvironment) -> dict[str, list[SubQuestion]]:
    """tool name -> the sub-questions that its reference calls answer.

    Raises:
        ValueError: a sub-question needs a tool but no reference call answers it, or no sub-question needs one; such an
            environment cannot be scored.
    """
    tool_of = {call.sub_question: call.tool for call in environment.reference_calls}
    by_tool: dict[str, list[SubQuestion]] = {}
    for sub in environment.sub_questions:
        if not sub.needs_tool:
            continue
        if sub.id not in tool_of:
            raise InputError(
                f"environment {environment.id}: sub-question {sub.id} needs a tool but has no reference call; "
                "drop the environment or synthesise it again"
            )
        by_tool.setdefault(tool_of[sub.id], []).append(sub)
    if not by_tool:
        raise InputError(f"environment {environment.id}: no sub-question needs a tool, nothing can be scored; drop it")
    return by_tool


def answered_by(
    sub_tasks: Mapping[str, Sequence[SubQuestion]], tool: str, output: Any, language: str = "en"
) -> list[int]:
    """Ids of the sub-questions of the called tool whose answers its output holds; see `solved_by`."""
    asked = [sub for sub in sub_tasks.get(tool, ()) if not sub.asks_state]
    reading = Reading(output, language) if asked else None
    return [sub.id for sub in asked if contains(reading, sub.answer)]


def solved_by(
    sub_tasks: Mapping[str, Sequence[SubQuestion]], tool: str, output: Any, language: str = "en"
) -> list[int]:
    """The id of the sub-question that a successful call solves, or none: an output with several answers is a list.

    Args:
        sub_tasks: from `sub_tasks_by_tool`.
        tool: the called tool.
        output: the JSON value that the call returned, whole (not the text the model is shown, which may be truncated).
        language: of the environment; see `matching.match`.
    """
    found = answered_by(sub_tasks, tool, output, language)
    return found if len(found) == 1 else []


class MadeCall(NamedTuple):
    """A call of a policy and what came of it: its output, or the text of its error."""

    tool: str
    ok: bool
    output: Any = None


def score(
    environment: ToolEnvironment, calls: Sequence[MadeCall], grade: Grade = STATELESS, *, epsilon: float = 1e-6
) -> Reward:
    """The F1 reward of an episode that made these calls and left a state of this grade.

    Raises:
        ValueError: the environment cannot be scored, see `sub_tasks_by_tool`.
    """
    sub_tasks = sub_tasks_by_tool(environment)
    solved = {
        id_ for call in calls if call.ok for id_ in solved_by(sub_tasks, call.tool, call.output, environment.language)
    }
    return graded_reward(sub_tasks, solved, len(calls), grade, epsilon=epsilon)
