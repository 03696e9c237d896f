"""Two hosts that are asked to stop: two real processes of `jax.distributed`, of GRPO and of saves alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest
from two_hosts_world import hosts, of_two_hosts, two_hosts

from astra_jax.run.metrics import read_metrics


@pytest.mark.slow
async def test_a_sigterm_to_either_of_two_hosts_saves_both(chat_tokenizer_dir, tmp_path) -> None:
    """In rollouts that do not end (they hang in the third batch): the run ends at once, saved after its second update;
    what is started then takes the episodes over, is asked before its first step, and goes on after that as well."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "hang").touch()
    with hosts(tmp_path) as start:
        for host, started in ((1, 1), (0, 2)):
            with two_hosts(start, chat_tokenizer_dir, tmp_path / "two", max_off_policy_steps=0) as two:
                deadline = time.monotonic() + 300
                while len(list((tmp_path / "two").glob("hangs.*"))) < started:
                    assert time.monotonic() < deadline and [one.poll() for one in two] == [None, None]
                    await asyncio.sleep(0.05)
                os.kill(two[host].pid, signal.SIGTERM)
                assert [one.wait(120).code for one in two] == [0, 0]
            assert (tmp_path / "two" / "stopped").read_text() == "preempted 2"
            assert [row["step"] for row in read_metrics(tmp_path / "two" / "metrics")] == [1, 2]
        (tmp_path / "two" / "hang").unlink()
        with two_hosts(start, chat_tokenizer_dir, tmp_path / "two", max_off_policy_steps=0) as two:
            assert [one.wait(400).code for one in two] == [0, 0]
    rows = read_metrics(tmp_path / "two" / "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["filling/journal_episodes"] > 0


SAVES_EACH_STEP = """
import os, signal, sys, time
import jax, jax.numpy as jnp
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec
from astra_jax.mesh import make_mesh
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.preemption import Preemption
halves = NamedSharding(make_mesh(fsdp=2), PartitionSpec("fsdp"))
params = {"w": jax.jit(lambda: jnp.arange(8.0), out_shardings=halves)()}
checkpointer = Checkpointer(sys.argv[3], keep_params=2)
with Preemption() as preemption:
    for step in range(1_000, 1_020):
        checkpointer.save(step, params=params)
        if (step, sys.argv[2]) == (1_001, "1"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # all hosts agree on a step meanwhile
        if preemption.asked():
            print("stopped after", step, file=sys.stderr)
            break
checkpointer.close()
"""


@pytest.mark.slow
def test_who_is_told_during_a_save_stops_on_all_hosts(tmp_path) -> None:
    """Orbax asked the same service by the numbers of its steps, so that hosts agreed on one that the run, which counts
    from its own start, came to a thousand updates later."""
    ended = of_two_hosts(SAVES_EACH_STEP, str(tmp_path))
    assert [code for _, code in ended] == [0, 0], ended
    first, second = (re.findall(r"stopped after (\d+)", said) for said, _ in ended)
    assert first == second and 1_001 <= int(*first) < 1_010, ended
