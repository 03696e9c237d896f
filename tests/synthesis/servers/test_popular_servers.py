"""Servers that people use, from npm and PyPI: started from their documents, listed and called.

    ASTRA_MCP_SERVERS=1 python -m pytest tests/synthesis/servers/test_popular_servers.py

Skipped without the variable: it runs what strangers have published, as it is today. Where packages are signed for by an
authority of one's own, SSL_CERT_FILE names it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from synthesis.servers.configured import read_sources
from synthesis.servers.mcp_client import McpConnection, ServerUnavailable, find_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("ASTRA_MCP_SERVERS"), reason="ASTRA_MCP_SERVERS=1 starts foreign packages"),
]

OFFLINE: list[tuple[str, str, list[str], str, dict[str, Any]]] = [
    ("npm", "@modelcontextprotocol/server-memory", [], "read_graph", {}),
    ("npm", "@modelcontextprotocol/server-everything", [], "echo", {"message": "Oslo"}),
    (
        "npm", "@modelcontextprotocol/server-sequential-thinking", [], "sequentialthinking",
        {"thought": "a", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
    ),
    ("npm", "@modelcontextprotocol/server-filesystem", ["."], "list_allowed_directories", {}),
    ("npm", "mcp-server-kubernetes", [], "cleanup", {}),
    ("pypi", "mcp-server-time", [], "get_current_time", {"timezone": "UTC"}),
]  # fmt: skip
"""Whose call succeeds without a network or a key: registry, package, arguments, tool, its arguments."""
ONLINE: list[tuple[str, str, str, dict[str, Any]]] = [
    ("npm", "@modelcontextprotocol/server-github", "search_repositories", {"query": "astra"}),
    ("npm", "@upstash/context7-mcp", "resolve-library-id", {"libraryName": "numpy", "query": "numpy"}),
    ("npm", "@playwright/mcp", "browser_close", {}),
    ("npm", "chrome-devtools-mcp", "list_pages", {}),
    ("npm", "@notionhq/notion-mcp-server", "API-get-self", {}),
    ("npm", "firecrawl-mcp", "firecrawl_map", {"url": "http://127.0.0.1:9/"}),
    ("npm", "tavily-mcp", "tavily_search", {"query": "x"}),
    ("npm", "exa-mcp-server", "web_search_exa", {"query": "x"}),
    ("npm", "mongodb-mcp-server", "aggregate-db", {}),
    ("pypi", "mcp-server-fetch", "fetch", {"url": "http://127.0.0.1:9/"}),
    ("pypi", "mcp-server-git", "git_status", {"repo_path": "."}),
    ("pypi", "wikipedia-mcp", "search_wikipedia", {"query": "Oslo"}),
]
"""Whose call wants a network, a key, a browser or something to work on: it is answered, with a result or the server's
own error."""
KEYED = [
    ("npm", "figma-developer-mcp", ["--stdio"]),
    ("npm", "@sentry/mcp-server", []),
    ("npm", "@stripe/mcp", []),
    ("npm", "@supabase/mcp-server-supabase", []),
]
"""Which do not start without a key."""


def connection(folder: Path, registry: str, package: str, arguments: list[str]) -> McpConnection:
    """From a document of the registry's form."""
    given = {"registryType": registry, "identifier": package, "packageArguments": [
        {"type": "positional", "value": one} for one in arguments]}  # fmt: skip
    if "SSL_CERT_FILE" in os.environ:
        given["environmentVariables"] = [{"name": "SSL_CERT_FILE", "isRequired": True}]
    (folder / "server.json").write_text(json.dumps({"name": f"x/{package}", "packages": [given]}))
    (source,) = read_sources([folder / "server.json"])
    assert source.execution.__class__.__name__ == "StdioExecution"
    if find_command(source.execution.command[0]) is None:  # type: ignore[union-attr]
        pytest.skip(f"{registry} has no runner here")
    return McpConnection(source.execution, cwd=folder / "cwd", timeout_seconds=120)


@pytest.mark.parametrize(("registry", "package", "arguments", "tool", "given"), OFFLINE)
async def test_a_server_is_started_listed_and_called(
    tmp_path: Path, registry: str, package: str, arguments: list[str], tool: str, given: dict[str, Any]
) -> None:
    async with connection(tmp_path, registry, package, arguments) as server:
        assert tool in {one.name for one in (await server.list_tools()).entries}
        said, ok = await server.call(tool, given)
        assert ok and said
        offers = len((await server.list_resources()).entries), len((await server.list_prompts()).entries)
        assert package != "@modelcontextprotocol/server-everything" or min(offers) > 0


@pytest.mark.parametrize(("registry", "package", "tool", "given"), ONLINE)
async def test_a_server_that_wants_more_is_listed_and_answers(
    tmp_path: Path, registry: str, package: str, tool: str, given: dict[str, Any]
) -> None:
    async with connection(tmp_path, registry, package, []) as server:
        assert tool in {one.name for one in (await server.list_tools()).entries}
        said, _ = await server.call(tool, given)
        assert said
        await server.list_resources()  # or it raises
        await server.list_prompts()


@pytest.mark.parametrize(("registry", "package", "arguments"), KEYED)
async def test_a_server_without_its_key_is_unavailable(
    tmp_path: Path, registry: str, package: str, arguments: list[str]
) -> None:
    with pytest.raises(ServerUnavailable, match="did not start"):
        async with connection(tmp_path, registry, package, arguments):
            pass
