"""A request that cannot be carried out fails alone; the engine goes on, and says so when it cannot."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import decisive
from serving_world import model

from astra_jax.rollout.engine import device_steps
from astra_jax.rollout.engine.engine import Engine, EngineError
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.sampler import RequestFailed, Sampling

MODEL = model(61)
SHAPES = EngineConfig(slots=3, max_length=64, prefill_chunk=8, decode_chunk=4, min_window=64)
PROMPT = list(range(2, 40))
POISON = 666


@pytest.fixture(scope="module")
def params():
    return decisive(MODEL)


def sampling(seed: int = 0, **changes: Any) -> Sampling:
    return Sampling(**({"max_tokens": 10, "stop_ids": (), "seed": seed} | changes))


def run(params, work):
    async def main():
        async with Engine(params, MODEL, SHAPES) as engine:
            return await asyncio.wait_for(work(engine), 240)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_ids": (3, 1 << 40)}, r"stop_ids has 1099511627776; token ids are from 0 to 2147483647"),
        ({"stop_ids": (-1,)}, "stop_ids has -1"),
        ({"max_tokens": 0}, "max_tokens is 0; use a number from 1"),
        ({"max_tokens": 1 << 31}, "max_tokens is 2147483648"),
        ({"temperature": math.nan}, "temperature is nan; use 0 .greedy., or a number from 1e-06 to 100"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"top_p": math.nan}, "top_p is nan; use a number from 1e-06 to 1"),
        ({"top_p": 1e-300}, "top_p is 1e-300"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_numbers_that_the_device_cannot_hold_are_refused_where_they_are_said(changes, message):
    with pytest.raises(ValueError, match=message):
        sampling(**changes)


def test_the_least_and_the_most_of_each_number_are_drawn_with(params):
    edges = [{"temperature": value, "top_p": mass} for value in (0, 1e-6, 100) for mass in (1e-6, 1)]
    edges += [{"stop_ids": (0, (1 << 31) - 1)}, {"max_tokens": (1 << 31) - 1}, {"seed": 1 << 70}, {"seed": -1}]

    async def drawn(engine):
        return await asyncio.gather(*(engine.generate(PROMPT, sampling(**edge)) for edge in edges))

    for completion in run(params, drawn):
        assert completion.token_ids and np.isfinite(completion.logprobs).all()


def test_ids_that_the_model_has_no_row_for_are_refused(params):
    async def refused(engine):
        for ids in ([1, 61], [-1], [1 << 40], [1 << 80]):
            with pytest.raises(ValueError, match="ids are from 0 to 60"):
                await engine.generate(ids, sampling())
        return engine.running

    assert run(params, refused) == 0


@pytest.mark.parametrize("donated", [False, True])
def test_a_request_that_a_device_step_fails_of_fails_alone(params, donated, monkeypatch):
    seeds = [1, POISON, 2, 3, POISON, 4]  # more than slots, two of them poisonous
    real = device_steps.decode

    def poisoned(given, cache, rows, **static):
        if POISON in rows.seeds_r and (rows.positions_r >= len(PROMPT)).any():  # under way already
            if donated:
                real(given, cache, rows, **static)  # takes the keys and values along
            raise MemoryError("no room for this one")
        return real(given, cache, rows, **static)

    async def crowd(engine):
        requests = (engine.generate(PROMPT, sampling(seed), session=f"{i}") for i, seed in enumerate(seeds))
        got = await asyncio.gather(*requests, return_exceptions=True)
        late = await engine.generate(PROMPT, sampling(1))
        return got, late, engine.failure, engine.stats

    expected = run(params, lambda engine: asyncio.gather(*(engine.generate(PROMPT, sampling(s)) for s in seeds)))
    monkeypatch.setattr(device_steps, "decode", poisoned)
    got, late, failure, stats = run(params, crowd)
    for seed, want, one in zip(seeds, expected, got, strict=True):
        if seed == POISON:
            assert isinstance(one, RequestFailed) and isinstance(one.__cause__, MemoryError)
            assert "a request of 38 tokens (seed 666) failed after 4 new ones" in str(one)
        else:
            assert one.token_ids == want.token_ids
            np.testing.assert_allclose(one.logprobs, want.logprobs, atol=1e-4)
    assert late.token_ids == expected[0].token_ids
    assert failure is None and stats.failed == 2 and stats.failed_steps >= 4


def test_logits_that_are_not_finite_fail_their_request_and_reach_no_other():
    untied = model(61, tie=False)
    broken = next(path for path, leaf in jax.tree.leaves_with_path(decisive(untied)) if leaf.shape == (61, 64))
    params = jax.tree.map_with_path(
        lambda path, leaf: leaf.at[29].set(jnp.nan) if path == broken else leaf, decisive(untied)
    )
    short = (PROMPT[:4], sampling(5, temperature=0, max_tokens=4))

    async def both(engine):
        async with engine:
            first = await engine.generate(*short)
            lost = await asyncio.gather(
                *(engine.generate(PROMPT, sampling(i)) for i in range(3)), return_exceptions=True
            )
            # In the slots that held NaN, shorter than those were.
            again = [engine.generate(*short) for _ in range(3)]
            return first, lost, await asyncio.gather(*again), engine.stats.failed, engine.failure

    first, lost, again, failed, failure = asyncio.run(both(Engine(params, untied, SHAPES)))
    assert {str(one.__cause__) for one in lost} == {"the model's logits are not finite; look at its weights and dtype"}
    assert all(one.token_ids == first.token_ids for one in again)
    assert (failed, failure) == (3, None)


def test_an_engine_that_draws_nothing_any_more_fails_all_and_says_so(params, monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("the device is lost")

    async def lost(engine):
        await engine.generate(PROMPT, sampling())
        monkeypatch.setattr(device_steps, "decode", gone)
        waiting = [asyncio.ensure_future(engine.generate(PROMPT, sampling(i))) for i in range(5)]
        got = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(type(one) is EngineError and "the device is lost" in str(one) for one in got)
        with pytest.raises(EngineError, match="has stopped: the device is lost"):
            await engine.generate(PROMPT, sampling())
        return engine.failure

    assert "the device is lost" in str(run(params, lost))
