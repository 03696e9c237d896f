"""Interaction (paper 2.1.4): multi-turn agent runs against real tools and emulators, with injected failures."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call, parse_arguments
from synthesis.core.records import Message, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.teacher import TeacherError
from synthesis.trajectories.context import Servers, TrajectoryContext
from synthesis.trajectories.teacher_answers import AgentCall, AgentTurn


class CallStatus(msgspec.Struct, frozen=True):
    """What really became of a call; see `execution.ToolResult`."""

    call_id: str
    ok: bool
    injected: str = ""
    error: str = ""


class AgentRun(msgspec.Struct, frozen=True):
    """A finished run, not judged yet."""

    task: Task
    messages: list[Message]
    calls: list[CallStatus]


async def interact(task: Task, context: TrajectoryContext, servers: Servers) -> list[AgentRun]:
    """One run: the agent calls tools, several at once where they do not depend on each other, until it answers.

    A run that would show the agent more than `max_tokens` in a turn (`estimated_tokens`) is rejected: one that goes on
    with half its past teaches calls that nothing explains.

    Raises:
        Rejected: `teacher_failed`, `malformed_call`, `turn_limit`, `token_limit`, `empty_answer`, `emulator_failed`,
            `bad_schema`.
        Transient: the infrastructure failed; the run can be tried again as it was.
    """
    server, config = servers[task.server_id], context.config
    agent = _TeacherAgent(task, server, context)
    session = context.executor.session(server, task, config.failures)
    statuses: list[CallStatus] = []

    async def execute(turn: int, calls: Sequence[Call]) -> list[str]:
        made = [call for call in calls if isinstance(call, ToolCall)]  # all: a malformed one rejects the run
        results = await session.call_all(made)
        for call, result in zip(made, results, strict=True):
            statuses.append(CallStatus(call.id, result.ok, result.injected, result.error))
        return [result.content for result in results]

    finish = await run_agent(agent, execute, max_turns=config.max_turns) if agent.has_room() else "token_limit"
    if finish == "token_limit":
        where = f"about {agent.tokens} tokens at turn {agent.turns + 1} of {config.max_tokens}"
        raise Rejected("token_limit", f"{task.id}: {where}")
    if finish == "turn_limit":
        raise Rejected("turn_limit", f"{task.id}: no answer after {config.max_turns} turns")
    if not agent.messages[-1].content:
        raise Rejected("empty_answer", f"{task.id}: the last message says nothing")
    return [AgentRun(task, agent.messages, statuses)]


class _TeacherAgent:
    """The teacher, asked for each turn in a structured answer. Implements `Agent`.

    What it writes becomes training data, so a call that cannot be read is no observation, as it is for a policy: it
    rejects the run.

    Attributes:
        messages: the conversation so far.
        tokens: about how many it has, with the tools' documents.
        turns: how many the teacher made.
    """

    def __init__(self, task: Task, server: ToolServer, context: TrajectoryContext) -> None:
        system = context.config.system_prompt
        self.messages = [Message("system", system)] if system else []
        self.messages.append(Message("user", task.question))
        self.tokens, self._counted = estimated_tokens([], server.tools), 0
        self.turns = self._calls = 0
        self._task, self._server, self._context = task, server, context

    def has_room(self) -> bool:
        """Whether the teacher may be shown the conversation so far; counts what is new in it."""
        self.tokens += estimated_tokens(self.messages[self._counted :])
        self._counted = len(self.messages)
        return self.tokens <= self._context.config.max_tokens

    async def act(self) -> list[ToolCall]:
        turns_left = self._context.config.max_turns - self.turns
        variables = {"messages": self.messages, "tools": self._server.tools, "turns_left": turns_left}
        number = rng_for(self._context.seed, "agent", self._task.id, self.turns).getrandbits(31)
        try:
            answer = await self._context.teacher.ask(AgentTurn, variables, language=self._task.language, seed=number)
        except TeacherError as error:
            raise Rejected("teacher_failed", str(error)) from error
        calls = [_tool_call(call, self._calls + index) for index, call in enumerate(answer.tool_calls, start=1)]
        self.turns, self._calls = self.turns + 1, self._calls + len(calls)
        self.messages.append(Message("assistant", answer.content.strip(), answer.reasoning.strip(), calls))
        return calls

    async def observe(self, outputs: Sequence[str]) -> bool:
        calls = self.messages[-1].tool_calls
        for call, output in zip(calls, outputs, strict=True):
            self.messages.append(Message("tool", output, tool_call_id=call.id, name=call.name))
        return self.has_room()


def _tool_call(call: AgentCall, number: int) -> ToolCall:
    """The call with an id that is unique in its run."""
    try:
        return ToolCall(f"call_{number}", call.name, parse_arguments(call.arguments))
    except ValueError as error:
        raise Rejected("malformed_call", f"{call.name}: {error}") from error


def estimated_tokens(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """About how many tokens a model reads: one for a Chinese character, one for four others of the JSON."""
    text = msgspec.json.encode([messages, tools]).decode()
    chinese = len(re.findall(r"[\u3400-\u9fff]", text))
    return chinese + (len(text) - chinese) // 4
