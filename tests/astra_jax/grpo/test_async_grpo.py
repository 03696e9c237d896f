"""Training across updates: strictly online it is the plain loop to the bit; else old tokens are corrected."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from killed_rollouts import CONFIG, ENVIRONMENTS, Killed, Sampler, Tables
from rollout_world import tiny_model
from sft_world import starting

from astra_jax.base.settings import SettingError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.groups import GroupSampler
from astra_jax.grpo.step import grpo_optimizer, update_step
from astra_jax.grpo.train import train
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.filling import Group, GroupBuffer, fill
from astra_jax.run.metrics import read_metrics
from astra_jax.run.optimizers import initial_state
from synthesis.core.reward import Reward

SHORT = dataclasses.replace(CONFIG, row_buckets=(64, 900), micro_batch_size=4)


@pytest.fixture(scope="module")
def model(chat_tokenizer):
    return tiny_model(chat_tokenizer.vocab_size, 1024)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(1))


class Unhurried(Sampler):
    """Draws take a moment, so that updates fall into turns."""

    async def generate(self, token_ids, sampling, *, session=""):
        begun = self.version
        await asyncio.sleep(0.004)
        completion = await super().generate(token_ids, sampling, session=session)
        half = len(completion.token_ids) // 2
        versions = [begun] * half + completion.versions[half:]
        return dataclasses.replace(completion, versions=versions)


def equal(left, right) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


async def test_strictly_online_it_is_the_plain_loop_to_the_bit(model, params, chat_tokenizer, tmp_path) -> None:
    policy = Sampler(chat_tokenizer)
    arguments = (CONFIG, model, starting(params), ENVIRONMENTS, chat_tokenizer, Tables(), tmp_path)
    trained = (await train(*arguments, policy=policy, progress=False)).params
    plain = Sampler(chat_tokenizer)
    parts = (plain, Tables(), ENVIRONMENTS, chat_tokenizer, CONFIG.episode)
    sampler = GroupSampler(*parts, group_size=3, seed=0, at_once=CONFIG.episodes_at_once)
    buffer = GroupBuffer(CONFIG.batch_size, min_reward_std=CONFIG.min_reward_std, max_age=CONFIG.surplus_max_age)
    weights, state = initial_state(jax.tree.map(jnp.copy, params), grpo_optimizer(CONFIG))
    for update in range(CONFIG.steps):
        plain.version = update
        buffer.begin(update)
        sampler.begin(update)
        assert await fill(buffer, sampler, oversample=CONFIG.oversample, concurrent=CONFIG.groups_at_once)
        weights, state, _ = update_step(weights, state, buffer.take(), model, CONFIG)
    equal(trained, weights)
    assert sorted(policy.draws) == sorted(plain.draws)


async def test_rollouts_go_on_across_updates_and_over_a_kill(
    model, params, chat_tokenizer, tmp_path, monkeypatch
) -> None:
    """Its batches after the last checkpoint are trained on again, to the bit, and nothing of them is drawn again."""
    config = dataclasses.replace(CONFIG, async_steps=2, steps=8, checkpoint_every=4)
    busy, asked, lives = False, 0, []

    def update(weights, state, groups, *arguments, **options):
        nonlocal busy
        busy = True
        time.sleep(0.1)
        busy = False
        lives[-1][options["update"]] = groups
        return update_step(weights, state, groups, *arguments, **options)

    class Remote(Unhurried):
        dies = False

        async def generate(self, *arguments, **options):
            nonlocal asked
            asked += busy
            if self.dies and 4 in lives[-1]:  # in the update after a checkpoint
                raise Killed
            return await super().generate(*arguments, **options)

    async def run(dies: bool):
        lives.append({})
        policy = Remote(chat_tokenizer)
        policy.dies = dies
        arguments = (config, model, starting(params), ENVIRONMENTS, chat_tokenizer, Tables(), tmp_path)
        try:
            return await train(*arguments, policy=policy, progress=False)
        finally:
            lives[-1]["draws"] = policy.draws

    monkeypatch.setattr("astra_jax.grpo.train.update_step", update)
    with pytest.raises(Killed):
        await run(True)
    result = await run(False)
    first, second = lives
    assert result.steps == 8 and asked > 0
    again = [step for step in first if step in second and step != "draws"]
    assert again[:1] == [4] and max(again) <= 6 and all(first[step] == second[step] for step in again)
    batches = {step: groups for step, groups in (first | second).items() if step != "draws"}
    indices = [group.index for groups in batches.values() for group in groups]
    assert len(set(indices)) == len(indices) == 8 * CONFIG.batch_size
    spans = {(step, step - version) for step in batches for group in batches[step] for version in drew(group)}
    assert {1} <= {age for _, age in spans} <= {0, 1, 2}
    drawn = {(session, place) for _, session, place in first["draws"]}
    twice = [session for _, session, place in second["draws"] if (session, place) in drawn]
    assert len(twice) == len(set(twice)), "of an episode at most the turn that was under way is drawn again"
    rows = read_metrics(tmp_path / "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    for row in rows:
        shares = [row.get(f"train/age_{age}_share", 0.0) for age in range(3)]
        assert sum(shares) == pytest.approx(1) and row["filling/mean_age"] <= 2 and row["filling/length_bias"] > 0
    assert any(row.get("train/age_0_share", 0.0) < 1 for row in rows)
    assert not list((tmp_path / "rollouts").iterdir())


def drew(group: Group) -> set[int]:
    return {version for episode in group.episodes for version in episode.sampled_by}


def groups_of(versions: list[int], seed: int = 0) -> list[Group]:
    """Two groups whose tokens are of these versions in turn."""
    rng = np.random.default_rng(seed)

    def episode(value: float) -> Episode:
        length = int(rng.integers(20, 60))
        mask = [0] * 3 + [1] * (length - 3)
        logprobs = [float(rng.normal(-6.2, 0.5)) if m else 0.0 for m in mask]
        score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
        ids = rng.integers(0, 300, length).tolist()
        drawn = [versions[i * len(versions) // length] * m for i, m in enumerate(mask)]
        return Episode("e", ids, 3, mask, logprobs, drawn, [], score, 1, "answered", [])

    return [Group(i, "e", min(versions), [episode(0.0), episode(1.0), episode(0.5)]) for i in range(2)]


def updated(model, params, groups: list[Group], config: GRPOConfig):
    state = initial_state(jax.tree.map(jnp.copy, params), grpo_optimizer(config))
    weights, _, metrics = update_step(*state, groups, model, config, update=7)
    return jax.device_get(weights), metrics


def test_a_token_counts_as_it_would_online_and_is_measured_by_its_age(model, params) -> None:
    """What drew it is in its logprob; its age is for the metrics alone."""
    groups = groups_of([5, 6, 7])
    online, plain = updated(model, params, groups, SHORT)
    old, metrics = updated(model, params, groups, dataclasses.replace(SHORT, async_steps=3))
    for a, b in zip(jax.tree.leaves(online), jax.tree.leaves(old), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert not any(name.startswith("age_") for name in plain)
    shares = [metrics[f"age_{age}_share"] for age in range(3)]
    assert min(shares) > 0.25 and sum(shares) == pytest.approx(1) and not any("age_3" in name for name in metrics)
    for figure in ("mismatch_kl", "mismatch_abs", "tis_clipped_share"):
        total = sum(share * metrics[f"age_{age}_{figure}"] for age, share in enumerate(shares))
        assert total == pytest.approx(metrics[figure], rel=1e-4) == pytest.approx(plain[figure], rel=1e-4)


def test_a_checkpoint_of_before_has_its_tokens_versions() -> None:
    buffer = GroupBuffer(2, min_reward_std=0.0, max_age=1)
    buffer.groups = groups_of([4])
    groups = msgspec.to_builtins(buffer.groups)
    again = GroupBuffer(2, min_reward_std=0.0, max_age=1)
    again.load({"groups": groups, "counts": {}})
    assert again.groups == buffer.groups
    for group in groups:
        for episode in group["episodes"]:
            episode["versions"] = [4]  # of its one turn
    again.load({"groups": groups, "counts": {}})
    assert again.groups == buffer.groups


def test_a_deadline_is_for_strictly_online_batches() -> None:
    with pytest.raises(SettingError, match="deadline_seconds is 60 with async_steps=2"):
        dataclasses.replace(CONFIG, async_steps=2, deadline_seconds=60.0)
