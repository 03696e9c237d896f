"""How long an event loop is held by a call."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_SECONDS = 0.05
"""Of processor time, for which what others have written may hold a loop that serves many."""


def loop_seconds(act: Callable[[], object]) -> float:
    """Processor time of a call, of this thread alone; the least of three where the first was too long.

    The machine is shared, and a process that has run many tests has threads of its own and garbage to collect.
    """
    least = 1e9
    for _ in range(3):
        started = time.thread_time()
        act()
        least = min(least, time.thread_time() - started)
        if least < MOST_SECONDS:
            break
    return least
