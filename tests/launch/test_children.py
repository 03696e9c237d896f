"""Servers that a program starts beside itself: when they are ready, what is said of their end, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.flags.children import ChildServer, ChildServers, ServerFailed, free_ports
from launch.flags.cli import UsageError
from launch.flags.vllm_servers import Division, divided

SERVER = """
import http.server, os, sys
if os.path.exists(sys.argv[2]):
    os.remove(sys.argv[2])
    sys.exit("no memory")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            os._exit(7)
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(folder: Path, path: str = "/health") -> ChildServer:
    port = free_ports(1)[0]
    command = [sys.executable, "-c", SERVER, str(port), str(folder / "fails")]
    return ChildServer("the server", command, f"http://127.0.0.1:{port}{path}", folder / "logs" / "server.log")


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_is_awaited_restarted_and_stopped(tmp_path, caplog) -> None:
    one = server(tmp_path)
    with ChildServers([one], restarts=1) as servers:
        servers.wait(60)
        servers.keep_running()
        first = one._process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: one._process is not first and one.is_ready())
        assert "the server ended with signal 9" in caplog.text and "started again, for up to 0 more" in caplog.text
        second = one._process
        assert second is not None
        os.kill(second.pid, signal.SIGKILL)
        until(lambda: "is not started again" in caplog.text)
    assert second.poll() is not None


def test_a_server_that_does_not_get_ready_is_an_error_with_its_log(tmp_path) -> None:
    (tmp_path / "fails").touch()
    for one, why in (
        (server(tmp_path), r"ended with code 1; the end of .*server.log:\nno memory"),
        (server(tmp_path, "/never"), "is not ready after 1 s"),
    ):
        with pytest.raises(ServerFailed, match=why), ChildServers([one]) as servers:
            servers.wait(1 if "never" in one.health_url else 60)
        assert one._process is not None and one._process.poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_server_ends_with_a_program_that_is_killed(tmp_path) -> None:
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_children import server, ChildServers
one = server(Path({str(tmp_path)!r}))
with ChildServers([one]) as servers:
    servers.wait(60)
    print(one._process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        child = Path(f"/proc/{int(program.stdout.readline())}")
        assert child.exists()
        program.kill()
    until(lambda: not child.exists() or "(zombie)" in (child / "status").read_text())


@pytest.mark.parametrize(
    ("gpus", "servers", "wanted", "expected"),
    [
        ("", 2, None, ("", ["", ""])),
        ("3", 2, None, ("3", ["3", "3"])),
        ("01", 1, None, ("0", ["1"])),
        ("01234567", 2, None, ("0123", ["45", "67"])),
        ("01234567", 3, None, ("01234", ["5", "6", "7"])),
        ("0123", 2, "0 2", ("13", ["0", "2"])),
    ],
)
def test_gpus_are_divided(gpus, servers, wanted, expected) -> None:
    found = divided(list(gpus), servers, wanted)
    assert found == Division(tuple(expected[0]), tuple(tuple(one) for one in expected[1]))


def test_too_few_gpus_are_refused() -> None:
    for gpus, servers, wanted, why in (
        ("0123", 4, None, "Give at most --vllm=3"),
        ("0123", 2, "0,1,2,3", "a word of different GPUs for each of the 2 servers"),
        ("0123", 1, "0,1,2,3", "leave one for the trainer; this machine has 0, 1, 2, 3"),
        ("01", 1, "5", "this machine has 0, 1"),
    ):
        with pytest.raises(UsageError, match=why):
            divided(list(gpus), servers, wanted)
