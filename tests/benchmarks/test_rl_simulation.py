"""The simulation of GRPO on a fleet: its clock and servers by hand, its runs by what must hold, its rows and page."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
from benchmark_world import program

from benchmarks import rows, simulation_page
from benchmarks.simulated_fleet import (
    ServerSpeed,
    SimulatedRun,
    SimulatedServer,
    SimulatedTurn,
    SimulatedWork,
    bound_of,
    in_simulated_time,
    now,
    simulated,
)

program("benchmarks.cost")
simulation = program("benchmarks.rl_simulation")

SHARED = ServerSpeed(lambda sequences, cached: 0.1 * sequences, 0.01, 100_000, read_seconds=5.0, load_seconds=2.0)
"""A token of a sequence for each tenth of a second, however many there are; prompts at 100 tokens a second."""


def test_only_sleeping_takes_time() -> None:
    async def work() -> list[float]:
        async def one(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return now()

        return [*await asyncio.gather(one(3e6), one(1.5)), await one(1.0)]

    assert in_simulated_time(work()) == pytest.approx([3e6, 1.5, 3e6 + 1])
    with pytest.raises(RuntimeError, match="nothing is to happen any more"):
        in_simulated_time(asyncio.Event().wait())


def test_a_server_draws_for_all_its_sequences_at_once() -> None:
    """Ten tokens and twenty: both get half until the first has its ten; a prompt that is read stops both."""

    async def work() -> list[float]:
        server = SimulatedServer("s", SHARED)

        async def one(uncached: int, tokens: int) -> float:
            await server.draw(100, uncached, tokens)
            return now()

        drawn = await asyncio.gather(one(0, 10), one(0, 20))
        begun = now()
        after = await asyncio.gather(one(100, 10), asyncio.sleep(0.5))
        return [*drawn, after[0] - begun]

    assert in_simulated_time(work()) == pytest.approx([2.0, 3.0, 2.0])


def test_a_sync_reads_beside_and_pauses_and_computes_caches_anew() -> None:
    async def work() -> tuple[float, float, int]:
        server = SimulatedServer("s", SHARED)

        async def one() -> float:
            await server.draw(100, 0, 60)
            return now()

        async def sync() -> float:
            await server.sync(1)
            return now()

        drawn, synced = await asyncio.gather(one(), sync())
        return drawn, synced, server.version

    # 6 s of drawing, 2 s of loading after 5 s, and 150 tokens of cache at 100 a second.
    assert in_simulated_time(work()) == pytest.approx((9.5, 7.0, 1))


def turns(draws: random.Random) -> list[SimulatedTurn]:
    calls = draws.randint(0, 3)
    return [
        SimulatedTurn(draws.randint(5, 40), 0.2 if i < calls else 0.0, 10 if i < calls else 0) for i in range(calls + 1)
    ]


SPEED = ServerSpeed(lambda sequences, cached: 0.01 + 1e-6 * cached, 1e-4, 4_000, read_seconds=0.5, load_seconds=0.2)
RUN = SimulatedRun(
    SimulatedWork(turns, 100, 200, 0.6, 4, 8), [SPEED] * 3, lambda tokens: tokens * 5e-4, 0.3, 16, updates=6,
    concurrent_groups=32,
)  # fmt: skip


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_run_keeps_the_trainers_rules(k) -> None:
    run = dataclasses.replace(RUN, async_steps=k)
    outcome = simulated(run)
    assert len(outcome.steps) == run.updates - 1 - k and simulated(run) == outcome
    for step in outcome.steps:
        assert step.step == pytest.approx(step.wait + step.update + step.publish + step.sync)
        assert 0 <= step.age <= max(k, run.surplus_max_age) and step.publish == pytest.approx(0.3)
        assert step.sync >= 0.7 - 1e-9 and step.update > 0
        if not k:
            assert step.wait >= step.bound - 1e-6 or step.sampled < run.work.batch_size  # a surplus was there
    assert 0.9 <= outcome.stayed <= 1 and 0 < outcome.busy <= 1


def test_rollouts_ahead_keep_the_trainer_busy_where_the_fleet_is_large_enough() -> None:
    online, ahead = (simulated(dataclasses.replace(RUN, async_steps=k)) for k in (0, 2))
    assert ahead.mean("wait") < 0.3 * online.mean("wait") and ahead.mean("step") < online.mean("step")
    assert online.length_bias == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "change, bound",
    [
        ({"servers": [dataclasses.replace(SPEED, token_seconds=lambda sequences, cached: 0.1)]}, "rollout"),
        ({"sandboxes": 1}, "sandbox"),
        ({"publish_seconds": 60.0}, "sync"),
        ({"update_seconds": lambda tokens: 60.0}, "update"),
    ],
    ids=["slow servers", "one sandbox", "a slow disk", "slow updates"],
)
def test_what_bounds_a_step_is_named(change, bound) -> None:
    run = dataclasses.replace(RUN, async_steps=2, **change)
    assert bound_of(simulated(run), run) == bound


def test_episodes_are_as_long_as_is_said() -> None:
    draws = random.Random(0)
    played = [simulation.episode(draws, sampled=6_000, tools=2_000, tool_seconds=0.05, sigma=1.0) for _ in range(3_000)]
    calls = [len(one) - 1 for one in played]
    assert sum(calls) / len(calls) == pytest.approx(simulation.CALLS, rel=0.03)
    assert sum(turn.tokens for one in played for turn in one) / len(played) == pytest.approx(6_000, rel=0.05)
    assert sum(turn.tool_tokens for one in played for turn in one) / len(played) == pytest.approx(2_000, rel=0.05)
    assert max(sum(turn.tokens for turn in one) for one in played) <= simulation.MOST_TURN


def test_the_simulation_is_beside_real_runs_and_the_page_has_its_rows() -> None:
    found = rows.read("rl_simulation")
    validations = [row for row in found if row["case"] == "validation"]
    assert {row["async_steps"] for row in validations} >= {0, 2}
    newest = {row["async_steps"]: row for row in validations}
    assert all(abs(row["step_error"]) <= 0.15 and abs(row["age_error"]) <= 0.25 for row in newest.values())
    page = (rows.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert simulation_page.table(found) in page
    assert {row["servers"] for row in found if row["case"] == "14b"} >= {8, 16, 32, 64}
