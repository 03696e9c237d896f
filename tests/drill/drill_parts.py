"""What the drill is made of: processes that are killed, stopped and started again, and the wires between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
UNTIL_DONE = str(ROOT / "launch" / "recipes" / "until_done.sh")
FULL_BYTES = 2048
"""No file may have more, where a disk is full."""

Mode = Literal["whole", "refused", "silent"]


class Wire:
    """A TCP proxy on loopback.

    Attributes:
        mode: `whole`; `refused`: connections are reset, those that there are too; `silent`: nothing comes through, and
            nobody is told.
    """

    def __init__(self, to: int) -> None:
        self.to, self.port = to, 0
        self.mode: Mode = "whole"
        self._open = asyncio.Event()
        self._open.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, mode: Mode) -> None:
        self.mode = mode
        if mode == "refused":
            for task in self._connections:
                task.cancel()
        (self._open.clear if mode == "silent" else self._open.set)()

    async def stop(self) -> None:
        self.set("refused")
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if self.mode != "refused":
                await self._open.wait()
                there, back = await asyncio.open_connection("127.0.0.1", self.to)
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._carry(reader, back))
                        both.create_task(self._carry(there, writer))
                except* OSError:
                    pass
                finally:
                    back.transport.abort()
        writer.transport.abort()
        self._connections.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(1 << 16):
            await self._open.wait()
            writer.write(block)
            await writer.drain()
        writer.write_eof()


class Member:
    """One process of the drill, and those that it starts, in a session of their own.

    Args:
        log: gets what it says, through a pipe: a disk that is full for it is not full for its log.

    Attributes:
        starts: how often it was started.
        stopped: it has had a SIGSTOP.
        told: it has had a SIGTERM since its last start.
        killed: it has had a SIGKILL since its last start.
        full: its disk was full since its last start.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.command, self.log, self.environment = name, list(command), log, dict(environment)
        self.starts = self._from = 0
        self.stopped = self.told = self.killed = self.full = False
        self._process: subprocess.Popen[bytes] | None = None
        self._writing: threading.Thread | None = None

    def start(self, *more: str) -> None:
        self.starts += 1
        self.stopped = self.told = self.killed = self.full = False
        self._from = self.log.stat().st_size if self.log.exists() else 0
        self._process = subprocess.Popen(
            [*self.command, *more],
            cwd=ROOT,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._writing = threading.Thread(target=self._write, args=[self._process], daemon=True)
        self._writing.start()

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with self.log.open("ab") as log:
            while block := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                log.write(block)
                log.flush()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def code(self) -> int | None:
        """How it ended, as a shell says it; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        return code if code >= 0 else 128 - code

    @property
    def runs(self) -> bool:
        return self._process is not None and self.code() is None

    def said(self) -> str:
        """What it has said since its last start."""
        if self._writing is not None and not self.runs:
            self._writing.join(10)
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._from)
            return log.read().decode(errors="replace")

    def pids(self) -> list[int]:
        """Of its session, this one's first."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid:
                    found.append(int(path.parent.name))
        return sorted(found)

    def send(self, number: signal.Signals, *, to_all: bool = True) -> None:
        """A signal to its group, or to the process alone, as engines send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_all else os.kill)(self.pid, number)

    def kill(self) -> None:
        self.killed = True
        self.send(signal.SIGKILL)

    def kill_program(self) -> None:
        """The program alone; what has started it lives, and says how it ended."""
        self.killed = True
        for pid in self.pids()[1:2] or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self.stopped = True
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)
        self.stopped = False

    def tell(self) -> None:
        self.told = True
        self.send(signal.SIGTERM, to_all=False)

    def fill_disk(self, full: bool) -> None:
        self.full = self.full or full
        bytes_ = FULL_BYTES if full else resource.RLIM_INFINITY
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))

    async def ended(self, seconds: float) -> int | None:
        """How it ended within so many seconds; None: it has not."""
        until = asyncio.get_running_loop().time() + seconds
        while (code := self.code()) is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        return code

    def end(self) -> None:
        """At once, with all that it has started."""
        if self._process is not None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
            self._process.wait()
