"""The benchmark of `async_steps`: its slow tools, its drained servers, what it makes of metrics, its page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import jax
import pytest
from benchmark_world import program
from emulated_rollouts import emulated, policy_on, until
from rollout_world import tiny_model

from astra_jax.rollout.sampler import Sampling
from benchmarks import async_page, rows
from launch.flags import cli

measured = program("benchmarks.async_rollouts")
CODE = "def double(x):\n    return 2 * x\n"
SAMPLING = Sampling(max_tokens=2, stop_ids=(), seed=0)


def test_arms_have_names() -> None:
    for name in ("0", "4", "2-drained"):
        assert measured.Arm.of(name).name == name
    assert measured.Arm.of("2-drained") == measured.Arm(2, drained=True)
    for wrong in ("-1", "two", "2-slow", ""):
        with pytest.raises(cli.UsageError, match="NUMBER-drained"):
            measured.Arm.of(wrong)


async def test_slow_tools_take_as_long_for_the_same_call_and_give_the_same_values() -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async with measured.SlowTools() as tools:
        tools.seconds = 2.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measured.asyncio, "sleep", noted)
            values = [(await tools.call(CODE, "double", {"x": x})).value for x in (3, 3, 4)]
    assert values == [6, 6, 8]
    took = [one for one in slept if one > 0]
    assert len(took) == 3 and took[0] == took[1] != took[2] and all(one < 2 for one in took)


@contextlib.asynccontextmanager
async def with_a_request_under_way(kind: type, folder: Path) -> AsyncIterator[tuple]:
    """The server, the policy, its weights, of which version 1 is there, and the request, which waits for the server."""
    model = tiny_model(640, 4096)
    params = model.init(jax.random.key(0))
    async with (
        emulated(1) as (server,),
        policy_on([server], model, folder, kind=kind, max_off_policy_steps=2) as policy,
    ):
        await policy.load_weights(params, 1)
        server.hangs.clear()
        first = asyncio.create_task(policy.generate([1, 2], SAMPLING))
        await until(lambda: server.here)
        yield server, policy, params, first


async def test_a_drained_update_waits_for_requests_and_requests_for_it(tmp_path: Path) -> None:
    async with with_a_request_under_way(measured.DrainedPolicy, tmp_path) as (server, policy, params, first):
        update = asyncio.create_task(policy.load_weights(params, 2))
        second = asyncio.create_task(policy.generate([1, 2], SAMPLING))
        await asyncio.sleep(0.3)
        assert server.asked == 1 and len(server.syncs) == 1 and not update.done()
        server.hangs.set()
        await update
        assert {*(await first).versions} == {1} and {*(await second).versions} == {2}


async def test_an_update_in_flight_waits_for_nobody(tmp_path: Path) -> None:
    async with with_a_request_under_way(measured.ClockedPolicy, tmp_path) as (server, policy, params, first):
        await policy.load_weights(params, 2)
        assert len(server.syncs) == 2 and not first.done()
        server.hangs.set()
        assert (await first).versions == [1, 2]


def _row(step: float, age: float) -> dict[str, float]:
    seconds = {"step": step, "wait": step / 2, "update": step / 4, "publish": 0.1, "sync": 0.2}
    return {
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "filling/mean_age": age,
        "filling/valid_share": 0.5,
        "rollout/reward": 0.75,
    }


def test_the_first_update_is_not_in_the_means() -> None:
    found = measured.means([_row(100.0, 0.0), _row(8.0, 1.0), _row(10.0, 2.0)])
    assert found["updates"] == 3 and found["updates_an_hour"] == 400.0
    assert found["step_seconds"] == {"step": 9.0, "wait": 4.5, "update": 2.25, "publish": 0.1, "sync": 0.2}
    assert found["mean_age"] == 1.5 and found["reward"] == 0.75
    of_the_end = {"step": 4, "filling/valid_share": 0.0, "goodput/share": 0.5}  # which came before a fourth update
    assert measured.means([_row(100.0, 0.0), _row(8.0, 1.0), _row(10.0, 2.0), of_the_end]) == found


def test_the_table_is_beside_the_strictly_online_arm_of_the_same_seed() -> None:
    def row(steps: int, seed: int, hourly: float, drained: bool = False) -> dict:
        means = measured.means([_row(3_600 / hourly, steps)])
        scores = {"f1_before": 0.5, "f1": 0.6 + seed / 10, "answer_accuracy_before": 0.4, "answer_accuracy": 0.5}
        return {"async_steps": steps, "drained": drained, "seed": seed, **means, **scores}

    found = [row(0, 0, 100.0), row(0, 1, 200.0), row(2, 0, 200.0), row(2, 1, 300.0), row(2, 0, 150.0, True)]
    lines = async_page.table([row(2, 0, 999.0), *found]).splitlines()
    assert len(lines) == 5
    assert "| 0 | between batches | 2 | 150 | 1.00 x |" in lines[2]
    assert "| 2 | in flight | 2 | 250 | 1.75 x |" in lines[3] and "0.65 (0.60, 0.70)" in lines[3]
    assert "| 2 | after a drain | 1 | 150 | 1.50 x |" in lines[4]


def test_the_page_has_the_rows() -> None:
    page = (rows.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert async_page.table(rows.read("async_rollouts")) in page
