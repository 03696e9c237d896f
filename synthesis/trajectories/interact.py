"""Interaction (paper 2.1.4): multi-turn agent runs against real tools and emulators, with injected failures."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call, parse_arguments
from synthesis.core.records import Message, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.teacher import Teacher, TeacherError
from synthesis.trajectories.execution import Failures, ToolExecutor
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


async def interact(
    task: Task,
    server: ToolServer,
    *,
    teacher: Teacher,
    executor: ToolExecutor,
    failures: Failures,
    max_turns: int,
    system_prompt: str,
    seed: int,
    max_tokens: int = 58_000,
) -> list[AgentRun]:
    """One run: the agent calls tools, several at once where they do not depend on each other, until it answers.

    Args:
        max_turns: most assistant turns.
        system_prompt: no system message when empty.
        max_tokens: most tokens, as `estimated_tokens` has it, that the agent may be shown in a turn. A run beyond is
            rejected: one that goes on with half its past teaches calls that nothing explains.

    Raises:
        Rejected: `teacher_failed`, `malformed_call`, `turn_limit`, `token_limit`, `empty_answer`, `emulator_failed`,
            `bad_schema`.
        Transient: the infrastructure failed; the run can be tried again as it was.
    """
    agent = _TeacherAgent(
        task, server, system_prompt, teacher=teacher, max_turns=max_turns, max_tokens=max_tokens, seed=seed
    )
    session = executor.session(server, task, failures)
    statuses: list[CallStatus] = []

    async def execute(turn: int, calls: Sequence[Call]) -> list[str]:
        made = [call for call in calls if isinstance(call, ToolCall)]  # all: a malformed one rejects the run
        results = await session.call_all(made)
        for call, result in zip(made, results, strict=True):
            statuses.append(CallStatus(call.id, result.ok, result.injected, result.error))
        return [result.content for result in results]

    finish = await run_agent(agent, execute, max_turns=max_turns) if agent.has_room() else "token_limit"
    if finish == "token_limit":
        where = f"about {agent.tokens} tokens at turn {agent.turns + 1} of {max_tokens}"
        raise Rejected("token_limit", f"{task.id}: {where}")
    if finish == "turn_limit":
        raise Rejected("turn_limit", f"{task.id}: no answer after {max_turns} turns")
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

    def __init__(
        self,
        task: Task,
        server: ToolServer,
        system_prompt: str,
        *,
        teacher: Teacher,
        max_turns: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        self.messages = [Message("system", system_prompt)] if system_prompt else []
        self.messages.append(Message("user", task.question))
        self.tokens, self._counted = estimated_tokens([], server.tools), 0
        self.turns = self._calls = 0
        self._task, self._server, self._teacher, self._seed = task, server, teacher, seed
        self._max_turns, self._max_tokens = max_turns, max_tokens

    def has_room(self) -> bool:
        """Whether the teacher may be shown the conversation so far; counts what is new in it."""
        self.tokens += estimated_tokens(self.messages[self._counted :])
        self._counted = len(self.messages)
        return self.tokens <= self._max_tokens

    async def act(self) -> list[ToolCall]:
        turns_left = self._max_turns - self.turns
        variables = {"messages": self.messages, "tools": self._server.tools, "turns_left": turns_left}
        number = rng_for(self._seed, "agent", self._task.id, self.turns).getrandbits(31)
        try:
            answer = await self._teacher.ask(AgentTurn, variables, language=self._task.language, seed=number)
        except TeacherError as error:
            raise Rejected("teacher_failed", str(error)) from error
        calls = [_tool_call(call, self._calls + index) for index, call in enumerate(answer.tool_calls, start=1)]
        self.turns, self._calls = self.turns + 1, self._calls + len(calls)
        self.messages.append(Message("assistant", answer.content.strip(), answer.reasoning.strip(), calls))
        return calls

    def observe(self, outputs: Sequence[str]) -> bool:
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
