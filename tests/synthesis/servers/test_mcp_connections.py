"""What a connection to an MCP server does when its server dies, hangs, floods, or is not waited for to its end."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
from pathlib import Path

import pytest
from scripted_mcp import write_server

from synthesis.core.environment import ToolAnswer, ToolsUnavailable
from synthesis.core.records import StdioExecution
from synthesis.servers import bounded_stdio
from synthesis.servers.mcp_client import McpConnection, McpConnections, ServerUnavailable
from synthesis.servers.mcp_environment import mcp_environments

SERVER = """
    import os, signal, time

    mode, folder = sys.argv[1:]
    open(os.path.join(folder, f"pid-{os.getpid()}"), "w").close()
    if mode == "slow":
        time.sleep(60)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heard = []
    for message, answer in requests():
        if message["method"] == "tools/list":
            tool = {"name": "hear", "description": "Hear a word.", "inputSchema": {"type": "object"}}
            tool["annotations"] = {"readOnlyHint": mode == "reads"}
            answer["result"] = {"tools": [tool]}
        elif message["method"] == "tools/call":
            word = message["params"]["arguments"]["word"]
            with open(os.path.join(folder, "calls"), "a") as calls:
                calls.write(word + " ")
            while word == "hang":
                time.sleep(0.1)
            if word == "slowly":
                continue
            if word == "die" and len([name for name in os.listdir(folder) if name.startswith("pid-")]) < 2:
                os._exit(1)
            if word == "flood":
                for _ in range(200):
                    sys.stdout.write("x" * 65536)
                print(flush=True)
                continue
            heard.append("x" * 3_000_000 if word == "long" else word)
            answer["result"] = {"content": [{"type": "text", "text": " ".join(heard)}]}
        elif "result" not in answer:
            answer["error"] = {"code": -32601, "message": "no such method"}
        print(json.dumps(answer), flush=True)
    """


@pytest.fixture
def served(tmp_path: Path):
    """The execution of a server in a mode, and the processes of it that are still there."""
    write_server(tmp_path / "server.py", SERVER)
    notes = tmp_path / "notes"
    notes.mkdir()

    def execution(mode: str) -> StdioExecution:
        return StdioExecution([sys.executable, str(tmp_path / "server.py"), mode, str(notes)])

    def alive() -> int:
        count = 0
        for note in notes.glob("pid-*"):
            try:
                os.kill(int(note.name[4:]), 0)
                count += 1
            except ProcessLookupError:
                pass
        return count

    return execution, alive, notes


async def started(notes: Path) -> None:
    async with asyncio.timeout(60):
        while not list(notes.glob("pid-*")):
            await asyncio.sleep(0.05)


async def test_a_server_whose_start_is_not_waited_for_is_ended(served, tmp_path):
    execution, alive, notes = served
    begun = asyncio.create_task(McpConnection(execution("slow"), cwd=tmp_path).__aenter__())
    await started(notes)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert alive() == 0


async def test_servers_that_still_start_when_all_are_closed_are_ended(served, tmp_path):
    execution, alive, notes = served
    async with McpConnections(cwd=tmp_path) as connections:
        waiting = asyncio.create_task(connections.get(execution("slow")))
        await started(notes)
    assert alive() == 0
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(("mode", "made"), [("reads", "a die die b "), ("writes", "a die b ")])
async def test_a_call_is_made_twice_only_of_a_tool_that_reads(served, tmp_path, mode, made):
    execution, _, notes = served
    async with McpConnections(cwd=tmp_path) as connections:
        running = await connections.get(execution(mode))
        await running.list_tools()
        assert await running.call("hear", {"word": "a"}) == ("a", True)
        if mode == "reads":
            assert await running.call("hear", {"word": "die"}) == ("die", True)
        else:
            with pytest.raises(ServerUnavailable, match="it went away at hear, which is not asked twice"):
                await running.call("hear", {"word": "die"})
        assert (await running.call("hear", {"word": "b"}))[1]
        assert running.reopened == 1
    assert (notes / "calls").read_text() == made


async def test_an_episode_whose_server_went_away_has_no_other(served, tmp_path):
    execution, _, notes = served
    command, *arguments = execution("writes").command
    file = tmp_path / "tasks.json"
    server = f'{{"command": "{command}", "args": {arguments}}}'.replace("'", '"')
    file.write_text(f'{{"mcpServers": {{"one": {server}}}, "tasks": [{{"question": "?", "answer": 1}}]}}')
    async with mcp_environments(file) as (environment,):
        for note in notes.glob("pid-*"):
            note.unlink()  # of the process that listed the tools
        session = await environment.begin()
        assert await session.call("hear", {"word": "a"}) == ToolAnswer("a")
        for word in ("die", "b"):
            with pytest.raises(ToolsUnavailable, match="it went away"):
                await session.call("hear", {"word": word})
        await session.close()
    assert (notes / "calls").read_text() == "a die "


async def test_a_server_that_hears_nothing_more_is_started_again(served, tmp_path):
    execution, alive, _ = served
    async with McpConnections(cwd=tmp_path, timeout_seconds=2) as connections:
        running = await connections.get(execution("deaf"))
        with pytest.raises(ServerUnavailable, match="hear did not answer in 2 s"):
            await running.call("hear", {"word": "hang"})
        assert await running.call("hear", {"word": "a"}) == ("a", True)
        assert running.reopened == 1 and alive() == 1


async def test_a_server_that_is_only_slow_is_kept(served, tmp_path):
    execution, _, _ = served
    async with McpConnections(cwd=tmp_path, timeout_seconds=2) as connections:
        running = await connections.get(execution("writes"))
        assert await running.call("hear", {"word": "a"}) == ("a", True)
        with pytest.raises(ServerUnavailable, match="hear did not answer in 2 s"):
            await running.call("hear", {"word": "slowly"})
        assert await running.call("hear", {"word": "b"}) == ("a b", True) and running.reopened == 0


async def test_a_deaf_server_can_be_closed_however_short_its_time_is(served, tmp_path):
    execution, alive, _ = served
    async with asyncio.timeout(60), McpConnections(cwd=tmp_path, timeout_seconds=2) as connections:
        running = await connections.get(execution("deaf"))
        hanging = asyncio.create_task(running.call("hear", {"word": "hang"}))
        await asyncio.sleep(0.5)
        hanging.cancel()
    assert alive() == 0


async def test_a_line_is_read_to_a_bound(served, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(bounded_stdio, "MOST_BYTES", 4 << 20)
    execution, _, _ = served
    async with McpConnections(cwd=tmp_path, timeout_seconds=10) as connections:
        running = await connections.get(execution("writes"))
        with pytest.raises(ServerUnavailable, match="hear did not answer"):
            await running.call("hear", {"word": "flood"})
        text, ok = await running.call("hear", {"word": "long"})
        assert (len(text), ok) == (3_000_000, True)
    assert "has more than 4 MiB, and is dropped" in caplog.text


def test_lines_come_whole_whatever_the_pipe_cuts(monkeypatch):
    monkeypatch.setattr(bounded_stdio, "MOST_BYTES", 12)
    text = "eins\n日本\n" + "x" * 40 + "\nzwei\ndrei"
    whole = "eins\n日本\nzwei\n"
    for size in (1, 3, 7, 12):
        decoder = codecs.getincrementaldecoder(bounded_stdio.ENCODING)()
        data = text.encode()
        parts = [decoder.decode(data[at : at + size]) for at in range(0, len(data), size)]
        assert "".join(parts) == whole, size
    assert "日本".encode(bounded_stdio.ENCODING) == "日本".encode()


def test_a_byte_order_mark_and_a_line_in_another_encoding_cost_no_other_line(caplog):
    decoder = codecs.getincrementaldecoder(bounded_stdio.ENCODING)()
    assert decoder.decode(codecs.BOM_UTF8 + b'{"a": 1}\n') == '{"a": 1}\n'
    assert decoder.decode(b"one\n" + "café\n".encode("latin-1") + "日本\n".encode()) == "one\n日本\n"
    assert "is not UTF-8, and is dropped" in caplog.text
    assert decoder.decode(codecs.BOM_UTF8 + b"two\n") == "\ufefftwo\n"  # in the middle it is a character
