"""The GRPO objective against a NumPy reference, and its exactness across micro-batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.losses import PolicyTerms, group_advantages, grpo_objective


def reference(logps, old, sampler, advantages, mask, clip_low, clip_high, tis_cap):
    """Eq. 32's numerator, token by token, in float64, with its gradient by logps."""
    loss, gradient = 0.0, np.zeros_like(logps)
    counts = dict.fromkeys(("tokens", "clipped_low", "clipped_high", "tis_clipped", "mismatch_kl", "mismatch_abs"), 0.0)
    for index in np.ndindex(logps.shape):
        if not mask[index]:
            continue
        ratio = np.exp(logps[index] - old[index])
        advantage = advantages[index]
        weight = 1.0
        sampler_ratio = np.exp(old[index] - sampler[index])
        if tis_cap is not None:
            weight = min(sampler_ratio, tis_cap)
            counts["tis_clipped"] += sampler_ratio > tis_cap
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        if ratio * advantage <= clipped * advantage:
            loss -= weight * ratio * advantage
            gradient[index] = -weight * ratio * advantage
        else:
            loss -= weight * clipped * advantage
        counts["tokens"] += 1
        counts["clipped_low"] += ratio < 1 - clip_low and advantage < 0
        counts["clipped_high"] += ratio > 1 + clip_high and advantage > 0
        counts["mismatch_kl"] += sampler_ratio - 1 - np.log(sampler_ratio)
        counts["mismatch_abs"] += abs(np.log(sampler_ratio))
    return loss, gradient, counts


def random_terms(seed: int, rows: int = 6, length: int = 33) -> PolicyTerms:
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    logps = -rng.exponential(1.5, shape)
    old = logps + rng.normal(0, 0.25, shape)
    return PolicyTerms(
        logps=jnp.asarray(logps, jnp.float32),
        old_logps=jnp.asarray(old, jnp.float32),
        sampler_logps=jnp.asarray(old + rng.normal(0, 0.5, shape), jnp.float32),
        advantages=jnp.asarray(rng.normal(0, 1, shape), jnp.float32),
        mask=jnp.asarray(rng.random(shape) < 0.6, jnp.float32),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tis_cap", [2.0, 1.1, None])
def test_objective_equals_numpy_reference(seed, tis_cap):
    terms = random_terms(seed)
    clips = {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": tis_cap}

    def objective(logps):
        return grpo_objective(terms.replace(logps=logps), **clips)

    (loss, sums), gradient = jax.value_and_grad(objective, has_aux=True)(terms.logps)
    arrays = [np.asarray(x, np.float64) for x in jax.tree.leaves(terms)]
    want_loss, want_gradient, want_counts = reference(*arrays, **clips)
    assert float(loss) == pytest.approx(want_loss, rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-5)
    for name, want in want_counts.items():
        assert float(getattr(sums, name)) == pytest.approx(want, rel=1e-4, abs=1e-4), name
    assert want_counts["clipped_low"] and want_counts["clipped_high"]


def test_sums_over_micro_batches_are_the_sums_of_the_batch():
    terms = random_terms(7, rows=8)
    clips = {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0}
    whole = grpo_objective(terms, **clips)
    parts = [grpo_objective(jax.tree.map(lambda x, i=i: x[i : i + 2], terms), **clips) for i in range(0, 8, 2)]
    added = jax.tree.map(lambda *xs: sum(xs), *parts)
    for got, want in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_masked_positions_never_matter():
    terms = random_terms(3)
    off = terms.mask == 0
    wild = terms.replace(
        logps=jnp.where(off, -1e4, terms.logps),
        sampler_logps=jnp.where(off, 1e4, terms.sampler_logps),
        advantages=jnp.where(off, 99.0, terms.advantages),
    )

    def objective(t):
        return grpo_objective(t, clip_low=0.2, clip_high=0.28, tis_cap=2.0)

    def loss_of(t):
        return jax.value_and_grad(lambda logps: objective(t.replace(logps=logps))[0])(t.logps)

    (loss, gradient), (wild_loss, wild_gradient) = loss_of(terms), loss_of(wild)
    np.testing.assert_allclose(wild_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(wild_gradient, gradient, rtol=1e-6)
    assert not np.any(np.asarray(gradient)[np.asarray(off)])


def test_on_policy_gradient_is_the_policy_gradient():
    """With old = current (the loop's default) nothing clips and d loss / d logp = -advantage."""
    terms = random_terms(5)
    terms = terms.replace(old_logps=terms.logps, sampler_logps=terms.logps)

    def loss(logps):
        on_policy = terms.replace(logps=logps, old_logps=logps)
        return grpo_objective(on_policy, clip_low=0.2, clip_high=0.2, tis_cap=2.0)[0]

    np.testing.assert_allclose(jax.grad(loss)(terms.logps), -terms.advantages * terms.mask, rtol=1e-5)


def test_group_advantages():
    advantages = group_advantages([0.0, 1.0, 1.0, 0.5])
    assert advantages.mean() == pytest.approx(0)
    assert advantages.std() == pytest.approx(1)
    assert advantages[1] == advantages[2] > advantages[3] > advantages[0]
    with pytest.raises(ValueError, match="no deviation"):
        group_advantages([0.7, 0.7, 0.7])
