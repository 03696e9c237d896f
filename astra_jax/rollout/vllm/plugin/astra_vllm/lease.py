"""Reservation of a server for one run at a time, as long as its trainer checks the server.

A version's label is `RUN:UPDATE`. A trainer takes the lease before its first sync, and renews it with each check. A run
that resumes elsewhere keeps its name, which comes from its workdir, and so takes over at once. Another run waits until
the lease expires.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 60.0
"""Duration of a lease that a sync took."""
MOST_SECONDS = 3600.0
_MOST_NAME = 64
_IN_NAMES = set("-_.")


class Held(Exception):
    """Another run has the lease. The message says which, for how long, and what to do."""


def is_run(name: object) -> bool:
    """Return whether it is a valid run name: ASCII letters, digits, and - _ ."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _MOST_NAME
        and name.isascii()
        and all(one.isalnum() or one in _IN_NAMES for one in name)
    )


def run_of(label: object) -> str | None:
    """Return the run in a label, or None if it is not a label."""
    if not isinstance(label, str):
        return None
    run, colon, update = label.partition(":")
    whole = bool(colon) and update.isascii() and update.isdecimal() and len(update) <= _MOST_NAME
    return run if whole and is_run(run) else None


class Lease:
    """Lease of a server: the run that has it, and its expiry.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run = ""
        self._until = 0.0
        self._seconds = 0.0
        self._syncs = 0

    @property
    def state(self) -> dict[str, Any] | None:
        """The run with the lease and the remaining seconds, or None."""
        left = self._left()
        return {"run": self._run, "seconds": round(left, 1)} if left > 0 else None

    def take(self, run: str, seconds: float) -> None:
        """Give the lease to this run for `seconds` from now.

        Raises:
            Held: another run has it.
        """
        self.check(run)
        self._run, self._seconds, self._until = run, seconds, self._clock() + seconds

    def check(self, run: str) -> None:
        """Check that no other run has the lease. Raises `Held`."""
        left = self._left()
        if left > 0 and self._run != run:
            raise Held(
                f"this server is held by the run {self._run} for {left:.0f} more seconds, and {run} is another: give "
                "this run servers of its own, or end the other and start this one when its lease has run out; the same "
                "run, from its own workdir, takes over at once"
            )

    @contextlib.contextmanager
    def syncing(self, run: str) -> Iterator[None]:
        """Keep the lease during a sync, taking it if it is free.

        Raises:
            Held: another run has the lease.
        """
        self.check(run)
        if self._run != run:
            self.take(run, SECONDS)
        self._syncs += 1
        try:
            yield
        finally:
            self._syncs -= 1
            if self._run == run:
                self._until = max(self._until, self._clock() + self._seconds)

    def _left(self) -> float:
        return self._seconds if self._syncs else max(0.0, self._until - self._clock())
