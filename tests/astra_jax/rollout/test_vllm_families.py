"""Real vLLM servers of the other families follow the trainer; weights of another family are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from vllm_world import PROMPTS, Server, World, assert_same, post, require_vllm, serving, trainer_logprobs, weights

from astra_jax.models.layers.sizes import Llama3Scaling
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.qwen2.presets import Qwen2Config

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("vllm")
    scaling = Llama3Scaling(8.0, 128)
    return {
        "llama": World.make(folder / "llama", tie=True, family=LlamaConfig, rope_theta=5e5, llama3=scaling),
        "qwen2": World.make(folder / "qwen2", tie=False, family=Qwen2Config),
    }


@pytest.fixture(scope="module")
def servers(worlds) -> Iterator[dict[str, Server]]:
    """Started side by side, from dummy weights."""
    with serving(*(Server(world) for world in worlds.values())) as started:
        yield dict(zip(worlds, started, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
async def test_a_server_of_each_family_follows_the_trainer(worlds, servers, family: str) -> None:
    world, server = worlds[family], servers[family]
    assert world.model.family == family
    async with world.policy(server) as policy:
        for version, seed in ((1, 1), (2, 2)):
            params = weights(world.model, seed)
            await policy.load_weights(params, version)
            await assert_same(policy, params, world, version)
        assert policy.stats.stale == policy.stats.failures == policy.stats.dropped == 0
    # What the comparison is worth: biases and the rotary embedding's scaling are seen in it.
    if family == "qwen2":
        bare = jax.tree_util.tree_map_with_path(lambda path, x: x * ("bias" not in path[-1].key), params)
        other = trainer_logprobs(bare, world.model, PROMPTS[1])
    else:
        plain = LlamaConfig(**{**vars(world.model), "llama3": None})
        other = trainer_logprobs(params, plain, PROMPTS[1])
    assert np.abs(other - trainer_logprobs(params, world.model, PROMPTS[1])).max() > 1e-2


async def test_weights_of_another_family_and_the_same_sizes_are_refused(worlds, servers) -> None:
    sizes = vars(worlds["qwen2"].model)
    llama = World(worlds["qwen2"].folder, LlamaConfig(**{**sizes, "attention_bias": False}), worlds["qwen2"].tokenizer)
    publisher = llama.publisher()
    item = str(publisher.publish(weights(llama.model, 1), 9))
    publisher.close()
    status, answer = post(servers["qwen2"], "/v1/policy/sync", {"item": item, "version": "r1:9"})
    assert status == 400 and "self_attn" in answer["error"] and "bias is missing" in answer["error"], answer
