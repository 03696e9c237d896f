"""Bounds on processor time that hold on any machine: they are seconds of a processor of a certain speed.

A slow processor, or one that shares its core with another program, takes several times as long; a fault that such a
bound is to find takes ten times as long or more.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_SECONDS = 0.05
"""Of processor time, for which what others have written may hold a loop that serves many."""
_RUNS = 20
_TEXT = "The 12 quick brown foxes, of 1,234 m, jump over 56 lazy dogs; " * 100
_WORD = re.compile(r"[a-z]+|\d[\d,]*", re.IGNORECASE)
_SECONDS = 0.5e-3
"""What `_work` takes of the processor whose seconds the bounds are, a fast one; a Zen 3 takes 1.4 ms, on which the
longest of what the bounds are for take half of what they may."""


def slowness() -> float:
    """How many times as long as the processor of the bounds this one takes now; 1 where it is as fast or faster.

    The mean of many runs: what is measured is too long to fall between the bursts of other programs.
    """
    return max(_spent(lambda: [_work() for _ in range(_RUNS)]) / _RUNS / _SECONDS, 1.0)


def _work() -> None:
    """Python's interpreter, its dictionaries, texts and regular expressions: what the bounded functions are made of."""
    lengths: dict[str, int] = {}
    for one in _WORD.finditer(_TEXT):
        word = one.group().casefold()
        lengths[word] = lengths.get(word, 0) + len(word)
    sorted(lengths)


def _spent(act: Callable[[], object]) -> float:
    """Processor time of a call, of this thread alone, without the collector: as `timeit`, since it goes through all
    objects that earlier tests left."""
    collects = gc.isenabled()
    gc.disable()
    started = time.thread_time()
    try:
        act()
        return time.thread_time() - started
    finally:
        if collects:
            gc.enable()


def loop_seconds(act: Callable[[], object]) -> float:
    """Processor time of a call, of this thread alone; where the first was too long, the least of five, each in seconds
    of the processor of the bounds as fast as it was then.

    The machine is shared, and a process that has run many tests has threads of its own.
    """
    first = _spent(act)
    if first < MOST_SECONDS:
        return first
    return min(_spent(act) / max(slowness(), slowness()) for _ in range(5))


def grows_as_the_text(read: Callable[[str], object], text: str) -> bool:
    """Return whether reading a text takes at most three times as long as reading its first half.

    A pause of the machine may fall into one measurement, so up to five pairs are measured.
    """
    half = text[: len(text) // 2]
    return any(loop_seconds(lambda: read(text)) < 3 * loop_seconds(lambda: read(half)) + 0.01 for _ in range(5))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What runs within takes no more processor time of the process.

    Raises:
        AssertionError: it did.
    """
    started = time.process_time()
    yield
    spent = time.process_time() - started
    assert spent <= seconds or spent <= seconds * slowness(), f"{spent:.2f} s of processor time, {seconds} are allowed"
