"""Files in which people write down their MCP servers: read, started, and refused by name where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astra_jax.base.errors import InputError
from synthesis.core.records import HttpExecution, StdioExecution
from synthesis.servers.configured import read_sources
from synthesis.servers.mcp_client import McpConnection, ServerUnavailable


def write(folder: Path, value: Any) -> Path:
    path = folder / "servers.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


async def test_servers_of_a_client_s_file_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"command": "python", "args": ["-m", "mcp_server_time"], "env": {"TZ": "${A_ZONE}"}}
    remote = {"type": "http", "url": "https://h/mcp", "headers": {"Authorization": "Bearer ${KEY}"}}
    off = {"command": "nothing", "disabled": True}
    sources = read_sources([write(tmp_path, {"mcpServers": {"My Time": started, "far": remote, "off": off}})])
    assert [one.id for one in sources] == ["my_time", "far"]
    assert sources[1].execution == HttpExecution("https://h/mcp", {"Authorization": "Bearer ${KEY}"})
    assert sources[0].execution == StdioExecution(["python", "-m", "mcp_server_time"], {"TZ": "${A_ZONE}"})
    with pytest.raises(ServerUnavailable, match="environment variable A_ZONE is not set"):
        async with McpConnection(sources[0].execution, cwd=tmp_path):
            pass
    monkeypatch.setenv("A_ZONE", "UTC")
    async with McpConnection(sources[0].execution, cwd=tmp_path) as connection:
        assert {tool.name for tool in (await connection.list_tools()).entries} == {"get_current_time", "convert_time"}


def test_documents_of_the_official_registry_become_commands(tmp_path: Path) -> None:
    npm = {
        "registryType": "npm", "identifier": "@a/b", "version": "1.2.3", "transport": {"type": "stdio"},
        "runtimeArguments": [{"type": "named", "name": "--loglevel", "value": "error"}],
        "packageArguments": [{"type": "positional", "value": "serve"}, {"type": "named", "name": "--optional"},
                             {"type": "named", "name": "--of", "default": "x"}],
        "environmentVariables": [{"name": "A_KEY", "isRequired": True, "isSecret": True}, {"name": "MAY"},
                                 {"name": "MODE", "value": "quiet"}],
    }  # fmt: skip
    oci = {"registryType": "oci", "identifier": "docker.io/x"}
    far = {"type": "streamable-http", "url": "https://h/mcp", "headers": [{"name": "X-Key", "isRequired": True}]}
    documents = [
        {
            "name": "io.x/one",
            "description": "Finds the parts of a machine.",
            "version": "1.2.3",
            "packages": [oci, npm],
        },
        {"server": {"name": "io.x/two", "packages": [{"registryType": "pypi", "identifier": "two", "version": "9"}]}},
        {"server": {"name": "io.x/three", "packages": [oci], "remotes": [{"type": "sse", "url": "https://s"}, far]}},
    ]
    one, two, three = (source.execution for source in read_sources([write(tmp_path, {"servers": documents})]))
    assert one == StdioExecution(
        ["npx", "-y", "--loglevel", "error", "@a/b@1.2.3", "serve", "--of", "x"], {"A_KEY": "${A_KEY}", "MODE": "quiet"}
    )
    assert two == StdioExecution(["uvx", "two@9"]) and three == HttpExecution("https://h/mcp", {"X-Key": "${X_Key}"})
    assert read_sources([write(tmp_path, documents[0])])[0].description == "Finds the parts of a machine."


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "servers.json is not JSON"),
        ({"tools": []}, 'is neither {"mcpServers": {…}} nor a server.json'),
        ([], "is neither"),
        ({"mcpServers": {"a": 5}}, "a is 5; write an object with `command` or `url`"),
        ({"mcpServers": {"a": {}}}, "a has neither `command` nor `url`"),
        ({"mcpServers": {"a": {"type": "sse", "url": "https://h"}}}, "the transport 'sse' is not spoken"),
        ({"mcpServers": {"a": {"command": "c", "env": {"KEY": "sk-1"}}}}, "env.KEY is written out, and would"),
        ({"mcpServers": {"a": {"url": "https://h", "headers": {"K": "v"}}}}, "headers.K is written out"),
        ({"mcpServers": {"a": {"command": "c", "env": 5}}}, "env is 5; write an object"),
        ({"mcpServers": {"a b": {"command": "c"}, "a-b": {"command": "c"}}}, "two servers have the id 'a_b'"),
        ({"name": "x/y", "packages": [{"registryType": "oci", "identifier": "z"}]}, "x/y has oci; packages of npm"),
        ({"name": "x/y"}, "x/y has no package"),
        (
            {"name": "x/y", "packages": [{"registryType": "npm", "identifier": "z", "packageArguments": [
                {"type": "positional", "valueHint": "folder", "isRequired": True}]}]},
            "x/y needs a value of its argument 'folder'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused_by_name(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(InputError) as refused:
        read_sources([write(tmp_path, value)])
    assert said in str(refused.value) and "sk-1" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere.json"):
        read_sources([tmp_path / "nowhere.json"])
