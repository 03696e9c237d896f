"""GRPO on two hosts that are asked to stop: two real processes of `jax.distributed`."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from two_hosts_world import two_hosts

from astra_jax.run.metrics import read_metrics


@pytest.mark.slow
async def test_a_sigterm_to_either_of_two_hosts_saves_both(chat_tokenizer_dir, tmp_path) -> None:
    """In rollouts that do not end (they hang in the third batch): the run ends at once, saved after its second update;
    what is started then takes the episodes over, is asked before its first step, and goes on after that as well."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "hang").touch()
    for host, started in ((1, 1), (0, 2)):
        with two_hosts(chat_tokenizer_dir, tmp_path / "two", surplus_max_age=0) as hosts:
            deadline = time.monotonic() + 300
            while len(list((tmp_path / "two").glob("hangs.*"))) < started:
                assert time.monotonic() < deadline and [one.process.poll() for one in hosts] == [None, None]
                await asyncio.sleep(0.2)
            hosts[host].process.send_signal(signal.SIGTERM)
            assert [one.ended(120)[0] for one in hosts] == [0, 0]
        assert (tmp_path / "two" / "stopped").read_text() == "preempted 2"
        assert [row["step"] for row in read_metrics(tmp_path / "two" / "metrics")] == [1, 2]
    (tmp_path / "two" / "hang").unlink()
    with two_hosts(chat_tokenizer_dir, tmp_path / "two", surplus_max_age=0) as hosts:
        assert [one.ended(400)[0] for one in hosts] == [0, 0]
    rows = read_metrics(tmp_path / "two" / "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["filling/journal_episodes"] > 0
