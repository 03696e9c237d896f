"""Draws that ask for more than a temperature and a nucleus: each option does what it says, to its own request alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import decisive, engine_model

from astra_jax.rollout.engine import worker
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.engine.sampling import LogitsProcessing, TokenCounts, draw_shaped, said_so_far
from astra_jax.rollout.sampler import ConstraintError, RequestFailed, Sampling, TokenChunk

MODEL = engine_model(61)
SHAPES = EngineConfig(slots=4, max_length=64, prefill_chunk=64, decode_chunk=4, min_window=64)
PROMPT = [7, 8, 9, 7]
PENALTIES: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def params():
    return decisive(MODEL, 0)


def sampling(seed: int = 0, **changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": 15, "stop_ids": (), "seed": seed, "temperature": 0.8, **changes})


class Steps:
    """Allows what a function of the tokens so far says."""

    def __init__(self, allowed) -> None:
        self._allowed = allowed

    def allow(self, drawn: Sequence[int], words_w: np.ndarray) -> None:
        for token in self._allowed(list(drawn)):
            words_w[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)


def anything() -> Steps:
    return Steps(lambda drawn: range(61))


async def parts(engine: Engine, asked: Sampling, prompt: Sequence[int] = PROMPT) -> TokenChunk:
    """A whole stream as one part."""
    got: list[TokenChunk] = [one async for one in engine.stream(prompt, asked)]
    last = got[-1]
    return TokenChunk(
        [token for one in got for token in one.token_ids],
        [value for one in got for value in one.logprobs],
        [version for one in got for version in one.versions],
        last.finish,
        [best for one in got for best in one.alternatives],
    )


def drawn(params, *asked: Sampling) -> list[TokenChunk]:
    """What an engine says to requests that it has at once."""

    async def main() -> list[TokenChunk]:
        async with Engine(params, MODEL, SHAPES) as engine:
            return await asyncio.gather(*(parts(engine, one) for one in asked))

    return asyncio.run(main())


def reference(logits: np.ndarray, seen: np.ndarray, times: np.ndarray, asked: Sampling) -> np.ndarray:
    """The distribution of one draw, written plainly."""
    again = np.where(logits > 0, logits / asked.repetition_penalty, logits * asked.repetition_penalty)
    logits = np.where(seen, again, logits) - asked.frequency_penalty * times - asked.presence_penalty * (times > 0)
    p = np.exp((logits - logits.max()) / (asked.temperature or 1))
    p /= p.sum()
    if asked.temperature == 0:
        return p
    p = np.where(p >= asked.min_p * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if asked.top_k:
        p[order[asked.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= asked.top_p]] = 0
    return p / p.sum()


def test_the_distribution_is_the_plainly_written_one():
    rng = np.random.default_rng(0)
    asked = [
        sampling(),
        sampling(top_k=5),
        sampling(min_p=0.2, temperature=1.5),
        sampling(top_k=9, top_p=0.7, min_p=0.01),
        sampling(**PENALTIES),
        sampling(**PENALTIES, top_k=2**31 - 1, top_p=0.9),
        sampling(**PENALTIES, temperature=0, top_k=3, min_p=0.5),
        sampling(presence_penalty=-2, repetition_penalty=0.5),
    ]
    n = len(asked)
    logits = rng.normal(0, 3, (n, 61)).astype(np.float32)
    ids = rng.integers(0, 61, (n, 20)).astype(np.int32)
    ids[:, 15:] = -1
    shaping = LogitsProcessing(
        top_k_r=jnp.asarray([one.top_k for one in asked], jnp.int32),
        min_p_r=jnp.asarray([one.min_p for one in asked], jnp.float32),
        presence_r=jnp.asarray([one.presence_penalty for one in asked], jnp.float32),
        frequency_r=jnp.asarray([one.frequency_penalty for one in asked], jnp.float32),
        repetition_r=jnp.asarray([one.repetition_penalty for one in asked], jnp.float32),
        ids_rt=jnp.asarray(ids),
        drawn_r=jnp.full(n, 6),
    )
    said = said_so_far(shaping, 61).and_now(jnp.arange(n), jnp.arange(n) % 2 == 0)
    assert isinstance(said, TokenCounts)
    temperature, top_p = (jnp.asarray([getattr(one, name) for one in asked]) for name in ("temperature", "top_p"))
    _, logps, (best, values) = draw_shaped(
        jnp.asarray(logits), jnp.arange(n, dtype=jnp.uint32), jnp.arange(n), temperature, top_p, shaping, said,
        alternatives=61,
    )  # fmt: skip
    for i, one in enumerate(asked):
        new = [*ids[i, 6:15], *([i] if i % 2 == 0 else [])]
        times = np.bincount(new, minlength=61)
        seen = (times > 0) | (np.bincount(ids[i, :6], minlength=61) > 0)
        p = np.zeros(61)
        p[np.asarray(best[i])] = np.exp(np.asarray(values[i], np.float64))
        np.testing.assert_allclose(p, reference(logits[i].astype(np.float64), seen, times, one), atol=2e-5)
        assert np.isfinite(logps[i])


@pytest.mark.parametrize("written_out", [True, False], ids=["cpu", "accelerator"])
def test_penalties_go_by_what_was_said_across_chunks_and_in_both_ways_of_drawing(params, written_out, monkeypatch):
    """Greedy tokens equal those of a loop over the whole forward pass, in chunks and token by token."""
    monkeypatch.setattr(worker, "unroll_decode_layers", lambda *model, device: written_out)
    asked = sampling(temperature=0, **PENALTIES)
    chunks, single = drawn(params, asked, sampling(temperature=0, **PENALTIES, constraint=anything()))
    ids = list(PROMPT)
    kernel = np.asarray(MODEL.head_kernel(params))
    forward = jax.jit(lambda tokens, segments: MODEL.forward(params, tokens, jnp.arange(64)[None], segments)[0])
    for _ in range(15):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(forward(row, (np.arange(64) < len(ids)).astype(np.int32)[None]))[0, len(ids) - 1] @ kernel
        times = np.bincount(ids[len(PROMPT) :], minlength=61)
        ids.append(int(reference(logits, np.bincount(ids, minlength=61) > 0, times, asked).argmax()))
    assert chunks.token_ids == single.token_ids == ids[len(PROMPT) :]
    np.testing.assert_allclose(chunks.logprobs, single.logprobs, atol=1e-4)


def test_alternatives_are_the_likeliest_tokens_and_the_draw_is_the_same(params):
    plain, shown, few, greedy = drawn(
        params,
        sampling(3),
        sampling(3, alternatives=20),
        sampling(3, alternatives=5, top_k=2),
        sampling(3, alternatives=1, temperature=0),
    )
    assert shown.token_ids == plain.token_ids and not plain.alternatives
    np.testing.assert_allclose(shown.logprobs, plain.logprobs, atol=1e-5)
    assert [len(best) for best in shown.alternatives] == [20] * 15
    for token, value, best in zip(shown.token_ids, shown.logprobs, shown.alternatives, strict=True):
        assert list(best) == sorted(best, key=lambda one: -one[1])
        assert abs(dict(best).get(token, value) - value) < 1e-5
    assert [len(best) for best in few.alternatives] == [2] * 15  # no third one can be drawn
    assert all(token in dict(best) for token, best in zip(few.token_ids, few.alternatives, strict=True))
    assert [best[0][0] for best in greedy.alternatives] == greedy.token_ids


def test_a_constraint_holds_for_its_request_and_no_other_is_drawn_otherwise(params):
    def fives(drawn: list[int]) -> range:
        return range(len(drawn) % 5, 61, 5)

    def fails(drawn: list[int]) -> list[int]:
        if len(drawn) == 6:
            raise ConstraintError("too complex")
        return [len(drawn) + 1]

    alone = drawn(params, sampling(1), sampling(2))

    async def crowd() -> tuple[Any, Any]:
        async with Engine(params, MODEL, SHAPES) as engine:
            asked = [
                sampling(1),
                sampling(2),
                sampling(3, constraint=Steps(fives), stop_ids=(58,), max_tokens=40),
                sampling(4, constraint=Steps(fails)),
                sampling(5, constraint=Steps(lambda drawn: [9] if len(drawn) < 3 else [])),
            ]
            work = (parts(engine, one) for one in asked)
            return await asyncio.gather(*work, return_exceptions=True), engine.stats

    (first, second, held, failed, stuck), stats = asyncio.run(crowd())
    for got, expected in zip((first, second), alone, strict=True):
        assert got.token_ids == expected.token_ids
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    assert [token % 5 for token in held.token_ids] == [i % 5 for i in range(len(held.token_ids))]
    assert held.finish == "stop" if 58 in held.token_ids else len(held.token_ids) == 40
    assert all(value <= 0 for value in held.logprobs)
    for one, why in ((failed, "too complex"), (stuck, "no token of the vocabulary may follow")):
        assert isinstance(one, RequestFailed) and isinstance(one.__cause__, ConstraintError) and why in str(one)
    assert stats.failed == 2 and stats.failed_steps == 0  # nobody was prefilled again


def test_options_out_of_range_are_refused():
    for changes in ({"top_k": -1}, {"min_p": 1.5}, {"presence_penalty": float("nan")}, {"repetition_penalty": 0}):
        with pytest.raises(ValueError, match=f"Sampling.{next(iter(changes))} is"):
            sampling(**changes)


def test_programs_compile_beside_requests_and_none_after_that(params, caplog):
    """A request is answered while programs are compiled, and has what it needs compiled first."""
    shapes = EngineConfig(slots=2, max_length=40, prefill_chunk=40, decode_chunk=3, min_window=20)
    asked: list[dict[str, Any]] = [{"top_p": 0.5}, {}, {"top_k": 3}, {"top_k": 3, "alternatives": 2}]
    form = Steps(lambda drawn: [len(drawn) % 5])

    async def main() -> tuple[list[tuple[int, int]], list[str]]:
        async with Engine(params, MODEL, shapes) as engine:
            early = asyncio.create_task(parts(engine, sampling(max_tokens=4), [1] * 30))
            counts = []
            async for counted in engine.warm_up(options=True):
                counts.append(counted)
                if len(counts) == 1:
                    assert len((await early).token_ids) == 4
            with jax.log_compiles():
                caplog.clear()
                for how in asked:
                    await parts(engine, sampling(max_tokens=4, **how), [2] * 9)
                for how in (*asked, {"constraint": form}, {"prompt_logprobs": True}):
                    await asyncio.gather(*(parts(engine, sampling(max_tokens=4, **how), [n] * 20) for n in (3, 4)))
            return counts, [record.message for record in caplog.records if "XLA compilation" in record.message]

    counts, compiled = asyncio.run(main())
    of = counts[0][1]
    assert counts == [(n, of) for n in range(counts[0][0], of + 1)] and counts[0][0] < of / 4
    assert not compiled


def prompt_logps(params, prompt: Sequence[int]) -> np.ndarray:
    """[n - 1, vocabulary]: what the model expects after each token but the last, by the trainer's forward pass."""
    tokens_bt = jnp.asarray([prompt])
    x_btd, _ = MODEL.forward(params, tokens_bt, jnp.arange(len(prompt))[None], jnp.ones_like(tokens_bt))
    return np.asarray(jax.nn.log_softmax((x_btd @ MODEL.head_kernel(params))[0, :-1]))


def test_prompts_are_scored_alone_in_a_batch_and_after_their_like(params):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 61, n).tolist() for n in (1, 2, 17, 40, 63)]
    scored = sampling(max_tokens=0, prompt_logprobs=True, alternatives=3, temperature=0.3, top_p=0.5)
    shapes = EngineConfig(slots=4, max_length=64, prefill_chunk=16, decode_chunk=4, min_window=16)

    async def first_part(engine: Engine, prompt: Sequence[int], asked: Sampling) -> TokenChunk:
        return [one async for one in engine.stream(prompt, asked)][0]

    async def main() -> list[list[TokenChunk]]:
        async with Engine(params, MODEL, shapes) as engine:
            await asyncio.gather(*(parts(engine, sampling(max_tokens=1), prompt) for prompt in prompts))
            together = await asyncio.gather(
                *(first_part(engine, prompt, scored) for prompt in prompts),
                *(parts(engine, sampling(seed), PROMPT) for seed in range(3)),
            )
            prefix_segment_id = sampling(max_tokens=3, prompt_logprobs=True, alternatives=3)
            alone = [await first_part(engine, prompt, prefix_segment_id) for prompt in prompts]
            return [together[: len(prompts)], alone]

    for answers in asyncio.run(main()):
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = prompt_logps(params, prompt)
            places = np.arange(len(prompt) - 1)
            np.testing.assert_allclose(answer.prompt_logprobs, expected[places, prompt[1:]], atol=1e-5)
            assert answer.cached == 0 and len(answer.prompt_alternatives) == len(prompt) - 1
            for i, best in enumerate(answer.prompt_alternatives):
                assert [token for token, _ in best] == np.argsort(-expected[i])[:3].tolist()
                assert dict(best).get(prompt[i + 1], answer.prompt_logprobs[i]) == answer.prompt_logprobs[i]
            if not answer.token_ids:
                assert answer.finish == "length"
    with pytest.raises(ValueError, match=r"Sampling\.max_tokens is 0; use a number from 1"):
        sampling(max_tokens=0)


def test_what_a_prompt_took_over_is_counted(params):
    async def main() -> list[int]:
        async with Engine(params, MODEL, SHAPES) as engine:
            known = list(range(40))
            found = []
            for prompt in (known, known, [*known[:30], 50, 51], [60]):
                found.append([one async for one in engine.stream(prompt, sampling(max_tokens=1))][0].cached)
            return found

    assert asyncio.run(main()) == [0, 39, 30, 0]
