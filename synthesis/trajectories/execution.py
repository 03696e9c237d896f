"""Execution of tool calls by a real MCP server, the sandbox or the stateful emulator, with injected failures.

Every path ends in the same `ToolResult`. A failure of the infrastructure is never a tool's result: it is raised as
`Transient`, and the whole run is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from astra_jax.base.settings import OneOf, Settings, Share
from synthesis.core import tool_results
from synthesis.core.chat_format import parse_json
from synthesis.core.records import CodeExecution, McpExecution, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, Transient, rng_for
from synthesis.core.tool_schemas import UncheckableSchema, with_integers
from synthesis.pipeline.context import ask_until, in_sandbox
from synthesis.pipeline.languages import NAMES, stray_text
from synthesis.pipeline.ray_cluster import RayCluster
from synthesis.pipeline.teacher import Teacher, route
from synthesis.servers.async_once import AsyncOnce
from synthesis.servers.collect import connected
from synthesis.servers.mcp_client import McpConnection, McpConnections, ServerUnavailable
from synthesis.servers.normalize import fix_names
from synthesis.trajectories.teacher_answers import EmulatedResult

if TYPE_CHECKING:
    from sandbox import CallResult, Sandbox

FAILURES: Mapping[str, str] = {
    "timeout": tool_results.error_text("timeout"),
    "error": tool_results.error_text("internal server error"),
    "empty": "",
    "rate_limit": tool_results.error_text("rate limit exceeded"),
}
"""Kind of injected failure → text that the agent sees instead of the result. Short, as it is read every turn."""
_ATTEMPTS = 3
"""Maximum number of requests to the emulator for a usable result."""
_HISTORY = 5
"""Number of earlier calls that the emulator sees (the original's number)."""


class ToolResult(msgspec.Struct, frozen=True):
    """Result of a call, as the agent sees it.

    Attributes:
        ok: True if the call succeeded: it did not fail by itself, and no failure was injected.
        injected: the kind of injected failure, or "".
        error: the kind of the call's own failure (`records.CallError`), or "".
    """

    content: str
    ok: bool
    injected: str = ""
    error: str = ""


def failed(kind: str, message: str) -> ToolResult:
    """Return the result of a call that failed by itself."""
    return ToolResult(tool_results.error_text(message), False, error=kind)


@dataclass(frozen=True)
class Failures(Settings):
    """Injection of failures into calls, seeded by run and call.

    Attributes:
        rate: probability that a call fails, 0 to 1.
        kinds: kinds of failures, of which one is sampled uniformly: `timeout`, `error`, `empty` and `rate_limit`.
            Empty: no failures.
    """

    rate: Share = 0.2
    kinds: tuple[Annotated[str, OneOf(FAILURES)], ...] = tuple(FAILURES)

    def draw(self, seed: int, task_id: str, call_id: str) -> str:
        """Return the kind of failure to inject into this call, or "" for none."""
        rng = rng_for(seed, "failure", task_id, call_id)
        return rng.choice(self.kinds) if self.kinds and rng.random() < self.rate else ""


class ToolExecutor:
    """Executes the calls of all runs. Has the sandbox pool and the MCP connections, but no state of a run."""

    def __init__(
        self, *, sandbox: Sandbox | RayCluster, connections: McpConnections, teacher: Teacher, seed: int
    ) -> None:
        self._sandbox = sandbox
        self._connections = connections
        self._teacher = teacher
        self.seed = seed
        self._original_names: AsyncOnce[str, dict[str, str]] = AsyncOnce()

    def session(
        self, server: ToolServer, task: Task, failures: Failures, servers: Mapping[str, ToolServer] = {}
    ) -> Session:
        """Start the session that executes the calls of one run.

        Args:
            servers: by id; of a group, the servers of its tools.
        """
        return Session(self, server, task, failures, {**servers, server.id: server})

    async def code(self, execution: CodeExecution, call: ToolCall, seed: int) -> ToolResult:
        """Execute a call in the sandbox.

        Raises:
            Transient: the sandbox itself failed.
        """
        result = await in_sandbox(self._sandbox, _called, execution.code, call, seed)
        if result.is_infrastructure:
            raise Transient(f"sandbox: {result.kind}: {result.error}")
        return ToolResult(tool_results.outcome_text(result), result.ok, error="" if result.ok else result.kind.value)

    async def mcp(self, server: ToolServer, execution: McpExecution, call: ToolCall) -> ToolResult:
        """Execute a call on the running MCP server.

        Raises:
            Transient: the server went away and did not come back, or did not answer in time.
            Rejected: see `collect.connected`.
        """
        try:
            connection = await connected(execution, self._connections)
            names = await self._original_names.get(server.id, lambda: _original_names(connection))
            text, ok = await connection.call(names.get(call.name, call.name), call.arguments)
        except ServerUnavailable as error:
            raise Transient(str(error)) from error
        if ok:
            return ToolResult(tool_results.server_text(text), True)
        return ToolResult(tool_results.server_error_text(text), False, error="tool_error")

    async def emulate(
        self, server: ToolServer, spec: ToolSpec, task: Task, call: ToolCall, history: Sequence[tuple[ToolCall, str]],
        seed: int,
    ) -> ToolResult:  # fmt: skip
        """Let the teacher write the result, from the tool's document, the session's last calls and the user's question.

        The result must be JSON. Its sentences must be in a language of the user or of the tool's document. Otherwise
        the request is repeated with the reason.

        Raises:
            Rejected: `emulator_failed`: no answer, or no valid one; `emulator_leaked_markup`.
        """
        variables = {
            "server": server,
            "tool": spec,
            "call": call,
            "history": [{"call": earlier, "result": result} for earlier, result in history[-_HISTORY:]],
            "question": "\n".join(goal.utterance for goal in task.dialogue.goals) if task.dialogue else task.question,
        }

        async def check(given: EmulatedResult) -> ToolResult:
            try:
                parse_json(given.result)
            except (ValueError, RecursionError) as error:
                raise Rejected("emulator_failed", f"{call.name}: the emulated result is not JSON: {error}") from error
            if found := stray_text(given.result, server.language, task.language):
                raise Rejected(
                    "emulator_failed",
                    f"{call.name}: the result has text in {NAMES[found[1]]}, not in {NAMES[server.language]}: "
                    f"{found[0]!r:.200}",
                )
            text = tool_results.server_text(given.result)
            return ToolResult(text, not given.is_error, error="tool_error" if given.is_error else "")

        return await ask_until(
            route(self._teacher, task.family),
            EmulatedResult,
            variables,
            language=server.language,
            seeds=(seed + attempt for attempt in range(_ATTEMPTS)),
            check=check,
            failed="emulator_failed",
        )


@dataclass
class Session:
    """The calls of one run, in order, with the history that the emulator must stay consistent with."""

    executor: ToolExecutor
    server: ToolServer
    task: Task
    failures: Failures
    servers: Mapping[str, ToolServer]
    history: list[tuple[ToolCall, str]] = field(default_factory=list)
    spoken: int = 1
    """Number of user messages so far."""

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Execute the calls of one turn concurrently; no call sees the result of another."""
        before = list(self.history)
        results = await asyncio.gather(*(self._call(call, before) for call in calls))
        self.history.extend((call, result.content) for call, result in zip(calls, results, strict=True))
        return list(results)

    async def _call(self, call: ToolCall, history: Sequence[tuple[ToolCall, str]]) -> ToolResult:
        withheld = self.task.dialogue.hidden_at(self.spoken) if self.task.dialogue else ()
        specs = {tool.name: tool for tool in self.server.tools if tool.name not in withheld}
        try:
            refused = tool_results.refusal(call, specs)
        except UncheckableSchema as problem:
            raise Rejected("bad_schema", f"{self.server.id}.{call.name}: {problem}") from problem
        if refused:
            return failed(*refused)
        seed = self.executor.seed
        if kind := self.failures.draw(seed, self.task.id, call.id):
            return ToolResult(FAILURES[kind], False, kind)
        number = rng_for(seed, "call", self.task.id, call.id).getrandbits(31)
        origin = self.server.origin(call.name)
        server = self.servers[origin.server_id]
        given = with_integers(specs[call.name].parameters, call.arguments)
        own = msgspec.structs.replace(call, name=origin.tool, arguments=given)
        if isinstance(server.execution, CodeExecution):
            return await self.executor.code(server.execution, own, number)
        if isinstance(server.execution, McpExecution):
            return await self.executor.mcp(server, server.execution, own)
        # The emulator sees the session's other calls, and each tool by the name that it was offered under.
        return await self.executor.emulate(server, specs[call.name], self.task, call, history, number)


async def _called(code: str, call: ToolCall, seed: int, sandbox: Sandbox) -> CallResult:
    return await sandbox.call(code, call.name, call.arguments, seed=seed)


async def _original_names(connection: McpConnection) -> dict[str, str]:
    """Return our name → the running server's name, which may have characters that OpenAI's form does not allow."""
    originals = [tool.name for tool in (await connection.list_tools()).entries]
    pairs = zip(fix_names(originals), originals, strict=True)
    return {name: original for name, original in pairs if name is not None}
