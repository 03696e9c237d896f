"""Interaction (paper 2.1.4): multi-turn agent runs against real tools and emulators, with injected failures."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from synthesis.core.records import Message, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.teacher import Teacher, TeacherError
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
    config, teacher, executor, seed = context.config, context.teacher, context.executor, context.seed
    server, failures, system_prompt = servers[task.server_id], config.failures, config.system_prompt
    max_turns, max_tokens = config.max_turns, config.max_tokens
    messages = [Message("system", system_prompt)] if system_prompt else []
    messages.append(Message("user", task.question))
    session = executor.session(server, task, failures)
    statuses: list[CallStatus] = []
    tokens, counted = estimated_tokens([], server.tools), 0
    for turn in range(max_turns):
        tokens, counted = tokens + estimated_tokens(messages[counted:]), len(messages)
        if tokens > max_tokens:
            raise Rejected("token_limit", f"{task.id}: about {tokens} tokens at turn {turn + 1} of {max_tokens}")
        answer = await _turn(task, server, messages, turn, max_turns, teacher=teacher, seed=seed)
        calls = [_tool_call(call, len(statuses) + index) for index, call in enumerate(answer.tool_calls, start=1)]
        messages.append(Message("assistant", answer.content.strip(), answer.reasoning.strip(), calls))
        if not calls:
            if not answer.content.strip():
                raise Rejected("empty_answer", f"{task.id}: the last message says nothing")
            return [AgentRun(task, messages, statuses)]
        for call, result in zip(calls, await session.call_all(calls), strict=True):
            messages.append(Message("tool", result.content, tool_call_id=call.id, name=call.name))
            statuses.append(CallStatus(call.id, result.ok, result.injected, result.error))
    raise Rejected("turn_limit", f"{task.id}: no answer after {max_turns} turns")


async def _turn(
    task: Task, server: ToolServer, messages: list[Message], turn: int, max_turns: int, *, teacher: Teacher, seed: int
) -> AgentTurn:
    variables = {"messages": messages, "tools": server.tools, "turns_left": max_turns - turn}
    number = rng_for(seed, "agent", task.id, turn).getrandbits(31)
    try:
        return await teacher.ask(AgentTurn, variables, language=task.language, seed=number)
    except TeacherError as error:
        raise Rejected("teacher_failed", str(error)) from error


def _tool_call(call: AgentCall, number: int) -> ToolCall:
    """The call with an id that is unique in its run."""
    try:
        # Strict JSON: what a reader of the record could not read again (NaN, half a surrogate pair) is refused here.
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected("malformed_call", f"{call.name}: the arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise Rejected("malformed_call", f"{call.name}: the arguments are {call.arguments[:80]!r}, not an object")
    return ToolCall(f"call_{number}", call.name, arguments)


def estimated_tokens(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """About how many tokens a model reads: one for a Chinese character, one for four others of the JSON."""
    text = msgspec.json.encode([messages, tools]).decode()
    chinese = len(re.findall(r"[\u3400-\u9fff]", text))
    return chinese + (len(text) - chinese) // 4
