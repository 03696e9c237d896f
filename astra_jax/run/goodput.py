"""Goodput: the share of a run's wall time spent on steps that it has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging


class Goodput:
    """Goodput since a run's first start. Lost time is pauses between starts, startup, and steps undone by a fault,
    whose rows are removed. Each row of metrics has the totals, from which the next start continues.

    Args:
        rows: kept from earlier starts of the run.
        now: seconds, at the first step of this start, of a clock shared by all starts that never jumps within a
            process.
        began: start time of the run's first known process, used if no row has it.
    """

    LONGEST = 366 * 86400.0
    """Seconds since the first start above which a clock is considered wrong, for example not yet set."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], now: float, began: float) -> None:
        last = rows[-1] if rows else {}
        self._began = float(last.get("goodput/started_at") or began)
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
        """Return the goodput metrics of a row."""
        self._kept, self._from = self._kept + max(0.0, now - self._from), now
        whole = max(now - self._began, self._kept, 1e-9)
        return {
            "goodput/share": self._kept / whole,
            "goodput/kept_seconds": self._kept,
            "goodput/started_at": self._began,
        }
