"""GRPO on two hosts that are asked to stop: two real processes of `jax.distributed`."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from two_hosts_world import hosts, two_hosts

from astra_jax.run.metrics import read_metrics


@pytest.mark.slow
async def test_a_sigterm_to_either_of_two_hosts_saves_both(chat_tokenizer_dir, tmp_path) -> None:
    """In rollouts that do not end (they hang in the third batch): the run ends at once, saved after its second update;
    what is started then takes the episodes over, is asked before its first step, and goes on after that as well."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "hang").touch()
    with hosts(tmp_path) as start:
        for host, started in ((1, 1), (0, 2)):
            with two_hosts(start, chat_tokenizer_dir, tmp_path / "two", surplus_max_age=0) as two:
                deadline = time.monotonic() + 300
                while len(list((tmp_path / "two").glob("hangs.*"))) < started:
                    assert time.monotonic() < deadline and [one.poll() for one in two] == [None, None]
                    await asyncio.sleep(0.05)
                os.kill(two[host].pid, signal.SIGTERM)
                assert [one.wait(120).code for one in two] == [0, 0]
            assert (tmp_path / "two" / "stopped").read_text() == "preempted 2"
            assert [row["step"] for row in read_metrics(tmp_path / "two" / "metrics")] == [1, 2]
        (tmp_path / "two" / "hang").unlink()
        with two_hosts(start, chat_tokenizer_dir, tmp_path / "two", surplus_max_age=0) as two:
            assert [one.wait(400).code for one in two] == [0, 0]
    rows = read_metrics(tmp_path / "two" / "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["filling/journal_episodes"] > 0
