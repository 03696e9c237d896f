"""The embedded engine decodes every family as its whole forward pass does."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np
import pytest
from serving_world import trainer_logps

from astra_jax.axes import is_bias
from astra_jax.models.decoder import Decoder
from astra_jax.models.layers.sizes import Llama3Scaling
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.model import Params
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.sampler import Completion, Sampling

SIZES: dict[str, Any] = dict(vocab_size=61, d_model=36, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=12, d_ff=48)
FAMILIES: dict[str, Decoder] = {
    "llama": LlamaConfig(**SIZES, tie_embeddings=True, llama3=Llama3Scaling(8.0, 32)),
    "qwen2": Qwen2Config(**SIZES, tie_embeddings=False),
}
SHAPES = EngineConfig(slots=4, max_length=64, prefill_chunk=16, decode_chunk=4, min_window=64)  # of few shapes


def weights(model: Decoder) -> Params:
    """Far from uniform, with biases, which begin at 0."""

    def wide(path: Any, x: jax.Array) -> jax.Array:
        if is_bias(path[-1].key):
            return jax.random.normal(jax.random.key(ord(path[-1].key[0])), x.shape)
        return x * 2 if x.ndim > 2 else x

    return jax.tree_util.tree_map_with_path(wide, model.init(jax.random.key(0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_equals_the_whole_forward_pass(family: str) -> None:
    """Greedy and sampled, with a shared beginning, of more requests than slots, some longer than a prefill's chunks."""
    model = FAMILIES[family]
    params = weights(model)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 61, 9).tolist()
    prompts = [shared + rng.integers(0, 61, rng.integers(1, 36)).tolist() for _ in range(9)]

    temperatures = [0.0, 0.8, 1.0] * 3

    async def drawn() -> list[Completion]:
        async with Engine(params, model, SHAPES) as engine:
            samplings = [
                Sampling(max_tokens=12, stop_ids=(), seed=i, temperature=one) for i, one in enumerate(temperatures)
            ]
            return await asyncio.gather(*(engine.generate(*one) for one in zip(prompts, samplings, strict=True)))

    for prompt, temperature, completion in zip(prompts, temperatures, asyncio.run(drawn()), strict=True):
        assert len(completion.token_ids) == 12
        want = trainer_logps(params, model, prompt, completion.token_ids, temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)
        if not temperature:
            assert completion.token_ids == greedy(params, model, prompt, completion)


def greedy(params: Params, model: Decoder, prompt: list[int], completion: Completion) -> list[int]:
    """The likeliest token at each place of a completion."""
    ids = np.zeros((1, 128), np.int32)
    ids[0, : len(prompt) + 12] = [*prompt, *completion.token_ids]
    places = np.arange(128)[None]
    x_btd, _ = jax.jit(model.forward)(params, ids, places, (places < len(prompt) + 12).astype(np.int32))
    logits = np.asarray(x_btd[0] @ model.head_kernel(params))
    return np.argmax(logits[len(prompt) - 1 : len(prompt) + 11], axis=-1).tolist()
