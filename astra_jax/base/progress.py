"""Progress display of a running stage: a bar; in synthesis with its inputs and the traffic with model endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from astra_jax.base.metrics import METRICS
from astra_jax.base.terminal import printable


def progress_bar(**options: Any) -> tqdm:
    """Return a bar on standard error; without a terminal, a line from time to time (see `_Log`).

    Args:
        options: as `tqdm` takes them.
    """
    label = printable(options.pop("desc", "") or "", lines=False)
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(**options, desc=label or None, file=sys.stderr if is_terminal else _Log())


def log_above_progress(line: str) -> None:
    """Print a line on standard error, where the bars are; standard output is for the result."""
    tqdm.write(printable(line, lines=False), file=sys.stderr)


class _Log:
    """Standard error as a bar's file: it prints the state as a line every half minute, and once at the end.

    A bar that overwrites itself leaves thousands of states in a log, in one line.
    """

    SECONDS = 30.0

    def __init__(self) -> None:
        self._state = ""
        self._next = time.monotonic() + self.SECONDS

    def write(self, text: str) -> None:
        """Write a text of `tqdm`: a carriage return and a state, or a line feed when it is closed."""
        self._state = text.strip() or self._state
        if self._state and (text.endswith("\n") or time.monotonic() >= self._next):
            with contextlib.suppress(OSError, ValueError):  # without `protect_streams`, as in a program of a user's
                print(self._state, file=sys.stderr, flush=True)
            self._state, self._next = "", time.monotonic() + self.SECONDS

    def flush(self) -> None:
        """Do nothing: lines are flushed as they are written."""


@dataclass
class Traffic:
    """Traffic of this process with model endpoints.

    Attributes:
            requests: that were sent, failed ones too.
        tokens: of prompts and completions, as the answers say.
    """

    requests: int = 0
    tokens: int = 0


TRAFFIC = Traffic()
"""Traffic with all endpoints of this process. It is only displayed; nothing else depends on it."""


class Progress:
    """A progress bar; `ticking` refreshes its numbers, so that counting costs an addition."""

    SECONDS = 1.0

    def __init__(self, label: str, total: int | None, done: int) -> None:
        self._bar = progress_bar(total=total, initial=done, desc=label)
        self._label = label
        self._rejected = 0
        self._seen = (time.monotonic(), TRAFFIC.requests, TRAFFIC.tokens)
        self._first = TRAFFIC.requests

    def count(self, *, rejected: bool) -> None:
        self._rejected += rejected
        self._bar.update()

    def close(self) -> None:
        self._renew()
        self._bar.close()

    async def ticking(self) -> None:
        """Refresh the numbers until cancelled."""
        while True:
            await asyncio.sleep(self.SECONDS)
            self._renew()

    def _renew(self) -> None:
        METRICS.put("stage_finished", self._bar.n, stage=self._label)
        METRICS.put("stage_rejected", self._rejected, stage=self._label)
        if self._bar.total is not None:
            METRICS.put("stage_inputs", self._bar.total, stage=self._label)
        METRICS.put("teacher_requests", TRAFFIC.requests)
        METRICS.put("teacher_tokens", TRAFFIC.tokens)
        shown = {"rejected": str(self._rejected)} if self._rejected else {}
        if requests := TRAFFIC.requests - self._first:
            then, _, tokens = self._seen
            now = time.monotonic()
            shown["requests"] = str(requests)
            shown["tokens/s"] = f"{(TRAFFIC.tokens - tokens) / max(now - then, 1e-9):.0f}"
            self._seen = (now, TRAFFIC.requests, TRAFFIC.tokens)
        if shown:
            self._bar.set_postfix(shown)
