"""The embedded engine equals a plain forward loop, whatever is batched, cached, copied or evicted around a request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import decisive, engine_model
from selection import by_day

from astra_jax.head import token_logprobs
from astra_jax.rollout.engine import cache_memory, device_steps
from astra_jax.rollout.engine.engine import Engine, EngineConfig, EngineError
from astra_jax.rollout.engine.sampling import draw
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.sft.samples import _next_turns

MODEL = engine_model(61)
SHAPES = EngineConfig(slots=5, max_length=128, prefill_chunk=8, decode_chunk=4, min_window=64)
LENGTH = 128


@pytest.fixture(scope="module")
def params():
    return decisive(MODEL, 0)


@jax.jit
def hidden(params, tokens_bt, lengths_b):
    positions_bt = jnp.broadcast_to(jnp.arange(LENGTH), tokens_bt.shape)
    segments_bt = (positions_bt < lengths_b[:, None]).astype(jnp.int32)
    return MODEL.forward(params, tokens_bt, positions_bt, segments_bt)[0]


def row(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens, np.asarray([len(ids)])


def greedy(params, prompt: Sequence[int], steps: int) -> list[int]:
    ids, kernel = list(prompt), np.asarray(MODEL.head_kernel(params))
    for _ in range(steps):
        x_btd = np.asarray(hidden(params, *row(ids)))
        ids.append(int(np.argmax(x_btd[0, len(ids) - 1] @ kernel)))
    return ids[len(prompt) :]


@functools.partial(jax.jit, static_argnames="temperature")
def logps(params, tokens_bt, lengths_b, targets_bt, temperature):
    x_btd = hidden(params, tokens_bt, lengths_b)
    return token_logprobs(x_btd, MODEL.head_kernel(params), targets_bt, temperature=temperature)[0]


def trainer_logps(params, prompt: Sequence[int], new: Sequence[int], temperature: float) -> np.ndarray:
    ids = [*prompt, *new]
    tokens, lengths = row(ids)
    found = logps(params, tokens, lengths, np.roll(tokens, -1, axis=1), temperature=temperature)
    return np.asarray(found)[0, len(prompt) - 1 : len(ids) - 1]


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MODEL.vocab_size, rng.integers(low, high)).tolist() for _ in range(count)]


def sampling(seed: int = 0, **changes) -> Sampling:
    return Sampling(**({"max_tokens": 12, "stop_ids": (), "seed": seed} | changes))


def run(params, work):
    """Run the coroutine function `work(engine)` with a fresh engine."""

    async def main():
        async with Engine(params, MODEL, SHAPES) as engine:
            return await asyncio.wait_for(work(engine), 120)

    return asyncio.run(main())


async def all_of(engine: Engine, texts: Sequence[Sequence[int]], **changes) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(p, sampling(i, **changes)) for i, p in enumerate(texts)))


async def streamed(
    engine: Engine, text: Sequence[int], how: Sampling, session: str, begun: asyncio.Event
) -> Completion:
    """Return what `generate` would give; `begun` is set with the first tokens."""
    tokens, logprobs, versions = [], [], []
    async for part in engine.stream(text, how, session=session):
        begun.set()
        tokens, logprobs = tokens + part.token_ids, logprobs + part.logprobs
        versions += part.versions
    return Completion(tokens, logprobs, versions, part.finish)


def check_versions(one: Completion, text: Sequence[int], weights: dict[int, Any]) -> None:
    """All of these weights drew some of it, one after the other, and each token is of those that it names."""
    assert set(one.versions) == set(weights) and one.versions == sorted(one.versions)
    by_version = {version: trainer_logps(params, text, one.token_ids, 1.0) for version, params in weights.items()}
    want = [by_version[version][place] for place, version in enumerate(one.versions)]
    np.testing.assert_allclose(one.logprobs, want, atol=1e-4)


def test_greedy_equals_plain_forward_loop(params):
    texts = prompts(11)  # more than slots, some longer than several prefill chunks
    got = run(params, lambda engine: all_of(engine, texts, temperature=0.0))
    for text, completion in zip(texts, got, strict=True):
        assert completion.token_ids == greedy(params, text, 12)
        assert completion.finish == "length"
        np.testing.assert_allclose(
            completion.logprobs, trainer_logps(params, text, completion.token_ids, 1.0), atol=1e-4
        )


@pytest.mark.parametrize("part", by_day([24, 64], 64))
def test_a_cache_in_parts_draws_what_a_whole_one_draws(params, monkeypatch, part: int):
    """Over their ends: prompts, what is copied of a group's, next turns, and what is drawn, up to the last place."""

    async def work(engine: Engine) -> list[list[Completion]]:
        texts = [text for text in prompts(4, seed=5, low=20, high=50) for _ in range(2)]

        async def episode(i: int, text: list[int]) -> list[Completion]:
            said: list[Completion] = []
            for turn, more in enumerate(prompts(2, seed=i, low=10, high=20)):
                how = sampling(10 * i + turn, max_tokens=18)
                said.append(await engine.generate(text, how, session=f"{i}"))
                text = [*text, *said[-1].token_ids, *more]
            return said

        return list(await asyncio.gather(*(episode(i, text) for i, text in enumerate(texts))))

    whole = run(params, work)
    monkeypatch.setattr(cache_memory, "kept_part", lambda platform: part)
    assert len(Engine(params, MODEL, SHAPES)._worker.cache[0].parts) == -(-LENGTH // part)
    for ours, theirs in zip(run(params, work), whole, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_weights_that_were_made_and_those_of_a_checkpoint_share_their_programs(params):
    """The latter are committed to their device, which for JAX are other arguments."""
    programs: list[Any] = [device_steps.prefill, device_steps.decode, device_steps.copy]
    texts = prompts(11)
    made = run(params, lambda engine: all_of(engine, texts, temperature=0.0))
    compiled = [program._cache_size() for program in programs]
    restored = run(jax.device_put(params, jax.devices()[0]), lambda engine: all_of(engine, texts, temperature=0.0))
    assert restored == made and [program._cache_size() for program in programs] == compiled


@pytest.mark.parametrize("temperature", by_day([1.0, 0.7, 1.6], 1.0, 0.7))
def test_sampler_logprobs_equal_trainer_logprobs(params, temperature):
    texts = prompts(9, seed=1)
    got = run(params, lambda engine: all_of(engine, texts, temperature=temperature))
    for text, completion in zip(texts, got, strict=True):
        want = trainer_logps(params, text, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)


def test_a_request_does_not_depend_on_its_neighbours(params):
    text = prompts(1, seed=2)[0]
    alone = run(params, lambda engine: engine.generate(text, sampling(99)))

    async def crowded(engine):
        others = asyncio.gather(*(engine.generate(p, sampling(i, top_p=0.9)) for i, p in enumerate(prompts(8, 3))))
        await asyncio.sleep(0)
        mine = await engine.generate(text, sampling(99))
        await others
        return mine

    got = run(params, crowded)
    assert got.token_ids == alone.token_ids
    # How many rows a program has and how far it reads changes the order of sums (docs/serving.md, "Seeds").
    np.testing.assert_allclose(got.logprobs, alone.logprobs, atol=2e-5)
    assert run(params, lambda engine: engine.generate(text, sampling(98))).token_ids != alone.token_ids


def test_the_same_requests_in_the_same_order_give_the_same_bytes(params):
    texts = prompts(11, seed=12)
    first, again = (run(params, lambda engine: all_of(engine, texts, top_p=0.9)) for _ in range(2))
    assert first == again


def test_turns_prefill_only_new_tokens(params):
    text, extra = prompts(2, seed=4, low=20)

    async def turns(engine):
        first = await engine.generate(text, sampling(5), session="a")
        before = engine.stats.snapshot()
        second = await engine.generate([*text, *first.token_ids, *extra], sampling(5), session="a")
        return first, second, engine.stats.since(before)

    first, second, stats = run(params, turns)
    whole = [*text, *first.token_ids, *extra]
    # The last sampled token was never fed, and the last prompt token is fed by decoding: exactly `extra` many remain.
    assert stats.prefilled_tokens == len(extra)
    fresh = run(params, lambda engine: engine.generate(whole, sampling(5)))
    assert second.token_ids == fresh.token_ids
    np.testing.assert_allclose(second.logprobs, fresh.logprobs, atol=1e-5)


def test_session_with_another_prefix_is_prefilled_again(params):
    text, other = prompts(2, seed=6, low=20)

    async def turns(engine):
        await engine.generate(text, sampling(1), session="a")
        return await engine.generate([*text[:7], *other], sampling(2), session="a")

    fresh = run(params, lambda engine: engine.generate([*text[:7], *other], sampling(2)))
    assert run(params, turns).token_ids == fresh.token_ids


def test_a_groups_prompt_is_prefilled_once(params):
    text = prompts(1, seed=7, low=39, high=40)[0]

    async def group(engine):
        got = await asyncio.gather(*(engine.generate(text, sampling(i), session=f"g{i}") for i in range(5)))
        return got, engine.stats.snapshot()

    got, stats = run(params, group)
    assert stats.prefilled_tokens == len(text) - 1
    assert stats.copied_tokens == 4 * (len(text) - 1)
    for i, completion in enumerate(got):
        want = run(params, lambda engine, i=i: engine.generate(text, sampling(i)))
        assert completion.token_ids == want.token_ids
        np.testing.assert_allclose(completion.logprobs, want.logprobs, atol=1e-5)
    assert len({tuple(c.token_ids) for c in got}) > 1


def test_groups_that_begin_alike_prefill_each_prompt_once(params):
    """All prompts of a model begin alike. What two groups share was copied to each episode of the second, and the rest
    of its prompt computed for each. After an update, what is under way is computed anew in the same way."""
    start, *ends = prompts(3, seed=14, low=19, high=20)
    texts = [start + end for end in ends for _ in range(2)]
    other = jax.tree.map(lambda x: x * 0.9, params)

    async def groups(engine):
        begun = [asyncio.Event() for _ in texts]
        running = [
            asyncio.ensure_future(streamed(engine, text, sampling(i, max_tokens=60), str(i), begun[i]))
            for i, text in enumerate(texts)
        ]
        for event in begun:
            await event.wait()
        first = engine.stats.snapshot()
        await engine.load_weights(other, 7)
        return [await one for one in running], first, engine.stats.since(first)

    got, first, second = run(params, groups)
    once = len(start) + sum(map(len, ends))
    assert first.prefilled_tokens == once - 2, "each prompt's last token is fed by decoding"
    assert first.copied_tokens == 2 * (len(texts[0]) - 1) + len(start)
    assert once - 2 <= second.prefilled_tokens <= once + sum(one.versions.count(0) for one in got)
    for text, one in zip(texts, got, strict=True):
        check_versions(one, text, {0: params, 7: other})


def test_more_sessions_than_slots(params):
    texts = prompts(13, seed=8, low=17)

    async def two_turns(engine, i, text):
        first = await engine.generate(text, sampling(i, max_tokens=5), session=str(i))
        await asyncio.sleep(0.001 * (i % 3))
        both = [*text, *first.token_ids]
        second = await engine.generate([*both, 1, 2, 3], sampling(i, max_tokens=5), session=str(i))
        engine.release(str(i))
        return [*both, 1, 2, 3, *second.token_ids], second.logprobs

    async def everyone(engine):
        got = await asyncio.gather(*(two_turns(engine, i, text) for i, text in enumerate(texts)))
        return got, engine.stats.evictions

    got, evictions = run(params, everyone)
    assert evictions > 0
    for ids, logprobs in got:
        np.testing.assert_allclose(logprobs, trainer_logps(params, ids[:-5], ids[-5:], 1.0), atol=1e-4)


def test_an_update_swaps_the_weights_of_what_is_under_way(params):
    """In the middle of a request, and of another that shares its prompt; every token is of the weights it names."""
    other = jax.tree.map(lambda x: x * 0.9, params)
    text = prompts(1, seed=9, low=30)[0]

    async def across(engine):
        drawn = [asyncio.Event(), asyncio.Event()]
        running = [
            asyncio.ensure_future(streamed(engine, text, sampling(seed, max_tokens=40), f"early {seed}", event))
            for seed, event in enumerate(drawn)
        ]
        for event in drawn:
            await event.wait()
        copied = engine.stats.copied_tokens
        await engine.load_weights(other, 7)
        late = await engine.generate(text, sampling(1, max_tokens=40), session="late")
        return [await one for one in running], late, engine.stats.copied_tokens - copied

    before, after, copied = run(params, across)
    assert copied >= len(text) - 1, "what both share is computed once"
    assert set(after.versions) == {7}
    np.testing.assert_allclose(after.logprobs, trainer_logps(other, text, after.token_ids, 1.0), atol=1e-4)
    for one in before:
        assert one.policy_version == 7
        check_versions(one, text, {0: params, 7: other})


def lowered(params, model, count: int):
    """Programs of so many rows, in a cache of one more and in a whole one; and the whole one."""
    worker = Engine(params, model, EngineConfig(slots=count + 1, max_length=4096, min_window=64))._worker
    worker._prepare()
    rows, index, some = worker._rows(count, []), np.zeros(count, np.int32), np.zeros((count, 8), np.int32)
    given = {"model": model, "window": 64}
    apart = dict(given, whole=False)
    whole = Engine(params, model, EngineConfig(slots=count, max_length=4096, min_window=64))._worker
    programs = [
        device_steps.prefill.lower(worker._params, worker.cache, index, some, some, **given),
        device_steps.copy.lower(worker.cache, index, index, window=64),
        *(
            program.lower(worker._params, cache, rows, **how, **more)
            for program, more in ((device_steps.decode, {"steps": 4, "nucleus": False}), (device_steps.feed, {}))
            for cache, how in (
                (worker.cache, apart),
                (whole.cache, dict(given, whole=True)),
                (whole.cache, dict(given, whole=True, window=1024)),
            )
        ),
    ]
    return programs, whole.cache


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 3])
def test_no_program_makes_a_second_of_any_layers_cache(params, count):
    """Of one row or more, XLA copies what it may write before it has read it; and of one array, what it reads."""
    programs, cache = lowered(params, MODEL, count)
    a_layer = sum(x.nbytes for x in jax.tree.leaves(cache[0]))
    for program in programs:
        memory = program.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= MODEL.n_layers * a_layer
        assert memory.temp_size_in_bytes < a_layer / 4


def test_no_program_multiplies_batches_of_bfloat16_matrices(params):
    """On CPUs XLA does it element by element, five times as slowly as in float32."""
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    programs, cache = lowered(params, model, 3)
    prompts_rt, lengths_r = np.zeros((3, 256), np.int32), np.full(3, 9, np.int32)
    programs.append(_next_turns.lower(params, prompts_rt, lengths_r, model=model, steps=4, stops=(1,), mesh=None))
    prefill, copy, *others = (program.as_text().splitlines() for program in programs)
    assert cache[0].dtype == "float32" and not any("dot_general" in line for line in copy)
    for text in (prefill, *others):
        products = [line for line in text if "dot_general" in line]
        batches = [line for line in products if "batching_dims" in line]
        assert batches and not any("bf16" in line for line in batches)
        assert any("bf16" in line for line in products)  # all others are in the model's dtype


def test_stop_and_length_limits(params):
    text = prompts(1, seed=10, low=10)[0]
    free = run(params, lambda engine: engine.generate(text, sampling(3, max_tokens=30)))
    stop = free.token_ids[9]
    stopped = run(params, lambda engine: engine.generate(text, sampling(3, max_tokens=30, stop_ids=(60_000, stop))))
    cut = free.token_ids.index(stop) + 1
    assert stopped.finish == "stop" and stopped.token_ids == free.token_ids[:cut]
    # Exactly to the end of the cache.
    full = run(params, lambda engine: engine.generate(text, sampling(3, max_tokens=1000)))
    assert full.finish == "length" and len(text) + len(full.token_ids) == SHAPES.max_length
    np.testing.assert_allclose(full.logprobs, trainer_logps(params, text, full.token_ids, 1.0), atol=1e-4)


def test_cancelled_requests_free_their_slots(params):
    text = prompts(1, seed=11, low=30)[0]

    async def cancel(engine):
        doomed = [asyncio.ensure_future(engine.generate(text, sampling(i, max_tokens=90))) for i in range(8)]
        await asyncio.sleep(0.02)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        return await engine.generate(text, sampling(3))

    assert run(params, cancel).token_ids == run(params, lambda e: e.generate(text, sampling(3))).token_ids


def held_beyond(before: list[jax.Array]) -> int:
    """Bytes of arrays made since. `before` keeps the others: what earlier tests left may be collected at any moment."""
    known = {id(x) for x in before}
    return sum(x.nbytes for x in jax.live_arrays() if id(x) not in known)


def test_a_closed_engine_holds_nothing_on_the_devices(params):
    """Not even where the garbage collector never comes and somebody still has it."""

    other, kept = decisive(MODEL, 1), []

    async def draw(engine: Engine) -> list[Completion]:
        kept.append(engine)
        await engine.load_weights(other, 7)
        return await all_of(engine, prompts(3), temperature=0.0)

    gc.disable()
    try:
        before = jax.live_arrays()
        run(params, draw)
        assert held_beyond(before) == 0
    finally:
        gc.enable()
    with pytest.raises(EngineError):
        asyncio.run(all_of(kept[0], prompts(1)))


def test_asleep_it_holds_nothing_and_requests_wait_for_the_next_weights(params):
    other, texts = decisive(MODEL, 1), prompts(3, seed=4)

    async def slept(engine: Engine) -> tuple[list[Completion], bool]:
        await all_of(engine, texts)
        busy = asyncio.ensure_future(engine.generate(texts[0], sampling(max_tokens=80)))
        while not engine.running:
            await asyncio.sleep(0)
        await engine.sleep()  # what is under way is not given up
        assert engine.running and len((await busy).token_ids) == 80
        await engine.sleep()
        await engine.sleep()
        assert held_beyond(before) == 0
        early = asyncio.ensure_future(all_of(engine, texts))
        await asyncio.sleep(0.2)
        waited = engine.waiting == len(texts) and not early.done()
        await engine.load_weights(other, 6)
        await early
        await asyncio.gather(engine.sleep(), engine.load_weights(other, 7))
        return await all_of(engine, texts), waited

    async def awake(engine: Engine) -> list[Completion]:
        return await all_of(engine, texts)

    before = jax.live_arrays()
    drawn, waited = run(params, slept)
    assert waited and {version for one in drawn for version in one.versions} == {7}
    assert [one.token_ids for one in drawn] == [one.token_ids for one in run(other, awake)]


def test_a_stream_is_the_completion_in_parts_and_frees_its_slot_when_closed(params):
    text = prompts(1, seed=12, low=30)[0]

    async def streamed(engine):
        parts = [part async for part in engine.stream(text, sampling(3, max_tokens=11))]
        whole = await engine.generate(text, sampling(3, max_tokens=11))
        async with contextlib.aclosing(engine.stream(text, sampling(3, max_tokens=90))) as stream:
            async for _ in stream:
                assert engine.running == 1
                break
        await engine.generate(text, sampling(3, max_tokens=1))
        return parts, whole, engine.running

    parts, whole, running = run(params, streamed)
    assert [len(part.token_ids) for part in parts] == [4, 4, 3]  # decode_chunk is 4
    assert [part.finish for part in parts] == [None, None, "length"]
    assert sum((part.token_ids for part in parts), []) == whole.token_ids
    assert sum((part.logprobs for part in parts), []) == pytest.approx(whole.logprobs, abs=1e-5)
    assert running == 0


def test_bad_requests_and_failures(params):
    async def refused(engine):
        for ids in ([], [1] * SHAPES.max_length):
            with pytest.raises(ValueError, match="max_length"):
                await engine.generate(ids, sampling())
        with pytest.raises(ValueError, match="stop ids"):
            await engine.generate([1], sampling(stop_ids=(1, 2, 3, 4, 5)))

    run(params, refused)

    async def broken(engine):
        await engine.load_weights({"not": "a model"}, 1)
        waiting = [asyncio.ensure_future(engine.generate([1, 2], sampling(i))) for i in range(10)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(r, EngineError) for r in results)
        with pytest.raises(EngineError, match="has stopped"):
            await engine.generate([1], sampling())

    run(params, broken)


def test_draw_follows_the_distribution():
    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0, -2.0])
    n = 20_000
    tile = jnp.broadcast_to(logits, (n, 5))
    seeds = jnp.arange(n, dtype=jnp.uint32)
    ones = jnp.ones(n)

    def frequencies(temperature, top_p):
        tokens, logps = draw(tile, seeds, jnp.full(n, 3), ones * temperature, ones * top_p, nucleus=top_p < 1)
        return np.bincount(np.asarray(tokens), minlength=5) / n, np.asarray(tokens), np.asarray(logps)

    for temperature in (1.0, 0.5):
        want = np.asarray(jax.nn.softmax(logits / temperature))
        got, tokens, logps = frequencies(temperature, 1.0)
        np.testing.assert_allclose(got, want, atol=0.015)
        np.testing.assert_allclose(np.exp(logps), want[tokens], rtol=1e-5)
    # A vocabulary of several blocks, the last one not full, with rare and impossible tokens.
    rng = np.random.default_rng(0)
    wide = rng.normal(0, 2, 150)
    wide[[3, 70, 140]] = -np.inf
    tile = jnp.broadcast_to(jnp.asarray(wide, jnp.float32), (n, 150))
    tokens, logps = draw(tile, seeds, jnp.full(n, 3), ones * 0.8, ones, nucleus=False)
    want = np.asarray(jax.nn.softmax(jnp.asarray(wide) / 0.8))
    np.testing.assert_allclose(np.bincount(np.asarray(tokens), minlength=150) / n, want, atol=0.015)
    np.testing.assert_allclose(np.exp(logps), want[tokens], rtol=1e-5)
    tokens, logps = draw(tile, seeds, jnp.full(n, 3), ones * 0, ones, nucleus=False)
    assert set(np.asarray(tokens).tolist()) == {int(np.argmax(wide))}
    np.testing.assert_allclose(np.exp(logps), np.asarray(jax.nn.softmax(jnp.asarray(wide))).max(), rtol=1e-5)
    tile = jnp.broadcast_to(logits, (n, 5))
    # softmax is .636 .234 .086 ...: a nucleus of 0.8 is the first two, and the logprobs are renormalised over them.
    got, tokens, logps = frequencies(1.0, 0.8)
    want = np.asarray(jax.nn.softmax(logits[:2]))
    np.testing.assert_allclose(got[:2], want, atol=0.015)
    assert got[2:].sum() == 0
    np.testing.assert_allclose(np.exp(logps), want[tokens], rtol=1e-5)
    got, _, _ = frequencies(0.0, 0.8)
    assert got[0] == 1
