"""Graceful stop on SIGTERM, which clusters send some time before they reclaim a machine, and on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from astra_jax.run.hosts import host_is_preempted


class Preemption:
    """While it is open, SIGTERM requests a stop after a step instead of ending the process.

    Several hosts stop after the same step, though the notice reaches them at different times or only one of them.
    `jax.distributed`'s preemption service handles the signal then. Signals can be handled only in the main thread; in
    other threads this does nothing.

    SIGINT keeps its effect, and is remembered. Python raises `KeyboardInterrupt` at an arbitrary point, such as a
    destructor or a C++ callback, where it may be swallowed. Such a run is interrupted at its next check, or when it
    fails. A subprocess that the same Ctrl-C ended is then not reported as an error.
    """

    def __enter__(self) -> Preemption:
        self._asked = False
        self._times = 0
        self._interrupted = False
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGINT: self._interrupt}
        if jax.process_count() == 1:
            handlers[signal.SIGTERM] = self._ask
        main = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        for number, handler in handlers.items() if main else ():
            self._before[number] = signal.getsignal(number)  # first: a signal may arrive in between
            signal.signal(number, handler)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before or signal.SIG_DFL)
        if self._interrupted and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        before = self._before[signal.SIGINT]
        if callable(before):  # Python's, which raises, or asyncio's, which cancels the training task
            before(number, frame)

    def _raise_again(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def noticed(self) -> bool:
        """Return whether any host is known to be asked to stop; hosts learn of it at different times.

        Raises:
            KeyboardInterrupt: this process received a SIGINT that was swallowed.
        """
        self._raise_again()
        return host_is_preempted() if jax.process_count() > 1 else self._asked

    def asked(self) -> bool:
        """Return whether to save and stop after this step. On several hosts each must call it after each step.

        Raises:
            KeyboardInterrupt: as in `noticed`.
        """
        self._raise_again()
        if jax.process_count() > 1:
            # Counted from the start of the process, like the service: after a notice before the first call it waits
            # for number 1, which a run resumed at step 100 would never reach.
            self._times += 1
            return multihost_utils.reached_preemption_sync_point(self._times)
        return self._asked
