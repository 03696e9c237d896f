"""The seven-axis reward (paper, section 2.1.5): each axis is a judge's answer with its own schema, or an exact rule.

It fails closed: a judge without a valid answer rejects the trajectory (`judge_failed`); it never scores it as good. The
round-based axes judge on the history up to the reaction, not on later messages. An axis with nothing to judge (a
trajectory without calls has no tool results) has no score. The original gives it 1, so an agent that answers from
memory would get four of seven for nothing. What a rule can see is not left to a judge: before any is asked, the run
must have called the tools that its task names (`check_coverage`). Its calls and texts must pass the audit's rules
(`check_claims`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean
from typing import Final, Literal, TypeVar

import msgspec

from synthesis.audit.conversations import findings
from synthesis.core.endpoint_settings import Role
from synthesis.core.records import (
    AxisScore,
    CallError,
    EmulatedExecution,
    InjectedFailure,
    Message,
    ToolServer,
    Trajectory,
)
from synthesis.core.stages import Rejected
from synthesis.pipeline.context import no_check
from synthesis.pipeline.languages import NAMES, strays
from synthesis.trajectories.behaviours import check_behaviour, offered
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.runs import AgentRun
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
CLAIMS: Final = frozenset({
    "argument_from_nowhere", "repeated_call", "contradictory_results", "unsupported_claim", "success_after_failure",
    "refusal_after_success", "template_tokens", "talk_of_simulation",
})  # fmt: skip
"""Rules of the audit that a run must pass; see `synthesis.audit.findings.RULES`. Schemas and languages have their own
checks where calls are made and texts are written."""
T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R", QueryUnderstandingScore, QueryPlanningScore, ToolUnderstandingScore, ToolPlanningScore)


async def judge(run: AgentRun, context: TrajectoryContext, servers: Servers) -> list[Trajectory]:
    """Return the run as a scored trajectory.

    Raises:
        Rejected: see `check_coverage` and `check_claims`; `judge_failed`, `low_reward`, or `low_final_answer`, since
            good axes must not hide a wrong answer.
    """
    config, server, context = context.config, servers[run.task.server_id], context.route(run.task.family)
    executions = [servers[id].execution for id in server.servers]
    emulated: tuple[Role, ...] = ("emulator",) if any(isinstance(x, EmulatedExecution) for x in executions) else ()
    users: tuple[Role, ...] = ("user",) if run.task.dialogue and run.task.dialogue.user_turns > 1 else ()
    roles: tuple[Role, ...] = ("agent", "author", *emulated, *users, "judge")
    provenance = context.provenance(server.license or config.license, run.task.family, roles)
    one = msgspec.structs.replace(unscored(run, server), provenance=provenance)
    try:
        check_coverage(run)
        check_claims(one)
        scores = await score_axes(run, context, server)
        one = msgspec.structs.replace(one, scores=scores, reward=fmean(score.score for score in scores.values()))
        check_reward(one, config)
    except Rejected as rejection:
        rejection.record = one
        raise
    return [one]


def unscored(run: AgentRun, server: ToolServer) -> Trajectory:
    """Return a run as a trajectory without scores."""
    return Trajectory(
        id=f"trajectory-{run.task.id}",
        task_id=run.task.id,
        server_id=server.id,
        domain=server.domain,
        language=run.task.language,
        tools=offered(run.task, server, spoken(run.messages)),
        messages=run.messages,
        injected_failures=sum(bool(call.injected) for call in run.calls),
        scores={},
        reward=None,
        failures=[InjectedFailure(call.call_id, call.injected) for call in run.calls if call.injected],
        errors=[CallError(call.call_id, call.error) for call in run.calls if call.error],
        repaired={call.call_id: call.repairs for call in run.calls if call.repairs} or msgspec.UNSET,
        needs=run.task.tools,
        dialogue=run.task.dialogue,
        servers=run.task.servers,
    )


def check_reward(one: Trajectory, config: TrajectoriesConfig) -> None:
    """Check the scores against the thresholds. Raises `Rejected`: `low_reward`, `low_final_answer`."""
    scores = one.scores
    if one.reward is not None and one.reward < config.reward_threshold:
        worst = min(scores, key=lambda axis: scores[axis].score)
        raise Rejected("low_reward", f"{one.task_id}: {one.reward:.3f}; {worst}: {scores[worst].reason}")
    if scores["final_answer"].score < config.final_answer_threshold:
        raise Rejected("low_final_answer", f"{one.task_id}: {scores['final_answer'].reason}")


def check_coverage(run: AgentRun) -> None:
    """Check that the run called the tools of its task; if not, no judge is asked.

    A tool counts as called when a call reached it, even if the call failed: a failure that the agent reports is honest.
    But if every call failed, the answer can only be from memory.

    Raises:
        Rejected: `tools_unused`: a tool that the task names was not called; `no_result`: no call succeeded; `no_tools`:
            the task names no tool although its mode needs one; and what `behaviours.check_behaviour` raises.
    """
    task = run.task
    check_behaviour(run)
    if task.mode == "no_tool":
        return
    names = {call.id: call.name for message in run.messages for call in message.tool_calls}
    if not task.tools:
        raise Rejected("no_tools", f"{task.id}: a task of the mode {task.mode} names the tools that it needs")
    reached = {names[call.call_id] for call in run.calls if call.error not in ("unknown_tool", "invalid_arguments")}
    if unused := [name for name in dict.fromkeys(task.tools) if name not in reached]:
        raise Rejected("tools_unused", f"{task.id}: never called {', '.join(unused)}, which the task needs")
    if not any(call.ok for call in run.calls):
        raise Rejected("no_result", f"{task.id}: none of {len(run.calls)} calls succeeded")


def check_claims(one: Trajectory) -> None:
    """Check what a run says and calls against what it has heard.

    Raises:
        Rejected: the first rule of `CLAIMS` that finds something, with what it found.
    """
    for rule, detail in findings(one):
        if rule in CLAIMS:
            raise Rejected(rule, f"{one.task_id}: {detail}")


async def score_axes(run: AgentRun, context: TrajectoryContext, server: ToolServer) -> dict[str, AxisScore]:
    """Score the axes that have something to judge, in the order of `AXES`.

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
    return {axis: score for axis, score in zip(AXES, scores, strict=True) if score is not None}


def tool_call_status(run: AgentRun) -> AxisScore | None:
    """Return the share of calls that succeeded; exact, from the executor's records (paper: mean of success)."""
    if not run.calls:
        return None
    ok = sum(call.ok for call in run.calls)
    return AxisScore(ok / len(run.calls), f"{ok} of {len(run.calls)} calls succeeded")


def spoken(messages: Sequence[Message]) -> int:
    """Return the number of user messages."""
    return sum(message.role == "user" for message in messages)


def reactions(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant messages that answer tool results."""
    pairs = enumerate(zip(messages, messages[1:], strict=False), start=1)
    return [index for index, (before, after) in pairs if before.role == "tool" and after.role == "assistant"]


class _Judge:
    def __init__(self, run: AgentRun, context: TrajectoryContext, server: ToolServer) -> None:
        self._run = run
        self._context = context
        self._server = server

    async def _ask(
        self, answer: type[T], messages: Sequence[Message], check: Callable[[T], Awaitable[T]] = no_check
    ) -> T:
        task = self._run.task
        variables = {
            "tools": offered(task, self._server, spoken(messages)),
            "messages": list(messages),
            "conduct": task.dialogue.behaviour if task.dialogue else "",
            "turns": spoken(messages),
        }
        return await self._context.ask(
            answer,
            variables,
            language=task.language,
            key=("judge", answer.__name__, task.id, len(messages)),
            check=check,
            failed="judge_failed",
        )

    def _ends(self, of: Literal[0, -1]) -> list[int]:
        """Return the end index of the first, or the last, assistant message after each user message."""
        ends: list[int] = []
        starts = [i for i, message in enumerate(self._run.messages) if message.role == "user"]
        for start, end in zip(starts, [*starts[1:], len(self._run.messages)], strict=True):
            own = [i for i in range(start, end) if self._run.messages[i].role == "assistant"]
            ends.append(own[of] + 1)
        return ends

    async def query_understanding(self) -> AxisScore | None:
        return await self._rounds(QueryUnderstandingScore, self._ends(0))

    async def query_planning(self) -> AxisScore | None:
        return await self._rounds(QueryPlanningScore, self._ends(0))

    async def tool_response_understanding(self) -> AxisScore | None:
        return await self._rounds(ToolUnderstandingScore, [i + 1 for i in reactions(self._run.messages)])

    async def response_conditioned_planning(self) -> AxisScore | None:
        messages = self._run.messages
        ends = [i + 1 for i in reactions(messages) if messages[i].tool_calls]
        return await self._rounds(ToolPlanningScore, ends)

    async def _rounds(self, answer: type[R], ends: Sequence[int]) -> AxisScore | None:
        """Return the mean over rounds with the reason of the worst one; None if there is no round."""
        if not ends:
            return None
        given = [await self._ask(answer, self._run.messages[:end]) for end in ends]
        worst = min(given, key=lambda one: POINTS[one.verdict])
        return AxisScore(fmean(POINTS[one.verdict] for one in given), worst.reason)

    async def conciseness(self) -> AxisScore | None:
        ids = [call.call_id for call in self._run.calls]
        if not ids:
            return None

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
        """Return the score of the worst answer to a user message: other answers must not hide a wrong one."""
        return min([await self._answer(end) for end in self._ends(-1)], key=lambda one: one.score)

    async def _answer(self, end: int) -> AxisScore:
        if (found := strays(self._run.messages[end - 1].content, self._run.task.language)) is not None:
            return AxisScore(0.0, f"the answer is in {NAMES[found]}, not in the language of the question")
        given = await self._ask(FinalAnswerScore, self._run.messages[:end])
        return AxisScore((POINTS[given.solves] + POINTS[given.faithful]) / 2, given.reason)
