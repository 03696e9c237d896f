"""Answers of MCP servers of any shape: an invalid entry costs itself, and the agent sees all data of a result once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_mcp import write_server

from synthesis.core.records import ServedPrompt, ServedResource, StdioExecution, ToolCall
from synthesis.offline.teacher import OfflineTeacher
from synthesis.servers.collect import ServerDocument, ServerSource, collect
from synthesis.servers.mcp_answers import is_error, result_text
from synthesis.servers.mcp_client import McpConnection, McpConnections
from synthesis.servers.mcp_environment import served_tools, tool_answer
from synthesis.servers.normalize import normalize
from synthesis.trajectories.execution import ToolExecutor

OPEN = {"type": "object", "properties": {"key": {"type": "string"}}}
SCRIPT = """
    ANSWERS = json.loads(sys.argv[1])
    for message, answer in requests():
        if message["method"] == "initialize":
            answer["result"]["capabilities"] = {"tools": {}, "resources": {}, "prompts": {}}
        else:
            cursor = (message.get("params") or {}).get("cursor", "")
            given = ANSWERS.get(f"{message['method']} {cursor}".strip())
            name = message.get("params", {}).get("name")
            if given == "name":
                given = {"content": [{"type": "text", "text": name}]}
            if isinstance(given, str):
                answer["error"] = {"code": -32603, "message": given}
            elif given is None:
                answer["error"] = {"code": -32601, "message": "no such method"}
            else:
                answer["result"] = given
        print(json.dumps(answer), flush=True)
    """


def tool(name: str, **more: object) -> dict[str, object]:
    about = {"description": f"Reads the thing {name} by its key.", "annotations": {"readOnlyHint": True}}
    return {"name": name, "inputSchema": OPEN, **about, **more}


def source(folder: Path, **answers: object) -> ServerSource:
    """Answers by method, with `_` for `/`; a second page has its cursor behind it."""
    write_server(folder / "any.py", SCRIPT)
    given = {name.replace("_", "/", 1).replace("__", " "): answer for name, answer in answers.items()}
    command = [sys.executable, str(folder / "any.py"), json.dumps(given)]
    return ServerSource("any", "Any", "A server.", "test", "en", StdioExecution(command))


async def collected(folder: Path, **answers: object) -> ServerDocument:
    async with McpConnections(cwd=folder) as connections:
        (document,) = await collect(source(folder, **answers), SimpleNamespace(connections=connections))
    return document


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (tool("c", icons="icon.png"), ""),
        (tool("c", outputSchema=True), ""),
        (tool("c", outputSchema={"type": "object", "properties": {"a": {"type": "nosuch"}}}), ""),
        (tool("c", _meta="words", title=7, execution=[]), ""),
        (tool("c", annotations={"readOnlyHint": True, "title": 7}), ""),
        (tool("c", annotations={"readOnlyHint": "sometimes"}), "not_declared_read_only"),
        (tool("c", annotations="readOnly"), "not_declared_read_only"),
        ({"inputSchema": OPEN, "description": "Has no name at all."}, "bad_name"),
        (tool("c", description=["a", "list"]), "no_description"),
        (tool("c", inputSchema="text"), "no_schema"),
        (tool("c", inputSchema={"type": "string"}), "not_an_object"),
        (tool("c", inputSchema={"type": "object", "properties": {"a": {"type": "nosuch"}}}), "unknown_type"),
        ("not an object", "bad_name"),
        (None, "bad_name"),
    ],
    ids=str,
)
async def test_an_invalid_tool_costs_itself(tmp_path, entry, reason):
    document = await collected(tmp_path, tools_list={"tools": [tool("a"), entry, tool("b")]})
    done = normalize(document, min_tools=1)
    assert [one.name for one in done.server.tools] == (["a", "b"] if reason else ["a", "c", "b"])
    assert [one.reason for one in done.rejected] == ([reason] if reason else []) and done.read == 3
    assert document.left_out == []


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ("the disk is gone", "tools/list failed after 2 entries: the disk is gone"),
        ({"tools": {"not": "a list"}}, "its answer to tools/list has no list `tools` after 2 entries"),
        ({"tools": [tool("c")], "nextCursor": "p2"}, "the pages of tools/list do not end; 3 entries were read"),
        ({"tools": [tool("c")], "nextCursor": 7}, "the pages of tools/list do not end; 3 entries were read"),
        ({"tools": [tool("c")], "nextCursor": ""}, ""),
    ],
    ids=str,
)
async def test_a_page_that_fails_costs_itself(tmp_path, second, problem):
    first = {"tools": [tool("a"), tool("b")], "nextCursor": "p2"}
    document = await collected(tmp_path, tools_list=first, tools_list__p2=second)
    names = [one["function"]["name"] for one in document.tools]
    assert names == (["a", "b"] if "2 entries" in problem else ["a", "b", "c"])
    assert [(one.reason, one.detail) for one in document.left_out] == (
        [("incomplete_list", problem)] if problem else []
    )


async def test_invalid_resources_and_prompts_cost_themselves(tmp_path, caplog):
    resources = [{"uri": "file:///a", "name": "A"}, {"uri": "my notes", "name": None}, {"name": "no address"}, 7]
    templates = [{"uriTemplate": "file:///{never closed", "name": "T"}]
    prompts = [{"name": "p", "arguments": [{"name": "x"}]}, {"description": "no name"}, {"name": "q", "arguments": 3}]
    document = await collected(
        tmp_path, tools_list={"tools": [tool("a")]}, resources_list={"resources": resources},
        **{"resources_templates/list": {"resourceTemplates": templates}}, prompts_list={"prompts": prompts},
    )  # fmt: skip
    assert document.resources == [ServedResource("A", "file:///a"), ServedResource("T", "file:///{never closed")]
    assert document.prompts == [ServedPrompt("p", "", ["x"])]
    assert [one.reason for one in document.left_out] == ["bad_resource"] * 3 + ["bad_prompt"] * 2
    assert (
        "server any: left out 3 bad_resource: resources: {'name': None, 'uri': 'my notes'}: `name` must be"
        in caplog.text
    )
    document = await collected(tmp_path, tools_list={"tools": [tool("a")]}, resources_list="gone", prompts_list="gone")
    assert [one.reason for one in document.left_out] == ["resources_unavailable", "prompts_unavailable"]
    assert len(document.tools) == 1


async def test_calls_reach_the_servers_own_names_on_both_tracks(tmp_path):
    names = ["weather.get/today", "a" * 70, "plain"]
    one = source(tmp_path, tools_list={"tools": [tool(name) for name in names]}, tools_call="name")
    async with McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(one, SimpleNamespace(connections=connections))
        server = normalize(document).server
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)
        results = [await executor.mcp(server, server.execution, ToolCall("1", t.name, {})) for t in server.tools]
        assert [result.content for result in results] == names
    async with McpConnection(one.execution, cwd=tmp_path) as connection:
        tools = await served_tools({"any": connection}, prefixed=True)
        called = [tools.places[spec.name][1] for spec in tools.specs]
        assert [(await tool_answer(connection, name, {})).text for name in called] == names
        assert all(len(spec.name) <= 64 for spec in tools.specs)


# ---------------------------------------------------------------------------------------------------------------------
# Results


def said(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
ROWS = {"rows": [1, 2]}
RESULTS = [
    ({"content": said("one", "two")}, "one\ntwo"),
    # Structured content beside a text that is its serialisation is shown once.
    ({"content": said("3"), "structuredContent": {"result": 3}}, "3"),
    ({"content": said("a word"), "structuredContent": {"result": "a word"}}, "a word"),
    ({"content": said('{\n  "rows": [1, 2]\n}'), "structuredContent": ROWS}, '{\n  "rows": [1, 2]\n}'),
    ({"content": said('```json\n{"rows": [1, 2]}\n```'), "structuredContent": ROWS}, '```json\n{"rows": [1, 2]}\n```'),
    ({"content": said('Two: {"rows": [1, 2]}'), "structuredContent": ROWS}, 'Two: {"rows": [1, 2]}'),
    ({"content": said('{"a": 1}', '{"a": 2}'), "structuredContent": {"result": [{"a": 1}, {"a": 2}]}},
     '{"a": 1}\n{"a": 2}'),
    ({"content": said("a", "b"), "structuredContent": {"result": ["a", "b"]}}, "a\nb"),
    # Beside any other text it is shown too, and a text that stands in it only there.
    ({"content": said("2 rows"), "structuredContent": ROWS}, '2 rows\n{"rows":[1,2]}'),
    ({"content": said('{"rows": [1]}'), "structuredContent": ROWS}, '{"rows": [1]}\n{"rows":[1,2]}'),
    ({"content": said("its text"), "structuredContent": {"file": {"text": "its text\n"}, "size": 8}},
     '{"file":{"text":"its text\\n"},"size":8}'),
    ({"content": said(""), "structuredContent": ROWS}, '{"rows":[1,2]}'),
    ({"content": [], "structuredContent": {"城市": "奥斯陆"}}, '{"城市":"奥斯陆"}'),
    ({"structuredContent": [1, 2]}, "[1,2]"),
    ({"content": [IMAGE], "structuredContent": {"high": 31.5}}, '{"high":31.5}\n[not shown: 1 image (image/png)]'),
    ({"content": said("no such key"), "structuredContent": {"code": 404}, "isError": True},
     'no such key\n{"code":404}'),
    # Other blocks are shown, or named with their count.
    ({"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "its words"}}]}, "its words"),
    ({"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "AAAA", "mimeType": "x/y"}}]},
     "[not shown: 1 resource file:///a (x/y)]"),
    ({"content": [{"type": "resource_link", "uri": "file:///a", "name": "a", "_meta": {}}]},
     '{"uri":"file:///a","name":"a"}'),
    ({"content": [IMAGE, IMAGE, {"type": "audio", "data": "AA"}, *said("seen")]},
     "seen\n[not shown: 2 image (image/png), 1 audio]"),
    ({"content": [{"type": "video", "data": "AAAA"}]}, "[not shown: 1 video]"),
    ({"content": [{"type": "json", "json": {"a": 1}}, *said("hello")]}, '{"type":"json","json":{"a":1}}\nhello'),
    ({"content": [{"type": "text", "text": 42}]}, "42"),
    ({"content": [{"type": "text", "text": None}, None, "bare"]}, "null\nbare"),
    ({"content": "bare"}, "bare"),
    ({"content": said("seen")[0]}, "seen"),
    ({"content": None}, ""),
    ({"content": [], "_meta": {"fastmcp": {"wrap_result": True}}}, ""),
    ({"content": said("[" * 50_000)}, "[" * 50_000),
]  # fmt: skip


@pytest.mark.parametrize(("result", "text"), RESULTS, ids=[str(number) for number in range(len(RESULTS))])
def test_the_agent_sees_all_data_of_a_result_once(result, text):
    assert result_text(result) == text


async def test_results_of_any_shape_arrive(tmp_path):
    tools = {"tools": [tool("a", outputSchema={"type": "object", "required": ["a"]})]}
    for result, text in RESULTS[:-1]:
        async with McpConnection(source(tmp_path, tools_list=tools, tools_call=result).execution, cwd=tmp_path) as one:
            await one.list_tools()
            assert await one.call("a", {}) == (text, "isError" not in result)


def test_what_says_that_a_call_failed():
    assert [is_error({"isError": value}) for value in (True, 1, "true", "yes")] == [True] * 4
    assert [is_error({"isError": value}) for value in (False, None, 0, "false")] == [False] * 4
    assert is_error({"is_error": True}) and not is_error({})


async def test_an_error_without_a_message_has_one(tmp_path):
    empty = {"content": [], "isError": True}
    one = source(tmp_path, tools_list={"tools": [tool("a")]}, tools_call=empty)
    async with McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(one, SimpleNamespace(connections=connections))
        server = normalize(document, min_tools=1).server
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)
        shown = await executor.mcp(server, server.execution, ToolCall("1", "a", {}))
    assert (shown.content, shown.error) == ('{"error":"the tool failed and gave no message"}', "tool_error")
