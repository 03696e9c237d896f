"""Whose weights a server serves: one run's at a time, for as long as its trainer looks at the server.

A version's label is `RUN:UPDATE`. A trainer takes the lease before its first sync, and renews it with each look; a run
that goes on elsewhere has its name from its workdir, so that it takes over at once. Another run waits until the lease
has run out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 60.0
"""Of a lease that a sync has taken."""
MOST_SECONDS = 3600.0
_MOST_NAME = 64
_IN_NAMES = set("-_.")


class Held(Exception):
    """The server is another run's; the message says whose, for how long, and what to do."""


def is_run(name: object) -> bool:
    """Whether it can be a run's name: letters, digits, and - _ . of ASCII."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= _MOST_NAME
        and name.isascii()
        and all(one.isalnum() or one in _IN_NAMES for one in name)
    )


def run_of(label: object) -> str | None:
    """Whose version it is; None: it is no label."""
    if not isinstance(label, str):
        return None
    run, colon, update = label.partition(":")
    whole = bool(colon) and update.isascii() and update.isdecimal() and len(update) <= _MOST_NAME
    return run if whole and is_run(run) else None


class Lease:
    """Who holds a server, and until when.

    Args:
        clock: seconds that only go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run = ""
        self._until = 0.0
        self._seconds = 0.0
        self._syncs = 0

    @property
    def state(self) -> dict[str, Any] | None:
        """The run that holds it, and for how many more seconds; None: nobody does."""
        left = self._left()
        return {"run": self._run, "seconds": round(left, 1)} if left > 0 else None

    def take(self, run: str, seconds: float) -> None:
        """From now on it is this run's, for so many seconds.

        Raises:
            Held: it is another's.
        """
        self.check(run)
        self._run, self._seconds, self._until = run, seconds, self._clock() + seconds

    def check(self, run: str) -> None:
        """See that it is not another run's. Raises `Held`."""
        left = self._left()
        if left > 0 and self._run != run:
            raise Held(
                f"this server is held by the run {self._run} for {left:.0f} more seconds, and {run} is another: give "
                "this run servers of its own, or end the other and start this one when its lease has run out; the same "
                "run, from its own workdir, takes over at once"
            )

    @contextlib.contextmanager
    def syncing(self, run: str) -> Iterator[None]:
        """Around a sync, which takes the lease where nobody has it: it does not run out meanwhile.

        Raises:
            Held: the server is another run's.
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
