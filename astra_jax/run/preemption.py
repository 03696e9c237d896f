"""Stopping when asked to: SIGTERM, which clusters send some time before they take the machine away, and Ctrl-C."""

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
    """While it is open, SIGTERM does not end the process, but asks it to stop after a step.

    Several hosts stop after the same step, though the notice reaches them at different times or only one of them; that
    is `jax.distributed`'s preemption service, which takes the signal itself. In other threads than the main one signals
    cannot be handled: there nothing changes.

    A SIGINT does what it did before, and is remembered: Python raises `KeyboardInterrupt` wherever it happens to be,
    which may be a destructor or a callback of a library's C++, where it is swallowed. A run that has got that far is
    interrupted when it asks next, or when it fails: a process of its own that the same Ctrl-C has ended is no bug.
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
            self._before[number] = signal.getsignal(number)  # first: a signal may come in between
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
        if callable(before):  # Python's, which raises, or that of asyncio, which cancels the task that trains
            before(number, frame)

    def _raise_again(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def noticed(self) -> bool:
        """Whether any host is asked to stop, by now; hosts learn of it at different times.

        Raises:
            KeyboardInterrupt: this process has had a SIGINT, and goes on in spite of it.
        """
        self._raise_again()
        return host_is_preempted() if jax.process_count() > 1 else self._asked

    def asked(self) -> bool:
        """Whether to save and stop after this step. On several hosts each must ask after each step.

        Raises:
            KeyboardInterrupt: as of `noticed`.
        """
        self._raise_again()
        if jax.process_count() > 1:
            # Counted from the start of the process, as the service counts: after a notice before anybody has asked it
            # waits for number 1, which a run that goes on from step 100 would never come to.
            self._times += 1
            return multihost_utils.reached_preemption_sync_point(self._times)
        return self._asked
