"""Slot zygote: keeps one environment's compiled module as bytes, and forks a locked process for each call.

A slot is trusted: it never executes, compiles or unmarshals its input, and parses only a fixed-size head of a call's
output. It decides every verdict from the outside. Standard library only.

Each call is a copy of the slot's memory, which must contain nothing of other calls at the fork. So requests are read
from the socket one at a time, results are passed on in parts, and both buffers are cleared. A page that the slot
changes while a call runs is copied, so the slot's work for each call touches few objects.
"""

from __future__ import annotations

import _socket
import contextlib
import json
import math
import operator
import os
import select
import signal

from sandbox import call, libc, lockdown, modules
from sandbox.protocol import (
    HELLO_ID,
    LENGTH,
    LOCKED,
    REPLY,
    REPORT,
    REQUEST,
    CallVerdict,
    Operation,
    Report,
)
from sandbox.seccomp import call_filter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

    from sandbox.limits import Limits, LockPlan

    Buffer = bytes | bytearray | memoryview

_CODE_BYTES_PER_SOURCE_BYTE = 8
_SLACK_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_WATCH_SECONDS = 0.002
_HEAD_BYTES = len(LOCKED) + REPORT.size
# Plain integers: each look-up in an enumeration touches more of its objects, whose memory pages are copied after a
# fork.
_LOAD, _CALL, _CANCEL = int(Operation.LOAD), int(Operation.CALL), int(Operation.CANCEL)
_REPORTED, _PART, _RETURNED = int(CallVerdict.REPORTED), int(CallVerdict.PART), int(Report.RETURNED)
_LAST_REPORT = int(max(Report))


class _Inbox:
    """Reader of the host's frames, one at a time. The next call's frame stays in the socket until the fork."""

    def __init__(self, control: _socket.socket) -> None:
        self._control = control
        self._wanted = self._length = bytearray(LENGTH.size)
        self._filled = 0

    def frames(self) -> Iterator[memoryview]:
        """Yield each frame that has arrived; use it before the next one. Raises `EOFError` when the host closes."""
        while True:
            try:
                count = self._control.recv_into(memoryview(self._wanted)[self._filled :], 0, _socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not count:
                raise EOFError
            self._filled += count
            if self._filled < len(self._wanted):
                continue
            self._filled = 0
            if self._wanted is self._length:
                self._wanted = bytearray(LENGTH.unpack(self._length)[0])
                continue
            yield memoryview(self._wanted)
            self._wanted[:] = bytes(len(self._wanted))
            self._wanted = self._length


class _Job:
    """Forked process that works on one request."""

    def __init__(
        self,
        number: int,
        operation: int,
        pid: int,
        pipe: int,
        started: float,
        cpu_seconds: int,
        wall_seconds: float,
        most_bytes: int,
    ) -> None:
        self.number = number
        self.operation = operation
        self.pid = pid
        self.pipe = pipe
        self.started = started
        self.cpu_seconds = cpu_seconds
        self.deadline = started + wall_seconds
        self.most_bytes = most_bytes  # of the report
        self.watched = False  # whether the slot waits for data in its pipe
        self.head = b""  # the first bytes of its output, at most `_HEAD_BYTES`
        self.written = 0  # bytes, in total
        self.code = bytearray()  # the module's code, if this job compiles one
        self.stopped: CallVerdict | None = None  # set when the slot itself killed it
        self.cancelled = False


class Slot:
    """Server of one environment's calls over `control`, until the host closes it.

    Args:
        control: stream socket to the host.
        lifeline: read end of a pipe whose other end the zygote holds; it closes when the zygote ends.
        plan: layers of the calls.
        limits: limits of compiling, and of each call's standard output; a call's other limits are in its request.
        readable: paths that calls may read, from `lockdown.library_paths`.
        clock: the real monotonic clock (the `time` module's own is virtual in here).
    """

    def __init__(
        self,
        control: _socket.socket,
        lifeline: int,
        plan: LockPlan,
        limits: Limits,
        readable: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self._control = control
        self._lifeline = lifeline
        self._limits = limits
        self._clock = clock
        lockdown.limit_slot()
        self._locks = call.Locks(
            rules=lockdown.LandlockRules(readable) if plan.landlock else None,
            calls=call_filter(allow_open=plan.allow_open) if plan.seccomp else None,
            parent=libc.getpid(),
        )
        self._can_wait = not plan.seccomp
        self._output = call.Output(limits.stdout_bytes)
        self._code = b""
        self._compiler: tuple[int, int, int] | None = None  # result of `_fork_compiler`, while it waits
        self._jobs: dict[int, _Job] = {}  # by process id
        self._pipes: dict[int, _Job] = {}
        self._inbox = _Inbox(control)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._poll = select.poll()
        # SIGCHLD wakes the poll, so a call's end is noticed at once, whatever the call did with its pipe.
        self._wake, wake_writer = os.pipe()
        for descriptor in (self._wake, wake_writer):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, operator.is_)  # any function of two arguments that does nothing
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)

    def serve(self, layers: dict[str, str]) -> NoReturn:
        """Greet the host with the layers' states, then serve until the host closes the socket."""
        self._reply(HELLO_ID, CallVerdict.REPORTED, 0, payload=json.dumps(layers).encode())
        self._compiler = self._fork_compiler()
        for descriptor in (self._control.fileno(), self._wake, self._lifeline):
            self._poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll(self._milliseconds_to_look()):
                if descriptor == self._control.fileno():
                    self._read_requests()
                elif descriptor == self._lifeline:
                    self._end()
                elif descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif descriptor in self._pipes:
                    self._read_report(self._pipes[descriptor])
            self._look_after_jobs()

    def _milliseconds_to_look(self) -> float | None:
        if not self._jobs:
            return None
        first = math.inf
        for job in self._jobs.values():
            time = job.deadline if job.watched else job.started + _WATCH_SECONDS
            if time < first:
                first = time
        left = first - self._clock()
        return left * 1000 + 1 if left > 0 else 1

    def _read_requests(self) -> None:
        try:
            for message in self._inbox.frames():
                number, operation, cpu, wall, memory, result = REQUEST.unpack_from(message)
                if operation == _CALL:
                    self._start(number, cpu, wall, memory, result, message[REQUEST.size :])
                elif operation == _CANCEL:
                    self._cancel(number)
                else:
                    self._load(number, message[REQUEST.size :])
        except (EOFError, ConnectionResetError):
            self._end()

    def _end(self) -> NoReturn:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _fork_compiler(self) -> tuple[int, int, int]:
        """Fork a locked process that waits for the module, so that opening an environment is mostly compiling.

        Returns:
            Its process id, negative if there is none; the read end of its results' pipe; the write end of its source's.
        """
        source, source_writer = os.pipe()
        reader, writer = os.pipe()
        pid = libc.fork()
        if pid == 0:
            call.wait_for_module(source, writer, self._locks, self._limits)
        os.close(source)
        os.close(writer)
        os.set_blocking(reader, False)
        return pid, reader, source_writer

    def _take_compiler(self) -> tuple[int, int, int]:
        waiting, self._compiler = self._compiler, None
        if waiting is not None:
            pid, *pipes = waiting
            if pid > 0 and not os.waitpid(pid, os.WNOHANG)[0]:
                return waiting
            for pipe in pipes:  # it was killed while it waited
                os.close(pipe)
        return self._fork_compiler()

    def _load(self, number: int, source: memoryview) -> None:
        pid, reader, writer = self._take_compiler()
        if pid > 0:
            limits = self._limits
            most_bytes = limits.source_bytes * _CODE_BYTES_PER_SOURCE_BYTE + _SLACK_BYTES
            self._jobs[pid] = _Job(
                number, _LOAD, pid, reader, self._clock(), limits.cpu_seconds, limits.wall_seconds, most_bytes
            )
            with contextlib.suppress(BrokenPipeError):  # the process has ended, and its exit status decides
                while source:
                    source = source[os.write(writer, source) :]
        else:
            os.close(reader)
            self._reply(number, CallVerdict.NOT_FORKED, 0)
        os.close(writer)

    def _start(
        self,
        number: int,
        cpu_seconds: int,
        wall_seconds: float,
        memory_bytes: int,
        result_bytes: int,
        payload: memoryview,
    ) -> None:
        arguments = (self._code, payload, result_bytes, self._output)
        reader, writer = os.pipe()
        pid = libc.fork()
        if pid == 0:
            call.run_locked(writer, self._locks, cpu_seconds, memory_bytes, call.call_function, arguments)
        os.close(writer)
        if pid < 0:
            os.close(reader)
            self._reply(number, CallVerdict.NOT_FORKED, 0)
            return
        os.set_blocking(reader, False)
        most_bytes = result_bytes + 4 * self._limits.stdout_bytes + _SLACK_BYTES
        self._jobs[pid] = _Job(number, _CALL, pid, reader, self._clock(), cpu_seconds, wall_seconds, most_bytes)

    def _cancel(self, number: int) -> None:
        for job in self._jobs.values():
            if job.number == number:
                job.cancelled = True
                os.kill(job.pid, signal.SIGKILL)

    def _read_report(self, job: _Job, *, ended: bool = False) -> memoryview:
        """Read the pipe and pass the data on. If the process has ended, return the last part instead.

        The end of the pipe tells nothing: only the process's end does.
        """
        while job.pipe >= 0:
            try:
                count = os.readv(job.pipe, [self._buffer])
            except BlockingIOError:
                break
            chunk = self._buffer[:count]
            rest = chunk[_HEAD_BYTES - len(job.head) :]
            job.head += bytes(chunk[: count - len(rest)])
            job.written += count
            flood = job.written > job.most_bytes
            if flood:
                self._stop(job, CallVerdict.FLOOD)
            if flood or not count:
                self._close_pipe(job)
            elif job.operation == _LOAD:
                job.code += rest
            elif ended and count < len(self._buffer):
                return rest
            else:
                self._reply(job.number, _PART, 0, payload=rest)
            self._clear(chunk)
        return self._buffer[:0]

    @staticmethod
    def _clear(chunk: memoryview) -> None:
        chunk[:] = bytes(len(chunk))

    def _close_pipe(self, job: _Job) -> None:
        if job.pipe >= 0:
            if job.watched:
                self._poll.unregister(job.pipe)
                del self._pipes[job.pipe]
            os.close(job.pipe)
            job.pipe = -1

    def _stop(self, job: _Job, verdict: CallVerdict) -> None:
        if job.stopped is None:
            job.stopped = verdict
            os.kill(job.pid, signal.SIGKILL)

    def _look_after_jobs(self) -> None:
        """Watch the pipes of jobs that take longer, and stop overdue jobs.

        Most jobs finish at once and write less than a pipe can hold. To wake up only for their end, and not for each
        write, saves a tenth of a call's time.
        """
        now = self._clock()
        for job in self._jobs.values():
            if not job.watched and job.pipe >= 0 and now >= job.started + _WATCH_SECONDS:
                job.watched = True
                self._pipes[job.pipe] = job
                self._poll.register(job.pipe, select.POLLIN)
            if now >= job.deadline:
                self._stop(job, CallVerdict.WALL_LIMIT)
                job.deadline = now + 1.0

    def _reap(self) -> None:
        while self._jobs:
            pid, status, cpu_seconds, memory_kib = libc.reap()
            if pid == 0:
                return
            job = self._jobs.pop(pid, None)
            if job is None:
                continue
            rest = self._read_report(job, ended=True)
            self._close_pipe(job)
            if not job.cancelled:
                self._finish(job, status, cpu_seconds, memory_kib, rest)
            self._clear(rest)

    def _finish(self, job: _Job, status: int, cpu_seconds: float, memory_kib: int, rest: memoryview) -> None:
        verdict, detail = self._judge(job, status, cpu_seconds)
        payload: Buffer = rest
        if job.operation == _LOAD:
            returned = verdict == _REPORTED and detail == _RETURNED
            if returned:
                # Not parsed: this only reads which of our own names the compiling process wrote.
                modules.load_named(job.code[: modules.NAMED_BYTES])
            self._code, payload = (bytes(job.code[modules.NAMED_BYTES :]), b"") if returned else (b"", job.code)
        self._reply(job.number, verdict, detail, cpu_seconds, self._clock() - job.started, memory_kib, payload)

    def _judge(self, job: _Job, status: int, cpu_seconds: float) -> tuple[int, int]:
        overspent = cpu_seconds >= job.cpu_seconds  # also when the soft limit's signal was ignored, or came late
        if job.stopped is not None and not (overspent and job.stopped == CallVerdict.WALL_LIMIT):
            return job.stopped, int(job.stopped == CallVerdict.WALL_LIMIT and self._can_wait)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU or overspent:
            return CallVerdict.CPU_LIMIT, 0
        if number == signal.SIGKILL:
            return CallVerdict.KILLED, number
        if not job.head.startswith(LOCKED):
            return CallVerdict.NOT_LOCKED, number
        if number:
            return CallVerdict.SIGNAL, number
        if len(job.head) == len(LOCKED):
            return CallVerdict.NO_REPORT, 0
        if len(job.head) < _HEAD_BYTES:
            return CallVerdict.MALFORMED, 0
        kind, length = REPORT.unpack_from(job.head, len(LOCKED))
        if kind > _LAST_REPORT or job.written != _HEAD_BYTES + length:
            return CallVerdict.MALFORMED, 0
        return _REPORTED, kind

    def _reply(
        self,
        number: int,
        verdict: int,
        detail: int,
        cpu: float = 0.0,
        wall: float = 0.0,
        memory_kib: int = 0,
        payload: Buffer = b"",
    ) -> None:
        size = REPLY.size + len(payload)
        parts: list[Buffer] = [LENGTH.pack(size) + REPLY.pack(number, verdict, detail, cpu, wall, memory_kib), payload]
        left = LENGTH.size + size
        try:
            while left:
                sent = self._control.sendmsg(parts)
                left -= sent
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = memoryview(parts[0])[sent:]
        except (BrokenPipeError, ConnectionResetError):
            self._end()
