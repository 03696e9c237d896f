"""Collecting from real MCP servers over stdio, and normalising what comes: nothing is lost without a reason."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from synthesis.core.records import CodeExecution, StdioExecution, ToolCall
from synthesis.core.stages import Rejected, Transient
from synthesis.offline.facts.repository import make_repository
from synthesis.offline.teacher import OfflineTeacher
from synthesis.servers.collect import (
    CLOCK,
    ServerDocument,
    ServerSource,
    collect,
    default_sources,
    fact_documents,
    source_key,
)
from synthesis.servers.duplicates import check_allowed, normalize_all
from synthesis.servers.mcp_client import McpConnections, ServerUnavailable
from synthesis.servers.normalize import fix_names, normalize
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import ToolExecutor

SERVER = textwrap.dedent(
    """
    import asyncio, os, sys
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    ENDLESS = "endless" in sys.argv

    async def list_tools(context, parameters):
        page = int(parameters.cursor) if parameters is not None and parameters.cursor else 0
        names = [f"tool.number {3 * page + i}" for i in range(3)] + (["die"] if page == 2 else [])
        reads = ToolAnnotations(read_only_hint=True)
        kept = {"description": "A tool of this page.", "input_schema": {"type": "object"}, "annotations": reads}
        tools = [Tool(name=name, **kept) for name in names]
        after = "0" if ENDLESS else str(page + 1) if page < 2 else None
        return ListToolsResult(tools=tools, next_cursor=after)

    async def call_tool(context, parameters):
        if parameters.name == "die":
            os._exit(3)
        return CallToolResult(content=[TextContent(text=f"{parameters.name} in {os.getpid()}")])

    async def main():
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        server = Server("paged", on_list_tools=list_tools, on_call_tool=call_tool)
        async with stdio_server() as streams:
            await server.run(*streams, server.create_initialization_options())

    asyncio.run(main())
    """
)


def source(*command: str) -> ServerSource:
    return ServerSource("own", "Own", "A server.", "test", "en", StdioExecution(list(command)))


@pytest.fixture
def paged(tmp_path):
    (tmp_path / "paged.py").write_text(SERVER)
    return [sys.executable, str(tmp_path / "paged.py")]


async def test_tools_of_the_installed_servers(tmp_path):
    async with McpConnections(cwd=tmp_path) as connections:
        time, git = [
            (await collect(one, SimpleNamespace(connections=connections)))[0] for one in default_sources(["en"])
        ]
        names = {tool["function"]["name"] for tool in git.tools}
        assert [tool["function"]["name"] for tool in time.tools] == ["get_current_time", "convert_time"]
        assert {"git_log", "git_show", "git_commit"} <= names
        running = await connections.get(time.execution)
        text, ok = await running.call("get_current_time", {"timezone": "Asia/Tokyo"})
        assert ok and CLOCK[:10] + "T21:00:00+09:00" in text  # the clock stands still
        assert (await running.call("get_current_time", {"timezone": "Mars/Olympus"}))[1] is False
        assert await running.call("no_such_tool", {}) == ("Unknown tool: no_such_tool", False)


async def test_all_pages_are_read(tmp_path, paged):
    async with McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(source(*paged), SimpleNamespace(connections=connections))
    assert [tool["function"]["name"] for tool in document.tools] == [f"tool.number {i}" for i in range(9)] + ["die"]


async def test_pages_without_end_are_read_once(tmp_path, paged):
    async with McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(source(*paged, "endless"), SimpleNamespace(connections=connections))
    assert [tool["function"]["name"] for tool in document.tools] == [f"tool.number {i}" for i in range(3)]
    (problem,) = document.left_out
    assert problem.reason == "incomplete_list" and "tools/list do not end; 3 entries" in problem.detail


async def test_a_broken_connection_is_opened_again(tmp_path, paged):
    async with McpConnections(cwd=tmp_path) as connections:
        running = await connections.get(StdioExecution(paged))
        first, _ = await running.call("tool.number 1", {})
        with pytest.raises(ServerUnavailable):
            await running.call("die", {})
        second, ok = await running.call("tool.number 1", {})
        assert ok and second != first  # another process
        assert connections.reopened == running.reopened == 2  # within the call that broke it twice, and after it


def kill(folder: Path) -> None:
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


async def test_a_server_that_died_after_its_tools_were_listed(tmp_path, paged):
    """The run's first call lists them once more, for their names: on a new connection, and one only for all runs."""
    async with McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(source(*paged), SimpleNamespace(connections=connections))
        server = normalize(document).server
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)
        calls = [ToolCall(f"call_{number}", "tool_number_1", {}) for number in range(5)]
        for reopened in (1, 2):
            kill(tmp_path)
            results = await asyncio.gather(*(executor.mcp(server, server.execution, call) for call in calls))
            new = (tmp_path / "pid").read_text()
            assert {(one.content, one.ok) for one in results} == {(f"tool.number 1 in {new}", True)}
            assert connections.reopened == reopened
        kill(tmp_path)
        (tmp_path / "paged.py").write_text("raise SystemExit(3)")  # it does not come back: nobody's tool has failed
        with pytest.raises(Transient, match="MCP server .* did not start"):
            await executor.mcp(server, server.execution, calls[0])
        assert connections.reopened == 2


async def test_a_server_that_did_not_start_is_started_at_the_next_request(tmp_path, paged):
    (tmp_path / "paged.py").write_text("raise SystemExit(3)")
    async with McpConnections(cwd=tmp_path) as connections:
        with pytest.raises(Rejected, match="did not start"):
            await collect(source(*paged), SimpleNamespace(connections=connections))
        (tmp_path / "paged.py").write_text(SERVER)
        (document,) = await collect(source(*paged), SimpleNamespace(connections=connections))
        assert len(document.tools) == 10 and connections.reopened == 0


@pytest.mark.parametrize(
    ("command", "timeout", "what"),
    [
        (["no-such-mcp-server"], 20, "no-such-mcp-server.*not found; install it"),
        ([sys.executable, "-c", "raise SystemExit(3)"], 20, "did not start"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], 1, "did not answer in 1 s"),
    ],
)
async def test_a_server_that_does_not_start_is_rejected_in_one_line(tmp_path, command, timeout, what):
    async with McpConnections(cwd=tmp_path, timeout_seconds=timeout) as connections:
        with pytest.raises(Rejected, match=what) as rejection:
            await collect(source(*command), SimpleNamespace(connections=connections))
    assert rejection.value.reason == "mcp_server_unavailable" and "\n" not in rejection.value.detail


def test_a_missing_server_is_tried_again_once_it_is_there():
    assert source_key(source("no-such-mcp-server")).endswith("missing")
    assert source_key(source("mcp-server-time")).endswith("found")


def test_the_git_project_is_the_same_everywhere(tmp_path):
    heads = set()
    for name in ("a", "b"):
        make_repository(tmp_path / name)
        make_repository(tmp_path / name)  # is left as it is
        log = subprocess.run(
            ["git", "log", "--all", "--format=%H"], cwd=tmp_path / name, capture_output=True, text=True
        )
        heads.add(log.stdout)
    assert len(heads) == 1 and len(heads.pop().split()) == 10


def test_fact_documents_can_be_chosen():
    documents = fact_documents(["en", "zh"], only=["colors", "http"], emulated=["http"])
    assert [document.id for document in documents] == ["colors", "http", "colors_zh", "http_zh"]
    assert [isinstance(document.execution, CodeExecution) for document in documents] == [True, False, True, False]
    with pytest.raises(ValueError, match="only: no fact server 'dragons'"):
        fact_documents(["en"], only=["dragons"])


# ---------------------------------------------------------------------------------------------------------------------
# Normalising

OBJECT = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}


def tool(name="look_up", description="Look up a thing.", parameters=OBJECT, **more):
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
        **more,
    }


def document(*tools, execution=None) -> ServerDocument:
    return ServerDocument("srv", "S", "A server.", "test", "en", list(tools), execution or CodeExecution(""))


def reasons(*tools, **options) -> dict[str, str]:
    done = normalize(document(*tools), min_tools=0, **options)
    assert done.server is not None and len(done.server.tools) + len(done.rejected) == done.read == len(tools)
    return {one.name: one.reason for one in done.rejected}


def parameters_of(schema) -> dict:
    (kept,) = normalize(document(tool(parameters=schema)), min_tools=1).server.tools
    return kept.parameters


def test_each_bad_tool_has_its_reason():
    assert reasons(
        tool("good"),
        tool("no_schema", parameters="x"),
        {"name": "no_key", "description": "Look up a thing.", "arg_list": {"x": {"type": "string"}}},
        tool("no_words", description=" "),
        tool("get_it", description="Get it."),
        tool("odd_type", parameters={"type": "object", "properties": {"x": {"type": "colour"}}}),
        tool("not_object", parameters={"type": "array"}),
        tool("bad_required", parameters={"type": "object", "properties": {}, "required": ["x"]}),
        tool("foreign", parameters={"type": "object", "properties": {"x": {"$ref": "https://x.org/y"}}}),
        tool("endless", parameters={"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}},
                                    "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        tool("long", description="Look up a thing. " * 8_000),
        tool("", description="Look up a thing."),
        "not a tool",
    ) == {
        "no_schema": "no_schema",
        "no_key": "no_schema",
        "no_words": "no_description",
        "get_it": "vague_description",
        "odd_type": "unknown_type",
        "not_object": "not_an_object",
        "bad_required": "invalid_schema",
        "foreign": "foreign_reference",
        "endless": "recursive_schema",
        "long": "document_too_long",
        "": "bad_name",
    }  # fmt: skip


def test_schemas_become_plain():
    assert parameters_of(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "Arguments",
            "properties": {
                "title": {"title": "Title", "type": "str"},
                "since": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Since"},
                "place": {"$ref": "#/$defs/Place", "description": "Where."},
                "size": {"oneOf": [{"type": "int"}, {"type": "string"}]},
            },
            "required": ["title"],
            "$defs": {"Place": {"type": "dict", "properties": {"lat": {"type": "float"}}}},
        }
    ) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "since": {"type": ["string", "null"], "default": None},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "description": "Where."},
            "size": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
        "required": ["title"],
    }
    assert parameters_of({"type": "object"}) == {"type": "object", "properties": {}}


def test_names_are_mended_and_stay_apart():
    names = ["get.weather", "get_weather", "café", "天气", "查询天气", "ok-1",
             "x" * 64 + "a", "x" * 64 + "b", "x" * 64 + "c", "", "café"]  # fmt: skip
    fixed = fix_names(names)
    assert fixed == [
        "get_weather_f65d4328", "get_weather", "cafe", "tool_4d947325", "tool_22cf3c76", "ok-1",
        *(f"{'x' * 55}_{end}" for end in ("8123067d", "8218dac0", "5d65034b")), None, None,
    ]  # fmt: skip
    # A running server's tools are found by the same names, in whatever order it lists them.
    assert dict(zip(reversed(names[:-1]), fix_names(names[-2::-1]), strict=True)) == dict(
        zip(names[:-1], fixed, strict=False)
    )


def test_small_servers_and_writing_tools_are_dropped_and_counted():
    done = normalize(document(tool("a"), tool("b", parameters="x")), min_tools=3)
    assert done.server is None and done.reasons() == {"server_too_small": 1, "no_schema": 1}
    running = document(tool("a", read_only=False), tool("b", read_only=True), execution=StdioExecution(["x"]))
    assert normalize(running, min_tools=1).reasons() == {"changes_state": 1}
    assert not normalize(running, min_tools=1, read_only=False).rejected


def test_a_tool_is_found_in_the_wrappers_that_vendors_have():
    """OpenAI's two forms, Anthropic, MCP, Bedrock, Gemini, Cohere, smolagents, LangChain, JSON texts of data sets."""
    words = {"name": "look_up", "description": "Look up a thing."}
    for given in (
        {"type": "function", "function": {**words, "parameters": OBJECT}},
        {"type": "function", **words, "parameters": OBJECT, "strict": True},
        {**words, "input_schema": OBJECT, "cache_control": {"type": "ephemeral"}},
        {**words, "inputSchema": OBJECT, "outputSchema": {"type": "object"}, "annotations": {}},
        {"toolSpec": {**words, "inputSchema": {"json": OBJECT}}},
        {**words, "inputSchema": {"jsonSchema": OBJECT}},
        {**words, "parametersJsonSchema": OBJECT},
        {**words, "parameter_definitions": {"x": {"type": "str", "required": True}}},
        {**words, "inputs": {"x": {"type": "string"}}, "output_type": "string"},
        {**words, "args": {"x": {"title": "X", "type": "string"}}},
        {**words, "parameters": json.dumps(OBJECT)},
        {**words, "properties": OBJECT["properties"], "required": ["x"]},
        {**words, "parameters": {"x": {"type": "str", "default": "a"}}, "required": ["x"]},
    ):
        (kept,) = normalize(document(given), min_tools=1).server.tools
        assert kept.parameters["required"] == ["x"] and kept.parameters["properties"]["x"]["type"] == "string", given


def test_what_a_kept_tool_says_otherwise_than_its_document_is_named():
    done = normalize(document(tool("a", parameters={"x": {"type": "str"}}), tool("b", parameters=None), tool("c")))
    assert [(one.name, one.change) for one in done.changed] == [("a", "parameters_rewritten"), ("b", "no_parameters")]
    assert all(one.detail for one in done.changed)
    assert not normalize(document(tool("a", parameters=None))).changed  # no server is left


def test_a_server_of_too_many_or_too_long_tools_is_split_by_topic():
    tools = [
        tool(f"{verb}_{topic}", f"Do it to the {topic} there.")
        for topic in ("pets", "orders", "users")
        for verb in ("get", "list", "create", "update", "delete")
    ]
    done = normalize(document(*tools), max_tools=6)
    assert [len(server.tools) for server in done.servers] == [5, 5, 5] and not done.rejected
    assert [server.title for server in done.servers] == ["S: pet", "S: order", "S: user"]
    assert [server.id for server in done.servers] == ["srv.1", "srv.2", "srv.3"]
    long = [tool(f"{topic}_{i}", "Do it now. " * 300) for topic in ("pets", "orders") for i in range(5)]
    done = normalize(document(*long), max_tokens=10_000)
    assert [{one.name[:4] for one in server.tools} for server in done.servers] == [{"pets"}, {"orde"}]
    mixed = normalize(
        document(*(tool(f"w{'xyzuv'[i % 5] * i}", "Do the thing there.") for i in range(40))), max_tools=8
    )
    assert sum(len(server.tools) for server in mixed.servers) == 40 and all(
        len(one.tools) <= 8 for one in mixed.servers
    )


UNDECLARED = textwrap.dedent(
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    server = MCPServer("notes")
    READS = ToolAnnotations(read_only_hint=True)

    @server.tool(annotations=READS)
    def list_notes() -> str:
        "List all notes there are."
        return "none"

    @server.tool()
    def add_note(text: str) -> str:
        "Add one note to all notes."
        return text

    @server.tool(annotations=ToolAnnotations(title="Forget"))
    def forget_note(text: str) -> str:
        "Forget one note of all notes."
        return text

    @server.tool(annotations=ToolAnnotations(read_only_hint=False))
    def empty_notes() -> str:
        "Throw away all notes there are."
        return "gone"

    server.run()
    """
)


async def test_what_a_server_does_not_declare_read_only_may_write(tmp_path):
    """MCP's default of `readOnlyHint` is false: a tool without the hint, or any annotation, is one that writes."""
    (tmp_path / "notes.py").write_text(UNDECLARED)
    async with McpConnections(cwd=tmp_path) as connections:
        own = source(sys.executable, str(tmp_path / "notes.py"))
        (document,) = await collect(own, SimpleNamespace(connections=connections))

    def kept(**options):
        (done,) = normalize_all([document], min_tools=1, **options)
        return [one.name for one in done.server.tools], done.reasons()

    assert kept() == (["list_notes"], {"not_declared_read_only": 2, "changes_state": 1})
    named = {"own": ["add_note", "empty_notes"]}
    assert kept(allowed_tools=named) == (["list_notes", "add_note", "empty_notes"], {"not_declared_read_only": 1})
    assert kept(read_only=False) == (["list_notes", "add_note", "forget_note", "empty_notes"], {})
    with pytest.raises(InputError, match="server own has no tool 'add_nte'; it has list_notes, add_note"):
        check_allowed([document], {"own": ["add_nte"]})


def test_an_allow_list_names_sources_that_are_there():
    with pytest.raises(SettingError, match="no source has the id 'mcp_tme'; there are mcp_time, mcp_git"):
        TrajectoriesConfig(allowed_tools={"mcp_tme": ("get_current_time",)})
    assert TrajectoriesConfig(allowed_tools={"mcp_git": ("git_commit",)}).allowed_tools


async def test_the_installed_servers_declare_what_they_are(tmp_path):
    async with McpConnections(cwd=tmp_path) as connections:
        every = [(await collect(one, SimpleNamespace(connections=connections)))[0] for one in default_sources(["en"])]
    clock, git = normalize_all(every, min_tools=1)
    assert [one.name for one in clock.server.tools] == ["get_current_time", "convert_time"]
    assert {"git_log", "git_show"} <= {one.name for one in git.server.tools}
    assert set(git.reasons()) == {"changes_state"} and "git_commit" in {one.name for one in git.rejected}
