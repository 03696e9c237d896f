"""The soak of `benchmarks.sandbox_soak`, short: random kills, and no call lost, crossed or blamed for them."""

from __future__ import annotations

import gc

import pytest
from benchmark_world import program

soak = program("benchmarks.sandbox_soak").soak

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
async def test_random_kills_lose_no_call_and_nothing_grows() -> None:
    gc.collect()  # descriptors of earlier tests' garbage must not be closed between the two looks
    found = await soak(6_000, kill_seconds=0.5)
    assert found["answered"] == found["calls"] and found["mistakes"] == []
    assert sum(found["killed"].values()) > 5 and found["pool"]["retried"] > 5
    assert found["pool"]["infrastructure"] < 100
    first, last = found["first"], found["last"]
    assert last["host_bytes"] < first["host_bytes"] + (8 << 20)
    assert last["zygote_bytes"] < first["zygote_bytes"] + (1 << 20)
    for name in ("host_descriptors", "zygote_descriptors", "processes", "mounts"):
        assert last[name] == first[name], name
