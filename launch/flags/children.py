"""Servers that a program starts beside itself on this machine, and stops.

Each has a log file, and a session of its own, so that Ctrl-C reaches the program alone. On Linux a server receives
SIGTERM when the program ends in any way, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from absl import logging

from astra_jax.base.errors import UserError
from astra_jax.base.terminal import say

_TETHERED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the thread that started this one ends
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_STOP_SECONDS = 30.0
_REPORT_SECONDS = 10.0
_LINES = 15


class ServerFailed(UserError):
    """A server of this program ended, or did not get ready in time. The message has the end of its log."""


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def make_key(file: Path) -> Path:
    """Return a file with a random key that only this user can read; an existing key stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as stream:
            stream.write(f"{secrets.token_hex(16)}\n")
    return file


@dataclass
class ChildServer:
    """One server.

    Attributes:
        name: name for messages, such as "vLLM server 1".
        command: program and arguments.
        health_url: address that answers 200 once the server is ready.
        log: file of both output streams; each start appends to it.
        variables: environment variables to set for it.
    """

    name: str
    command: Sequence[str]
    health_url: str
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. It ends with the calling thread, so call this from one that lasts."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", _TETHERED, str(os.getpid()), *self.command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Return whether it answers at `health_url`. Raises `ServerFailed`: it has ended."""
        self.check()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.health_url, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def check(self) -> None:
        """Raise `ServerFailed` if it has ended."""
        assert self._process is not None, "start comes first"
        if (code := self._process.poll()) is not None:
            why = f"ended with signal {-code}" if code < 0 else f"ended with code {code}"
            raise ServerFailed(f"{self.name} {why}; the end of {self.log}:\n{self.last_lines()}")

    def last_lines(self, count: int = _LINES) -> str:
        """Return the end of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 65_536))
            lines = log.read().decode(errors="replace").replace("\r", "\n").splitlines()
        return "\n".join([line for line in lines if line.strip()][-count:])

    def tell_to_stop(self) -> None:
        """Send SIGTERM to its processes."""
        self._signal(signal.SIGTERM)

    def stop(self, until: float) -> None:
        """Wait for its end until a time of `time.monotonic`, then kill what is left of its session."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class ChildServers:
    """Servers that run until the end of the `with` block.

    Args:
        restarts: how often in all `keep_running` starts an ended server again.
    """

    def __init__(self, servers: Sequence[ChildServer], *, restarts: int = 0) -> None:
        self._servers, self._restarts = servers, restarts
        self._stopping = threading.Event()
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> ChildServers:
        try:
            for server in self._servers:
                server.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, seconds: float) -> None:
        """Wait until all servers are ready. Print every ten seconds which ones are waited for, and their last line.

        Raises:
            ServerFailed: one ended, or was not ready in time.
        """
        started = reported = time.monotonic()
        left = list(self._servers)
        while left := [server for server in left if not server.is_ready()]:
            now = time.monotonic()
            if now - started >= seconds:
                late = left[0]
                raise ServerFailed(
                    f"{late.name} is not ready after {seconds:g} s; the end of {late.log}:\n{late.last_lines()}"
                )
            if now - reported >= _REPORT_SECONDS:
                reported = now
                for server in left:
                    last = server.last_lines(1)
                    say(f"waiting for {server.name}, {now - started:.0f} s{last and f': {last:.120}'}", file=sys.stderr)
            self._stopping.wait(0.2)

    def keep_running(self) -> None:
        """Start ended servers again in the background, as often as `restarts` allows; each time a warning says so."""
        self._keeper = threading.Thread(target=self._keep_running, name="servers", daemon=True)
        self._keeper.start()

    def _keep_running(self) -> None:
        gone: set[str] = set()
        while not self._stopping.wait(1.0):
            for server in self._servers:
                if server.name in gone:
                    continue
                try:
                    server.check()
                except ServerFailed as error:
                    if self._restarts:
                        self._restarts -= 1
                        logging.warning("%s\nit is started again, for up to %d more times", error, self._restarts)
                        server.start()
                    else:
                        gone.add(server.name)
                        logging.error("%s\nit has ended too often and is not started again", error)

    def close(self) -> None:
        """Stop all servers: SIGTERM, and SIGKILL after 30 s."""
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.join()
        until = time.monotonic() + _STOP_SECONDS
        for server in self._servers:
            server.tell_to_stop()
        for server in self._servers:
            server.stop(until)
