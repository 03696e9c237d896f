"""Which compiled program the embedded engine takes: how many rows, and how many tokens of each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from rollout_world import tiny_model
from serving_world import trainer_logps

from astra_jax.rollout.engine import slots as engine_slots
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.engine.slots import Shapes
from astra_jax.rollout.engine.worker import Worker
from astra_jax.rollout.sampler import Completion, Sampling


def prefilled(shapes: Shapes, tokens: list[int], shape_for: Callable[[list[int]], tuple[int, int]]) -> tuple[int, int]:
    """Calls, and positions that they compute."""
    calls = computed = 0
    while tokens:
        rows, chunk = shape_for(tokens)
        calls, computed = calls + 1, computed + rows * chunk
        tokens = [n - chunk for n in tokens[:rows] if n > chunk] + tokens[rows:]
    return calls, computed


@pytest.mark.parametrize("slots", [16, 64, 256])
@pytest.mark.parametrize(
    "tokens", [[1], [129], [600], [1_024], [2_048], [5_000], [500, *[30] * 15], [20, 64, 700], [570] * 16, [300] * 5]
)
@pytest.mark.parametrize(("platform", "weights"), [("gpu", 10**9), ("cpu", 10**8)])
def test_little_is_prefilled_in_vain(platform: str, weights: int, slots: int, tokens: list[int]) -> None:
    """Calls of whichever shape, all alike, cost a fifth less at most, with what each costs beside its positions."""
    shapes = EngineConfig(slots=slots, max_length=8_192).on(platform, weights=weights)

    def cost(shape_for: Callable[[list[int]], tuple[int, int]]) -> int:
        calls, computed = prefilled(shapes, tokens, shape_for)
        return shapes.call_tokens * calls + computed

    alike = itertools.product(shapes.prefill_rows, shapes.prefill_chunks)
    assert cost(shapes.prefill_shape_for) <= 1.25 * min(cost(lambda _, one=one: one) for one in alike)


def test_a_prompt_of_half_a_chunk_is_no_whole_one() -> None:
    """A chunk for the longest row, as it was, computed 2,048 positions of each row for 1,024; and 16 rows for five."""
    shapes = EngineConfig(slots=64, max_length=1_280).on("gpu")
    assert prefilled(shapes, [1_024] * 64, shapes.prefill_shape_for) == (8, 64 * 1_024)
    assert prefilled(shapes, [128] * 5, shapes.prefill_shape_for) == (2, 8 * 128)


def test_a_large_model_on_a_cpu_computes_fewer_rows_in_vain() -> None:
    """A lone prompt in a row of its own, where a program of two computed as much again; and rows between the halves."""
    config = EngineConfig(slots=32, max_length=1_536)
    small, large = config.on("cpu", weights=10**6), config.on("cpu", weights=135 * 10**6)
    assert (small.prefill_rows, large.prefill_rows) == ((2, 4, 8), (1, 2, 4, 8))
    assert (small.decode_rows, large.decode_rows) == ((1, 2, 8, 16, 32), (1, 2, 8, 12, 16, 24, 32))
    assert [prefilled(shapes, [350], shapes.prefill_shape_for) for shapes in (small, large)] == [(6, 768), (6, 384)]
    assert [large.decode_rows_for(rows) for rows in (1, 2, 9, 13, 17, 25)] == [1, 2, 12, 16, 24, 32]
    # Three that wait are two and one; before, a program of four.
    assert prefilled(large, [60] * 3, large.prefill_shape_for) == (2, 3 * 64)
    assert config.on("gpu", weights=10**9).decode_rows == (1, 2, 8, 32)


@pytest.mark.parametrize("slots", range(1, 18))
@pytest.mark.parametrize(("platform", "weights"), [("gpu", 10**9), ("cpu", 10**6), ("cpu", 10**8)])
def test_any_number_of_rows_has_a_program(platform: str, weights: int, slots: int) -> None:
    shapes = EngineConfig(slots=slots, max_length=256).on(platform, weights=weights)
    assert shapes.decode_rows[0] == 1 and shapes.decode_rows[-1] == slots
    for rows in range(1, slots + 1):
        assert rows <= shapes.decode_rows_for(rows) <= max(1, 4 * rows, slots // 4)
    assert all(1 <= rows <= slots for rows in shapes.prefill_rows)


def test_what_is_drawn_does_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve of sixteen requests that go on together, in rows that only a large model's engine has."""
    monkeypatch.setattr(engine_slots, "_LARGE", 1)
    model = tiny_model(61, 128)
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 5 + i).tolist() for i in range(16)]
    counts: list[int] = []
    place = Worker._placed

    def counted(self: Worker, *args: Any) -> Any:
        placed = place(self, *args)
        counts.append(placed[0])
        return placed

    monkeypatch.setattr(Worker, "_placed", counted)

    async def drawn() -> list[Completion]:
        config = EngineConfig(slots=16, max_length=64, prefill_chunk=16, decode_chunk=4, min_window=64)
        async with Engine(params, model, config) as engine:
            samplings = [Sampling(max_tokens=24 if i < 12 else 8, stop_ids=(), seed=i) for i in range(16)]
            return await asyncio.gather(*(engine.generate(*one) for one in zip(prompts, samplings, strict=True)))

    for prompt, completion in zip(prompts, asyncio.run(drawn()), strict=True):
        want = trainer_logps(params, model, prompt, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)
    assert {12, 16} <= set(counts)
