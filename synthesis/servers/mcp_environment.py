"""Tasks over MCP servers as environments: `{"mcpServers": …, "tasks": […]}`, and the expected final answers.

    {
      "mcpServers": {"clock": {"command": "python", "args": ["-m", "mcp_server_time"]}},
      "tasks": [{"question": "What time is it in Lima when it is noon in Oslo?", "answer": "06:00"}],
      "score": "my_module:my_score"
    }

`mcpServers` is as everywhere (`configured.py`), and the tools of all of them are offered. `system` is a system message;
`score`, a function of an episode, judges in place of the answer. Servers whose tools all declare that they only read
are shared by all episodes. Any other server is started (or connected to) for each episode, over stdio in a folder of
its own. If one goes away in an episode, its state is lost, so that episode is not used.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.files import read_unpacked
from astra_jax.base.typed import decode_json
from synthesis.core.environment import Environment, EnvironmentSession, PlayedEpisode, ToolAnswer, ToolsUnavailable
from synthesis.core.own_objects import check_ids
from synthesis.core.own_workers import OwnWorkers
from synthesis.core.records import Answer, McpExecution, Message, ToolSpec
from synthesis.core.references import referred
from synthesis.core.rewards import MOST_SECONDS, answers, check_language
from synthesis.core.schemas import Unmappable, object_schema
from synthesis.servers.configured import read_sources
from synthesis.servers.mcp_answers import ListedTool
from synthesis.servers.mcp_client import McpConnection, ServerUnavailable
from synthesis.servers.normalize import fix_names

_AT_ONCE = 64
"""Episodes that have servers of their own; others wait."""
_SECONDS = 60.0
"""For a server to start, and for a call."""

_log = logging.getLogger(__name__)


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    question: str
    answer: str | int | float | bool | list[str] | None = None
    id: str = ""
    language: str = "en"
    kind: str = "task"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    servers: dict[str, Any] = msgspec.field(name="mcpServers")
    tasks: list[_Task]
    system: str = ""
    score: str = ""


@dataclass(frozen=True)
class ServedTools:
    """Tools that connections offer.

    Attributes:
        specs: under names that models may call, each once.
        places: such a name → the connection's, and the tool's name there.
        read_only: True if all tools declare that they only read.
    """

    specs: list[ToolSpec]
    places: dict[str, tuple[str, str]]
    read_only: dict[str, bool]


async def served_tools(connections: Mapping[str, McpConnection], *, prefixed: bool) -> ServedTools:
    """List the tools of all connections. One whose schema cannot be checked is left out, with a warning.

    Args:
        prefixed: a tool's name begins with its connection's, where that has one.

    Raises:
        ServerUnavailable: one cannot list them.
        InputError: there is no tool at all.
    """
    found: list[tuple[str, ListedTool, dict[str, Any]]] = []
    read_only: dict[str, bool] = {}
    for name, connection in connections.items():
        read_only[name] = True
        tools = await connection.list_tools()
        if tools.problem:
            _log.warning("the list of the tools of %.80s is incomplete: %s", name, tools.problem)
        for tool in tools.entries:
            try:
                found.append((name, tool, object_schema(tool.document["function"].get("parameters"))))
            except Unmappable as unmappable:
                _log.warning("left out the tool %.80s of %.80s: %s", tool.name, name, unmappable.detail)
                continue
            read_only[name] &= bool(tool.reads)
    wanted = [f"{name}_{tool.name}" if prefixed and name else tool.name for name, tool, _ in found]
    specs, places = list[ToolSpec](), dict[str, tuple[str, str]]()
    for fixed, (name, tool, schema) in zip(fix_names(wanted), found, strict=True):
        if fixed is None or fixed in places:
            _log.warning("left out the tool %.80s of %.80s: its name is missing or used twice", tool.name, name)
            continue
        description = tool.document["function"].get("description")
        specs.append(ToolSpec(fixed, description if isinstance(description, str) else "", schema))
        places[fixed] = name, tool.name
    if not specs:
        raise InputError(f"the servers {', '.join(connections)} offer no tool that could be called")
    return ServedTools(specs, places, read_only)


class McpEnvironment:
    """A question over MCP servers. See `Environment`."""

    def __init__(self, task: _Task, system: str, servers: _Servers, judge: OwnWorkers | None) -> None:
        self.id, self.subject = task.id, task
        self.language, self.kind = task.language, task.kind
        self.answer = None if task.answer is None else Answer(task.answer)
        messages = [Message("system", system)] if system else []
        self.prompt: Sequence[Message] = [*messages, Message("user", task.question)]
        self.tools: Sequence[ToolSpec] = servers.tools.specs
        self._servers, self._judge = servers, judge

    async def begin(self) -> EnvironmentSession:
        """Start a session; servers that do more than read are started for it."""
        return await self._servers.session(self._judge)


class _Servers:
    """The servers of a file: the shared ones, which are running, and the start commands of the others."""

    def __init__(
        self, executions: Mapping[str, McpExecution], shared: Mapping[str, McpConnection], tools: ServedTools
    ) -> None:
        self.tools = tools
        self._executions, self._shared = executions, shared
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def session(self, judge: OwnWorkers | None) -> _McpSession:
        async with AsyncExitStack() as stack:
            connections = dict(self._shared)
            own = [name for name in self._executions if name not in connections]
            if own:
                await stack.enter_async_context(self._gate)
            for name in own:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mcp-", ignore_cleanup_errors=True))
                own_one = _connection(self._executions[name], folder, reopens=False)
                connections[name] = await stack.enter_async_context(own_one)
            return _McpSession(self.tools, connections, stack.pop_all(), judge)


class _McpSession:
    def __init__(
        self,
        tools: ServedTools,
        connections: Mapping[str, McpConnection],
        stack: AsyncExitStack,
        judge: OwnWorkers | None,
    ) -> None:
        self._tools, self._connections, self._stack, self._judge = tools, connections, stack, judge

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        server, name = self._tools.places[tool]
        return await tool_answer(self._connections[server], name, arguments)

    async def score(self, episode: PlayedEpisode) -> float:
        """Return what the file's function says; else 1 where the final answer states the task's, else 0."""
        if self._judge is not None:
            return await self._judge.reward(0, episode, seconds=MOST_SECONDS)
        return float(answers(episode, None))

    async def close(self) -> None:
        await self._stack.aclose()


async def tool_answer(connection: McpConnection, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
    """Return a server's answer. Raises `ToolsUnavailable`: it gave no answer."""
    try:
        return ToolAnswer(*await connection.call(tool, arguments))
    except ServerUnavailable as error:
        raise ToolsUnavailable(str(error)) from error


@asynccontextmanager
async def mcp_environments(file: Path) -> AsyncIterator[list[Environment]]:
    """The tasks of a file, whose servers run meanwhile.

    Raises:
        InputError: the file is of another form, a server does not start, or a task has neither answer nor judge.
    """
    read = read_tasks(file)
    judge = _judge(read.score) if read.score else None
    executions = {source.id: source.execution for source in read_sources([file])}
    async with AsyncExitStack() as stack:
        running = {}
        try:
            for name, execution in executions.items():
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mcp-", ignore_cleanup_errors=True))
                running[name] = await stack.enter_async_context(_connection(execution, folder))
            tools = await served_tools(running, prefixed=len(running) > 1)
        except (ServerUnavailable, ToolsUnavailable) as error:
            raise InputError(f"{file}: {error}") from error
        shared = {name: connection for name, connection in running.items() if tools.read_only[name]}
        servers = _Servers(executions, shared, tools)
        made: list[Environment] = [McpEnvironment(task, read.system, servers, judge) for task in read.tasks]
        check_ids(made, str(file))
        yield made


def _judge(reference: str) -> OwnWorkers:
    """Return the processes in which a file's `score` judges. Raises `InputError`: there is no such function."""
    workers = OwnWorkers([])
    if not callable(function := referred(reference)):
        raise InputError(f"score {reference} is {function!r:.80}; write a function of an episode")
    workers.add(function)
    return workers


def read_tasks(file: Path) -> _File:
    """Read a file of tasks, and give each an id.

    Raises:
        InputError: it is of another form, or has a task that nothing can judge, as its answer's language is not read.
    """
    try:
        read = decode_json(read_unpacked(file), _File)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f'{file} is not a file of {{"mcpServers": …, "tasks": […]}} ({error})') from None
    if not (read.tasks and read.servers):
        raise InputError(f"{file} has no {'tasks' if read.servers else 'mcpServers'}")
    for number, task in enumerate(read.tasks):
        if not read.score and task.answer is None:
            raise InputError(f"{file}: task {number} has no `answer`, and the file no `score` that would judge it")
        if not read.score:
            check_language(task.language, f"{file}: task {number}")
        task.id = task.id or f"{file.stem}-{number}"
    return read


@asynccontextmanager
async def _connection(execution: McpExecution, folder: str, *, reopens: bool = True) -> AsyncIterator[McpConnection]:
    connection = McpConnection(execution, cwd=Path(folder), timeout_seconds=_SECONDS, reopens=reopens)
    try:
        await connection.__aenter__()
    except ServerUnavailable as error:
        raise ToolsUnavailable(str(error)) from error
    try:
        yield connection
    finally:
        await connection.__aexit__(None, None, None)
