"""GRPO: exact over packing and micro-batches, learns a bandit, resumes where it stopped."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_world import ScriptedPolicy, call, make_environment

from astra_jax.evaluate import EvalConfig, evaluate
from astra_jax.grpo import GRPOConfig, accumulate, grpo_optimizer, train, update_step
from astra_jax.metrics import read_metrics
from astra_jax.models.qwen3.modules import init_params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine import Engine, EngineConfig
from astra_jax.rollout.episode import Episode, EpisodeConfig
from astra_jax.rollout.filling import Group
from astra_jax.rollout.packing import bucket_for, first_fit, pack
from astra_jax.rollout.policy import Sampling
from astra_jax.rollout.reward import Reward
from astra_jax.run_identity import WorkdirError

MODEL = Qwen3Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tie_embeddings=True,
    max_positions=256,
)
EPISODE = EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1)
CONFIG = GRPOConfig(
    updates=4,
    groups_per_batch=2,
    group_size=4,
    learning_rate=1e-2,
    concurrent_groups=4,
    episode=EPISODE,
    row_buckets=(64, 128, 512, 800),
    micro_batch_rows=2,
    weight_decay=0.0,
    checkpoint_every=2,
)

WIDE = dataclasses.replace(CONFIG, learning_rate=2e-2, micro_batch_rows=8)
"""Used where many episodes of one length make a batch; one config, so that the programs are compiled once."""


def make_episode(rng: np.random.Generator, value: float, length: int) -> Episode:
    mask = [0] * 3 + (rng.random(length - 3) < 0.7).astype(int).tolist()
    logprobs = [-float(rng.exponential(1)) if m else 0.0 for m in mask]
    score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
    ids = rng.integers(0, MODEL.vocab_size, length).tolist()
    return Episode("e", ids, 3, mask, logprobs, [0], [], score, 1, "answered", [])


def gradients_of(params, episodes, advantages, *, rows: int, packed: bool):
    batches = pack(episodes, advantages, row_buckets=(64, 128), rows=rows, packed=packed)
    total = jnp.float32(sum(sum(e.loss_mask) for e in episodes))
    gradients, losses, sums = jax.tree.map(jnp.zeros_like, params), 0.0, []
    for batch in batches:
        gradients, loss, part, *_ = accumulate(params, gradients, batch, total, model=MODEL, config=WIDE)
        losses += float(loss)
        sums.append(part)
    return gradients, losses, jax.tree.map(lambda *xs: float(sum(xs)), *sums)


def test_packed_equals_padded_and_one_micro_batch_equals_many():
    rng = np.random.default_rng(0)
    params = init_params(MODEL, jax.random.key(0))
    episodes = [make_episode(rng, float(i % 2), int(rng.integers(8, 60))) for i in range(8)]
    advantages = rng.normal(0, 1, 8).tolist()
    # The reference: every episode in a row of its own, all rows in one micro-batch.
    want, want_loss, want_sums = gradients_of(params, episodes, advantages, rows=8, packed=False)
    assert want_sums.tokens == sum(sum(e.loss_mask) for e in episodes)
    got, loss, sums = gradients_of(params, episodes, advantages, rows=2, packed=True)
    assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(sums), jax.tree.leaves(want_sums), rtol=1e-4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(4, 128), min_size=1, max_size=30), rows=st.integers(1, 5), seed=st.integers(0, 99))
def test_packing_keeps_every_token_once(lengths, rows, seed):
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, 0.0, n) for n in lengths]
    batches = pack(episodes, list(range(len(episodes))), row_buckets=(64, 128), rows=rows)
    found = {}
    for batch in batches:
        assert batch.tokens_bt.shape == (rows, bucket_for(max(lengths) - 1, (64, 128)))
        for row in range(rows):
            for segment in range(1, batch.segment_ids_bt[row].max() + 1):
                at = np.flatnonzero(batch.segment_ids_bt[row] == segment)
                assert (np.diff(at) == 1).all() and batch.positions_bt[row][at].tolist() == list(range(len(at)))
                index = int(batch.advantages_bt[row][at[0]])
                ids = [*batch.tokens_bt[row][at].tolist(), int(batch.targets_bt[row][at[-1]])]
                assert index not in found and ids == episodes[index].token_ids
                assert batch.targets_bt[row][at].tolist() == ids[1:]
                assert batch.mask_bt[row][at].tolist() == episodes[index].loss_mask[1:]
                np.testing.assert_allclose(batch.sampler_logps_bt[row][at], episodes[index].logprobs[1:], rtol=1e-6)
                found[index] = ids
        assert not batch.mask_bt[batch.segment_ids_bt == 0].any()
    assert len(found) == len(episodes)
    assert all(sum(lengths[i] for i in row) <= 128 for row in first_fit(lengths, 128))


def test_too_long_an_episode_is_refused():
    with pytest.raises(ValueError, match="raise the largest row bucket"):
        pack([make_episode(np.random.default_rng(0), 0.0, 200)], [1.0], row_buckets=(64, 128), rows=1)


def test_a_bandit_is_learnt():
    """Real engine, real update; the reward is the share of even tokens: ten updates raise it from 0.5 to over 0.85."""
    prompt = [1, 2, 3]

    async def learn() -> tuple[list[float], float]:
        params = init_params(MODEL, jax.random.key(0))
        opt_state = grpo_optimizer(WIDE).init(params)
        means, worst = [], 0.0
        async with Engine(jax.tree.map(jnp.copy, params), MODEL, EngineConfig(slots=32, max_length=32)) as engine:
            for update in range(10):
                jobs = [
                    engine.generate(prompt, Sampling(max_tokens=12, stop_ids=(), seed=update * 100 + i))
                    for i in range(32)
                ]
                completions = await asyncio.gather(*jobs)
                episodes = []
                for c in completions:
                    value = float(np.mean([t % 2 == 0 for t in c.token_ids]))
                    score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
                    mask, logprobs = [0] * 3 + [1] * 12, [0.0] * 3 + c.logprobs
                    ids = prompt + c.token_ids
                    episodes.append(Episode("b", ids, 3, mask, logprobs, [update], [], score, 1, "answered", []))
                means.append(float(np.mean([e.reward for e in episodes])))
                groups = [Group(i, "b", update, episodes[i * 8 : i * 8 + 8]) for i in range(4)]
                params, opt_state, metrics = update_step(params, opt_state, groups, MODEL, WIDE)
                worst = max(worst, metrics["mismatch_abs"])
                await engine.update(params, update + 1)
        return means, worst

    means, mismatch = asyncio.run(learn())
    assert means[0] < 0.6 and means[-1] > 0.85, means
    assert mismatch < 1e-4, "on policy, sampler and trainer agree"


def by_seed(session: str, turn: int, seed: int) -> str:
    """Half of the episodes solve the first sub-question of France, the others answer at once."""
    return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."


def model_for(tokenizer) -> Qwen3Config:
    return dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size, max_positions=1024)


async def test_resumed_equals_uninterrupted(pool, chat_tokenizer, tmp_path):
    model = model_for(chat_tokenizer)
    params = init_params(model, jax.random.key(1))
    environments = [make_environment("a"), make_environment("b", "Japan"), make_environment("c")]

    async def run(workdir, policy_type=ScriptedPolicy, **changes):
        policy = policy_type(chat_tokenizer, by_seed)
        config = dataclasses.replace(CONFIG, **changes)
        result = await train(
            config, model, params, environments, chat_tokenizer, pool, workdir, engine=policy, progress=False
        )
        assert policy.version == result.updates == 4
        return result

    class DiesAtThree(ScriptedPolicy):
        async def update(self, params, version):
            if version == 3:
                raise ConnectionError("the server is gone")
            await super().update(params, version)

    straight = await run(tmp_path / "straight")
    with pytest.raises(ConnectionError):
        await run(tmp_path / "resumed", DiesAtThree)
    resumed = await run(tmp_path / "resumed")  # from the checkpoint after update 2
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), straight.params, params)
    assert max(jax.tree.leaves(moved)) > 1e-3
    rows = [read_metrics(tmp_path / name / "metrics") for name in ("straight", "resumed")]
    assert [[r["step"] for r in run] for run in rows] == [[1, 2, 3, 4]] * 2
    for a, b in zip(*rows, strict=True):
        same = [k for k in a if not k.startswith(("seconds/", "tokens_per_second/"))]
        assert {k: a[k] for k in same} == {k: b[k] for k in same}
    assert rows[0][0]["rollout/calls"] > 0 and 0 < rows[0][0]["rollout/reward"] < 1
    assert len(resumed.history) == 2
    assert (await run(tmp_path / "resumed")).history == []
    with pytest.raises(WorkdirError, match="grpo.clip_low is 0.2 there, 0.1 here"):
        await run(tmp_path / "resumed", clip_low=0.1)


async def test_stops_when_no_group_is_valid(pool, chat_tokenizer, tmp_path):
    model = model_for(chat_tokenizer)
    params = init_params(model, jax.random.key(1))
    config = dataclasses.replace(CONFIG, max_groups_per_update=3)
    policy = ScriptedPolicy(chat_tokenizer, lambda session, turn, seed: "No.")
    arguments = (config, model, params, [make_environment()], chat_tokenizer, pool, tmp_path)
    result = await train(*arguments, engine=policy, progress=False)
    assert (result.stopped, result.updates) == ("exhausted", 0)
    np.testing.assert_array_equal(jax.tree.leaves(result.params)[0], jax.tree.leaves(params)[0])
    with pytest.raises(ValueError, match="at least one environment"):
        await train(config, model, params, [], chat_tokenizer, pool, tmp_path, engine=policy)


async def test_train_with_the_embedded_engine(pool, chat_tokenizer, tmp_path):
    """Random weights score nothing, but everything is real: engine, sandbox, filling; it ends exhausted."""
    model = model_for(chat_tokenizer)
    episode = dataclasses.replace(EPISODE, max_response_tokens=40)
    config = dataclasses.replace(CONFIG, max_groups_per_update=2, episode=episode)
    params = init_params(model, jax.random.key(2))
    result = await train(config, model, params, [make_environment()], chat_tokenizer, pool, tmp_path, progress=False)
    assert result.stopped == "exhausted"


async def test_evaluate(pool, chat_tokenizer):
    environments = [make_environment("a"), make_environment("b", "Japan")]
    config = EvalConfig(episodes_per_environment=3, episode=EPISODE, temperature=0.0)
    policy = ScriptedPolicy(
        chat_tokenizer, lambda session, turn, seed: "No." if turn else call("capital_of", country="France")
    )
    result = await evaluate(policy, environments, chat_tokenizer, pool, config=config, progress=False)
    # France: 1 of 2 in 1 call, F1 2/3; Japan: none.
    assert result.f1 == pytest.approx(1 / 3, abs=1e-5)
    assert (result.episodes, result.voided, result.recall, result.mean_calls, result.mean_turns) == (6, 0, 0.25, 1, 2)
    assert result.by_structure == {"multi_hop": pytest.approx(1 / 3, abs=1e-5)}
    low, high = result.f1_interval
    assert 0 <= low < result.f1 < high <= 1
    with pytest.raises(ValueError, match="at least one environment"):
        await evaluate(policy, [], chat_tokenizer, pool, config=config)


def test_bad_configs_are_refused():
    with pytest.raises(ValueError, match="group_size is 1"):
        dataclasses.replace(CONFIG, group_size=1)
    with pytest.raises(ValueError, match="temperature"):
        dataclasses.replace(CONFIG, episode=dataclasses.replace(EPISODE, temperature=0.0))
    with pytest.raises(ValueError, match="row_buckets"):
        dataclasses.replace(CONFIG, row_buckets=(64,))
