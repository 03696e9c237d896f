"""Several hosts, one program: what only the first of them does, how the others learn of it, and of each other's end."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

import jax
import numpy as np
from jax._src import distributed  # no public module of JAX has the coordination service's client
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from synthesis.core.terminal import say

_STATES = "astra_jax/hosts/"
_RUNNING, _ENDED, _FAILED = "running", "ended", "failed: "
_BEATS = 10
"""Signs of life within the deadline."""


def is_first() -> bool:
    """Whether this process is the one that talks to rollout servers, samples, and writes metrics."""
    return jax.process_index() == 0


def from_first(value: bytes) -> bytes:
    """The first process's `value`, on every process; all must call it. What the others pass is ignored."""
    if jax.process_count() == 1:
        return value
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(value))))
    content = np.frombuffer(value, np.uint8) if is_first() else np.zeros(size, np.uint8)
    return multihost_utils.broadcast_one_to_all(content).astype(np.uint8).tobytes()


class HostWatch:
    """While it is open, the end of any host ends all of them, with an error that names that host.

    A collective waits for a host that is gone, on TPUs for ever; JAX's own heartbeat aborts it after 100 s with a
    trace of C++. Here each host gives signs of life through JAX's coordination service, from a thread of its own, and
    leaves this process with exit code 1 when another one has given none for `deadline` seconds, or has said that it
    failed. With one host nothing is watched.

    Args:
        deadline: seconds; longer than anything that may stop all of a process's threads.
    """

    def __init__(self, deadline: float = 60.0) -> None:
        if deadline <= 0:
            raise ValueError(f"HostWatch.deadline is {deadline:g}; it is a number of seconds above 0")
        self._deadline = deadline
        self._state = _RUNNING
        self._changed = threading.Event()
        self._gave_up = float("inf")

    def __enter__(self) -> HostWatch:
        if jax.process_count() > 1:
            threading.Thread(target=self._watch, name="hosts", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if jax.process_count() == 1:
            return
        if error is None:
            self._say(_ENDED)
            return
        first = next(iter(str(error).strip().splitlines()), "")
        if isinstance(error, JaxRuntimeError):
            # A broken collective says nothing of who broke it: the watch finds out, and ends this process.
            say(f"error: host {jax.process_index()}: {first}; looking which host is gone", file=sys.stderr)
            time.sleep(1.5 * self._deadline)
        self._say(f"{_FAILED}{type(error).__name__}: {first}")
        # At exit JAX would wait for hosts that wait for this one.
        self._gave_up = time.monotonic() + self._deadline / 2

    def _say(self, state: str) -> None:
        self._state = state
        self._changed.set()

    def _watch(self) -> None:
        client, me, count = distributed.global_state.client, jax.process_index(), jax.process_count()
        assert client is not None
        heard = {host: ("", time.monotonic()) for host in range(count) if host != me}
        beats = 0
        while True:
            now = time.monotonic()
            try:
                client.key_value_set(f"{_STATES}{me}", f"{beats} {self._state}", allow_overwrite=True)
                for name, value in client.key_value_dir_get(_STATES):
                    host = int(name.rpartition("/")[2])
                    if host in heard and value != heard[host][0]:
                        heard[host] = (value, now)
            except JaxRuntimeError as error:
                if self._state == _ENDED:  # the first host has closed the service
                    return
                self._leave(f"host 0 of {count}, where the others meet, does not answer: {str(error).splitlines()[0]}")
            for host, (value, last) in heard.items():
                state = value.partition(" ")[2]
                if state.startswith(_FAILED):
                    self._leave(f"host {host} of {count} {state}")
                if state != _ENDED and now - last > self._deadline:
                    self._leave(f"host {host} of {count} has given no sign of life for {self._deadline:g} s")
            if now > self._gave_up:
                os._exit(1)
            beats += 1
            self._changed.wait(self._deadline / _BEATS)
            self._changed.clear()

    def _leave(self, reason: str) -> None:
        again = "start all hosts again, they go on from the last checkpoint"
        say(f"error: {reason}; {again}", file=sys.stderr)
        if is_first():
            # JAX aborts all others the moment that their meeting place is gone: they must have found out before.
            time.sleep(3 * self._deadline / _BEATS)
        os._exit(1)
