"""The GRPO objective, with all its options, against a NumPy reference; and its exactness across micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.base.settings import SettingError
from astra_jax.grpo.losses import (
    ObjectiveConfig,
    PolicyTerms,
    batch_advantages,
    group_advantages,
    grpo_objective,
    token_weights,
)


@dataclass
class Tokens:
    """One episode's sampled tokens."""

    reward: float
    logps: np.ndarray
    old: np.ndarray
    sampler: np.ndarray


def reference(groups: list[list[Tokens]], config: ObjectiveConfig):
    """The loss of a batch, token by token in float64, with its gradient by each episode's logprobs, and the counts."""
    episodes = sum(len(group) for group in groups)
    tokens = sum(len(one.logps) for group in groups for one in group)
    loss, gradients = 0.0, []
    counts = dict.fromkeys(("tokens", "clipped_low", "clipped_high", "tis_clipped", "mismatch_kl", "mismatch_abs"), 0.0)
    for group in groups:
        rewards = np.array([one.reward for one in group])
        deviation = np.sqrt(((rewards - rewards.mean()) ** 2).mean())
        for one in group:
            n = len(one.logps)
            advantage = one.reward - rewards.mean()
            if config.advantage == "deviation":
                advantage /= deviation
            share = {
                "batch": 1 / tokens,
                "group": 1 / len(groups) / sum(len(other.logps) for other in group),
                "episode": 1 / episodes / n,
                "fixed": 1 / episodes / config.fixed_tokens,
            }[config.loss_agg_mode]
            of_episode = np.exp((one.logps - one.old).mean())
            correction_of_episode = np.exp((one.old - one.sampler).sum())
            gradient = np.zeros(n)
            for t in range(n):
                ratio = np.exp(one.logps[t] - one.old[t]) if config.ratio == "token" else of_episode
                mismatch = np.exp(one.old[t] - one.sampler[t])
                correction = mismatch if config.tis == "token" else correction_of_episode
                weight = share * (1.0 if config.tis_cap is None else min(correction, config.tis_cap))
                clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                loss -= weight * min(ratio * advantage, clipped * advantage)
                if ratio * advantage <= clipped * advantage:
                    gradient[t] = -weight * ratio * advantage
                counts["tokens"] += 1
                counts["clipped_low"] += ratio < 1 - config.clip_low and advantage < 0
                counts["clipped_high"] += ratio > 1 + config.clip_high and advantage > 0
                counts["tis_clipped"] += config.tis_cap is not None and correction > config.tis_cap
                counts["mismatch_kl"] += mismatch - 1 - np.log(mismatch)
                counts["mismatch_abs"] += abs(np.log(mismatch))
            gradients.append(gradient)
    return loss, gradients, counts


def random_groups(seed: int) -> list[list[Tokens]]:
    rng = np.random.default_rng(seed)

    def episode() -> Tokens:
        n = int(rng.integers(1, 30))
        logps = -rng.exponential(1.5, n)
        old = logps + rng.normal(rng.normal(0, 0.2), 0.25, n)
        return Tokens(float(rng.random()), logps, old, old + rng.normal(0, 0.5, n))

    return [[episode() for _ in range(int(rng.integers(2, 6)))] for _ in range(4)]


def laid_out(groups: list[list[Tokens]], config: ObjectiveConfig, length: int = 40) -> tuple[PolicyTerms, float]:
    """The batch as arrays, an episode a row, prompts and padding around the sampled tokens."""
    rewards = [[one.reward for one in group] for group in groups]
    advantages, total = batch_advantages(rewards, [[len(one.logps) for one in group] for group in groups], config)
    episodes = [one for group in groups for one in group]
    rng = np.random.default_rng(0)
    terms = {name: rng.normal(0, 9, (len(episodes), length)) for name in ("logps", "old", "sampler")}
    mask, ratio, mismatch = (np.zeros((len(episodes), length)) for _ in range(3))
    for row, one in enumerate(episodes):
        at = slice(7, 7 + len(one.logps))
        for name in terms:
            terms[name][row, at] = getattr(one, name)
        mask[row, at] = 1
        ratio[row], mismatch[row] = (one.logps - one.old).mean(), (one.old - one.sampler).sum()
    arrays = [terms["logps"], terms["old"], terms["sampler"], np.tile(np.array(advantages)[:, None], length), mask]
    return PolicyTerms(*(jnp.asarray(x, jnp.float32) for x in (*arrays, ratio, mismatch))), total


def loss_and_gradient(terms: PolicyTerms, config: ObjectiveConfig):
    def objective(logps):
        return grpo_objective(dataclasses.replace(terms, logps=logps), config)

    return jax.value_and_grad(objective, has_aux=True)(terms.logps)


def test_the_coupled_objective_clips_relative_to_the_sampler() -> None:
    """And has no weight: a token that the sampler found e times as likely has the ratio 1 / e."""
    sampler = jnp.asarray([-1.0, -1.0, -2.0, -2.0])
    logps, advantages = sampler + jnp.asarray([1.0, -1.0, 1.0, 0.1]), jnp.asarray([1.0, -1.0, -1.0, 1.0])
    terms = PolicyTerms(logps, logps, sampler, advantages, jnp.ones(4), ages=jnp.asarray([0, 1, 1, 3]))
    config = ObjectiveConfig(ratio_reference="sampler")
    (loss, sums), gradient = jax.value_and_grad(
        lambda x: grpo_objective(dataclasses.replace(terms, logps=x, old_logps=x), config, 3), has_aux=True
    )(logps)
    gains = [1.28, -0.8, -np.e, np.exp(0.1)]
    assert float(loss) == pytest.approx(-sum(gains), rel=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 0.0, np.e, -np.exp(0.1)], atol=1e-6)
    assert (float(sums.clipped_high), float(sums.clipped_low), float(sums.tis_clipped)) == (1, 1, 0)
    np.testing.assert_array_equal(sums.by_age.tokens, [1, 2, 0, 1])
    np.testing.assert_allclose(sums.by_age.mismatch_abs, [1, 2, 0, 0.1], atol=1e-6)
    decoupled, at_ratio_1 = grpo_objective(terms, ObjectiveConfig(), 3)
    assert float(decoupled) == pytest.approx(-(2.0 - np.exp(-1) - 2.0 + np.exp(0.1)), rel=1e-6)
    np.testing.assert_array_equal(at_ratio_1.by_age.tis_clipped, [1, 1, 0, 0])
    for other in ({"ratio": "sequence"}, {"tis": "sequence"}):
        with pytest.raises(SettingError, match="objective.ratio_reference is sampler with ratio="):
            ObjectiveConfig(ratio_reference="sampler", **other)


OPTIONS = list(
    itertools.product(
        ("token", "sequence"),
        (("token", 2.0), ("token", 1.1), ("sequence", 2.0), ("token", None)),
        ("deviation", "mean"),
        ("batch", "group", "episode", "fixed"),
    )
)


@pytest.mark.parametrize(("ratio", "tis", "advantage", "loss_agg_mode"), OPTIONS, ids=str)
def test_objective_equals_numpy_reference(ratio, tis, advantage, loss_agg_mode) -> None:
    config = ObjectiveConfig(
        clip_low=0.1,
        clip_high=0.15,
        ratio=ratio,
        tis=tis[0],
        tis_cap=tis[1],
        advantage=advantage,
        loss_agg_mode=loss_agg_mode,
        fixed_tokens=31,
    )
    clipped = np.zeros(2)
    for seed in range(3):
        groups = random_groups(seed)
        terms, total = laid_out(groups, config)
        (loss, sums), gradient = loss_and_gradient(terms, config)
        want_loss, want_gradients, want_counts = reference(groups, config)
        assert float(loss) / total == pytest.approx(want_loss, rel=1e-4, abs=1e-5)
        for row, want in enumerate(want_gradients):
            np.testing.assert_allclose(gradient[row, 7 : 7 + len(want)] / total, want, rtol=1e-3, atol=1e-6)
        for name, want in want_counts.items():
            assert float(getattr(sums, name)) == pytest.approx(want, rel=1e-4, abs=1e-4), name
        clipped += want_counts["clipped_low"], want_counts["clipped_high"]
    assert clipped.all(), "both clips were tried"


@pytest.mark.parametrize("loss_agg_mode", ["batch", "group", "episode", "fixed"])
def test_the_terms_of_kl_and_entropy_equal_numpy(loss_agg_mode) -> None:
    """They are added to the loss, with the weights of the normalisation; the rest of it stays."""
    plain = ObjectiveConfig(loss_agg_mode=loss_agg_mode, fixed_tokens=31)
    config = dataclasses.replace(plain, kl_coef=0.3, entropy_coef=0.07)
    groups = random_groups(5)
    terms, total = laid_out(groups, config)
    rng, tokens = np.random.default_rng(1), [[len(one.logps) for one in group] for group in groups]
    start, entropies = (rng.normal(-2, 1, terms.mask.shape).astype(np.float32) for _ in range(2))
    by_episode = np.array(token_weights(tokens, config), np.float32)
    weights = np.where(terms.mask > 0, by_episode[:, None], 0)
    more = {"reference_logps": jnp.asarray(start), "entropies": jnp.asarray(entropies)}
    if config.has_token_weights:
        more["weights"] = jnp.broadcast_to(by_episode[:, None], terms.mask.shape)
    assert config.has_token_weights == (loss_agg_mode in ("group", "episode"))

    def loss(logps, entropies, config=config):
        given = dataclasses.replace(terms, logps=logps, **more | {"entropies": entropies})
        return grpo_objective(given, config)

    of = (terms.logps, more["entropies"])
    (found, sums), (by_logps, by_entropies) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*of)
    (without, bare), plain_gradient = jax.value_and_grad(lambda logps: loss(logps, of[1], plain), has_aux=True)(of[0])
    below = np.where(terms.mask > 0, start - terms.logps, 0)
    k3 = np.exp(below) - below - 1
    wanted = 0.3 * (weights * k3).sum() - 0.07 * (weights * entropies).sum()
    assert float(found - without) / total == pytest.approx(wanted / total, rel=1e-3, abs=1e-6)
    np.testing.assert_allclose(by_logps - plain_gradient, 0.3 * weights * (1 - np.exp(below)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(by_entropies, -0.07 * weights, rtol=1e-5)
    assert float(sums.kl_reference) == pytest.approx((k3 * (np.asarray(terms.mask) > 0)).sum(), rel=1e-4)
    assert bare.kl_reference is None
    for name in ("tokens", "clipped_low", "mismatch_kl"):
        assert getattr(sums, name) == getattr(bare, name)


def test_the_sequence_ratio_has_gspos_gradient() -> None:
    """With an equal weight for each episode, the gradient is the derivative of mean(min(s A, clip(s) A))."""
    config = ObjectiveConfig(ratio="sequence", loss_agg_mode="episode", tis_cap=None)
    groups = random_groups(1)
    _, gradients, _ = reference(groups, config)
    for episode, gradient in zip([one for group in groups for one in group], gradients, strict=True):
        for t in range(len(gradient)):
            episode.logps[t] += 1e-6
            above = reference(groups, config)[0]
            episode.logps[t] -= 2e-6
            below = reference(groups, config)[0]
            episode.logps[t] += 1e-6
            assert (above - below) / 2e-6 == pytest.approx(gradient[t], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("sequence", [False, True])
def test_sums_over_micro_batches_are_the_sums_of_the_batch(sequence) -> None:
    config = ObjectiveConfig(ratio="sequence", tis="sequence") if sequence else ObjectiveConfig()
    terms, _ = laid_out(random_groups(7), config)
    whole = grpo_objective(terms, config)
    n = len(terms.mask)
    parts = [grpo_objective(jax.tree.map(lambda x, i=i: x[i : i + 2], terms), config) for i in range(0, n, 2)]
    added = jax.tree.map(lambda *xs: sum(xs), *parts)
    for got, want in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequence", [False, True])
def test_masked_positions_never_matter(sequence) -> None:
    config = ObjectiveConfig(ratio="sequence", tis="sequence") if sequence else ObjectiveConfig()
    terms, _ = laid_out(random_groups(3), config)
    off = terms.mask == 0
    changed = {"logps": -1e4, "sampler_logps": 1e4, "advantages": 99.0, "episode_log_ratio": 1e4}
    noise = {name: jnp.where(off, value, getattr(terms, name)) for name, value in changed.items()}
    wild = dataclasses.replace(terms, **noise)
    ((loss, _), gradient), ((wild_loss, _), wild_gradient) = (loss_and_gradient(t, config) for t in (terms, wild))
    np.testing.assert_allclose(wild_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(wild_gradient, gradient, rtol=1e-6)
    assert not np.any(np.asarray(gradient)[np.asarray(off)])


def test_an_episode_that_the_sampler_saw_quite_differently_does_not_overflow() -> None:
    config = ObjectiveConfig(tis="sequence")
    terms, _ = laid_out(random_groups(3), config)
    for mismatch in (1e6, -1e6):
        (loss, _), gradient = loss_and_gradient(
            dataclasses.replace(terms, episode_mismatch=jnp.full_like(terms.mask, mismatch)), config
        )
        assert np.isfinite(loss) and np.isfinite(gradient).all()
        assert (mismatch < 0) == (not np.any(gradient)), "a weight of 2, or of 0"


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """With old = current (the loop's default) nothing clips and d loss / d logp = -advantage."""
    config = ObjectiveConfig()
    terms, _ = laid_out(random_groups(5), config)
    terms = dataclasses.replace(terms, sampler_logps=terms.logps)

    def loss(logps):
        return grpo_objective(dataclasses.replace(terms, logps=logps, old_logps=logps), config)[0]

    np.testing.assert_allclose(jax.grad(loss)(terms.logps), -terms.advantages * terms.mask, rtol=1e-5)


def test_group_advantages() -> None:
    advantages = group_advantages([0.0, 1.0, 1.0, 0.5])
    assert advantages.mean() == pytest.approx(0)
    assert advantages.std() == pytest.approx(1)
    assert advantages[1] == advantages[2] > advantages[3] > advantages[0]
    np.testing.assert_allclose(group_advantages([0.0, 1.0, 1.0, 0.0], "mean"), [-0.5, 0.5, 0.5, -0.5])
    with pytest.raises(ValueError, match="no deviation"):
        group_advantages([0.7, 0.7, 0.7])


def test_bad_objectives_are_refused() -> None:
    for changes, message in (
        ({"clip_low": 1.0}, "clip_low is 1.0"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"tis_cap": 0.0}, "tis_cap is 0.0"),
        ({"fixed_tokens": 0}, "fixed_tokens is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ObjectiveConfig(**changes)
