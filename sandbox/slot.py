"""A slot zygote: holds one environment's compiled module as bytes and forks a locked process for each call.

A slot is trusted: it never executes, compiles or unmarshals what it was given, and never parses what a call wrote
beyond a fixed-size head. It decides every verdict from the outside. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

from sandbox import call, lockdown
from sandbox.protocol import (
    HELLO_ID,
    LOCKED,
    REPLY,
    REPORT,
    REQUEST,
    FrameReader,
    Limits,
    Operation,
    Plan,
    Report,
    Verdict,
    frame,
)
from sandbox.seccomp import call_filter

_CODE_BYTES_PER_SOURCE_BYTE = 8
_SLACK_BYTES = 64 << 10
_READ_BYTES = 64 << 10


class _Job:
    """A forked process at work on one request."""

    def __init__(self, number: int, operation: Operation, pid: int, pipe: int, started: float, deadline: float) -> None:
        self.number = number
        self.operation = operation
        self.pid = pid
        self.pipe = pipe
        self.started = started
        self.deadline = deadline
        self.received = bytearray()
        self.stopped: Verdict | None = None  # set when the slot itself killed it
        self.cancelled = False


class Slot:
    """Serves one environment's calls over `control` until the host closes it.

    Args:
        control: stream socket to the host.
        lifeline: read end of a pipe whose other end the zygote holds; its end is the zygote's.
        plan: the layers that calls are to have.
        limits: of each call.
        readable: what calls may read, from `lockdown.library_paths`.
        clock: the real monotonic clock (the `time` module's own is virtual in here).
    """

    def __init__(
        self,
        control: socket.socket,
        lifeline: int,
        plan: Plan,
        limits: Limits,
        readable: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self._control = control
        self._lifeline = lifeline
        self._limits = limits
        self._clock = clock
        self._locks = call.Locks(
            rules=lockdown.LandlockRules(readable) if plan.landlock else None,
            calls=call_filter(allow_open=plan.allow_open) if plan.seccomp else None,
            resources=lockdown.resource_limits(limits),
        )
        self._process_id = lockdown.process_id()
        self._code = b""
        self._jobs: dict[int, _Job] = {}  # by process id
        self._pipes: dict[int, _Job] = {}
        self._frames = FrameReader()
        self._poll = select.poll()
        # SIGCHLD wakes the poll: how a call ended is then known at once, whatever it did with its pipe.
        self._wake, wake_writer = os.pipe()
        for descriptor in (self._wake, wake_writer):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)

    def serve(self, layers: dict[str, str]) -> NoReturn:
        """Greet the host with the layers' states, then serve until its end of the socket is closed."""
        self._reply(HELLO_ID, Verdict.REPORTED, 0, payload=json.dumps(layers).encode())
        for descriptor in (self._control.fileno(), self._wake, self._lifeline):
            self._poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll(self._milliseconds_to_deadline()):
                if descriptor == self._control.fileno():
                    self._read_requests()
                elif descriptor == self._lifeline:
                    self._end()
                elif descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif descriptor in self._pipes:
                    self._read_report(self._pipes[descriptor])
            self._stop_overdue()

    def _milliseconds_to_deadline(self) -> float | None:
        if not self._jobs:
            return None
        return max(0.0, min(job.deadline for job in self._jobs.values()) - self._clock()) * 1000 + 1

    def _read_requests(self) -> None:
        data = self._control.recv(1 << 20)
        if not data:
            self._end()
        for message in self._frames.feed(data):
            number, operation = REQUEST.unpack_from(message)
            payload = message[REQUEST.size :]
            if operation == Operation.CANCEL:
                self._cancel(number)
            else:
                self._start(number, Operation(operation), payload)

    def _end(self) -> NoReturn:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _start(self, number: int, operation: Operation, payload: bytes) -> None:
        def body() -> bytes:
            if operation == Operation.LOAD:
                return call.compile_module(payload)
            return call.call_function(self._code, payload, self._limits)

        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            call.run_locked(body, writer, self._locks, self._process_id)
        os.close(writer)
        os.set_blocking(reader, False)
        now = self._clock()
        job = _Job(number, operation, pid, reader, now, now + self._limits.wall_seconds)
        self._jobs[pid] = self._pipes[reader] = job
        self._poll.register(reader, select.POLLIN)

    def _cancel(self, number: int) -> None:
        for job in self._jobs.values():
            if job.number == number:
                job.cancelled = True
                os.kill(job.pid, signal.SIGKILL)

    def _most_bytes(self, job: _Job) -> int:
        if job.operation == Operation.LOAD:
            return self._limits.source_bytes * _CODE_BYTES_PER_SOURCE_BYTE + _SLACK_BYTES
        return self._limits.result_bytes + 4 * self._limits.stdout_bytes + _SLACK_BYTES

    def _read_report(self, job: _Job) -> None:
        """Take what is in the pipe. Its end says nothing: only the process's end does."""
        while job.pipe >= 0:
            try:
                data = os.read(job.pipe, _READ_BYTES)
            except BlockingIOError:
                return
            job.received += data
            flood = len(job.received) > self._most_bytes(job)
            if flood:
                self._stop(job, Verdict.FLOOD)
            if flood or not data:
                self._close_pipe(job)

    def _close_pipe(self, job: _Job) -> None:
        if job.pipe >= 0:
            self._poll.unregister(job.pipe)
            del self._pipes[job.pipe]
            os.close(job.pipe)
            job.pipe = -1

    def _stop(self, job: _Job, verdict: Verdict) -> None:
        if job.stopped is None:
            job.stopped = verdict
            os.kill(job.pid, signal.SIGKILL)

    def _stop_overdue(self) -> None:
        now = self._clock()
        for job in self._jobs.values():
            if now >= job.deadline:
                self._stop(job, Verdict.WALL_LIMIT)
                job.deadline = now + 1.0

    def _reap(self) -> None:
        while self._jobs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            job = self._jobs.pop(pid, None)
            if job is None:
                continue
            self._read_report(job)
            self._close_pipe(job)
            if not job.cancelled:
                self._finish(job, status, usage.ru_utime + usage.ru_stime)

    def _finish(self, job: _Job, status: int, cpu_seconds: float) -> None:
        verdict, detail, body = self._judge(job, status, cpu_seconds)
        if job.operation == Operation.LOAD and verdict == Verdict.REPORTED and detail == Report.RETURNED:
            self._code, body = body, b""
        self._reply(job.number, verdict, detail, cpu_seconds, self._clock() - job.started, body)

    def _judge(self, job: _Job, status: int, cpu_seconds: float) -> tuple[Verdict, int, bytes]:
        if job.stopped is not None:
            return job.stopped, 0, b""
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        overspent = cpu_seconds >= self._limits.cpu_seconds  # also when the soft limit's signal was ignored
        if number == signal.SIGXCPU or overspent:
            return Verdict.CPU_LIMIT, 0, b""
        if number == signal.SIGKILL:
            return Verdict.KILLED, number, b""
        if not job.received.startswith(LOCKED):
            return Verdict.NOT_LOCKED, number, b""
        if number:
            return Verdict.SIGNAL, number, b""
        report = bytes(job.received[len(LOCKED) :])
        if not report:
            return Verdict.NO_REPORT, 0, b""
        if len(report) < REPORT.size:
            return Verdict.MALFORMED, 0, b""
        kind, length = REPORT.unpack_from(report)
        if kind > max(Report) or len(report) != REPORT.size + length:
            return Verdict.MALFORMED, 0, b""
        return Verdict.REPORTED, kind, report[REPORT.size :]

    def _reply(
        self, number: int, verdict: Verdict, detail: int, cpu: float = 0.0, wall: float = 0.0, payload: bytes = b""
    ) -> None:
        try:
            self._control.sendall(frame(REPLY.pack(number, verdict, detail, cpu, wall) + payload))
        except (BrokenPipeError, ConnectionResetError):
            self._end()
