"""Sequences that begin alike: what they have in common is read once for some of them, and they draw the same."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_world import decisive

from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine import groups, worker
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.engine.groups import MEMBERS, Grouped, grouped
from astra_jax.rollout.engine.slots import CacheSlot
from astra_jax.rollout.policy import Completion, Sampling

MODEL = Qwen3Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=48,
    tie_embeddings=True,
    max_positions=256,
)
SHAPES = EngineConfig(slots=16, max_length=256, prefill_chunk=64, decode_chunk=4, min_window=32)


def drawn(params, *, compiled_before: bool = False) -> list[Completion]:
    """Two turns of each: three groups whose prompts begin alike, one's much longer; members end at different times."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, MODEL.vocab_size, n).tolist() for n in (40, 50, 110, 30)]
    prompts = [texts[0] + texts[1]] * 6 + [texts[0] + texts[2]] * 4 + [texts[0] + texts[3]] * 4

    async def turns(engine: Engine, i: int) -> list[Completion]:
        sampling = Sampling(max_tokens=6 + 3 * i, stop_ids=(), seed=i, temperature=0.8)
        one = await engine.generate(prompts[i], sampling, session=str(i))
        more = [*prompts[i], *one.token_ids, *texts[3][: 3 + i]]
        return [one, await engine.generate(more, sampling, session=str(i))]

    async def main() -> list[Completion]:
        async with Engine(params, MODEL, SHAPES) as engine:
            if compiled_before:
                await engine.warm_up()
            both = await asyncio.gather(*(turns(engine, i) for i in range(len(prompts))))
            return [one for pair in both for one in pair]

    return asyncio.run(main())


def test_in_groups_each_draws_what_it_draws_by_itself(monkeypatch) -> None:
    params = decisive(MODEL, 0)
    found: list[Grouped] = []

    def noted(*given) -> Grouped | None:
        if (one := grouped(*given)) is not None:
            found.append(one)
        return one

    monkeypatch.setattr(groups, "_ROW", 0)
    monkeypatch.setattr(worker, "grouped", noted)
    together = drawn(params)
    assert len(found) > 3 and len({(one.window, one.alike_window) for one in found}) > 1
    monkeypatch.setattr(worker, "grouped", lambda *given: None)
    for one, alone in zip(together, drawn(params), strict=True):
        assert one.token_ids == alone.token_ids
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=5e-5)


def test_where_programs_are_compiled_before_the_first_request_none_is_of_groups(monkeypatch) -> None:
    monkeypatch.setattr(groups, "_ROW", 0)
    monkeypatch.setattr(worker, "grouped", lambda *given: pytest.fail("rows are put into groups"))
    assert drawn(decisive(MODEL, 0), compiled_before=True)


def slot(index: int, ids: list[int]) -> CacheSlot:
    held = np.zeros(SHAPES.max_length, np.int32)
    held[: len(ids)] = ids
    return CacheSlot(index, held, length=len(ids), cached=len(ids) - 1)


@st.composite
def sequences(draw) -> list[CacheSlot]:
    """Of a few beginnings, of which one is of another's; with ends of their own, or none."""
    first = draw(st.integers(1, 200))
    beginnings = [[1] * first, [1] * draw(st.integers(1, first)) + [2] * draw(st.integers(0, 40)), [3] * 20]
    count = draw(st.integers(1, 16))
    ends = st.lists(st.integers(4, 9), min_size=1, max_size=12)
    return [slot(i, (draw(st.sampled_from(beginnings)) + draw(ends))[: SHAPES.max_length - 1]) for i in range(count)]


@given(sequences())
def test_each_group_has_alike_what_is_read_of_its_first(ready: list[CacheSlot]) -> None:
    shapes = SHAPES.on("cpu")
    found = grouped(ready, shapes)
    if found is None:
        return
    assert sorted(one.index for _, one in found.placed) == sorted(one.index for one in ready)
    assert len({row for row, _ in found.placed}) == len(ready)
    assert found.rows % MEMBERS == 0 and found.rows == shapes.decode_rows_for(found.rows)
    assert {found.window, found.alike_window} <= set(shapes.powers)
    firsts = {row // MEMBERS: one for row, one in found.placed if row % MEMBERS == 0}
    for row, one in found.placed:
        count = found.alike_g[row // MEMBERS]
        first = firsts[row // MEMBERS]
        assert 0 <= count <= min(one.cached, first.cached, found.alike_window)
        assert (one.ids[:count] == first.ids[:count]).all()
        assert count + found.window >= min(one.length + shapes.decode_chunk - 1, shapes.max_length)
        assert count + found.window <= shapes.max_length


@pytest.mark.parametrize(("platform", "alike", "pays"), [("cpu", 200, True), ("cpu", 20, False), ("tpu", 200, False)])
def test_they_are_read_together_where_that_is_less(platform: str, alike: int, pays: bool, monkeypatch) -> None:
    """Sixteen of 230 tokens, of which so many are alike; a device whose layers are not apart reads each by itself."""
    monkeypatch.setattr(groups, "_ROW", 64)
    rng = np.random.default_rng(1)
    ready = [slot(i, [7] * alike + rng.integers(8, 64, 230 - alike).tolist()) for i in range(16)]
    found = grouped(ready, SHAPES.on(platform))
    assert (found is not None) == pays
    if found is not None:
        read = found.rows * found.window + len(found.alike_g) * found.alike_window
        assert read < 16 * 256 * 0.7
        assert found.alike_g.tolist() == [SHAPES.max_length - found.window] * 4
