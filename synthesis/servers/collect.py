"""Collect: tool documents from real MCP servers, and from the relational fact tools (paper 2.1.1).

Servers that do not run, of which a registry holds the document, are read in `synthesis.servers.registry`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.records import (
    EmulatedExecution,
    Execution,
    Language,
    McpExecution,
    ServedPrompt,
    ServedResource,
    StdioExecution,
)
from synthesis.core.stages import Rejected
from synthesis.core.tool_schemas import brief
from synthesis.pipeline import demo
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.servers.mcp_answers import Listing
from synthesis.servers.mcp_client import McpConnection, McpConnections, ServerUnavailable, find_command

Served = TypeVar("Served", ServedResource, ServedPrompt)

_log = logging.getLogger(__name__)

PROJECT = "project"
"""The git repository that the git server serves, relative to the servers' working folder."""
CLOCK = "2026-01-15T12:00:00+00:00"
"""The time server's clock stands still here, so that a run gives the same bytes tomorrow."""


class ServerSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A running MCP server to read tool documents from, over stdio or streamable HTTP."""

    id: str
    title: str
    description: str
    domain: str
    language: Language
    execution: McpExecution
    license: str = ""


class RejectedTool(msgspec.Struct, frozen=True):
    """A tool that was left out: `reason` is counted, `detail` is one line for a person."""

    name: str
    reason: str
    detail: str


class ServerDocument(msgspec.Struct, frozen=True):
    """A server's tools as they were found: OpenAI's form, not normalised, anything may be wrong with them.

    `rejected` holds what was read but could not even be brought into that form; `left_out` the resources, prompts and
    pages of a running server's lists that could not be read.
    """

    id: str
    title: str
    description: str
    domain: str
    language: Language
    tools: list[Any]
    execution: Execution
    rejected: list[RejectedTool] = []
    license: str = ""
    resources: list[ServedResource] = []
    prompts: list[ServedPrompt] = []
    left_out: list[RejectedTool] = []


_MOST = 1_000
"""Resources, and prompts, of a server that its document has: some list all files of a disk."""
_TIME = StdioExecution(
    ["python", "-m", "synthesis.servers.pinned_clock", CLOCK, "mcp_server_time", "--local-timezone", "UTC"]
)
_GIT = StdioExecution(["mcp-server-git", "--repository", PROJECT])


def default_sources(languages: Iterable[Language] = ("en", "zh")) -> list[ServerSource]:
    """Return the MCP servers that are installed with this package: time and git."""
    every = [
        ServerSource("mcp_time", "Time", "Current time and time conversion between zones.", "time", "en", _TIME, "MIT"),
        ServerSource("mcp_git", "Git", "Read a git repository.", "software", "en", _GIT, "MIT"),
        ServerSource("mcp_time_zh", "时间", "查询时区的当前时间并换算时间。", "time", "zh", _TIME, "MIT"),
        ServerSource("mcp_git_zh", "Git 仓库", "读取 git 仓库。", "software", "zh", _GIT, "MIT"),
    ]
    return [source for source in every if source.language in set(languages)]


def source_key(source: ServerSource) -> str:
    """Return the journal's key: a server whose command was missing is another one once the command is there."""
    if not isinstance(source.execution, StdioExecution):
        return f"{source.id} {source.execution.url}"
    if not source.execution.command:
        return f"{source.id} missing"
    return f"{source.id} {'found' if find_command(source.execution.command[0]) else 'missing'}"


class HasConnections(Protocol):
    """The context of a stage that connects to servers."""

    @property
    def connections(self) -> McpConnections: ...


async def collect(source: ServerSource, context: HasConnections) -> list[ServerDocument]:
    """Return the document of one running server.

    Raises:
        Rejected: `mcp_server_unavailable`, with the command or address and the remedy.
    """
    try:
        running = await connected(source.execution, context.connections)
        tools = await running.list_tools()
    except ServerUnavailable as error:
        _log.warning("left out server %s: %s", source.id, error)
        raise Rejected("mcp_server_unavailable", str(error)) from error
    except Rejected as rejection:
        _log.warning("left out server %s: %s", source.id, rejection.detail)
        raise
    left_out = [RejectedTool("tools", "incomplete_list", tools.problem)] if tools.problem else []
    resources = await _entries(running.list_resources, "resources", _resource, left_out)
    prompts = await _entries(running.list_prompts, "prompts", _prompt, left_out)
    for reason, count in Counter(one.reason for one in left_out).items():
        example = next(one for one in left_out if one.reason == reason)
        _log.warning("server %s: left out %d %s: %s: %s", source.id, count, reason, example.name, example.detail)
    return [
        ServerDocument(
            source.id,
            source.title,
            source.description,
            source.domain,
            source.language,
            [tool.document for tool in tools.entries],
            source.execution,
            license=source.license,
            resources=resources,
            prompts=prompts,
            left_out=left_out,
        )
    ]


async def _entries(
    listed: Callable[[], Awaitable[Listing[Any]]],
    what: str,
    read: Callable[[Mapping[str, Any]], Served],
    left_out: list[RejectedTool],
) -> list[Served]:
    """Return the entries of a list that tasks do not depend on; what cannot be read is added to `left_out`."""
    try:
        listing = await listed()
    except ServerUnavailable as error:
        left_out.append(RejectedTool(what, f"{what}_unavailable", str(error)))
        return []
    if listing.problem:
        left_out.append(RejectedTool(what, "incomplete_list", listing.problem))
    found: list[Served] = []
    for entry in listing.entries:
        try:
            if len(found) == _MOST:
                count = len(listing.entries) - _MOST
                left_out.append(RejectedTool(what, f"more_{what}", f"{count} beyond the first {_MOST} are left out"))
                break
            if not isinstance(entry, Mapping):
                raise ValueError("an entry must be an object")
            found.append(read(entry))
        except ValueError as error:
            left_out.append(RejectedTool(what, f"bad_{what.removesuffix('s')}", f"{brief(entry):.200}: {error}"))
    return found


def _resource(entry: Mapping[str, Any]) -> ServedResource:
    """Return a resource, or a template of some. Raises `ValueError`: a field is missing or of another type."""
    address = "uri" if "uri" in entry else "uriTemplate"
    media = _text(entry, "mimeType") if entry.get("mimeType") is not None else ""
    return ServedResource(_text(entry, "name"), _text(entry, address), _line(entry), media)


def _prompt(entry: Mapping[str, Any]) -> ServedPrompt:
    """Return a prompt. Raises `ValueError`: as `_resource`."""
    arguments = entry.get("arguments") or []
    if not (isinstance(arguments, list) and all(isinstance(one, Mapping) for one in arguments)):
        raise ValueError("`arguments` must be a list of objects")
    return ServedPrompt(_text(entry, "name"), _line(entry), [_text(one, "name") for one in arguments])


def _text(entry: Mapping[str, Any], field: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str):
        raise ValueError(f"`{field}` must be text")
    return value


def _line(entry: Mapping[str, Any]) -> str:
    text = entry.get("description")
    return " ".join(text.split()) if isinstance(text, str) else ""


async def connected(execution: McpExecution, connections: McpConnections) -> McpConnection:
    """Return the running server, which finds what it serves in its folder.

    Raises:
        Rejected: `mcp_server_unavailable`: it serves the git repository, which cannot be made.
        ServerUnavailable: it does not start, or cannot be reached.
    """
    packaged = isinstance(execution, StdioExecution) and PROJECT in execution.command
    if packaged:
        demo.make_repository(connections.cwd / PROJECT)
    return await connections.get(execution, packaged=packaged)


def fact_documents(
    languages: Iterable[Language] = ("en", "zh"), *, only: Sequence[str] | None = None, emulated: Sequence[str] = ()
) -> list[ServerDocument]:
    """Return the fact servers as documents.

    Args:
        languages: languages without facts are left out.
        only: ids of the servers to take, without the language's suffix; None: all.
        emulated: ids of servers of which only the document is taken: their calls go to the stateful emulator.

    Raises:
        ValueError: an id that no fact server has.
    """
    for field, ids in (("only", only or ()), ("emulated", emulated)):
        if unknown := [one for one in ids if one not in demo.fact_server_ids()]:
            raise InputError(f"{field}: no fact server {unknown[0]!r}; there are {', '.join(demo.fact_server_ids())}")
    documents: list[ServerDocument] = []
    for language in (one for one in languages if one in PACKAGED_LANGUAGES):
        for server in demo.fact_servers(language, only):
            name = server.id.removesuffix(f"_{language}")
            execution: Execution = server.execution
            if name in emulated:
                execution = EmulatedExecution()
            tools: list[Any] = [tool.to_openai() for tool in server.tools]
            documents.append(
                ServerDocument(
                    server.id,
                    server.title,
                    server.description,
                    server.domain,
                    language,
                    tools,
                    execution,
                    license=server.license,
                )  # fmt: skip
            )
    return documents
