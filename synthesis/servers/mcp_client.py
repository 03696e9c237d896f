"""Connections to MCP servers over stdio and streamable HTTP, through the official SDK.

The SDK's client must be closed by the task that opened it. So each connection has a task of its own that only holds it
open; requests come from any task. A broken connection is reopened, once a request, and counted. A request that may
already have been executed is repeated only if it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import METHOD_NOT_FOUND, PARSE_ERROR
from pydantic import ValidationError

from astra_jax.base.files import check_held
from synthesis.core.records import McpExecution, StdioExecution
from synthesis.core.references import OWN_FOLDER
from synthesis.servers import bounded_stdio
from synthesis.servers.async_once import AsyncOnce
from synthesis.servers.bounded_http import HTTP_FAILED, BoundedTransport
from synthesis.servers.mcp_answers import (
    LIST_FIELDS,
    ListedTool,
    Listing,
    as_written,
    is_error,
    listed_tool,
    result_text,
    tolerant,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_BROKEN = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError)
_CONNECTION_CLOSED = -32000
_SESSION_LOST = ("Session terminated", "Session not found")
"""Messages of the SDK's client and servers over HTTP when a restarted server has forgotten the session."""
_MOST_ENTRIES = 10_000
"""Maximum number of entries of a list; a longer list is cut. The timeout bounds pages without entries."""
_PROBE_SECONDS = 5.0
"""For a server that let a request wait, to say that it is there. One that does not is started again."""
_CLOSING_SECONDS = 10.0
"""For a server to end: over stdio the SDK takes up to 8.5 s of one that is deaf, and must not be cancelled in it."""
_LEAVE_OUT = "correct the server, or leave it out of `tools`"
FUNCTION_SERVER = ("python", "-m", "synthesis.servers.function_server")
API_SERVER = ("python", "-m", "synthesis.servers.api_server")
"""Commands that serve Python functions and the operations of an API; what they are follows."""
_API_SECONDS = 600.0
"""For a call of an API, which may wait for its turn; the API's own timeout is in its configuration."""
_PACKAGES = Path(__file__).resolve().parents[2]
_LOG = "servers.log"


class ServerUnavailable(Exception):
    """A server that does not start, does not answer in time, or went away; the message names command and remedy."""


def find_command(name: str) -> str | None:
    """Return the command's path: beside the interpreter (console scripts of this environment) or else on PATH."""
    if name == "python":
        return sys.executable
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    return beside or shutil.which(name)


def own_environment() -> dict[str, str]:
    """Return the environment of a process that runs the user's functions: ours, with its modules and folder."""
    paths = os.pathsep.join(path or os.getcwd() for path in (str(_PACKAGES), *sys.path))
    return {**os.environ, "PYTHONPATH": paths, OWN_FOLDER: os.environ.get(OWN_FOLDER, os.getcwd())}


class McpConnection:
    """One running server. Use as `async with McpConnection(...) as connection`.

    Args:
        execution: over stdio, the command and what its environment adds to the SDK's safe default; over streamable
            HTTP, the address and headers.
        cwd: where a stdio server runs; relative paths of its arguments and calls are relative to this folder.
        log_folder: gets `servers.log`, what stdio servers write to standard error; None: `cwd`.
        timeout_seconds: for starting or connecting (the handshake `initialize` included), and for each request.
        reopens: whether a connection that broke is opened again. It is not where it belongs to one session: what the
            server kept of that is gone.

    Attributes:
        reopened: how often the connection broke and was opened again.
    """

    def __init__(
        self,
        execution: McpExecution,
        *,
        cwd: Path,
        timeout_seconds: float = 20.0,
        reopens: bool = True,
        log_folder: Path | None = None,
    ) -> None:
        self.execution = execution
        self.cwd = cwd
        self._log_file = (log_folder or cwd) / _LOG
        self.timeout_seconds = timeout_seconds
        self.reopens = reopens
        self.reopened = 0
        self._reading: frozenset[str] | None = None
        """Tools that declare that they only read; None until they are listed."""
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()
        self._entered = False

    async def __aenter__(self) -> McpConnection:
        self._entered = True
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        await self._close()

    async def list_tools(self) -> Listing[ListedTool]:
        """Return all tools, whatever is wrong with one of them.

        Raises:
            ServerUnavailable: no answer in time, no list, or the server went away and did not come back.
        """
        listed = await self._every("tools/list", Client.list_tools)
        tools = [listed_tool(entry) for entry in listed.entries]
        self._reading = frozenset(tool.name for tool in tools if tool.reads)
        return Listing(tools, listed.problem)

    async def list_resources(self) -> Listing[Any]:
        """Return all resources and resource templates; none of a server that offers none.

        Raises:
            ServerUnavailable: see `list_tools`; or the server offers resources and fails to list them.
        """
        client = self._client or await self._open_again()
        if client.server_capabilities.resources is None:
            return Listing([])
        fixed = await self._every("resources/list", Client.list_resources, may_lack=True)
        templates = await self._every("resources/templates/list", Client.list_resource_templates, may_lack=True)
        problems = "; ".join(filter(None, (fixed.problem, templates.problem)))
        return Listing([*fixed.entries, *templates.entries], problems)

    async def list_prompts(self) -> Listing[Any]:
        """Return all prompts; see `list_resources`."""
        client = self._client or await self._open_again()
        if client.server_capabilities.prompts is None:
            return Listing([])
        return await self._every("prompts/list", Client.list_prompts, may_lack=True)

    async def _every(
        self, method: str, request: Callable[..., Awaitable[Any]], *, may_lack: bool = False
    ) -> Listing[Any]:
        """Return what a server lists, page by page. A page that the server itself fails at ends the list.

        Args:
            request: of the client, with a cursor.
            may_lack: a server that does not know the request has none.

        Raises:
            ServerUnavailable: see `list_tools`.
        """

        async def pages(client: Client) -> Listing[Any]:
            found: list[Any] = []
            cursor: str | None = None
            seen: set[str] = set()
            while True:
                try:
                    page = await request(client, cursor=cursor, cache_mode="bypass")
                except MCPError as error:
                    if cursor is None or _is_lost(error):
                        raise
                    return Listing(found, f"{method} failed after {len(found)} entries: {error.message:.300}")
                written = as_written(page)
                entries, cursor = written.get(LIST_FIELDS[method]), written.get("nextCursor")
                if not isinstance(entries, list):
                    problem = f"its answer to {method} has no list `{LIST_FIELDS[method]}`"
                    if seen:
                        return Listing(found, f"{problem} after {len(found)} entries")
                    raise self._unavailable(problem, _LEAVE_OUT)
                in_circle = bool(seen and entries) and entries == found[: len(entries)]
                found += [] if in_circle else entries
                if cursor is None or cursor == "":
                    return Listing(found)
                if in_circle or not isinstance(cursor, str) or cursor in seen or len(found) > _MOST_ENTRIES:
                    return Listing(found, f"the pages of {method} do not end; {len(found)} entries were read")
                seen.add(cursor)

        try:
            return await self._ask(method, pages)
        except ServerUnavailable:
            raise
        except Exception as error:  # it fails in as many ways as there are servers
            if may_lack and isinstance(error, MCPError) and error.code == METHOD_NOT_FOUND:
                return Listing([])
            raise self._unavailable(f"{method} failed: {_innermost(error)}") from error

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the tool's result as text, and whether the server says that the call succeeded.

        A call at which the connection broke is made a second time only where its tool declares that it only reads:
        another may have done what it does.

        Raises:
            ServerUnavailable: the server gave no answer in time, or one that is no tool's (a gateway's error, a page),
                or went away and did not come back.
        """
        try:
            result = await self._ask(
                tool,
                lambda client: client.call_tool(tool, dict(arguments)),
                repeats=lambda: self._reads(tool),
                seconds=_API_SECONDS if self._is(API_SERVER) else None,
            )
        except MCPError as error:
            return error.message, False  # the protocol's own errors (unknown tool …) are answers
        except RuntimeError as error:  # the SDK's, of a server that asks the client for input without end
            raise self._unavailable(f"{tool}: {error}", _LEAVE_OUT) from error
        written = as_written(result)
        return result_text(written), not is_error(written)

    async def _reads(self, tool: str) -> bool:
        if self._reading is None:
            await self.list_tools()
        return self._reading is not None and tool in self._reading

    async def _ask(
        self,
        what: str,
        request: Callable[[Client], Awaitable[T]],
        *,
        repeats: Callable[[], Awaitable[bool]] | None = None,
        seconds: float | None = None,
    ) -> T:
        """Return the answer to a request, which is repeated if the connection broke.

        Args:
            repeats: whether it may be; None: it may.
            seconds: for an answer; None: `timeout_seconds`.

        Raises:
            ServerUnavailable: no answer in time, one that the protocol does not allow, or the connection broke twice.
            MCPError: the server's own error.
        """
        broken: Exception | None = None
        seconds = seconds or self.timeout_seconds
        for _ in range(2):
            client = self._client or await self._open_again()
            try:
                async with asyncio.timeout(seconds):
                    return await request(client)
            except TimeoutError:
                await self._abandon_deaf(client)
                raise self._unavailable(f"{what} did not answer in {seconds:g} s") from None
            except ValidationError as error:
                raise self._malformed(what, error) from None
            except MCPError as error:
                if not _is_lost(error):
                    raise
                if error.code in (HTTP_FAILED, PARSE_ERROR):
                    raise self._unavailable(f"{what} was not answered: {error.message:.500}") from error
                broken = error
            except _BROKEN as error:
                broken = error
            await self._abandon(client)
            if not self.reopens or not (repeats is None or await repeats()):
                raise self._unavailable(f"it went away at {what}, which is not asked twice: {broken}") from broken
        raise self._unavailable(f"the connection broke twice: {broken}") from broken

    async def _abandon(self, broken: Client) -> None:
        """Close a connection that broke, unless another request has done so."""
        async with self._opening:
            if self._client is broken:
                await self._close()

    async def _abandon_deaf(self, waited: Client) -> None:
        """Close the connection to a process that answers nothing any more, so that the next request starts another.

        A process that was only slow with one request answers others, and stays. Over HTTP each request is a connection
        of its own, and there is no process to restart.
        """
        if not isinstance(self.execution, StdioExecution):
            return
        async with self._opening:
            if self._client is not waited:
                return
            try:
                async with asyncio.timeout(min(self.timeout_seconds, _PROBE_SECONDS)):
                    await waited.list_tools(cache_mode="bypass")
            except TimeoutError:
                await self._close()
            except Exception:  # an error is an answer, and what is broken is found at the next request
                return

    async def _open_again(self) -> Client:
        """Reopen a broken connection, or connect to a server that was unreachable and may be back."""
        if not self.reopens:
            raise self._unavailable("it went away, and what it kept of this session with it")
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await self._opening.acquire()
        except TimeoutError:
            raise self._unavailable("it is not running") from None
        try:
            if self._client is None and self._entered:
                await self._open()
                self.reopened += 1
                _log.warning("connected again to the MCP server `%.200s`, whose connection broke", self._address())
            return self._client_or_raise()
        finally:
            self._opening.release()

    async def _open(self) -> None:
        if isinstance(self.execution, StdioExecution):
            if not self.execution.command or find_command(self.execution.command[0]) is None:
                raise self._unavailable(
                    "the command is not found", "install it into this environment or put it on PATH"
                )
            self._fill_in(*self.execution.env.values())
        else:
            self._fill_in(self.execution.url, *self.execution.headers.values())
        for folder in (self.cwd, self._log_file.parent):
            check_held(folder)
            folder.mkdir(parents=True, exist_ok=True)
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._owner = asyncio.create_task(self._hold(ready, self._stop))
        try:
            async with asyncio.timeout(self.timeout_seconds):
                self._client = await asyncio.shield(ready)
        except BaseException as error:  # also if the waiting task was cancelled: no other task knows of the server
            await self._cancel(self._owner)
            self._owner = None
            if isinstance(error, TimeoutError):
                raise self._unavailable(
                    f"it did not answer in {self.timeout_seconds:g} s after its start",
                    "try it by hand to see why, or give it more time (mcp_timeout_seconds)",
                ) from None
            raise

    async def _hold(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        stdio = isinstance(self.execution, StdioExecution)
        try:
            # No timeout of the client's own: it would end as an error that looks like the server's answer.
            async with self._transport() as transport, Client(transport, read_timeout_seconds=None) as client:
                ready.set_result(client)
                await stop.wait()
        except Exception as error:  # start-up fails in as many ways as there are servers
            if not ready.done():
                what, remedy = ("start", self._last_words()) if stdio else ("connect", "check its address and headers")
                ready.set_exception(self._unavailable(f"it did not {what}: {_innermost(error)}", remedy))
        finally:
            if not ready.done():  # the transport cancels this task when the server goes away in the handshake
                ready.set_exception(self._unavailable("it went away before it was ready"))
                ready.exception()  # seen: nobody waits for it when it was the wait that ended

    def _last_words(self) -> str:
        """Return the last line that a stdio server wrote to standard error, and where the others are."""
        tail = b""
        with contextlib.suppress(OSError), self._log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4_096))
            tail = log.read()
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        return f"{f'its last line was {lines[-1]:.300}; ' if lines else ''}see {self._log_file}"

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if isinstance(self.execution, StdioExecution):
            path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH", ""))))
            base = own_environment() if self._is(FUNCTION_SERVER, API_SERVER) else {"PYTHONPATH": path}
            values = self._fill_in(*self.execution.env.values())
            parameters = StdioServerParameters(
                command=find_command(self.execution.command[0]) or self.execution.command[0],
                args=list(self.execution.command[1:]),
                env={**base, **dict(zip(self.execution.env, values, strict=True))},
                cwd=str(self.cwd),
                encoding=bounded_stdio.ENCODING,
            )
            with open(self._log_file, "a", encoding="utf-8") as errors:
                yield tolerant(stdio_client(parameters, errlog=errors))
        else:
            url, *values = self._fill_in(self.execution.url, *self.execution.headers.values())
            headers = dict(zip(self.execution.headers, values, strict=True))
            # Reading has no limit of its own: servers hold streams open, and each request is timed where it is made.
            timeout = httpx2.Timeout(self.timeout_seconds, read=None)
            async with httpx2.AsyncClient(headers=headers, timeout=timeout, transport=BoundedTransport()) as http:
                yield tolerant(streamable_http_client(url, http_client=http))

    def _fill_in(self, *texts: str) -> list[str]:
        """Return the texts with `${NAME}` replaced from the environment."""

        def value(name: re.Match[str]) -> str:
            if name[1] not in os.environ:
                raise self._unavailable(
                    f"the environment variable {name[1]} is not set", "set it, as its url, headers or env name it"
                )
            return os.environ[name[1]]

        return [re.sub(r"\$\{(\w+)\}", value, text) for text in texts]

    async def _close(self) -> None:
        self._stop.set()
        self._client = None
        if (owner := self._owner) is not None:
            await asyncio.wait([owner], timeout=max(self.timeout_seconds, _CLOSING_SECONDS))
            if not owner.done():
                await self._cancel(owner)
            if self._owner is owner:
                self._owner = None

    async def _cancel(self, owner: asyncio.Task[None]) -> None:
        owner.cancel()
        await asyncio.wait([owner], timeout=_CLOSING_SECONDS)
        if not owner.done():
            _log.warning("the MCP server `%.200s` does not end, and is left to itself", self._address())

    def _client_or_raise(self) -> Client:
        if self._client is None:
            raise self._unavailable("it is not running")
        return self._client

    def _malformed(self, what: str, error: ValidationError) -> ServerUnavailable:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return self._unavailable(
            f"its answer to {what} is not what the protocol wants: {place}: {first['msg']}",
            _LEAVE_OUT,
        )

    def _unavailable(self, what: str, remedy: str = "try it by hand to see why") -> ServerUnavailable:
        return ServerUnavailable(" ".join(f"MCP server `{self._address():.200}`: {what}; {remedy}".split()))

    def _is(self, *commands: tuple[str, ...]) -> bool:
        """Return whether the server is one of this package's own."""
        command = self.execution.command if isinstance(self.execution, StdioExecution) else []
        return any(tuple(command[: len(one)]) == one for one in commands)

    def _address(self) -> str:
        execution = self.execution
        return " ".join(execution.command) if isinstance(execution, StdioExecution) else execution.url


ServerKey = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
"""A command and its environment, or an address and its headers: what makes two executions the same server."""


class McpConnections:
    """The MCP servers of one run: each started or connected to when first called, all closed at the end.

    Args:
        cwd: working folder of packaged stdio servers; gets their `servers.log`.
        own_cwd: working folder of the user's stdio servers; None: `cwd`.
        timeout_seconds: for starting or connecting, and for each request.
    """

    def __init__(self, *, cwd: Path, own_cwd: Path | None = None, timeout_seconds: float = 20.0) -> None:
        self.cwd, self._own_cwd = cwd, own_cwd or cwd
        self.timeout_seconds = timeout_seconds
        self._open: AsyncOnce[ServerKey, McpConnection] = AsyncOnce()

    async def __aenter__(self) -> McpConnections:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.give_up()
        # At the same time: each may take as long as the timeout.
        await asyncio.gather(*(connection.__aexit__(kind, error, trace) for connection in self._open.made()))
        self._open = AsyncOnce()

    @property
    def reopened(self) -> int:
        """Return how often a connection broke and was reopened."""
        return sum(connection.reopened for connection in self._open.made())

    async def get(self, execution: McpExecution, *, packaged: bool = False) -> McpConnection:
        """Return the running server of this command or address; one that failed to start is retried.

        Args:
            packaged: the server is one of this package.

        Raises:
            ServerUnavailable: it does not start, or cannot be reached.
        """
        if isinstance(execution, StdioExecution):
            key = (tuple(execution.command), tuple(sorted(execution.env.items())))
        else:
            key = ((execution.url,), tuple(sorted(execution.headers.items())))
        connection = McpConnection(
            execution, cwd=self.cwd if packaged else self._own_cwd, timeout_seconds=self.timeout_seconds,
            log_folder=self.cwd,
        )  # fmt: skip
        return await self._open.get(key, connection.__aenter__)


def _is_lost(error: MCPError) -> bool:
    """Return whether the error means that nothing was answered, not that the server refuses."""
    return error.code in (HTTP_FAILED, PARSE_ERROR, _CONNECTION_CLOSED) or error.message in _SESSION_LOST


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
