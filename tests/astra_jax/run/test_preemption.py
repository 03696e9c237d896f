"""Whoever trains is stopped by a signal wherever it falls, also where Python can raise nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref
from types import SimpleNamespace

import pytest

from astra_jax.run.preemption import Preemption
from astra_jax.run.trainer import RunContext

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)
    for _ in range(100):  # Python looks for signals between instructions
        pass


class Dies:
    def __del__(self) -> None:
        interrupt()


class Forgotten:
    """Something that a callback waits for."""

    seen: weakref.ref[Forgotten]


def in_a_destructor() -> None:
    Dies()


def in_a_weak_reference() -> None:
    one = Forgotten()
    one.seen = weakref.ref(one, interrupt)
    kept = one.seen  # noqa: F841 (or it dies before its object)
    del one


def where_it_is_caught() -> None:
    try:
        interrupt()
    except BaseException:  # noqa: BLE001 (as a library does that guards its own callbacks)
        return


@pytest.mark.parametrize("where", [in_a_destructor, in_a_weak_reference, where_it_is_caught])
@pytest.mark.parametrize("ask", ["asked", "noticed"])
def test_a_swallowed_ctrl_c_is_raised_when_the_run_asks_next(where, ask) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Preemption() as preemption:
        assert not getattr(preemption, ask)()
        where()
        with pytest.raises(KeyboardInterrupt):
            getattr(preemption, ask)()
        with pytest.raises(KeyboardInterrupt):  # and so is each later one, at once where it can be
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_task_that_trains_is_interrupted_though_its_cancellation_was_swallowed() -> None:
    """asyncio cancels the task at the first Ctrl-C, and raises nothing itself."""
    reached = []

    async def train() -> None:
        with Preemption() as preemption:
            run = SimpleNamespace(_preemption=preemption, stopped=None)
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                reached.append("swallowed")
            never = asyncio.ensure_future(asyncio.sleep(60))
            await RunContext._wait_or_stop(run, never)
            reached.append("gone on")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(train())
    assert reached == ["swallowed"]


def test_what_fails_after_a_swallowed_ctrl_c_is_no_fault() -> None:
    """The same signal reaches the run's own processes, and one that dies of it was told of as a bug."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as ended, Preemption():
        in_a_destructor()
        raise RuntimeError("a data worker died")
    assert str(ended.value.__cause__) == "a data worker died"
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(RuntimeError), Preemption():
        raise RuntimeError("without one it is")


def test_sigterm_asks_and_leaves_no_handler_behind() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.asked() and not preemption.noticed()
        signal.raise_signal(signal.SIGTERM)
        assert preemption.asked() and preemption.noticed()
    assert signal.getsignal(signal.SIGTERM) is before
