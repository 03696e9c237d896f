"""Reinforcement-learning objectives as functions of a dataclass of arrays.

They return *sums* and counts, never means. The caller divides once after adding all micro-batches and devices, so
accumulating N micro-batches exactly equals one big batch.

The default is the paper's: token-level PPO clip, advantages in deviations of the group, a sum over all tokens divided
by their number (eq. 32), no KL term, no entropy bonus. Alternatives for comparison:

  KL term (arXiv 2402.03300)     kl_coef: of each token, to the weights that the run started from, by Schulman's k3.
  entropy bonus                  entropy_coef: of each token's distribution.

  Dr. GRPO (arXiv 2503.20783)    scale_by_std=False, loss_agg_mode="fixed": neither an episode's length nor its group's
                                 deviation weighs.
  GSPO (arXiv 2507.18071)        ratio="sequence", loss_agg_mode="episode": one clipped ratio for the whole episode.
  sequence-level correction      tis="sequence": the sampler's mismatch of the whole episode, truncated once.

If tokens are older than the weights at the start of an update, these weights are the proximal policy. Ratio and clip
are relative to them, and a truncated weight corrects for the sampler (the decoupled objective, arXiv 2505.24298).
ratio_reference="sampler" is the coupled objective: ratio and clip are relative to the sampler's weights, without a
correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from astra_jax.base.settings import Bound, Count, OneOf, SettingError, Settings
from astra_jax.rollout.records import group_deviation
from synthesis.core.references import referred

Array = Any


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """Settings of the objective. Defaults are the paper's where it gives one; the others are ours.

    Attributes:
        function: `grpo`, with the settings below, or your own function as my_module:my_name, with the arguments and
            results of `grpo_objective`.
        clip_low: a token with a negative advantage gets no gradient if its ratio is below 1 - clip_low. Ours: 0.2,
            PPO's.
        clip_high: a token with a positive advantage gets no gradient if its ratio is above 1 + clip_high. Ours: 0.28,
            DAPO's higher upper clip, so that rare good tokens can grow. For GSPO (`ratio=sequence`) use much smaller
            clips; its paper has 3e-4 and 4e-4.
        ratio: ratio of trained and old policy: of each `token`, or the geometric mean over the episode (`sequence`,
            GSPO). With one update for each batch it is 1 either way.
        tis_cap: upper bound of the importance weight between trainer and sampler (truncated importance sampling). Ours:
            2. None: no importance weight.
        tis: importance weight of each `token`, or the product over the episode (`sequence`).
        scale_by_std: divide the advantage, the distance of the reward from its group's mean, by the group's standard
            deviation (TRL's `scale_rewards`).
        loss_agg_mode: how token losses are averaged. `batch`: every token of the batch weighs the same. `group` and
            `episode`: each group or episode weighs the same, as the mean over its tokens. `fixed`: the sum over tokens,
            divided by episodes x fixed_tokens.
        fixed_tokens: the constant of `loss_agg_mode=fixed`, in tokens. Ours: the response limit. Another value only
            scales the learning rate.
        ratio_reference: weights that ratio and clip are relative to: the `trainer`'s before the update, or those of the
            `sampler`, without an importance weight.
        kl_coef: weight of a KL penalty to the initial weights: r - 1 - log r for each token, with r = initial / trained
            probability (Schulman's k3, as in GRPO's paper, arXiv 2402.03300 eq. 4; TRL's `beta`). It costs a forward
            pass, and a copy of the weights unless there are adapters. Ours: 0, as in the paper.
        entropy_coef: weight of an entropy bonus for each token, in nats, at the sampling temperature. Ours: 0, as in
            the paper.
    """

    function: Annotated[str, OneOf(("grpo",), own=True)] = "grpo"
    clip_low: Annotated[float, Bound(least=0, below=1)] = 0.2
    clip_high: Annotated[float, Bound(least=0, most=1e6)] = 0.28
    ratio: Literal["token", "sequence"] = "token"
    tis_cap: Annotated[float, Bound(least=1e-30, most=1e30)] | None = 2.0
    tis: Literal["token", "sequence"] = "token"
    scale_by_std: bool = True
    loss_agg_mode: Literal["batch", "group", "episode", "fixed"] = "batch"
    fixed_tokens: Count = 49_152
    ratio_reference: Literal["trainer", "sampler"] = "trainer"
    kl_coef: Annotated[float, Bound(least=0, most=1e3)] = 0.0
    entropy_coef: Annotated[float, Bound(least=-1e3, most=1e3)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_reference == "sampler" and "sequence" in (self.ratio, self.tis):
            raise SettingError(
                f"objective.ratio_reference is sampler with ratio={self.ratio} and tis={self.tis}: its ratio is a "
                "token's own, and there is no other weight; use token for both, or ratio_reference=trainer"
            )

    @property
    def corrects_episodes(self) -> bool:
        """True if a token's weight depends on other tokens of its episode, whose logprobs must be computed first."""
        return self.tis == "sequence" and self.tis_cap is not None

    @property
    def has_token_weights(self) -> bool:
        """True if a term besides the advantages needs the token weights of `loss_agg_mode`."""
        return bool(self.kl_coef or self.entropy_coef) and self.loss_agg_mode in ("group", "episode")


@struct.dataclass
class PolicyTerms:
    """Inputs of the objective for each target token, all of one shape. Values are arbitrary (but not NaN) where `mask`
    is 0.

    Attributes:
        logps: the trained policy's logprobs, at the sampling temperature; gradients flow through these only.
        old_logps: the trainer's logprobs under the weights at the start of the update.
        sampler_logps: reported by the sampler.
        advantages: the episode's advantage, on each of its tokens.
        mask: 1 on sampled tokens, 0 on the prompt, tool outputs, template tokens and padding.
        episode_log_ratio: mean of logps - old_logps over the episode's sampled tokens; only for `ratio="sequence"`.
        episode_mismatch: sum of old_logps - sampler_logps over them; only for `tis="sequence"`.
        ages: int32, number of updates between the weights that sampled the token and those at the start of the update;
            only if they may differ.
        reference_logps: logprobs under the weights that the run started from; only with `kl_coef`.
        entropies: of the trained policy's distributions; only with `entropy_coef`.
        weights: token weights of `loss_agg_mode`, already included in `advantages`; None if all are 1.
    """

    logps: Array
    old_logps: Array
    sampler_logps: Array
    advantages: Array
    mask: Array
    episode_log_ratio: Array = None
    episode_mismatch: Array = None
    ages: Array = None
    reference_logps: Array = None
    entropies: Array = None
    weights: Array = None


@struct.dataclass
class AgeSums:
    """Sums as in `ObjectiveSums`, by token age from 0, [ages]."""

    tokens: Array
    tis_clipped: Array
    mismatch_kl: Array
    mismatch_abs: Array


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
        by_age: None if tokens have no ages.
        kl_reference: estimate of the KL term; None without it.
    """

    tokens: Array
    clipped_low: Array
    clipped_high: Array
    tis_clipped: Array
    mismatch_kl: Array
    mismatch_abs: Array
    by_age: AgeSums | None = None
    kl_reference: Array | None = None


class Objective(Protocol):
    """A function to minimise, as a sum over tokens; see `grpo_objective`.

    It is called with chunks of tokens, so each token's part may depend on that token's terms only. Values of whole
    episodes or groups come in `PolicyTerms`.
    """

    def __call__(
        self, terms: PolicyTerms, config: ObjectiveConfig, max_off_policy_steps: int = 0
    ) -> tuple[Array, ObjectiveSums]: ...


def objective_function(config: ObjectiveConfig) -> Objective:
    """Return the function named by `config.function`. Raises InputError if it does not exist."""
    function: Objective = grpo_objective if config.function == "grpo" else referred(config.function)
    return function


def grpo_objective(
    terms: PolicyTerms, config: ObjectiveConfig, max_off_policy_steps: int = 0
) -> tuple[Array, ObjectiveSums]:
    """Return the PPO clip loss with truncated importance sampling (paper eq. 32), plus terms of `kl_coef` and
    `entropy_coef`.

    Args:
        terms: see `PolicyTerms`.
        config: its `scale_by_std` and `loss_agg_mode` are already in `terms.advantages`, see `batch_advantages`.
        max_off_policy_steps: the largest of `terms.ages`.

    Returns:
        (loss to minimise, *summed* over tokens; sums for metrics).
    """
    mask = terms.mask.astype(jnp.float32)
    # Masked positions may have any finite logprob; a zero log-ratio there keeps exp() finite, so 0 * inf cannot
    # arise.
    on = mask > 0
    old = jax.lax.stop_gradient(terms.old_logps)
    reference = old if config.ratio_reference == "trainer" else terms.sampler_logps
    log_ratio = jnp.where(on, terms.logps - reference, 0.0)
    if config.ratio == "sequence":
        # The value is the episode's and the gradient each token's: with `loss_agg_mode="episode"` that is
        # GSPO's gradient.
        own = jax.lax.stop_gradient(log_ratio)
        log_ratio = jnp.where(on, terms.episode_log_ratio, 0.0) + log_ratio - own
    ratio = jnp.exp(log_ratio)
    mismatch = jnp.where(on, old - terms.sampler_logps, 0.0)
    sampler_ratio = jnp.exp(mismatch)

    advantages = terms.advantages
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)

    def total(x: Array) -> Array:
        return jnp.sum(x * mask)

    truncated, over = jnp.zeros(()), None
    if config.tis_cap is not None and config.ratio_reference == "trainer":
        log_weight = mismatch if config.tis == "token" else jnp.where(on, terms.episode_mismatch, 0.0)
        log_cap = math.log(config.tis_cap)
        gain = gain * jnp.exp(jnp.minimum(log_weight, log_cap))  # this order cannot overflow
        over = log_weight > log_cap
        truncated = total(over)

    by_age = None
    if terms.ages is not None:
        of_age = (terms.ages[..., None] == jnp.arange(max_off_policy_steps + 1)) * mask[..., None]

        def totals(x: Array) -> Array:
            return jnp.sum(x[..., None] * of_age, tuple(range(x.ndim)))

        by_age = AgeSums(
            tokens=totals(mask),
            tis_clipped=totals(jnp.zeros_like(mask) if over is None else over),
            mismatch_kl=totals(sampler_ratio - 1.0 - mismatch),
            mismatch_abs=totals(jnp.abs(mismatch)),
        )

    weights = 1.0 if terms.weights is None else terms.weights
    kl, more = None, []
    if config.kl_coef:
        below = jnp.where(on, terms.reference_logps - terms.logps, 0.0)
        estimate = jnp.exp(below) - below - 1.0
        kl = total(estimate)
        more.append(config.kl_coef * total(weights * estimate))
    if config.entropy_coef:
        more.append(-config.entropy_coef * total(weights * terms.entropies))

    sums = ObjectiveSums(
        tokens=jnp.sum(mask),
        clipped_low=total((ratio < 1.0 - config.clip_low) & (advantages < 0)),
        clipped_high=total((ratio > 1.0 + config.clip_high) & (advantages > 0)),
        tis_clipped=truncated,
        mismatch_kl=total(sampler_ratio - 1.0 - mismatch),
        mismatch_abs=total(jnp.abs(mismatch)),
        by_age=by_age,
        kl_reference=kl,
    )
    return sum(more, -total(gain)), sums


def group_advantages(rewards: Sequence[float], *, scale_by_std: bool = True) -> np.ndarray:
    """Return reward - group mean, divided by the group's deviation if `scale_by_std`; float64 [len(rewards)].

    Raises:
        ValueError: all rewards are equal. Such a group gives no signal and must be filtered out first.
    """
    deviation = group_deviation(rewards)
    if not deviation > 0:
        raise ValueError(f"group rewards {list(rewards)} have no deviation; train on groups whose rewards differ only")
    values = np.asarray(rewards, dtype=np.float64)
    return (values - values.mean()) / (deviation if scale_by_std else 1.0)


def batch_advantages(
    rewards: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], config: ObjectiveConfig
) -> tuple[list[float], float]:
    """Return the advantage of each episode's tokens, times its weight in `config.loss_agg_mode`, and the divisor of the
    objective's sum.

    Args:
        rewards: by group and episode; every group has a deviation.
        tokens: number of sampled tokens in each of those episodes, positive.

    Returns:
        (advantages by group and episode, times the weights of `config.loss_agg_mode`; the denominator).
    """
    advantages = [group_advantages(group, scale_by_std=config.scale_by_std) for group in rewards]
    counts = [np.asarray(group, dtype=np.float64) for group in tokens]
    if config.loss_agg_mode == "group":
        advantages, total = [a / n.sum() for a, n in zip(advantages, counts, strict=True)], float(len(counts))
    elif config.loss_agg_mode == "episode":
        advantages, total = [a / n for a, n in zip(advantages, counts, strict=True)], float(sum(map(len, counts)))
    elif config.loss_agg_mode == "fixed":
        total = float(sum(map(len, counts)) * config.fixed_tokens)
    else:
        total = float(sum(n.sum() for n in counts))
    return [float(a) for group in advantages for a in group], total


def token_weights(tokens: Sequence[Sequence[int]], config: ObjectiveConfig) -> list[float]:
    """Return `config.loss_agg_mode`'s token weight of each episode; arguments and order as in `batch_advantages`."""
    if config.loss_agg_mode == "group":
        return [1.0 / sum(group) for group in tokens for _ in group]
    return [1.0 / count if config.loss_agg_mode == "episode" else 1.0 for group in tokens for count in group]
