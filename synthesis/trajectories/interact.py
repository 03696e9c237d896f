"""Interaction (paper 2.1.4): multi-turn agent runs against real tools and emulators, with injected failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call, MalformedCall
from synthesis.core.openai_messages import estimated_tokens
from synthesis.core.records import Message, Task, ToolCall, ToolServer
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.teacher import TeacherError
from synthesis.trajectories.behaviours import offered
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.execution import Session
from synthesis.trajectories.runs import AgentRun, CallStatus, Ending
from synthesis.trajectories.users import speak


async def interact(task: Task, context: TrajectoryContext, servers: Servers) -> list[AgentRun]:
    """Run the agent on a task until its final answer.

    The agent calls tools, several at once if they are independent, until it answers. Then the simulated user speaks, if
    the task has one, and the agent acts again, until the user wants nothing more. A run is rejected if a turn would
    show the agent more than `max_tokens` (`estimated_tokens`). With half its past cut, it would teach calls that
    nothing explains.

    Raises:
        Rejected: `teacher_failed`, `malformed_call`, `leaked_markup`, `turn_limit`, `token_limit`, `empty_answer`,
            `emulator_failed`, `emulator_leaked_markup`, `bad_schema`; and what `users.speak` raises.
        Transient: the infrastructure failed; the run can be retried unchanged.
    """
    server, config, context = servers[task.server_id], context.config, context.route(task.family)
    agent = _TeacherAgent(task, server, context)
    session = context.executor.session(server, task, config.failures, servers)
    statuses: list[CallStatus] = []

    async def execute(turn: int, calls: Sequence[Call]) -> list[str]:
        made = [call for call in calls if isinstance(call, ToolCall)]  # all: a malformed one rejects the run
        results = await session.call_all(made)
        for call, result in zip(made, results, strict=True):
            repairs = agent.repairs.get(call.id, msgspec.UNSET)
            statuses.append(CallStatus(call.id, result.ok, result.injected, result.error, repairs))
        return [result.content for result in results]

    async def answer() -> None:
        """Run the agent's turns until it makes no more calls."""
        finish = await run_agent(agent, execute, max_turns=config.max_turns) if agent.has_room() else "token_limit"
        if finish == "token_limit":
            where = f"about {agent.tokens} tokens at turn {agent.turns + 1} of {config.max_tokens}"
            raise Rejected("token_limit", f"{task.id}: {where}")
        if finish == "turn_limit":
            raise Rejected("turn_limit", f"{task.id}: no answer after {config.max_turns} turns")
        if not agent.messages[-1].content:
            raise Rejected("empty_answer", f"{task.id}: the last message says nothing")

    try:
        ended = await _converse(task, agent, session, answer, context)
    except Rejected as rejection:
        rejection.record = AgentRun(task, agent.messages, statuses)
        raise
    return [AgentRun(task, agent.messages, statuses, ended)]


async def _converse(
    task: Task,
    agent: _TeacherAgent,
    session: Session,
    answer: Callable[[], Awaitable[None]],
    context: TrajectoryContext,
) -> Ending | msgspec.UnsetType:
    """Let the agent answer, and the simulated user speak if the task has one; return how the user ended it."""
    await answer()
    if not task.dialogue or task.dialogue.user_turns == 1:
        return msgspec.UNSET
    ended = Ending.TURN_LIMIT
    for spoken in range(1, task.dialogue.user_turns + 1):
        said = await speak(task, agent.messages, context)
        if said.finished and not said.message:
            ended = Ending.USER_LEFT
            break
        if spoken == task.dialogue.user_turns:  # nothing more may be said
            break
        session.spoken = agent.add_user_message(said.message)
        await answer()
        if said.finished:
            ended = Ending.USER_CLOSED
            break
    return ended


class _TeacherAgent:
    """The teacher as agent, which sees only the conversation and the tools' documents. Implements `Agent`.

    Its text becomes training data. So an unreadable call, or markup in the text, rejects the run; for a policy both are
    observations.

    Attributes:
        messages: the conversation so far.
        repairs: repairs of a call, by its id.
        tokens: estimated tokens of the conversation, tools' documents included.
        turns: number of the teacher's turns.
    """

    def __init__(self, task: Task, server: ToolServer, context: TrajectoryContext) -> None:
        told = (context.config.system_prompt, task.dialogue.policy if task.dialogue else "")
        system = "\n\n".join(filter(None, told))
        self.messages = [Message("system", system)] if system else []
        self.messages.append(Message("user", task.question))
        self._server, self._spoken = server, 1
        self._tools = offered(task, server)
        self.tokens, self._counted = estimated_tokens([], self._tools), 0
        self.turns = self._calls = 0
        self.repairs: dict[str, list[str]] = {}
        self._task, self._context = task, context
        self._sent: list[dict[str, Any] | None] = []

    def add_user_message(self, message: str) -> int:
        """Add a user message and return the number of user messages so far; tools may be offered from then on."""
        self.messages.append(Message("user", message))
        self._spoken += 1
        had, self._tools = self._tools, offered(self._task, self._server, self._spoken)
        self.tokens += estimated_tokens([], self._tools) - estimated_tokens([], had)
        return self._spoken

    def has_room(self) -> bool:
        """Return whether the teacher may be shown the conversation so far; counts the tokens of new messages."""
        self.tokens += estimated_tokens(self.messages[self._counted :])
        self._counted = len(self.messages)
        return self.tokens <= self._context.config.max_tokens

    async def act(self) -> list[ToolCall]:
        number = rng_for(self._context.seed, "agent", self._task.id, self.turns).getrandbits(31)
        try:
            turn = await self._context.teacher.act(
                self.messages, self._tools, language=self._task.language, seed=number, sent=self._sent
            )
        except TeacherError as error:
            raise Rejected("teacher_failed", str(error)) from error
        if turn.leak:
            raise Rejected("leaked_markup", f"{self._task.id}: {turn.leak}")
        calls = [self._own(call, number) for number, call in enumerate(turn.calls, start=self._calls + 1)]
        self.repairs |= {calls[index].id: repairs for index, repairs in turn.repairs.items()}
        self.turns, self._calls = self.turns + 1, self._calls + len(calls)
        self._sent.append(turn.sent)
        self.messages.append(Message("assistant", turn.content.strip(), turn.reasoning.strip(), calls))
        return calls

    def _own(self, call: Call, number: int) -> ToolCall:
        """Return the call with an id that is unique in its run."""
        if isinstance(call, MalformedCall):
            raise Rejected("malformed_call", f"{self._task.id}: {call.error}: {call.text:.200}")
        return msgspec.structs.replace(call, id=f"call_{number}")

    async def observe(self, outputs: Sequence[str]) -> bool:
        calls = self.messages[-1].tool_calls
        for call, output in zip(calls, outputs, strict=True):
            self.messages.append(Message("tool", output, tool_call_id=call.id, name=call.name))
        return self.has_room()
