"""Where tool calls go: a real MCP server, the sandbox, or the stateful emulator; and the failures injected on the way.

Every path ends in the same `ToolResult`. A failure of the infrastructure is never a tool's result: it is raised as
`Transient`, and the whole run is tried again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec

from synthesis.core.records import CodeExecution, McpExecution, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, Transient, rng_for
from synthesis.pipeline.teacher import Teacher, TeacherError
from synthesis.servers.collect import connected
from synthesis.servers.mcp_client import McpConnection, McpConnections, ServerUnavailable, Shared
from synthesis.servers.normalize import fix_names
from synthesis.trajectories.teacher_answers import EmulatedResult

if TYPE_CHECKING:
    from sandbox import Sandbox

FAILURES: Mapping[str, str] = {
    "timeout": '{"error": "timeout"}',
    "error": '{"error": "internal server error"}',
    "empty": "",
    "rate_limit": '{"error": "rate limit exceeded"}',
}
"""What the agent sees instead of the result, by kind of injected failure. Short: each is read again every turn."""
RESULT_CHARACTERS = 4_000
"""Longer results are cut: one listing must not fill the context."""
RAW_RESULT_BYTES = 10_000_000
"""What a server sent beyond this is not even parsed."""
CUT = " [cut]"
"""Marks the end of a result that was cut."""
_HISTORY = 5
"""How many earlier calls the emulator sees (the original's number)."""


class ToolResult(msgspec.Struct, frozen=True):
    """What the agent sees of a call.

    Attributes:
        ok: whether it succeeded: neither did it fail by itself, nor was a failure injected.
        injected: the kind of failure that was injected, or "".
        error: the kind of failure that was the call's own (`records.CallError`), or "".
    """

    content: str
    ok: bool
    injected: str = ""
    error: str = ""


def failed(kind: str, message: str) -> ToolResult:
    """Of a call that failed by itself."""
    return ToolResult(compact({"error": message}), False, error=kind)


@dataclass(frozen=True)
class Failures:
    """Failure injection: each call fails with probability `rate`, with a kind drawn evenly; seeded by run and call."""

    rate: float = 0.2
    kinds: tuple[str, ...] = tuple(FAILURES)

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"failures.rate: {self.rate} is not a probability; use 0 to 1")
        if unknown := [kind for kind in self.kinds if kind not in FAILURES]:
            raise ValueError(f"failures.kinds: unknown {unknown[0]!r}; use {', '.join(FAILURES)}")

    def draw(self, seed: int, task_id: str, call_id: str) -> str:
        """The kind of failure to inject into this call, or "" for none."""
        rng = rng_for(seed, "failure", task_id, call_id)
        return rng.choice(self.kinds) if self.kinds and rng.random() < self.rate else ""


class ToolExecutor:
    """Executes the calls of all runs. Holds the sandbox pool and the MCP connections, no state of any run."""

    def __init__(self, *, sandbox: Sandbox, connections: McpConnections, teacher: Teacher, seed: int) -> None:
        self._sandbox = sandbox
        self._connections = connections
        self._teacher = teacher
        self.seed = seed
        self._original_names: Shared[str, dict[str, str]] = Shared()

    def session(self, server: ToolServer, task: Task, failures: Failures) -> Session:
        """The calls of one run."""
        return Session(self, server, task, failures)

    async def code(self, execution: CodeExecution, call: ToolCall, seed: int) -> ToolResult:
        """In the sandbox.

        Raises:
            Transient: the sandbox itself failed.
        """
        result = await self._sandbox.call(execution.code, call.name, call.arguments, seed=seed)
        if result.is_infrastructure:
            raise Transient(f"sandbox: {result.kind}: {result.error}")
        if result.ok:
            return ToolResult(compact(result.value), True)
        return failed(str(result.kind), result.error.strip() or str(result.kind))

    async def mcp(self, server: ToolServer, execution: McpExecution, call: ToolCall) -> ToolResult:
        """On the running MCP server.

        Raises:
            Transient: it went away and did not come back, or did not answer in time.
            Rejected: see `collect.connected`.
        """
        try:
            connection = await connected(execution, self._connections)
            names = await self._original_names.get(server.id, lambda: _original_names(server.id, connection))
            text, ok = await connection.call(names.get(call.name, call.name), call.arguments)
        except ServerUnavailable as error:
            raise Transient(str(error)) from error
        content = readable(text)
        return ToolResult(content, True) if ok else failed("tool_error", content)

    async def emulate(
        self, server: ToolServer, spec: ToolSpec, task: Task, call: ToolCall, history: Sequence[tuple[ToolCall, str]],
        seed: int,
    ) -> ToolResult:  # fmt: skip
        """By the teacher, which sees the tool's document, the session's last calls and the user's question.

        Raises:
            Rejected: `emulator_failed`: no answer, or one that is not JSON.
        """
        variables = {
            "server": server,
            "tool": spec,
            "call": call,
            "history": [{"call": earlier, "result": result} for earlier, result in history[-_HISTORY:]],
            "question": task.question,
        }
        try:
            answer = await self._teacher.ask(EmulatedResult, variables, language=server.language, seed=seed)
            content = compact(json.loads(answer.result))
            return ToolResult(content, not answer.is_error, error="tool_error" if answer.is_error else "")
        except TeacherError as error:
            raise Rejected("emulator_failed", str(error)) from error
        except (ValueError, RecursionError) as error:
            raise Rejected("emulator_failed", f"{call.name}: the emulated result is not JSON: {error}") from error


@dataclass
class Session:
    """The calls of one run, in order; what the emulator must stay consistent with is kept here."""

    executor: ToolExecutor
    server: ToolServer
    task: Task
    failures: Failures
    history: list[tuple[ToolCall, str]] = field(default_factory=list)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The calls of one turn, at the same time; none of them sees another's result."""
        before = list(self.history)
        results = await asyncio.gather(*(self._call(call, before) for call in calls))
        self.history.extend((call, result.content) for call, result in zip(calls, results, strict=True))
        return list(results)

    async def _call(self, call: ToolCall, history: Sequence[tuple[ToolCall, str]]) -> ToolResult:
        spec = next((tool for tool in self.server.tools if tool.name == call.name), None)
        if spec is None:
            return failed("unknown_tool", f"unknown tool: {call.name}")
        try:
            jsonschema.Draft202012Validator(spec.parameters).validate(call.arguments)
        except jsonschema.ValidationError as problem:
            return failed("invalid_arguments", f"invalid arguments: {problem.message[:200]}")
        except Exception as problem:  # a pattern that is no regular expression, a reference that leads nowhere …
            raise Rejected("bad_schema", f"{self.server.id}.{call.name}: {problem!r:.200}") from problem
        seed = self.executor.seed
        if kind := self.failures.draw(seed, self.task.id, call.id):
            return ToolResult(FAILURES[kind], False, kind)
        number = rng_for(seed, "call", self.task.id, call.id).getrandbits(31)
        execution = self.server.execution
        if isinstance(execution, CodeExecution):
            result = await self.executor.code(execution, call, number)
        elif isinstance(execution, McpExecution):
            result = await self.executor.mcp(self.server, execution, call)
        else:
            result = await self.executor.emulate(self.server, spec, self.task, call, history, number)
        return msgspec.structs.replace(result, content=_shown(result.content))


async def _original_names(server_id: str, connection: McpConnection) -> dict[str, str]:
    """Our name → the running server's, which may have characters that OpenAI's form does not allow."""
    originals = [tool.name for tool in await connection.list_tools()]
    pairs = zip(fix_names(originals, server_id), originals, strict=True)
    return {name: original for name, original in pairs if name is not None}


def compact(value: Any) -> str:
    """One line of JSON, non-ASCII text as it is."""
    return json.dumps(value, ensure_ascii=False)


def readable(text: str) -> str:
    """A tool's text: one line of JSON if it is JSON that can be read, else as it is; cut at `RAW_RESULT_BYTES`."""
    data = text.encode("utf-8", "replace")
    if len(data) > RAW_RESULT_BYTES:
        return data[:RAW_RESULT_BYTES].decode("utf-8", "ignore").strip() + CUT
    try:
        return compact(json.loads(text))
    except (ValueError, RecursionError):  # no JSON, an endless number, or brackets a thousand deep
        return text.strip()


def _shown(content: str) -> str:
    """The result as the agent sees it: not too long, and of characters that a record can hold."""
    if len(content) > RESULT_CHARACTERS:
        content = content[:RESULT_CHARACTERS] + CUT
    return content.encode("utf-8", "replace").decode()
