"""Reinforcement-learning objectives: plain functions of a dataclass of arrays.

They return *sums* and counts, never means: the caller divides once, after every micro-batch and device has been added,
so that accumulating over N micro-batches equals one big batch exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = Any


@struct.dataclass
class PolicyTerms:
    """What the objective needs of each target token. All of one shape; anything goes where `mask` is 0, NaN excepted.

    Attributes:
        logps: the trained policy's logprobs, at the sampling temperature; gradients flow through these only.
        old_logps: the trainer's logprobs under the weights that the update starts from.
        sampler_logps: what the sampler said when it drew the token.
        advantages: the episode's advantage, on each of its tokens.
        mask: 1 on sampled tokens, 0 on the prompt, tool outputs, template tokens and padding.
    """

    logps: Array
    old_logps: Array
    sampler_logps: Array
    advantages: Array
    mask: Array


@struct.dataclass
class ObjectiveSums:
    """Sums over unmasked tokens; divide by `tokens` for means and shares.

    Attributes:
        tokens: how many tokens are trained on.
        clipped_low: tokens whose gradient the lower clip removed (ratio < 1 - clip_low, negative advantage).
        clipped_high: tokens whose gradient the upper clip removed (ratio > 1 + clip_high, positive advantage).
        tis_clipped: tokens whose importance weight was truncated.
        mismatch_kl: r - 1 - log r with r = trainer/sampler probability: non-negative, its mean estimates
            KL(sampler || trainer).
        mismatch_abs: |trainer - sampler| logprob.
    """

    tokens: Array
    clipped_low: Array
    clipped_high: Array
    tis_clipped: Array
    mismatch_kl: Array
    mismatch_abs: Array


def grpo_objective(
    terms: PolicyTerms, *, clip_low: float, clip_high: float, tis_cap: float | None
) -> tuple[Array, ObjectiveSums]:
    """Token-level PPO clip with truncated importance sampling; no KL term, no entropy bonus (paper eq. 32).

    Args:
        terms: see `PolicyTerms`.
        clip_low: lower clip; ratios below 1 - clip_low get no gradient where the advantage is negative.
        clip_high: upper clip.
        tis_cap: the weight min(old/sampler probability, cap) corrects for a sampler whose numerics or weights differ
            from the trainer's; None leaves it out.

    Returns:
        (loss to minimise, *summed* over tokens; sums for metrics).
    """
    mask = terms.mask.astype(jnp.float32)
    # Masked positions may hold any finite logprob; a zero log-ratio there keeps exp() finite, so 0 * inf cannot arise.
    on = mask > 0
    old = jax.lax.stop_gradient(terms.old_logps)
    log_ratio = jnp.where(on, terms.logps - old, 0.0)
    ratio = jnp.exp(log_ratio)
    mismatch = jnp.where(on, old - terms.sampler_logps, 0.0)
    sampler_ratio = jnp.exp(mismatch)

    advantages = terms.advantages
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    if tis_cap is not None:
        gain = gain * jnp.minimum(sampler_ratio, tis_cap)

    def total(x: Array) -> Array:
        return jnp.sum(x * mask)

    sums = ObjectiveSums(
        tokens=jnp.sum(mask),
        clipped_low=total((ratio < 1.0 - clip_low) & (advantages < 0)),
        clipped_high=total((ratio > 1.0 + clip_high) & (advantages > 0)),
        tis_clipped=total(sampler_ratio > tis_cap) if tis_cap is not None else jnp.zeros(()),
        mismatch_kl=total(sampler_ratio - 1.0 - mismatch),
        mismatch_abs=total(jnp.abs(mismatch)),
    )
    return -total(gain), sums


def group_deviation(rewards: Sequence[float]) -> float:
    """Population standard deviation of a group's rewards; exactly 0 when they are equal (rounding would say 1e-17)."""
    values = np.asarray(rewards, dtype=np.float64)
    return float(values.std()) if values.size and values.min() < values.max() else 0.0


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """(reward - group mean) / group deviation, float64 [len(rewards)].

    Raises:
        ValueError: all rewards are equal: such a group teaches nothing and must be filtered out before (delta >= 0).
    """
    deviation = group_deviation(rewards)
    if not deviation > 0:
        raise ValueError(f"group rewards {list(rewards)} have no deviation; train on groups with Std > delta only")
    values = np.asarray(rewards, dtype=np.float64)
    return (values - values.mean()) / deviation
