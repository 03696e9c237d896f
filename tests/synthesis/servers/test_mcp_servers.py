"""MCP servers over streamable HTTP, and servers of either kind that misbehave: each is rejected in one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from scripted_mcp import write_server

from synthesis.core.records import HttpExecution, StdioExecution, ToolCall, ToolServer, ToolSpec
from synthesis.core.stages import Rejected, Transient
from synthesis.offline.teacher import OfflineTeacher
from synthesis.servers import bounded_http
from synthesis.servers.collect import ServerSource, collect, source_key
from synthesis.servers.mcp_client import McpConnections, ServerUnavailable
from synthesis.servers.normalize import normalize
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import ToolExecutor

HTTP_SERVER = textwrap.dedent(
    """
    import os, sys
    import uvicorn
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    server = MCPServer("adder")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def add(first: int, second: int) -> int:
        "Add two whole numbers."
        return first + second

    @server.tool(name="process.id", annotations=ToolAnnotations(read_only_hint=True))
    def process() -> str:
        "The number of the process that answers."
        return str(os.getpid())

    app = server.streamable_http_app(stateless_http="stateless" in sys.argv)

    async def guarded(scope, receive, send):
        if scope["type"] == "http" and (b"authorization", b"Bearer open sesame") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    uvicorn.run(guarded, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    """
)
TOKEN = {"Authorization": "Bearer ${TEST_TOKEN}"}


def http_source(url: str, headers=TOKEN) -> ServerSource:
    return ServerSource("own", "Own", "A server.", "test", "en", HttpExecution(url, dict(headers)))


def free_port() -> int:
    with socket.socket() as one_socket:
        one_socket.bind(("127.0.0.1", 0))
        return one_socket.getsockname()[1]


@contextlib.contextmanager
def http_server(folder: Path, port: int, *arguments: str):
    (folder / "served.py").write_text(HTTP_SERVER)
    process = subprocess.Popen([sys.executable, str(folder / "served.py"), str(port), *arguments])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def test_a_server_over_streamable_http(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_TOKEN", "open sesame")
    port = free_port()
    async with McpConnections(cwd=tmp_path) as connections:
        with http_server(tmp_path, port) as url:
            (document,) = await collect(http_source(url), SimpleNamespace(connections=connections))
            done = normalize(document, min_tools=2)
            assert [tool.name for tool in done.server.tools] == ["add", "process_id"]
            assert isinstance(done.server.execution, HttpExecution)
            assert "sesame" not in msgspec.json.encode(done.server).decode()  # the record names the variable only
            running = await connections.get(document.execution)
            assert await running.call("add", {"first": 2, "second": 3}) == ("5", True)
            assert (await running.call("add", {"first": "two"}))[1] is False
            first, _ = await running.call("process.id", {})
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="did not connect"):
                await running.call("process.id", {})
        with http_server(tmp_path, port) as url:  # another process at the same address: connected to again
            second, ok = await running.call("process.id", {})
            assert ok and second != first


async def test_http_servers_that_let_nobody_in(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_TOKEN", "wrong")
    with http_server(tmp_path, free_port(), "stateless") as url:
        async with McpConnections(cwd=tmp_path, timeout_seconds=10) as connections:
            with pytest.raises(Rejected, match="did not connect.*check its address and headers") as rejection:
                await collect(http_source(url), SimpleNamespace(connections=connections))
    assert rejection.value.reason == "mcp_server_unavailable" and "\n" not in rejection.value.detail
    monkeypatch.delenv("TEST_TOKEN")
    async with McpConnections(cwd=tmp_path) as connections:
        with pytest.raises(Rejected, match="environment variable TEST_TOKEN is not set; set it"):
            await collect(http_source(url), SimpleNamespace(connections=connections))


HTTP_ANSWERS = {
    "page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello",
    "not json": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello",
    "other json": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}',
    "batch": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 43\r\n\r\n"
    b'[{"jsonrpc": "2.0", "id": 0, "result": {}}]',
    "error": b"HTTP/1.1 500 Oh no\r\nContent-Length: 0\r\n\r\n",
    "elsewhere": b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
    "noise": b"\x00\x01\x02\x03\r\n\r\n",
    "nothing": b"",
    "hang": None,
    "packed": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    b"Content-Length: 1\r\n\r\nx",
    "half": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
}


@pytest.mark.parametrize("answer", HTTP_ANSWERS.values(), ids=HTTP_ANSWERS)
async def test_http_servers_that_answer_nonsense_or_nothing(tmp_path, answer):
    stop = asyncio.Event()

    async def serve(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"")
            await writer.drain()
            if answer is None or answer.endswith(b"chunked\r\n\r\n"):
                await stop.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    async with asyncio.timeout(120), McpConnections(cwd=tmp_path, timeout_seconds=2) as connections:
        with pytest.raises(Rejected) as rejection:
            await collect(http_source(url, {}), SimpleNamespace(connections=connections))
    assert rejection.value.reason == "mcp_server_unavailable" and url in rejection.value.detail
    if answer and b"application/json" in answer and b"gzip" not in answer:
        start = answer.rpartition(b"\r\n\r\n")[2].decode()
        assert f"an answer that is not one message of JSON-RPC: {start!r}; check" in rejection.value.detail
    stop.set()
    server.close()


def http(status: str, kind: str = "text/plain", body: object = "no", *more: str) -> bytes:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    heads = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(content)}", *more, "", ""]
    return "\r\n".join(heads).encode() + content


@contextlib.asynccontextmanager
async def shaken_hands(answers: dict[str, bytes], seen: list[str] | None = None, session: str = ""):
    """A server in order over HTTP, but for the methods that it has other answers to."""

    async def serve(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length:")[2].split("\r\n")[0]
                message = json.loads(await reader.readexactly(int(length or 0)) or "{}")
                method, number = message.get("method"), message.get("id")
                if seen is not None:
                    seen.append(f"{head.split()[1]} {method}")
                capabilities = {"tools": {}, "prompts": {}, "resources": {}}
                look = {"name": "look", "description": "Look at a thing.", "inputSchema": {"type": "object"}}
                known = {
                    "initialize": {
                        "protocolVersion": "2025-06-18",
                        "capabilities": capabilities,
                        "serverInfo": {"name": "f", "version": "1"},
                    },
                    "tools/list": {"tools": [{**look, "annotations": {"readOnlyHint": True}}]},
                    "tools/call": {"content": [{"type": "text", "text": "seen"}]},
                }
                if method in answers and "/moved" not in head.split()[1]:
                    writer.write(answers[method])
                elif not head.startswith("post"):
                    writer.write(http("405 No"))
                elif number is None:
                    writer.write(http("202 Accepted"))
                else:
                    error = {"error": {"code": -32601, "message": "no such method"}}
                    said = {"result": known[method]} if method in known else error
                    head = [f"Mcp-Session-Id: {session}"] if session and method == "initialize" else []
                    body = {"jsonrpc": "2.0", "id": number, **said}
                    writer.write(http("200 OK", "application/json", body, *head))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()


OWN_ERROR = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "no such word"}}
REFUSALS = HTTP_ANSWERS | {
    **{status: http(f"{status} Oh") for status in ("401", "403", "404", "429", "502", "503")},
    "limited": http("429 Slow down", "application/json", OWN_ERROR),
    "accepted": http("202 Accepted"),
    "to a page": http("302 Found", "text/html", "", "Location: /login"),
    "round and round": http("307 Go", "text/html", "", "Location: /mcp"),
    "parse error": http("200 OK", "application/json", {**OWN_ERROR, "error": {"code": -32700, "message": "what?"}}),
}


@pytest.mark.parametrize("answer", REFUSALS.values(), ids=REFUSALS)
async def test_what_comes_instead_of_a_tools_answer_is_shown_to_nobody(tmp_path, answer):
    """Its handshake was in order: what stands before the server failed later."""
    look = ToolSpec("look", "Look at a thing.", {"type": "object", "properties": {}})
    answer = b"" if answer is None or answer.endswith(b"chunked\r\n\r\n") else answer  # what hangs has its own test
    async with (
        asyncio.timeout(120),
        shaken_hands({"tools/call": answer}) as url,
        McpConnections(cwd=tmp_path, timeout_seconds=2) as connections,
    ):
        server = ToolServer("own", "Own", "A server.", "test", "en", [look], HttpExecution(url))
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)
        with pytest.raises(Transient, match="MCP server"):
            await executor.mcp(server, server.execution, ToolCall("call_1", "look", {}))


async def test_what_a_server_says_over_http_with_another_status_is_its_answer(tmp_path):
    seen: list[str] = []
    moved = http("307 Go", "text/html", "", "Location: /mcp/moved")
    for answer, expected in (
        (http("400 Bad", "application/json", OWN_ERROR), ("no such word", False)),
        (http("404 Unknown", "application/json; charset=utf-8", OWN_ERROR), ("no such word", False)),
        (moved, ("seen", True)),
    ):
        async with shaken_hands({"tools/call": answer}, seen) as url, McpConnections(cwd=tmp_path) as connections:
            assert await (await connections.get(HttpExecution(url))).call("look", {}) == expected
    assert [one for one in seen if "call" in one][-2:] == ["/mcp tools/call", "/mcp/moved tools/call"]


async def test_a_gateway_that_answers_for_the_prompts_costs_the_prompts(tmp_path):
    async with shaken_hands({"prompts/list": http("404 Oh")}) as url, McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(http_source(url, {}), SimpleNamespace(connections=connections))
    (problem,) = document.left_out
    assert problem.reason == "prompts_unavailable" and "prompts/list was not answered: HTTP 404" in problem.detail


async def test_a_server_of_the_older_transport_is_refused_with_that_word(tmp_path):
    async with (
        shaken_hands(dict.fromkeys(("initialize", "server/discover"), http("405 No"))) as url,
        McpConnections(cwd=tmp_path) as connections,
    ):
        with pytest.raises(Rejected, match="HTTP 405.*HTTP.SSE alone.*address of its streamable HTTP endpoint"):
            await collect(http_source(url, {}), SimpleNamespace(connections=connections))


async def test_a_session_that_the_server_forgot_is_opened_again(tmp_path):
    seen: list[str] = []
    answers = {"tools/call": http("404 Gone")}
    async with shaken_hands(answers, seen, "s1") as url, McpConnections(cwd=tmp_path) as connections:
        running = await connections.get(HttpExecution(url))
        await running.list_tools()
        with pytest.raises(ServerUnavailable, match="broke twice: Session terminated"):
            await running.call("look", {})
        assert running.reopened == 1
        answers.clear()
        assert await running.call("look", {}) == ("seen", True)


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_an_answer_without_end_is_ended(tmp_path, monkeypatch, caplog, kind):
    monkeypatch.setattr(bounded_http, "MOST_BYTES", 1 << 20)
    sent = 0

    async def serve(reader, writer):
        nonlocal sent
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n\r\ndata: [")
            while True:
                writer.write(b'"a",' * 16_384)
                await writer.drain()
                sent += 65_536
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    async with asyncio.timeout(120), McpConnections(cwd=tmp_path, timeout_seconds=60) as connections:
        with pytest.raises(Rejected) as rejection:
            await collect(http_source(url, {}), SimpleNamespace(connections=connections))
    assert rejection.value.reason == "mcp_server_unavailable" and "the answer has more than 1 MiB" in caplog.text
    assert sent < 32 << 20  # what the sockets hold comes on top
    server.close()


async def test_nobody_listens(tmp_path):
    async with McpConnections(cwd=tmp_path, timeout_seconds=3) as connections:
        with pytest.raises(Rejected, match="mcp_server_unavailable.*did not connect"):
            await collect(
                http_source(f"http://127.0.0.1:{free_port()}/mcp", {}), SimpleNamespace(connections=connections)
            )
        with pytest.raises(Rejected, match="mcp_server_unavailable"):
            await collect(http_source("no address at all", {}), SimpleNamespace(connections=connections))
    assert source_key(http_source("http://x/mcp")) == "own http://x/mcp"


async def test_a_server_that_hangs_in_the_handshake_and_is_deaf_to_signals(tmp_path):
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); open('pid', 'w').write(str(os.getpid()))"
    code += "; time.sleep(99)"
    hanging = ServerSource("h", "H", "Hangs.", "test", "en", StdioExecution([sys.executable, "-c", code]))
    async with McpConnections(cwd=tmp_path, timeout_seconds=2) as connections:
        with pytest.raises(Rejected, match="did not answer in 2 s after its start"):
            await collect(hanging, SimpleNamespace(connections=connections))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_sources_are_written_as_json():
    """As a config's override gives them."""
    given = {"id": "own", "title": "Own", "description": "A server.", "domain": "test", "language": "en"}
    execution = {"type": "mcp_http", "url": "http://x/mcp", "headers": TOKEN}
    assert msgspec.convert({**given, "execution": execution}, ServerSource) == http_source("http://x/mcp")
    stdio = msgspec.convert({**given, "execution": {"type": "mcp_stdio", "command": ["a"]}}, ServerSource)
    assert stdio.execution == StdioExecution(["a"])


LIAR = """
    import time

    TOOLS, RESULT = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    for message, answer in requests():
        if message["method"] == "tools/list":
            while TOOLS is None:
                time.sleep(1)
            answer["result"] = {"tools": TOOLS}
        elif message["method"] == "tools/call":
            answer["result"] = RESULT
        elif "result" not in answer:
            answer["error"] = {"code": -32601, "message": "no such method"}
        print("this line is no message", flush=True)
        print(json.dumps(answer), flush=True)
    """


def liar(folder: Path, tools: object, result: object = None) -> ServerSource:
    write_server(folder / "liar.py", LIAR)
    if isinstance(tools, list):
        tools = [{**tool, "annotations": {"readOnlyHint": True}} if isinstance(tool, dict) else tool for tool in tools]
    command = [sys.executable, str(folder / "liar.py"), json.dumps(tools), json.dumps(result)]
    return ServerSource("liar", "Liar", "A server.", "test", "en", StdioExecution(command))


async def test_servers_that_lie_about_their_schemas(tmp_path):
    good = {"type": "object", "properties": {"key": {"type": "string"}}}
    deep: dict = {"type": "string"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    schemas = [
        good,
        good,
        {"type": "object", "properties": {"a": {"type": 42}}},
        {"type": "object", "required": ["x"]},
        {"type": "object", "properties": {"a": deep}},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    ]
    tools = [{"name": f"t{i}", "description": "Look up a thing.", "inputSchema": s} for i, s in enumerate(schemas)]
    tools[1]["name"] = "t0"
    async with McpConnections(cwd=tmp_path) as connections:
        (document,) = await collect(liar(tmp_path, tools), SimpleNamespace(connections=connections))
        done = normalize(document, min_tools=1)
        assert [tool.name for tool in done.server.tools] == ["t0"]
        assert [tool.reason for tool in done.rejected] == [
            "duplicate_name",
            "invalid_schema",
            "invalid_schema",
            "schema_too_large",
            "foreign_reference",
        ]
        with pytest.raises(Rejected, match="tools/list has no list `tools`.*leave it out"):
            await collect(liar(tmp_path, "tools"), SimpleNamespace(connections=connections))


async def test_a_server_that_hangs_holds_up_no_other(tmp_path):
    """Its tools are listed before its first call, and never come. All who wait for them give up together."""
    look = ToolSpec("look", "Look at a thing.", {"type": "object", "properties": {}})
    tool = {"name": "look", "inputSchema": {"type": "object"}}
    sources = liar(tmp_path, None), liar(tmp_path, [tool], {"content": [{"type": "text", "text": "seen"}]})
    hanging, other = (
        ToolServer(name, name, "A server.", "test", "en", [look], source.execution)
        for name, source in zip(("hanging", "other"), sources, strict=True)
    )
    call = ToolCall("call_1", "look", {})
    async with McpConnections(cwd=tmp_path, timeout_seconds=60) as connections:
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)
        await connections.get(hanging.execution)
        waiting = asyncio.create_task(executor.mcp(hanging, hanging.execution, call))
        await asyncio.sleep(0)
        assert (await executor.mcp(other, other.execution, call)).content == "seen"
        assert not waiting.done()
        waiting.cancel()
    async with McpConnections(cwd=tmp_path, timeout_seconds=3) as connections:
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)
        calls = [executor.mcp(hanging, hanging.execution, call) for _ in range(30)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(one) for one in errors} == {Transient}
        assert len({id(one.__cause__) for one in errors}) == 1  # one wait timed out, not one after the other


def test_each_source_has_its_own_id():
    with pytest.raises(ValueError, match="sources: the id 'own' is used twice"):
        TrajectoriesConfig(sources=(http_source("http://x"), http_source("http://y")))
