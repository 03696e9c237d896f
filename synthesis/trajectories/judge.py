"""The seven-axis reward (paper, section 2.1.5): judged calls with a schema each, or a rule where a rule is exact.

Fail closed: a judge that gives no valid answer rejects the trajectory (`judge_failed`), it never scores it as good. The
round-based axes judge on the history up to the reaction, not on what came later. An axis that has nothing to judge (a
trajectory without calls has no tool results) scores 1, as in the paper.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean
from typing import TypeVar

import msgspec

from synthesis.core.records import AxisScore, CallError, InjectedFailure, Message, ToolServer, Trajectory
from synthesis.core.stages import Rejected
from synthesis.pipeline.context import accept
from synthesis.pipeline.languages import has_words, language_of
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.interact import AgentRun
from synthesis.trajectories.teacher_answers import (
    POINTS,
    ConcisenessScore,
    FinalAnswerScore,
    QueryPlanningScore,
    QueryUnderstandingScore,
    ToolPlanningScore,
    ToolUnderstandingScore,
)

AXES = (
    "query_understanding",
    "query_planning",
    "tool_response_understanding",
    "response_conditioned_planning",
    "tool_call_status",
    "conciseness",
    "final_answer",
)
_NOTHING = AxisScore(1.0, "nothing to judge")
T = TypeVar("T", bound=msgspec.Struct)


async def judge(run: AgentRun, context: TrajectoryContext, servers: Servers) -> list[Trajectory]:
    """The run as a scored trajectory.

    Raises:
        Rejected: `judge_failed`, `low_reward`, or `low_final_answer`: six good axes must not carry a wrong answer.
    """
    config, server = context.config, servers[run.task.server_id]
    scores = await score_axes(run, context, server)
    reward = fmean(score.score for score in scores.values())
    if reward < config.reward_threshold:
        worst = min(scores, key=lambda axis: scores[axis].score)
        raise Rejected("low_reward", f"{run.task.id}: {reward:.3f}; {worst}: {scores[worst].reason}")
    if scores["final_answer"].score < config.final_answer_threshold:
        raise Rejected("low_final_answer", f"{run.task.id}: {scores['final_answer'].reason}")
    return [
        Trajectory(
            id=f"trajectory-{run.task.id}",
            task_id=run.task.id,
            server_id=server.id,
            domain=server.domain,
            language=run.task.language,
            tools=server.tools,
            messages=run.messages,
            injected_failures=sum(bool(call.injected) for call in run.calls),
            scores=scores,
            reward=reward,
            failures=[InjectedFailure(call.call_id, call.injected) for call in run.calls if call.injected],
            errors=[CallError(call.call_id, call.error) for call in run.calls if call.error],
        )
    ]


async def score_axes(run: AgentRun, context: TrajectoryContext, server: ToolServer) -> dict[str, AxisScore]:
    """All seven axes.

    Raises:
        Rejected: `judge_failed`.
    """
    judge = _Judge(run, context, server)
    scores = (
        await judge.query_understanding(),
        await judge.query_planning(),
        await judge.tool_response_understanding(),
        await judge.response_conditioned_planning(),
        tool_call_status(run),
        await judge.conciseness(),
        await judge.final_answer(),
    )
    return dict(zip(AXES, scores, strict=True))


def tool_call_status(run: AgentRun) -> AxisScore:
    """The share of calls that succeeded: exact, the executor knows (paper: mean of success)."""
    if not run.calls:
        return _NOTHING
    ok = sum(call.ok for call in run.calls)
    return AxisScore(ok / len(run.calls), f"{ok} of {len(run.calls)} calls succeeded")


def reactions(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant messages that answer tool results."""
    pairs = enumerate(zip(messages, messages[1:], strict=False), start=1)
    return [index for index, (before, after) in pairs if before.role == "tool" and after.role == "assistant"]


class _Judge:
    def __init__(self, run: AgentRun, context: TrajectoryContext, server: ToolServer) -> None:
        self._run = run
        self._context = context
        self._server = server

    async def _ask(
        self, answer: type[T], messages: Sequence[Message], check: Callable[[T], Awaitable[T]] = accept
    ) -> T:
        task = self._run.task
        return await self._context.ask(
            answer,
            {"tools": self._server.tools, "messages": list(messages)},
            language=task.language,
            key=("judge", answer.__name__, task.id, len(messages)),
            check=check,
            failed="judge_failed",
        )

    def _first_turn(self) -> list[Message]:
        """Up to the first assistant message, inclusive."""
        messages = self._run.messages
        return messages[: 1 + next(i for i, message in enumerate(messages) if message.role == "assistant")]

    async def query_understanding(self) -> AxisScore:
        given = await self._ask(QueryUnderstandingScore, self._first_turn())
        return AxisScore(POINTS[given.verdict], given.reason)

    async def query_planning(self) -> AxisScore:
        given = await self._ask(QueryPlanningScore, self._first_turn())
        return AxisScore(POINTS[given.verdict], given.reason)

    async def tool_response_understanding(self) -> AxisScore:
        return await self._rounds(ToolUnderstandingScore, reactions(self._run.messages))

    async def response_conditioned_planning(self) -> AxisScore:
        messages = self._run.messages
        return await self._rounds(ToolPlanningScore, [i for i in reactions(messages) if messages[i].tool_calls])

    async def _rounds(
        self, answer: type[ToolUnderstandingScore] | type[ToolPlanningScore], ends: Sequence[int]
    ) -> AxisScore:
        """The mean over rounds; the reason is that of the worst one."""
        if not ends:
            return _NOTHING
        given = [await self._ask(answer, self._run.messages[: end + 1]) for end in ends]
        worst = min(given, key=lambda one: POINTS[one.verdict])
        return AxisScore(fmean(POINTS[one.verdict] for one in given), worst.reason)

    async def conciseness(self) -> AxisScore:
        ids = [call.call_id for call in self._run.calls]
        if not ids:
            return _NOTHING

        async def check(given: ConcisenessScore) -> ConcisenessScore:
            if [call.call_id for call in given.calls] != ids:
                found = ", ".join(call.call_id for call in given.calls)
                raise Rejected("judge_failed", f"ConcisenessScore: judged the calls {found}, not {', '.join(ids)}")
            return given

        given = await self._ask(ConcisenessScore, self._run.messages, check)
        redundant = [call for call in given.calls if not call.necessary]
        reason = redundant[0].reason if redundant else "every call was necessary"
        return AxisScore(1 - len(redundant) / len(ids), reason)

    async def final_answer(self) -> AxisScore:
        question, answer = self._run.task.question, self._run.messages[-1].content
        if has_words(answer) and language_of(answer) != language_of(question):
            return AxisScore(0.0, "the answer is not in the language of the question")
        given = await self._ask(FinalAnswerScore, self._run.messages)
        return AxisScore((POINTS[given.solves] + POINTS[given.faithful]) / 2, given.reason)
