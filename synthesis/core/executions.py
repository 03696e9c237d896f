"""Ways to execute the calls of a server's tools, the servers of a group, and a running server's resources and
prompts."""

from __future__ import annotations

import msgspec


class StdioExecution(msgspec.Struct, tag="mcp_stdio", frozen=True):
    """Calls go to a real MCP server, started over stdio; `command[0]` is found on PATH or beside the interpreter.

    Values of `env` may name environment variables, `${TOKEN}`, as those of `HttpExecution.headers` may.
    """

    command: list[str]
    env: dict[str, str] = {}


class HttpExecution(msgspec.Struct, tag="mcp_http", frozen=True):
    """Calls go to a real MCP server over streamable HTTP (MCP specification, transports).

    `url` and the values of `headers` may name environment variables, `Bearer ${TOKEN}`: they are filled in when the
    connection is opened, so a dataset never holds the secret itself.
    """

    url: str
    headers: dict[str, str] = {}


class CodeExecution(msgspec.Struct, tag="code", frozen=True):
    """Calls run in the sandbox: one module implements all tools of the server."""

    code: str


class EmulatedExecution(msgspec.Struct, tag="emulated", frozen=True):
    """Only a document exists: a stateful emulator (the teacher) answers the calls."""


class ToolOrigin(msgspec.Struct, frozen=True):
    """Whose a tool is, and what that server calls it."""

    server_id: str
    tool: str


class GroupExecution(msgspec.Struct, tag="group", frozen=True):
    """Calls go to the servers of a group, each to its tool's own; `tools` has the origin of each name."""

    tools: dict[str, ToolOrigin]


McpExecution = StdioExecution | HttpExecution
"""A running MCP server, which all runs share."""
Execution = StdioExecution | HttpExecution | CodeExecution | EmulatedExecution | GroupExecution


class ServedResource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resource that clients can read from a running server; `uri` may have placeholders, `{name}` (MCP specification,
    resource templates)."""

    name: str
    uri: str
    description: str = ""
    media_type: str = ""


class ServedPrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text that a running server offers to users, and the names of its arguments."""

    name: str
    description: str = ""
    arguments: list[str] = []
