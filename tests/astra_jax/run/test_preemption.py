"""Whoever trains is stopped by a signal wherever it falls, also where Python can raise nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest

from astra_jax.run.preemption import Preemption
from astra_jax.run.shell import TrainingRun

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
            await TrainingRun.finished(run, never)
            reached.append("gone on")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(train())
    assert reached == ["swallowed"]


def test_sigterm_asks_and_leaves_no_handler_behind() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.asked() and not preemption.noticed()
        signal.raise_signal(signal.SIGTERM)
        assert preemption.asked() and preemption.noticed()
    assert signal.getsignal(signal.SIGTERM) is before


SAVES_EACH_STEP = """
import os, signal, sys, time
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.preemption import Preemption

sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
params = {"w": jax.make_array_from_callback((8,), sharding, lambda at: np.arange(8.0)[at])}
checkpointer = Checkpointer(sys.argv[3], keep_params=2)
with Preemption() as preemption:
    for step in range(1_000, 1_020):
        checkpointer.save(step, params=params)
        if (step, jax.process_index()) == (1_001, 1):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # all hosts agree on a step meanwhile
        if preemption.asked():
            print("stopped after", step)
            break
checkpointer.close()
"""


def test_who_is_told_during_a_save_stops_on_all_hosts(tmp_path) -> None:
    """Orbax asked the same service by the numbers of its steps, so that hosts agreed on one that the run, which counts
    from its own start, came to a thousand updates later."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES_EACH_STEP, address, str(host), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    said = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    first, second = (re.findall(r"stopped after (\d+)", out) for out, _ in said)  # beside what Gloo prints
    assert first == second and 1_001 <= int(*first) < 1_010, said
