"""One update of GRPO, from a batch of groups to new weights.

Episodes are packed into rows. Micro-batches of rows add up their gradients, which equals one whole batch exactly,
followed by one optimizer step. With `mini_batches` the batch is split into that many updates.

Old logprobs are the trainer's own under the weights at the start of the update. With one update per batch they equal
the current ones, so the ratio is 1 and its gradient is the policy gradient. One forward pass gives both. A
separate forward pass is needed only if they differ, or if a token's term depends on its whole episode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from astra_jax.attention.documents import numbers
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.losses import (
    AgeSums,
    ObjectiveSums,
    PolicyTerms,
    batch_advantages,
    objective_function,
    token_weights,
)
from astra_jax.grpo.packing import PolicyBatch, pack
from astra_jax.head import summed_loss, token_logprobs
from astra_jax.mesh import BATCH, AnyMesh, batch_sharding, constrain, unzigzag
from astra_jax.models import adapters
from astra_jax.models.layers.moe import RouterSums, router_metrics
from astra_jax.models.model import Model, Params
from astra_jax.rollout.records import Group
from astra_jax.run.batch import context_size, in_mesh_order, same_document, shift, target_mask, to_device, unshift
from astra_jax.run.compiler import program
from astra_jax.run.config import JitKey
from astra_jax.run.gradients import accumulate_one, add, gradient_shapes, sum_replicas, zero_gradients
from astra_jax.run.moments import on_devices
from astra_jax.run.optimizers import abstract_state, apply_gradients, learning_rate, make_optimizer

Array = jax.Array
Sums = tuple[ObjectiveSums, Array, RouterSums | None]
"""Sums of the objective's metrics, the tokens' entropies, and the router's statistics (None if dense)."""

_AHEAD = 2
"""Micro-batches queued on the devices while an earlier result is awaited, so the devices are never idle."""


def update_step(
    params: Params,
    opt_state: Any,
    groups: Sequence[Group],
    model: Model,
    config: GRPOConfig,
    *,
    base: Params | None = None,
    reference: Params | None = None,
    mesh: Mesh | None = None,
    policy_version: int = 0,
    on_rows: Callable[[np.ndarray], None] = lambda segment_ids_bt: None,
    before_program: Callable[[str], None] = lambda program: None,
    on_result: Callable[[], None] | None = None,
) -> tuple[Params, Any, dict[str, float]]:
    """Train on a batch of valid groups; `params` and `opt_state` are donated.

    Args:
        groups: `config.mini_batches` must divide their number.
        base: frozen weights if `params` are adapters; not donated. None if `params` are all weights.
        reference: starting weights for `objective.kl_coef`; not donated. None with adapters, which use `base`.
        policy_version: of `params`: the number of steps before; tokens' ages are relative to it.
        on_rows: called with the segment ids of each trained micro-batch.
        before_program: called with a program's name before it runs: `take_step`, or `accumulate` with its row length.
        on_result: called for each micro-batch of each pass after the devices computed it; None: do not wait.

    Returns:
        (params, optimizer state, metrics: means over the batch's tokens or mini-batches). If `train/grad_norm` is not
        finite, at least one optimizer step changed nothing.
    """
    options: dict[str, Any] = {"model": model, "config": config, "mesh": mesh}
    policy = partial(adapters.attach_lora, base=base, lora=config.lora)
    results = _Results(on_result)
    objective = config.objective
    needs_old = config.mini_batches > 1 or objective.corrects_episodes
    anchor = None
    if objective.kl_coef:
        anchor = jax.tree.map(on_devices, base if reference is None else reference)

    def with_logprobs(batch: PolicyBatch) -> PolicyBatch:
        if needs_old:
            batch = with_old_logps(policy(params), batch, **options)
            results.add(batch.old_logps_bt)
        if anchor is not None:
            batch = replace(batch, reference_logps_bt=trainer_logprobs(anchor, to_device(batch, mesh), **options))
            results.add(batch.reference_logps_bt)
        return batch

    size = len(groups) // config.mini_batches
    mini_batches = [
        build_micro_batches(groups[start : start + size], model, config, policy_version, mesh=mesh)
        for start in range(0, len(groups), size)
    ]
    if needs_old or objective.kl_coef:
        mini_batches = [([with_logprobs(batch) for batch in batches], total) for batches, total in mini_batches]

    anchor = None  # frees device memory before the gradients are allocated
    rate = learning_rate(config, config.steps)(policy_version)
    loss, parts, taken = 0.0, None, []
    for number, (batches, total) in enumerate(mini_batches):
        gradients = zero_gradients(params, mesh)
        for batch in batches:
            on_rows(np.asarray(batch.segment_ids_bt))
            if number and objective.ratio == "sequence":  # the ratio is 1 before the first step
                batch = with_episode_ratio(policy(params), batch, **options)
            batch = to_device(batch, mesh)
            before_program(f"accumulate {batch.tokens_bt.shape[1]}")
            gradients, (part, sums) = accumulate(params, gradients, batch, base=base, **options)
            results.add(part)
            loss += part / total
            parts = sums if parts is None else add(parts, sums)
        before_program("take_step")
        given = (gradients, jnp.float32(total), jnp.float32(rate))
        params, opt_state, one = take_step(params, opt_state, *given, config=config, mesh=mesh)
        taken.append(one)

    results.wait()
    sums, loss, taken = jax.device_get((*sum_replicas((parts, loss), mesh), taken))
    means = {"train/loss": float(loss) / config.mini_batches, "train/learning_rate": float(rate)}
    return params, opt_state, means | _step_metrics(groups, mini_batches, sums, taken)


class _Results:
    """Results that devices are computing, a few at a time so that they never stand idle.

    Args:
        on_result: called for each that is there, in order; None: nobody waits for them.
    """

    def __init__(self, on_result: Callable[[], None] | None) -> None:
        self._on_result, self._queue = on_result, deque[Any]()

    def add(self, result: Any) -> None:
        """Add a result, and wait for all but the newest `_AHEAD`."""
        if self._on_result is not None:
            self._queue.append(result)
            self.wait(_AHEAD)

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many are left."""
        while self._on_result is not None and len(self._queue) > most:
            self._queue.popleft().block_until_ready()
            self._on_result()


def _step_metrics(
    groups: Sequence[Group],
    mini_batches: Sequence[tuple[list[PolicyBatch], float]],
    sums: Sums,
    taken: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Return the metrics of an update: means over trained tokens, and shares.

    Args:
        taken: the results of each optimizer step.
    """
    objective, entropy, router = sums
    of_batch = jax.tree.map(float, replace(objective, by_age=None))
    every = [batch for batches, _ in mini_batches for batch in batches]
    in_rows = sum(int((b.segment_ids_bt > 0).sum()) for b in every)
    computed = sum(b.tokens_bt.size for b in every)
    in_episodes = sum(len(episode.token_ids) for group in groups for episode in group.episodes)
    metrics = {
        "train/grad_norm": sum(float(one["train/grad_norm"]) for one in taken) / len(taken),
        "weights_finite": all(one["weights_finite"] for one in taken),
        "train/entropy": float(entropy) / of_batch.tokens,
        "train/mismatch_kl": of_batch.mismatch_kl / of_batch.tokens,
        "train/mismatch_abs": of_batch.mismatch_abs / of_batch.tokens,
        "train/clipped_low_share": of_batch.clipped_low / of_batch.tokens,
        "train/clipped_high_share": of_batch.clipped_high / of_batch.tokens,
        "train/tis_clipped_share": of_batch.tis_clipped / of_batch.tokens,
        "train/trained_tokens": of_batch.tokens,
        "data/mask_share": of_batch.tokens / in_rows,
        "data/padding_share": 1 - in_rows / computed,
        "data/row_tokens": computed / sum(len(b.tokens_bt) for b in every),
        "data/shared_share": 1 - in_rows / in_episodes,
    }
    if of_batch.kl_reference is not None:
        metrics["train/kl_reference"] = of_batch.kl_reference / of_batch.tokens
    if objective.by_age is not None:
        metrics |= _by_age(objective.by_age)
    if router is not None:
        metrics |= {name: float(value) for name, value in router_metrics(router).items()}
    return metrics


def _by_age(sums: AgeSums) -> dict[str, float]:
    """Return, for each age that occurs, its share of the tokens, and means over them."""
    metrics, total = {}, float(sums.tokens.sum())
    for age, tokens in enumerate(map(float, sums.tokens)):
        if tokens:
            metrics[f"train/age_{age}_share"] = tokens / total
            metrics[f"train/age_{age}_tis_clipped_share"] = float(sums.tis_clipped[age]) / tokens
            metrics[f"train/age_{age}_mismatch_kl"] = float(sums.mismatch_kl[age]) / tokens
            metrics[f"train/age_{age}_mismatch_abs"] = float(sums.mismatch_abs[age]) / tokens
    return metrics


def build_micro_batches(
    groups: Sequence[Group], model: Model, config: GRPOConfig, policy_version: int = 0, *, mesh: AnyMesh | None = None
) -> tuple[list[PolicyBatch], float]:
    """Return the micro-batches (NumPy) of one optimizer step, and the divisor of the sum of their losses."""
    episodes = [episode for group in groups for episode in group.episodes]
    tokens = [[sum(episode.loss_mask) for episode in group.episodes] for group in groups]
    advantages, total = batch_advantages([group.rewards for group in groups], tokens, config.objective)
    weights = token_weights(tokens, config.objective) if config.objective.has_token_weights else None
    batches = pack(
        episodes,
        advantages,
        row_buckets=config.row_buckets,
        rows=config.micro_batch_size,
        groups=[number for number, group in enumerate(groups) for _ in group.episodes],
        needs_prefix_flag=model.needs_prefix_flag(mesh),
        policy_version=policy_version if config.async_rollouts else None,
        weights=weights,
    )
    return batches, total


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def loss_sums(
    params: Params,
    batch: PolicyBatch,
    *,
    model: Model,
    config: GRPOConfig | JitKey,
    base: Params | None = None,
    mesh: AnyMesh | None = None,
) -> tuple[Array, Sums]:
    """Return one micro-batch's sum of the objective. It is its part of eq. 32 when divided by the
    total of `build_micro_batches`. A further loss term is a sum too, with `terms.weights` (see
    `ObjectiveConfig.has_token_weights`), since the same total divides it.
    """
    params = adapters.attach_lora(params, base, config.lora)
    x_btd, router = _hidden(params, batch, model, config, mesh)

    def objective(logps: Array, entropies: Array, terms: PolicyTerms) -> tuple[Array, Any]:
        if terms.old_logps is None:
            terms = replace(terms, old_logps=jax.lax.stop_gradient(logps))
        terms = replace(terms, logps=logps, entropies=entropies if config.objective.entropy_coef else None)
        oldest = config.max_off_policy_steps if config.async_rollouts else 0
        loss, sums = objective_function(config.objective)(terms, config.objective, oldest)
        return loss, (sums, jnp.sum(entropies * terms.mask))

    terms = in_mesh_order(_terms(batch, config), mesh)
    loss, (sums, entropy) = summed_loss(
        objective,
        x_btd,
        model.head_weights(params),
        in_mesh_order(shift(batch.tokens_bt), mesh),
        terms=terms,
        counted_bt=terms.mask,
        temperature=config.episode.temperature,
        mesh=mesh,
        has_entropy_gradient=bool(config.objective.entropy_coef),
    )
    return loss, (sums, entropy, router)


def _terms(batch: PolicyBatch, config: GRPOConfig | JitKey) -> PolicyTerms:
    """Return the objective's inputs at the positions that predict each token; `logps` come from the head."""
    ratio = batch.episode_log_ratio_bt
    if config.objective.ratio == "sequence" and ratio is None:
        ratio = jnp.zeros_like(batch.advantages_bt)
    at_token = {
        "old_logps": batch.old_logps_bt,
        "sampler_logps": batch.sampler_logps_bt,
        "advantages": batch.advantages_bt,
        "episode_log_ratio": ratio if config.objective.ratio == "sequence" else None,
        "episode_mismatch": batch.episode_mismatch_bt,
        "ages": batch.ages_bt,
        "reference_logps": batch.reference_logps_bt,
        "weights": batch.weights_bt,
    }
    shifted = {name: None if x is None else shift(x) for name, x in at_token.items()}
    return PolicyTerms(logps=None, mask=target_mask(batch), **shifted)


@program(settings="config", static_argnames=("model", "config", "mesh"), donate_argnames=("gradients",))
def accumulate(
    params: Params,
    gradients: Params,
    batch: PolicyBatch,
    *,
    model: Model,
    config: JitKey,
    base: Params | None = None,
    mesh: Mesh | None = None,
) -> tuple[Params, tuple[Array, Sums]]:
    """Add one micro-batch's gradients; (gradients, (summed loss, other sums)), see `gradients.accumulate_one`."""
    return accumulate_one(partial(loss_sums, model=model, config=config), params, base, gradients, batch, mesh)


def grpo_optimizer(config: GRPOConfig | JitKey) -> optax.GradientTransformation:
    """Return the configured optimizer; its state does not depend on the learning rate."""
    return make_optimizer(config, config.learning_rate)


@program(settings="config", static_argnames=("config", "mesh"), donate_argnames=("params", "opt_state"))
def take_step(
    params: Params,
    opt_state: Any,
    gradients: Params,
    total: Array,
    rate: Array,
    *,
    config: JitKey,
    mesh: Mesh | None = None,
) -> tuple[Params, Any, dict[str, Array]]:
    """Take one optimizer step at this learning rate, on the sum of `accumulate`; see `optimizers.apply_gradients`."""
    gradients, optimizer = sum_replicas(gradients, mesh), make_optimizer(config, rate)
    return apply_gradients(params, opt_state, gradients, total, optimizer=optimizer, rounding=config.rounding)


def abstract_arguments(
    model: Model, config: GRPOConfig, length: int, mesh: Mesh | None
) -> tuple[Params, Any, Params, PolicyBatch, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of an update's arguments, with rows of `length` and shared prompts, except
    `adapters.abstract_base`.

    Returns:
        (params, optimizer state, gradients, a micro-batch, the batch's total). The learning rate is like the total.
    """
    trained = adapters.abstract_trained(model, config.lora)
    shardings = adapters.trained_shardings(model, config.lora, mesh)
    optimizer = grpo_optimizer(config)
    params, opt_state = abstract_state(trained, optimizer, shardings, offload=config.optimizer_offload)
    gradients = gradient_shapes(params, mesh)
    place = None if mesh is None else batch_sharding(mesh)
    number = jax.ShapeDtypeStruct((config.micro_batch_size or 1, length), jnp.float32, sharding=place)
    integer = jax.ShapeDtypeStruct(number.shape, jnp.int32, sharding=place)
    ages = integer if config.async_rollouts else None
    has_shared_prefix = model.needs_prefix_flag(mesh)
    batch = PolicyBatch(
        *(integer, integer, integer, integer, number, number),
        ages_bt=ages,
        reference_logps_bt=number if config.objective.kl_coef else None,
        weights_bt=number if config.objective.has_token_weights else None,
        has_shared_prefix=has_shared_prefix,
    )
    return params, opt_state, gradients, batch, jax.ShapeDtypeStruct((), jnp.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Values computed before the gradients


def with_old_logps(
    params: Params, batch: PolicyBatch, *, model: Model, config: GRPOConfig, mesh: Mesh | None = None
) -> PolicyBatch:
    """Return the micro-batch with the trainer's logprobs under `params`, and its episodes' mismatch if needed."""
    placed = to_device(batch, mesh)  # not kept: all micro-batches are prepared before the first is used
    old = trainer_logprobs(params, placed, model=model, config=config, mesh=mesh)
    batch = replace(batch, old_logps_bt=old)
    if config.objective.corrects_episodes:
        batch = replace(batch, episode_mismatch_bt=over_episodes(old - placed.sampler_logps_bt, placed, mesh=mesh))
    return batch


def with_episode_ratio(
    params: Params, batch: PolicyBatch, *, model: Model, config: GRPOConfig, mesh: Mesh | None = None
) -> PolicyBatch:
    """Return the micro-batch with its episodes' mean log-ratio per token, of `params` to the old weights."""
    batch = to_device(batch, mesh)
    change = trainer_logprobs(params, batch, model=model, config=config, mesh=mesh) - batch.old_logps_bt
    tokens = over_episodes(jnp.ones_like(change), batch, mesh=mesh)
    mean = over_episodes(change, batch, mesh=mesh) / jnp.maximum(tokens, 1.0)
    return replace(batch, episode_log_ratio_bt=mean)


@program(settings="config", static_argnames=("model", "config", "mesh"))
def trainer_logprobs(
    params: Params, batch: PolicyBatch, *, model: Model, config: JitKey, mesh: Mesh | None = None
) -> Array:
    """Return each token's logprob under `params` at the sampling temperature, float32 [B, T]; 0 on the first token of a
    document, and on padding."""
    x_btd, _ = _hidden(params, batch, model, config, mesh)
    targets_bt = in_mesh_order(shift(batch.tokens_bt), mesh)
    temperature = config.episode.temperature
    logps, _ = token_logprobs(x_btd, model.head_weights(params), targets_bt, temperature=temperature, mesh=mesh)
    at_token_bt = unshift(unzigzag(logps, context_size(mesh)))
    return jnp.where(unshift(same_document(batch)), at_token_bt, 0.0)


@partial(jax.jit, static_argnames=("mesh",))
def over_episodes(x_bt: Array, batch: PolicyBatch, *, mesh: Mesh | None = None) -> Array:
    """Return, at each token, the sum over its own episode's sampled tokens, [B, T]; 0 on padding."""
    sampled_bt = jnp.where(batch.loss_mask_bt > 0, x_bt, 0.0)

    def row(x_t: Array, segments_t: Array) -> Array:
        return jax.ops.segment_sum(x_t, segments_t, num_segments=len(x_t) + 1)[segments_t]

    return constrain(jax.vmap(row)(sampled_bt, numbers(batch.segment_ids_bt)), mesh, BATCH, "context")


def _hidden(
    params: Params, batch: PolicyBatch, model: Model, config: GRPOConfig | JitKey, mesh: AnyMesh | None
) -> tuple[Array, RouterSums | None]:
    places = in_mesh_order((batch.tokens_bt, batch.positions_bt, batch.segment_ids_bt), mesh)
    how: dict[str, Any] = {"remat": config.remat, "matmul": config.matmul_quantization, "mesh": mesh}
    return model.forward(params, *places, has_shared_prefix=batch.has_shared_prefix, **how)
