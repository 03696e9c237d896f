"""Where tool calls go: a real MCP server, the sandbox, or the stateful emulator; and the failures injected on the way.

Every path ends in the same `ToolResult`. A failure of the infrastructure is never a tool's result: it is raised as
`Transient`, and the whole run is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from sandbox.settings import OneOf, Settings, Share
from synthesis.core import tool_results
from synthesis.core.chat_format import parse_json
from synthesis.core.records import CodeExecution, McpExecution, Task, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, Transient, rng_for
from synthesis.core.tool_schemas import UncheckableSchema, with_integers
from synthesis.pipeline.context import ask_until, in_sandbox
from synthesis.pipeline.languages import NAMES, stray_text
from synthesis.pipeline.ray_cluster import RayCluster
from synthesis.pipeline.teacher import Teacher, cast
from synthesis.servers.collect import connected
from synthesis.servers.made_once import Shared
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
"""What the agent sees instead of the result, by kind of injected failure. Short: each is read again every turn."""
_ATTEMPTS = 3
"""How often the emulator is asked for a result that can be used."""
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
    return ToolResult(tool_results.error_text(message), False, error=kind)


@dataclass(frozen=True)
class Failures(Settings):
    """Failure injection, seeded by run and call.

    Attributes:
        rate: the probability with which each call fails.
        kinds: names of `FAILURES`, of which one is drawn evenly; none is no failure.
    """

    rate: Share = 0.2
    kinds: tuple[Annotated[str, OneOf(FAILURES)], ...] = tuple(FAILURES)

    def draw(self, seed: int, task_id: str, call_id: str) -> str:
        """The kind of failure to inject into this call, or "" for none."""
        rng = rng_for(seed, "failure", task_id, call_id)
        return rng.choice(self.kinds) if self.kinds and rng.random() < self.rate else ""


class ToolExecutor:
    """Executes the calls of all runs. Holds the sandbox pool and the MCP connections, no state of any run."""

    def __init__(
        self, *, sandbox: Sandbox | RayCluster, connections: McpConnections, teacher: Teacher, seed: int
    ) -> None:
        self._sandbox = sandbox
        self._connections = connections
        self._teacher = teacher
        self.seed = seed
        self._original_names: Shared[str, dict[str, str]] = Shared()

    def session(
        self, server: ToolServer, task: Task, failures: Failures, servers: Mapping[str, ToolServer] = {}
    ) -> Session:
        """The calls of one run.

        Args:
            servers: by id; those of the server's tools, where it is a group.
        """
        return Session(self, server, task, failures, {**servers, server.id: server})

    async def code(self, execution: CodeExecution, call: ToolCall, seed: int) -> ToolResult:
        """In the sandbox.

        Raises:
            Transient: the sandbox itself failed.
        """
        result = await in_sandbox(self._sandbox, _called, execution.code, call, seed)
        if result.is_infrastructure:
            raise Transient(f"sandbox: {result.kind}: {result.error}")
        return ToolResult(tool_results.outcome_text(result), result.ok, error="" if result.ok else result.kind.value)

    async def mcp(self, server: ToolServer, execution: McpExecution, call: ToolCall) -> ToolResult:
        """On the running MCP server.

        Raises:
            Transient: it went away and did not come back, or did not answer in time.
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
        """By the teacher, which sees the tool's document, the session's last calls and the user's question.

        The result must be JSON without a sentence in a language that neither the user nor the tool's document is in.
        Otherwise the teacher is asked again, with the reason.

        Raises:
            Rejected: `emulator_failed`: no answer, or none that is such; `emulator_leaked_markup`.
        """
        variables = {
            "server": server,
            "tool": spec,
            "call": call,
            "history": [{"call": earlier, "result": result} for earlier, result in history[-_HISTORY:]],
            "question": "\n".join(goal.says for goal in task.dialogue.goals) if task.dialogue else task.question,
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
            cast(self._teacher, task.family),
            EmulatedResult,
            variables,
            language=server.language,
            seeds=(seed + attempt for attempt in range(_ATTEMPTS)),
            check=check,
            failed="emulator_failed",
        )


@dataclass
class Session:
    """The calls of one run, in order; what the emulator must stay consistent with is kept here."""

    executor: ToolExecutor
    server: ToolServer
    task: Task
    failures: Failures
    servers: Mapping[str, ToolServer]
    history: list[tuple[ToolCall, str]] = field(default_factory=list)
    spoken: int = 1
    """How often the user has."""

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """The calls of one turn, at the same time; none of them sees another's result."""
        before = list(self.history)
        results = await asyncio.gather(*(self._call(call, before) for call in calls))
        self.history.extend((call, result.content) for call, result in zip(calls, results, strict=True))
        return list(results)

    async def _call(self, call: ToolCall, history: Sequence[tuple[ToolCall, str]]) -> ToolResult:
        withheld = self.task.dialogue.lacks(self.spoken) if self.task.dialogue else ()
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
    """Our name → the running server's, which may have characters that OpenAI's form does not allow."""
    originals = [tool.name for tool in (await connection.list_tools()).entries]
    pairs = zip(fix_names(originals), originals, strict=True)
    return {name: original for name, original in pairs if name is not None}
