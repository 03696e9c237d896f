"""Goodput: the share of a run's wall time that became steps which it has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging


class Goodput:
    """Since a run's first start: lost are the pauses between its starts, what a start takes, and steps that a fault
    took back, whose rows are forgotten. Each row of its metrics says how far it is, so that the next start goes on.

    Args:
        rows: that the run has kept, of its starts before this one.
        now: seconds of a clock that all starts share and that never jumps while a process runs, when this one begins
            with its first step.
        began: when the first process of the run was started that is known of, for where no row says it.
    """

    LONGEST = 366 * 86400.0
    """Seconds since the first start above which a clock is taken for wrong, as one that was not set yet."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], now: float, began: float) -> None:
        last = rows[-1] if rows else {}
        self._began = float(last.get("goodput/began") or began)
        self._kept = float(last.get("goodput/kept_seconds") or 0.0)
        self._from = now
        if not self._kept - 1.0 <= now - self._began <= self.LONGEST:
            logging.warning(
                "goodput: by this machine's clock the run was first started %.0f s ago, and %.0f s of steps are kept. "
                "The clock was set meanwhile; pauses between earlier starts are not counted",
                now - self._began,
                self._kept,
            )
            self._began = now - self._kept

    def step(self, now: float) -> dict[str, float]:
        """What a row says of the time up to it."""
        self._kept, self._from = self._kept + max(0.0, now - self._from), now
        whole = max(now - self._began, self._kept, 1e-9)
        return {
            "goodput/share": self._kept / whole,
            "goodput/kept_seconds": self._kept,
            "goodput/began": self._began,
        }
