"""Several hosts, one program: what only the first of them does, how the others learn of it, and of each other's end."""

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

from astra_jax.run.starts import is_fault
from synthesis.core.files import first_line
from synthesis.core.refusals import Refusal
from synthesis.core.terminal import say

T = TypeVar("T")

_STATES = "astra_jax/hosts/"
_FAILURES = "astra-failures/"
_RUNNING, _ENDED, _FAILED = "running", "ended", "failed: "
_PREEMPTED = "RECEIVED_PREEMPTION_NOTICE"  # kPreemptionNoticeKey of XLA's preemption_sync_manager.cc
_SAID = 500
"""Bytes of an error that other hosts are told."""
_FAULT = "!"
"""With which it begins where the run may go well when it is started again."""
_PIECE = 128 << 20
"""Bytes that the first host tells the others at once: each of its devices has a copy, and lengths are int32."""
_PULSE_SECONDS = 1.0
_BEATS = 10
"""Signs of life within the deadline."""
_LOOK_SECONDS = 0.5
"""Between two looks at whether something has failed on another host."""
_ENDING_SECONDS = 0.2
"""Between two looks at who has not come to its end yet."""


def is_first() -> bool:
    """Whether this process is the one that talks to rollout servers, samples, and writes metrics."""
    return jax.process_index() == 0


def from_first(value: bytes) -> bytes:
    """The first process's `value`, on every process; all must call it. What the others pass is ignored."""
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


def from_every(value: bytes, most: int) -> list[bytes]:
    """Each process's `value`, in their order; all must call it.

    Args:
        value: of up to `most` bytes, the last of which is not zero.
    """
    if jax.process_count() == 1:
        return [value]
    every = multihost_utils.process_allgather(np.frombuffer(value.ljust(most, b"\0"), np.uint8))
    return [line.tobytes().rstrip(b"\0") for line in np.asarray(every).astype(np.uint8)]


def host_is_preempted() -> bool:
    """Whether any host has had a SIGTERM. JAX's preemption service, which takes it, keeps it where all of them meet."""
    return _put_where_all_meet(_PREEMPTED) is not None


def _put_where_all_meet(key: str) -> str | None:
    """What any host has put there."""
    client = distributed.global_state.client
    assert client is not None
    try:
        return client.key_value_try_get(key)
    except JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


class HostError(Refusal):
    """Another host has failed; the message says which one, and of what. To start again would not help."""


class HostFaultError(HostError):
    """Another host has failed of what may go well when the run is started again."""

    away = True


def failure_of_any(error: Exception | None) -> Exception | None:
    """This host's error, or a `HostError` that says which host failed and of what; on several hosts all must call it.

    It is a `HostFaultError` where the one that failed ends with a fault: what starts a run again asks any of them.
    """
    if jax.process_count() == 1:
        return error
    said = "" if error is None else f"{_FAULT if is_fault(error) else ' '}{type(error).__name__}: {first_line(error)}"
    every = from_every(said.encode()[:_SAID], _SAID)
    for host, line in enumerate(every):
        if error is None and (text := line.decode(errors="replace")):
            kind = HostFaultError if text[0] == _FAULT else HostError
            return kind(f"host {host} of {len(every)} failed: {text[1:]}")
    return error


def meet_unless_failed(what: str, meet: Callable[[], None]) -> None:
    """Wait for the other hosts in a library's way, or learn that what it is waited for has failed on one of them.

    Orbax's background threads go to meet the others after a save that failed, too, while those wait elsewhere for what
    this host will never have written: for twenty minutes, in which nobody learns of it. Called while an exception is
    handled, this says so to the others instead, and returns; theirs fail then. It holds for all that is waited for
    under this name from then on.

    Args:
        what: a name for all that fails together.
        meet: blocks until all are there.

    Raises:
        OSError: it has failed on another host, which the message names.
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
    """Where this host's main thread is.

    Attributes:
        marks: how many places it came by; every host comes by the same ones.
        step: the training step that it is at.
        pulse: grows while it waits for something of its own, such as rollouts; 0: it is in no such wait.
    """

    marks: int = 0
    step: int = 0
    pulse: int = 0


_place = _Place()


def reached(step: int) -> None:
    """Say where the main thread is. Every host calls this as often, at the same places; also amid what takes long, of
    which others cannot tell that it goes on (`HostWatch`)."""
    _place.marks, _place.step, _place.pulse = _place.marks + 1, step, 0


async def awaited(work: Awaitable[T]) -> T:
    """What this host alone waits for, such as rollouts; meanwhile other hosts see that its main thread is well."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            _place.pulse += 1
            await asyncio.wait({task}, timeout=_PULSE_SECONDS)
        return task.result()
    finally:
        _place.pulse = 0
        task.cancel()


class Roll:
    """What the hosts have said of themselves, and which of them the others wait for in vain.

    Args:
        me: this host's number.
        count: how many there are.
        deadline: seconds after which a host without a sign of life is gone.
        step_deadline: seconds by which a host may be behind the others.
        now: seconds of a clock.
    """

    def __init__(self, me: int, count: int, deadline: float, step_deadline: float, now: float) -> None:
        self._me, self._count, self._deadline, self._step_deadline = me, count, deadline, step_deadline
        self._said = dict.fromkeys(range(count), "")
        self._heard = dict.fromkeys(range(count), now)  # when something new was said
        self._places = {host: _Place() for host in range(count)}
        self._moved = dict.fromkeys(range(count), now)  # when it came to another place

    @staticmethod
    def beat(number: int, place: _Place, state: str) -> str:
        """What a host says of itself."""
        return f"{number} {place.marks} {place.step} {place.pulse} {state}"

    def hear(self, host: int, said: str, now: float) -> None:
        """What a host says; other hosts than there are have nothing to say."""
        if host not in self._said or said == self._said[host]:
            return
        self._said[host], self._heard[host] = said, now
        place = _Place(*map(int, said.split(" ", 4)[1:4]))
        if place != self._places[host]:
            self._places[host], self._moved[host] = place, now

    def all_ended(self) -> bool:
        """Whether every host has come to its end."""
        return all(said.split(" ", 4)[-1] == _ENDED for said in self._said.values())

    def verdict(self, now: float) -> str | None:
        """Why this run cannot go on, if it cannot."""
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

    A collective waits for a host that is gone, on TPUs for ever; JAX's own heartbeat aborts it after 100 s with a
    trace of C++. Here each host gives signs of life through JAX's coordination service, from a thread of its own, and
    leaves this process with exit code 1 when another one has given none for `deadline` seconds, or has said that it
    failed. The signs say where the main thread is (`reached`, `awaited`): a host whose main thread hangs gives them
    too, and is behind the others. With one host nothing is watched.

    Args:
        deadline: seconds; longer than anything that may stop all of a process's threads.
        step_deadline: seconds; longer than anything that one host does alone while the others wait, and than half of
            what all do together from one place to the next.
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
            # A broken collective says nothing of who broke it: the watch finds out, and ends this process.
            say(f"error: host {jax.process_index()}: {first}; looking which host is gone", file=sys.stderr)
            time.sleep(1.5 * self._deadline)
        self._say(f"{_FAILED}{type(error).__name__}: {first}")
        # At exit JAX would wait for hosts that wait for this one.
        self._gave_up = time.monotonic() + self._deadline / 2

    def _wait_for_all(self) -> None:
        """At exit, before JAX waits for the others without watching them.

        And the thread has ended when Python does: Python 3.11 ends one that is in a call of C++ by an exception, which
        aborts the process (exit code -6 of a run that was finished).
        """
        if self._state == _ENDED:
            self._thread.join()

    def _say(self, state: str) -> None:
        self._state = state
        self._changed.set()

    def _watch(self) -> None:
        client, me, count = distributed.global_state.client, jax.process_index(), jax.process_count()
        assert client is not None
        roll = Roll(me, count, self._deadline, self._step_deadline, time.monotonic())
        beats = 0
        while True:
            now, failed = time.monotonic(), self._state.startswith(_FAILED)
            try:
                client.key_value_set(f"{_STATES}{me}", Roll.beat(beats, _place, self._state), allow_overwrite=True)
                for name, value in client.key_value_dir_get(_STATES):
                    roll.hear(int(name.rpartition("/")[2]), value, now)
            except JaxRuntimeError as error:
                if self._state == _ENDED:  # the first host has closed the service
                    return
                if not failed:
                    first = str(error).splitlines()[0]
                    self._leave(f"host 0 of {count}, where the others meet, does not answer: {first}")
            # What has failed itself ends by itself: its own error is what there is to say.
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
            # JAX aborts all others the moment that their meeting place is gone: they must have found out before.
            time.sleep(3 * self._deadline / _BEATS)
        os._exit(1)


_STATUS = re.compile(r"(?:ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
"""With which XLA's messages begin, of what a host that is gone makes others fail of."""


def _of_a_collective(error: BaseException | None) -> bool:
    """Whether it, or what it was raised over, is what JAX raises when a host is gone.

    That is a bare `ValueError` where the collective fails before it is begun. What is closed on the way out may fail
    too, and then is what is raised.
    """
    while error is not None:
        if isinstance(error, JaxRuntimeError) or isinstance(error, ValueError) and _STATUS.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
