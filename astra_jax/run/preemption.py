"""Stopping when asked to: SIGTERM, which clusters send some time before they take the machine away."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
    """While it is open, SIGTERM does not end the process, but asks it to stop after a step.

    Several hosts stop after the same step, though the notice reaches them at different times or only one of them; that
    is `jax.distributed`'s preemption service, which takes the signal itself. In other threads than the main one signals
    cannot be handled: there nothing changes.
    """

    def __enter__(self) -> Preemption:
        self._asked = False
        self._before: Any = None
        self._handles = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def asked(self, step: int) -> bool:
        """Whether to save and stop after this step. On several hosts each must ask after each step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked
