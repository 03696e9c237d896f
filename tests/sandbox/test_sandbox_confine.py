"""A process of somebody else's program locks itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HARNESS = """
import json, os, socket
from sandbox.confine import CHANNEL, breaches, confine
from sandbox.limits import Limits
secret = open({secret!r})
ours, theirs = socket.socketpair()
parent = os.getpid()
pid = os.fork()
if pid == 0:
    try:
        confine(theirs.fileno(), parent, Limits(cpu_seconds=2))
        {body}
        os.write(CHANNEL, json.dumps(result).encode())
    finally:
        os._exit(0)
theirs.close()
said = ours.makefile("rb").read().decode()
print(os.waitpid(pid, 0)[1], said)
"""


def locked(body: str, folder: Path) -> tuple[int, str]:
    """Status and report of a locked child of a program, which has a file open."""
    secret = folder / "secret"
    secret.write_text("a secret")
    code = HARNESS.format(secret=str(secret), body=textwrap.indent(textwrap.dedent(body), " " * 8).strip())
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    status, _, said = ended.stdout.strip().partition(" ")
    assert status, ended.stderr
    return int(status), said


def test_nothing_gets_out_of_a_locked_process(tmp_path) -> None:
    assert locked("result = breaches()", tmp_path) == (0, "[]")


def test_the_same_attacks_get_through_without_the_lock() -> None:
    """Those of them that harm nobody when they do."""
    code = """
from sandbox.attacks import open_sockets, start_process, start_thread, write_files
print([attack() is not None for attack in (open_sockets, start_process, start_thread, write_files)])
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[True, True, True, True]"


@pytest.mark.parametrize("abi", [1, 2])
def test_an_old_landlock_lets_no_file_be_emptied(tmp_path, abi: int) -> None:
    """As on kernels 5.13 to 6.1, with a copy: the rules alone let it be emptied, with the filter they do not."""
    copy = tmp_path / "library.py"
    body = """
import os, sys
from sandbox import libc, lockdown
from sandbox.seccomp import call_filter
path, abi, filtered = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "filtered"
libc.prctl(38, 1)  # no new privileges
rules = lockdown.LandlockRules([os.path.dirname(path)], highest_abi=abi)
calls = call_filter(allow_open=True)
for function, arguments in [rules.restriction(), *([calls.attachment()] if filtered else [])]:
    assert function(*arguments) == 0
attempts = {
    "emptied": lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
    "written": lambda: os.open(path, os.O_WRONLY),
    "shortened": lambda: os.truncate(path, 0),
}
done = []
for name, attempt in attempts.items():
    try:
        attempt()
        done.append(name)
    except PermissionError:
        pass
os.write(1, f"{done} {len(open(path).read())}".encode())
"""
    for filtered, expected in {"filtered": "[] 4", "bare": "['emptied', 'shortened'] 0"}.items():
        copy.write_text("text")
        command = [sys.executable, "-c", body, str(copy), str(abi), filtered]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        if "landlock: not offered" in ended.stderr:
            pytest.skip("this kernel has no Landlock")
        assert ended.stdout == expected, ended.stderr


def test_it_computes_and_reads_the_library_but_keeps_no_descriptor(tmp_path) -> None:
    body = """
    import tomllib
    left = []
    for number in range(64):
        try:
            os.fstat(number)
            left.append(number)
        except OSError:
            pass
    result = [tomllib.loads("a = 1"), left]
    """
    assert locked(body, tmp_path) == (0, '[{"a": 1}, [0, 1, 2, 3]]')


@pytest.mark.slow
def test_its_processor_time_ends(tmp_path) -> None:
    status, said = locked("while True: pass", tmp_path)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU and said == ""


def test_it_ends_with_its_parent(tmp_path) -> None:
    """The grandchild holds one end of a pipe of ours until it ends."""
    ours, theirs = socket.socketpair()
    code = textwrap.dedent(
        """
        import os, socket, sys, time
        from sandbox.confine import CHANNEL, confine
        from sandbox.limits import Limits
        parent = os.getpid()
        if os.fork() == 0:
            confine(int(sys.argv[1]), parent, Limits())
            os.write(CHANNEL, b"locked")
            os.read(CHANNEL, 1)
            os._exit(0)
        time.sleep(60)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno())], cwd=ROOT, pass_fds=[theirs.fileno()]
    ) as it:
        theirs.close()
        assert ours.recv(6) == b"locked"
        it.kill()
        assert ours.recv(1) == b""
