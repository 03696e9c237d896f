"""Coordination of several hosts in one program: work of the first host, exchange of values, and detection of failed
hosts."""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import jax
import numpy as np
from jax._src import distributed  # no public module of JAX has the coordination service's client
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from astra_jax.base.errors import UserError
from astra_jax.base.files import first_line
from astra_jax.base.terminal import say
from astra_jax.run.crash_loop import is_fault

T = TypeVar("T")

_STATES = "astra_jax/hosts/"
_FAILURES = "astra-failures/"
_RUNNING, _ENDED, _FAILED = "running", "ended", "failed: "
_PREEMPTED = "RECEIVED_PREEMPTION_NOTICE"  # kPreemptionNoticeKey of XLA's preemption_sync_manager.cc
_SAID = 500
"""Most bytes of an error sent to other hosts."""
_FAULT = "!"
"""Prefix of an error that may not recur when the run is restarted."""
_PIECE = 128 << 20
"""Bytes per broadcast from the first host: each device has a copy, and lengths are int32."""
_PULSE_SECONDS = 1.0
_BEATS = 10
"""Heartbeats per deadline."""
_LOOK_SECONDS = 0.5
"""Seconds between checks for failures on other hosts."""
_ENDING_SECONDS = 0.2
"""Seconds between checks for hosts that have not ended."""


def is_first() -> bool:
    """Return whether this is the first process, which talks to rollout servers, samples, and writes metrics."""
    return jax.process_index() == 0


def broadcast_from_host0(value: bytes) -> bytes:
    """Return the first process's `value` on every process; all must call it. Other processes' values are ignored."""
    if jax.process_count() == 1:
        return value
    whole, rest = multihost_utils.broadcast_one_to_all(np.array(divmod(len(value), _PIECE), np.int32)).tolist()
    found = []
    for number, size in enumerate([_PIECE] * whole + [rest] * (rest > 0)):
        content = np.zeros(size, np.uint8)
        if is_first():
            content = np.frombuffer(value, np.uint8, count=size, offset=number * _PIECE)
        found.append(multihost_utils.broadcast_one_to_all(content).astype(np.uint8).tobytes())
    return b"".join(found)


def allgather_bytes(value: bytes, most: int) -> list[bytes]:
    """Return each process's `value`, in order; all must call it.

    Args:
        value: of up to `most` bytes, the last of which is not zero.
    """
    if jax.process_count() == 1:
        return [value]
    every = multihost_utils.process_allgather(np.frombuffer(value.ljust(most, b"\0"), np.uint8))
    return [line.tobytes().rstrip(b"\0") for line in np.asarray(every).astype(np.uint8)]


def host_is_preempted() -> bool:
    """Return whether any host received a SIGTERM. JAX's preemption service handles the signal and publishes it to all
    hosts."""
    return _put_where_all_meet(_PREEMPTED) is not None


def _put_where_all_meet(key: str) -> str | None:
    """Return the value that any host published under a key, or None."""
    client = distributed.global_state.client
    assert client is not None
    try:
        return client.key_value_try_get(key)
    except JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


class HostError(UserError):
    """Another host failed. The message says which one and why. Restarting would not help."""


class HostFaultError(HostError):
    """Another host failed with an error that may not recur when the run is restarted."""

    away = True


def allgather_exception(error: Exception | None) -> Exception | None:
    """Return this host's error, or a `HostError` that names the failed host and its error. On several hosts all must
    call it.

    It is a `HostFaultError` if the failed host ends with a fault. The service that restarts a run may check any host.
    """
    if jax.process_count() == 1:
        return error
    said = "" if error is None else f"{_FAULT if is_fault(error) else ' '}{type(error).__name__}: {first_line(error)}"
    every = allgather_bytes(said.encode()[:_SAID], _SAID)
    for host, line in enumerate(every):
        if error is None and (text := line.decode(errors="replace")):
            kind = HostFaultError if text[0] == _FAULT else HostError
            return kind(f"host {host} of {len(every)} failed: {text[1:]}")
    return error


def meet_unless_failed(what: str, meet: Callable[[], None]) -> None:
    """Wait for the other hosts with a library's function, or raise if the awaited work failed on one of them.

    After a failed save, Orbax's background threads still wait for the others, which wait elsewhere for data that this
    host never writes: twenty minutes without a message. Called while an exception is handled, this function publishes
    the failure and returns, and the others raise. This applies to all later waits under the same name.

    Args:
        what: a name for all work that fails together.
        meet: blocks until all hosts have arrived.

    Raises:
        OSError: it failed on another host, which the message names.
    """
    failed = f"{_FAILURES}{what}"
    if (error := sys.exc_info()[1]) is not None:
        client = distributed.global_state.client
        assert client is not None
        said = f"host {jax.process_index()} of {jax.process_count()}: {type(error).__name__}: {first_line(error)}"
        client.key_value_set(failed, said.encode()[:_SAID].decode(errors="ignore"), allow_overwrite=True)
        return
    met: futures.Future[None] = futures.Future()

    def wait() -> None:
        try:
            meet()
            met.set_result(None)
        except Exception as error:
            met.set_exception(error)

    threading.Thread(target=wait, name=f"meeting for {what}", daemon=True).start()
    while not futures.wait([met], timeout=_LOOK_SECONDS).done:
        if (told := _put_where_all_meet(failed)) is not None:
            raise OSError(told)
    met.result()


@dataclass
class _Place:
    """Progress of this host's main thread.

    Attributes:
        marks: number of marked points passed; the same points on every host.
        step: the current training step.
        pulse: grows while the host waits for its own work, such as rollouts; 0 otherwise.
    """

    marks: int = 0
    step: int = 0
    pulse: int = 0


_place = _Place()


def heartbeat(step: int) -> None:
    """Record the main thread's progress. Every host must call this equally often, at the same points. Long operations
    call it too, so that others see progress (`HostWatch`)."""
    _place.marks, _place.step, _place.pulse = _place.marks + 1, step, 0


async def wait_with_heartbeat(work: Awaitable[T]) -> T:
    """Await work of this host only, such as rollouts, while other hosts see that its main thread is alive."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            _place.pulse += 1
            await asyncio.wait({task}, timeout=_PULSE_SECONDS)
        return task.result()
    finally:
        _place.pulse = 0
        task.cancel()


class HostLiveness:
    """Progress reports of all hosts, and detection of hosts that block the others.

    Args:
        me: this host's number.
        count: number of hosts.
        deadline: seconds without a heartbeat after which a host is considered dead.
        step_deadline: most seconds that a host may lag behind the others.
        now: seconds of a clock.
    """

    def __init__(self, me: int, count: int, deadline: float, step_deadline: float, now: float) -> None:
        self._me, self._count, self._deadline, self._step_deadline = me, count, deadline, step_deadline
        self._said = dict.fromkeys(range(count), "")
        self._heard = dict.fromkeys(range(count), now)  # time of the last new report
        self._places = {host: _Place() for host in range(count)}
        self._moved = dict.fromkeys(range(count), now)  # time of the last progress

    @staticmethod
    def beat(number: int, place: _Place, state: str) -> str:
        """Return this host's progress report."""
        return f"{number} {place.marks} {place.step} {place.pulse} {state}"

    def hear(self, host: int, said: str, now: float) -> None:
        """Process the report of a host; unknown hosts are ignored."""
        if host not in self._said or said == self._said[host]:
            return
        self._said[host], self._heard[host] = said, now
        place = _Place(*map(int, said.split(" ", 4)[1:4]))
        if place != self._places[host]:
            self._places[host], self._moved[host] = place, now

    def all_ended(self) -> bool:
        """Return whether every host has ended."""
        return all(said.split(" ", 4)[-1] == _ENDED for said in self._said.values())

    def verdict(self, now: float) -> str | None:
        """Return the reason why this run cannot continue, or None."""
        states = {host: said.split(" ", 4)[-1] for host, said in self._said.items()}
        for host, state in states.items():
            named = f"host {host} of {self._count}"
            if host != self._me and state.startswith(_FAILED):
                return f"{named} {state}"
            if host != self._me and state != _ENDED and now - self._heard[host] > self._deadline:
                return f"{named} has given no sign of life for {self._deadline:g} s"
        return self._behind(states, now)

    def _behind(self, states: Mapping[int, str], now: float) -> str | None:
        places, furthest = self._places, max(place.marks for place in self._places.values())
        if not furthest:  # weights are being read
            return None
        step = max(place.step for place in places.values())
        late = f"for {self._step_deadline:g} s"
        ahead = min((self._moved[host] for host, one in places.items() if one.marks == furthest), default=now)
        for host, place in places.items():
            still = now - max(self._moved[host], ahead if place.marks < furthest else 0.0) > self._step_deadline
            named = f"host {host} of {self._count}"
            if still and place.marks < furthest:
                what = "has ended there" if states[host] == _ENDED else "its main thread hangs"
                return f"{named} has been at step {place.step} {late} while others wait at step {step}: {what}"
            if still and place.pulse:
                return f"{named} has not moved {late} at step {place.step}, where others wait: its main thread hangs"
        still = all(now - moved > 2 * self._step_deadline for moved in self._moved.values())
        if still and _ENDED not in states.values():
            return f"all {self._count} hosts have waited for one another {late} and as long again, at step {step}"
        return None


class HostWatch:
    """While it is open, the end of any host ends all of them, with an error that names that host.

    A collective waits for a dead host, on TPUs forever. JAX's own heartbeat aborts it after 100 s with a C++ trace.
    Here a thread of each host sends heartbeats through JAX's coordination service. It exits the process with code 1 if
    another host has sent none for `deadline` seconds, or has reported a failure. Heartbeats include the main thread's
    progress (`heartbeat`, `wait_with_heartbeat`), which reveals a host whose main thread hangs. With one host nothing
    is watched.

    Args:
        deadline: seconds; longer than any pause of all threads of a process.
        step_deadline: seconds; longer than any work of one host for which others wait, and than half of the joint work
            between two marked points.
    """

    def __init__(self, deadline: float = 60.0, step_deadline: float = 1800.0) -> None:
        for name, seconds in (("deadline", deadline), ("step_deadline", step_deadline)):
            if seconds <= 0:
                raise ValueError(f"HostWatch.{name} is {seconds:g}; it is a number of seconds above 0")
        self._deadline, self._step_deadline = deadline, step_deadline
        self._state = _RUNNING
        self._changed = threading.Event()
        self._gave_up = float("inf")

    def __enter__(self) -> HostWatch:
        if jax.process_count() > 1:
            self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
            self._thread.start()
            atexit.register(self._wait_for_all)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if jax.process_count() == 1:
            return
        if error is None:
            self._say(_ENDED)
            return
        first = next(iter(str(error).strip().splitlines()), "")
        if _of_a_collective(error):
            # A broken collective does not name the dead host: the watch finds it and ends this process.
            say(f"error: host {jax.process_index()}: {first}; looking which host is gone", file=sys.stderr)
            time.sleep(1.5 * self._deadline)
        self._say(f"{_FAILED}{type(error).__name__}: {first}")
        # At exit JAX would wait for hosts that wait for this one.
        self._gave_up = time.monotonic() + self._deadline / 2

    def _wait_for_all(self) -> None:
        """At exit, wait for all hosts while watching them, before JAX waits without.

        The thread must end before Python does: Python 3.11 ends a thread inside a C++ call by an exception, which
        aborts the process (exit code -6 for a finished run).
        """
        if self._state == _ENDED:
            self._thread.join()

    def _say(self, state: str) -> None:
        self._state = state
        self._changed.set()

    def _watch(self) -> None:
        client, me, count = distributed.global_state.client, jax.process_index(), jax.process_count()
        assert client is not None
        roll = HostLiveness(me, count, self._deadline, self._step_deadline, time.monotonic())
        beats = 0
        while True:
            now, failed = time.monotonic(), self._state.startswith(_FAILED)
            try:
                client.key_value_set(
                    f"{_STATES}{me}", HostLiveness.beat(beats, _place, self._state), allow_overwrite=True
                )
                for name, value in client.key_value_dir_get(_STATES):
                    roll.hear(int(name.rpartition("/")[2]), value, now)
            except JaxRuntimeError as error:
                if self._state == _ENDED:  # the first host closed the service
                    return
                if not failed:
                    first = str(error).splitlines()[0]
                    self._leave(f"host 0 of {count}, where the others meet, does not answer: {first}")
            # A failed host ends by itself and reports its own error.
            if not failed and (reason := roll.verdict(now)) is not None:
                self._leave(reason)
            if now > self._gave_up:
                os._exit(1)
            if (ended := self._state == _ENDED) and roll.all_ended():
                return
            beats += 1
            self._changed.wait(min(_ENDING_SECONDS, self._deadline / _BEATS) if ended else self._deadline / _BEATS)
            self._changed.clear()

    def _leave(self, reason: str) -> None:
        again = "start all hosts again, they go on from the last checkpoint"
        say(f"error: {reason}; {again}", file=sys.stderr)
        if is_first():
            # JAX aborts the others once their coordination service is gone: let them find the reason first.
            time.sleep(3 * self._deadline / _BEATS)
        os._exit(1)


_STATUS = re.compile(r"(?:ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
"""Starts of XLA's messages for failures caused by a dead host."""


def _of_a_collective(error: BaseException | None) -> bool:
    """Return whether an error or its causes are what JAX raises when a host is dead.

    If a collective fails before it starts, JAX raises a bare `ValueError`. A failing cleanup may hide the original
    error.
    """
    while error is not None:
        if isinstance(error, JaxRuntimeError) or isinstance(error, ValueError) and _STATUS.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
