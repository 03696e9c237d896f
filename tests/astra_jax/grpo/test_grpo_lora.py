"""GRPO of adapters: gradients are the full ones' by the chain rule, who samples shares the weights under them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from episodes_world import MODEL
from rollout_world import ScriptedSampler, call, decisive, make_environment
from sft_world import starting

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.losses import ObjectiveConfig
from astra_jax.grpo.step import accumulate, build_micro_batches, grpo_optimizer, take_step, update_step
from astra_jax.grpo.train import train
from astra_jax.models import adapters, hf_checkpoint
from astra_jax.models.layers.adapted import is_adapted
from astra_jax.models.lora import LoRA
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.episode import Episode, EpisodeConfig
from astra_jax.rollout.records import Group
from astra_jax.rollout.sampler import Sampling
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher
from astra_jax.run.gradients import zero_gradients
from astra_jax.run.optimizers import initial_state
from synthesis.core.reward import Reward

LORA = LoRA(rank=3, alpha=12.0)
CONFIG = GRPOConfig(
    steps=2,
    batch_size=2,
    group_size=4,
    learning_rate=1e-2,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(800,),
    micro_batch_size=2,
    weight_decay=0.0,
    checkpoint_every=2,
    lora=LORA,
)


def drawn(model=MODEL):
    made = adapters.initial_adapters(model, LORA, jax.random.key(0), {})
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), made)


def group(rng: np.random.Generator) -> Group:
    def episode(i: int) -> Episode:
        length = int(rng.integers(8, 50))
        mask = [0] * 3 + [1] * (length - 3)
        logprobs = [float(rng.normal(-np.log(MODEL.vocab_size), 0.2)) if m else 0.0 for m in mask]
        score = Reward(value=i / 4, recall=i / 4, precision=i / 4, solved=0, needed=1, calls=1)
        ids = rng.integers(0, MODEL.vocab_size, length).tolist()
        return Episode("e", ids, 3, mask, logprobs, [0] * length, [], score, 1, "answered", [])

    return Group(0, "e", 0, [episode(i) for i in range(4)])


def summed(params, config, batches, base=None):
    gradients, loss = zero_gradients(params), 0.0
    for batch in batches:
        gradients, (part, _) = accumulate(params, gradients, batch, base=base, model=MODEL, config=config)
        loss += float(part)
    return gradients, loss


@pytest.mark.parametrize("stored", ["none", "int8"])
def test_an_update_goes_where_the_full_gradient_goes_by_the_chain_rule(stored) -> None:
    """Of the merged weights' gradient G, A's is scale · G Bᵀ and B's scale · Aᵀ G."""
    config = dataclasses.replace(
        CONFIG, row_buckets=(64, 800), lora=dataclasses.replace(LORA, weight_quantization=stored)
    )
    batches, total = build_micro_batches([group(np.random.default_rng(0))], MODEL, config)
    base, trained = MODEL.init(jax.random.key(0)), drawn()
    adapters.store(base, config.lora)
    merged = adapters.without_adapters(adapters.attach_lora(trained, base, LORA))
    full, full_loss = summed(merged, dataclasses.replace(config, lora=LoRA()), batches)
    ours, loss = summed(trained, config, batches, base)
    assert loss == pytest.approx(full_loss, rel=1e-5, abs=1e-5)
    for entry in adapters.targeted(MODEL, LORA).values():
        two, whole = adapters.at_path(trained, entry.path), adapters.at_path(full, entry.path)
        (a_name, a), (b_name, b) = sorted(two.items())
        flat = np.asarray(whole, np.float64).reshape(2, int(np.prod(a.shape[1:-1])), -1)
        a_lir, b_lro = np.asarray(a).reshape(2, -1, 3), np.asarray(b).reshape(2, 3, -1)
        found = adapters.at_path(ours, entry.path)
        expected = {a_name: flat @ b_lro.swapaxes(1, 2), b_name: a_lir.swapaxes(1, 2) @ flat}
        for name, wanted in expected.items():
            assert np.abs(wanted).max() > 1e-3
            np.testing.assert_allclose(
                np.asarray(found[name]).reshape(wanted.shape), LORA.scale * wanted, atol=2e-4, rtol=2e-3, err_msg=name
            )
    state = initial_state(trained, grpo_optimizer(config))
    stepped, _, said = take_step(*state, ours, jnp.float32(total), jnp.float32(config.learning_rate), config=config)
    assert said["weights_finite"] and jax.tree.structure(stepped) == jax.tree.structure(drawn())


def test_the_reference_of_adapters_is_the_weights_under_them() -> None:
    """They cost no copy: the KL is what merged weights have to the base."""
    objective = ObjectiveConfig(kl_coef=0.5)
    config = dataclasses.replace(CONFIG, row_buckets=(64, 800), objective=objective)
    groups, base = [group(np.random.default_rng(0))], MODEL.init(jax.random.key(0))
    merged = adapters.without_adapters(adapters.attach_lora(drawn(), base, LORA))
    of_merged = dataclasses.replace(config, lora=LoRA())
    ours, theirs = (
        update_step(*initial_state(params, grpo_optimizer(one)), groups, MODEL, one, **options)[2]
        for params, one, options in (
            (drawn(), config, {"base": base}),
            (merged, of_merged, {"reference": jax.tree.map(jnp.copy, base)}),
        )
    )
    assert (
        ours["train/kl_reference"] == pytest.approx(theirs["train/kl_reference"], rel=1e-3)
        and ours["train/kl_reference"] > 1e-3
    )
    assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3)


@pytest.mark.parametrize("stored", ["none", "int8"])
async def test_the_engine_samples_from_the_adapted_weights(stored) -> None:
    """Greedy tokens and their logprobs are those of the merged weights, and not the base's."""
    base = decisive(MODEL, 0)
    adapters.store(base, dataclasses.replace(LORA, weight_quantization=stored))
    joined = adapters.attach_lora(drawn(), base, LORA)
    sampling = Sampling(max_tokens=12, stop_ids=(), seed=0, temperature=0)
    said = {}
    shapes = EngineConfig(slots=4, max_length=64, prefill_chunk=8, decode_chunk=4, min_window=64)
    for name, params in {"joined": joined, "merged": adapters.without_adapters(joined), "base": base}.items():
        async with Engine(params, MODEL, shapes) as engine:
            said[name] = await engine.generate([3, 1, 4, 1, 5, 9], sampling)
    assert said["joined"].token_ids == said["merged"].token_ids != said["base"].token_ids
    np.testing.assert_allclose(said["joined"].logprobs, said["merged"].logprobs, atol=1e-5)


def by_seed(session: str, turn: int, seed: int) -> str:
    return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."


@pytest.mark.parametrize("async_steps", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_run_trains_adapters_alone_and_the_policy_shares_the_weights_under_them(
    pool, chat_tokenizer, tmp_path, async_steps
) -> None:
    model = dataclasses.replace(MODEL, vocab_size=chat_tokenizer.vocab_size, max_positions=1024)
    params = model.init(jax.random.key(1))
    config = dataclasses.replace(CONFIG, async_rollouts=async_steps > 0, max_off_policy_steps=async_steps or 1)
    given = []

    class Sampler(ScriptedSampler):
        aliases_params = True

        async def load_weights(self, params, version):
            given.append(params)
            await super().load_weights(params, version)

    policy = Sampler(chat_tokenizer, by_seed)
    arguments = (config, model, starting(params), [make_environment()], chat_tokenizer, pool, tmp_path)
    result = await train(*arguments, policy=policy, progress=False)
    assert result.steps == 2 and len(given) == 3
    jax.tree.map(np.testing.assert_array_equal, result.base, params)
    places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(result.base)}
    for one in given:
        held = [x.w if is_adapted(x) else x for x in jax.tree.leaves(one, is_leaf=is_adapted)]
        assert {x.unsafe_buffer_pointer() for x in held} == places, "the weights lie there twice"
    last = [x for x in jax.tree.leaves(given[-1], is_leaf=is_adapted) if is_adapted(x)]
    assert len(last) == 7 and all(jnp.any(x.b) for x in last)
    again = await train(*arguments, policy=Sampler(chat_tokenizer, by_seed), progress=False)
    assert again.history == []
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)


@pytest.mark.parametrize("stored", ["none", "int8"])
def test_servers_are_given_merged_weights(tmp_path, stored) -> None:
    """Today's plugin, and vLLM's own reload, know nothing of adapters."""
    base, trained = MODEL.init(jax.random.key(0)), drawn()
    adapters.store(base, dataclasses.replace(LORA, weight_quantization=stored))
    joined = adapters.attach_lora(trained, base, LORA)
    merged = adapters.without_adapters(joined)
    publisher = Publisher(tmp_path / "plugin", MODEL, dtype="float32")
    place = publisher.publish(joined, 1)
    publisher.wait()
    found = ocp.PyTreeCheckpointer().restore(place)
    publisher.close()
    tensors = dict(hf_checkpoint.hf_tensors(merged, MODEL))
    assert {name.replace("{}", "1") for name in found} == {name for name in tensors if ".0." not in name}
    for name, array in found.items():
        for layer in range(2 if "{}" in name else 1):
            wanted = tensors[name.format(layer)]
            np.testing.assert_allclose(array[layer] if "{}" in name else array, wanted, atol=1e-6)
    reload = FolderPublisher(tmp_path / "reload", MODEL, dtype="float32")
    folder = reload.publish(joined, 1)
    reload.wait()
    reload.close()
    written = hf_checkpoint.load_hf(folder, MODEL)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), written, merged)
