"""One update of GRPO: from a batch of groups to new weights.

The episodes are packed into rows; micro-batches of rows add up their gradients, exactly as one batch would; then comes
one optimizer step. With `mini_batches` the batch is cut into as many such updates.

Old logprobs are the trainer's own under the weights that the update starts from. With one update a batch they equal the
current ones, so the ratio is 1 and its gradient is the policy gradient: they are taken from the same forward pass. Only
where they differ, or where a token's part depends on its whole episode, is there a forward pass before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.losses import ObjectiveSums, PolicyTerms, batch_advantages, grpo_objective
from astra_jax.grpo.packing import PolicyBatch, pack
from astra_jax.head import summed_loss, token_logprobs
from astra_jax.mesh import BATCH, batch_sharding, constrain, unzigzag, zigzag
from astra_jax.models.layers.moe import RouterSums, router_metrics
from astra_jax.models.model import Model, Params
from astra_jax.rollout.filling import Group
from astra_jax.run.optimizers import make_optimizer

Array = jax.Array


def update_step(
    params: Params,
    opt_state: Any,
    groups: Sequence[Group],
    model: Model,
    config: GRPOConfig,
    *,
    mesh: Mesh | None = None,
) -> tuple[Params, Any, dict[str, float]]:
    """Train on a batch of valid groups; `params` and `opt_state` are donated.

    Args:
        groups: `config.mini_batches` must divide their number.

    Returns:
        (params, optimizer state, metrics: means over the batch's tokens, or over its mini-batches).
    """
    options: dict[str, Any] = {"model": model, "config": config, "mesh": mesh}
    size = len(groups) // config.mini_batches
    mini_batches = [lay_out(groups[start : start + size], config) for start in range(0, len(groups), size)]
    if config.mini_batches > 1 or config.objective.corrects_episodes:
        mini_batches = [
            ([with_old_logps(params, batch, **options) for batch in batches], total) for batches, total in mini_batches
        ]

    parts, norms = [], []
    for number, (batches, total) in enumerate(mini_batches):
        gradients = jax.tree.map(jnp.zeros_like, params)
        for batch in batches:
            if number and config.objective.ratio == "sequence":  # before the first step it is 1
                batch = with_episode_ratio(params, batch, **options)
            batch = _placed(batch, mesh)
            gradients, *part = accumulate(params, gradients, batch, jnp.float32(total), **options)
            parts.append(part)
        params, opt_state, norm = apply_gradients(params, opt_state, gradients, config=config)
        norms.append(norm)

    losses, sums, entropies, routers = zip(*jax.device_get(parts), strict=True)
    of_batch = jax.tree.map(lambda *xs: float(sum(xs)), *sums)
    every = [batch for batches, _ in mini_batches for batch in batches]
    metrics = {
        "loss": float(sum(losses)) / config.mini_batches,
        "gradient_norm": sum(map(float, jax.device_get(norms))) / config.mini_batches,
        "entropy": float(sum(entropies)) / of_batch.tokens,
        "mismatch_kl": of_batch.mismatch_kl / of_batch.tokens,
        "mismatch_abs": of_batch.mismatch_abs / of_batch.tokens,
        "clipped_low_share": of_batch.clipped_low / of_batch.tokens,
        "clipped_high_share": of_batch.clipped_high / of_batch.tokens,
        "tis_clipped_share": of_batch.tis_clipped / of_batch.tokens,
        "trained_tokens": of_batch.tokens,
        "row_fill": sum(int((b.segment_ids_bt > 0).sum()) for b in every) / sum(b.tokens_bt.size for b in every),
    }
    if routers[0] is not None:
        router = jax.tree.map(lambda *xs: sum(xs), *routers)
        metrics |= {name: float(value) for name, value in router_metrics(router).items()}
    return params, opt_state, metrics


def lay_out(groups: Sequence[Group], config: GRPOConfig) -> tuple[list[PolicyBatch], float]:
    """The micro-batches (NumPy) of one optimizer step, and what the sum of their losses is divided by."""
    episodes = [episode for group in groups for episode in group.episodes]
    tokens = [[sum(episode.loss_mask) for episode in group.episodes] for group in groups]
    advantages, total = batch_advantages([group.rewards for group in groups], tokens, config.objective)
    return pack(episodes, advantages, row_buckets=config.row_buckets, rows=config.micro_batch_rows), total


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def loss_fn(
    params: Params,
    batch: PolicyBatch,
    total: Array,
    *,
    model: Model,
    config: GRPOConfig,
    mesh: Mesh | None = None,
) -> tuple[Array, tuple[ObjectiveSums, Array, RouterSums | None]]:
    """One micro-batch's share of the batch loss.

    Args:
        total: the *whole* batch's denominator, from `lay_out`: the shares of all micro-batches add up to eq. 32.

    Returns:
        (share of the loss, (metric sums, sum of token entropies, the router's statistics or None)).
    """
    batch = _in_mesh_order(batch, mesh)
    x_btd, router = _hidden(params, batch, model, config, mesh)

    def objective(logps: Array, entropies: Array, batch: PolicyBatch) -> tuple[Array, Any]:
        sequence = config.objective.ratio == "sequence"
        terms = PolicyTerms(
            logps=logps,
            old_logps=jax.lax.stop_gradient(logps) if batch.old_logps_bt is None else batch.old_logps_bt,
            sampler_logps=batch.sampler_logps_bt,
            advantages=batch.advantages_bt,
            mask=batch.mask_bt,
            episode_log_ratio=_zero_unless(batch.episode_log_ratio_bt, logps) if sequence else None,
            episode_mismatch=batch.episode_mismatch_bt,
        )
        loss, sums = grpo_objective(terms, config.objective)
        return loss, (sums, jnp.sum(entropies * batch.mask_bt))

    loss, (sums, entropy) = summed_loss(
        objective,
        x_btd,
        model.head_kernel(params),
        batch.targets_bt,
        batch,
        temperature=config.episode.temperature,
        mesh=mesh,
    )
    return loss / total, (sums, entropy, router)


@partial(jax.jit, static_argnames=("model", "config", "mesh"), donate_argnames=("gradients",))
def accumulate(
    params: Params,
    gradients: Params,
    batch: PolicyBatch,
    total: Array,
    *,
    model: Model,
    config: GRPOConfig,
    mesh: Mesh | None = None,
) -> tuple[Params, Array, ObjectiveSums, Array, RouterSums | None]:
    """Add one micro-batch's gradients. Returns (gradients, loss share, metric sums, entropy sum, router sums)."""
    grad_fn = jax.value_and_grad(partial(loss_fn, model=model, config=config, mesh=mesh), has_aux=True)
    (loss, (sums, entropy, router)), new = grad_fn(params, batch, total)
    return jax.tree.map(jnp.add, gradients, new), loss, sums, entropy, router


def grpo_optimizer(config: GRPOConfig) -> optax.GradientTransformation:
    """The configured optimizer at a constant learning rate."""
    return make_optimizer(
        config.optimizer,
        config.learning_rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


@partial(jax.jit, static_argnames=("config",), donate_argnames=("params", "opt_state"))
def apply_gradients(
    params: Params, opt_state: Any, gradients: Params, *, config: GRPOConfig
) -> tuple[Params, Any, Array]:
    """One optimizer step. Returns (params, optimizer state, gradient norm before clipping)."""
    updates, opt_state = grpo_optimizer(config).update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(gradients)


# ---------------------------------------------------------------------------------------------------------------------
# What must be known before


def with_old_logps(
    params: Params, batch: PolicyBatch, *, model: Model, config: GRPOConfig, mesh: Mesh | None = None
) -> PolicyBatch:
    """The micro-batch with the trainer's logprobs under `params`, and its episodes' mismatch where it is asked for."""
    placed = _placed(batch, mesh)  # and not kept: all micro-batches of a batch are prepared before the first is used
    old = trainer_logprobs(params, placed, model=model, config=config, mesh=mesh)
    batch = replace(batch, old_logps_bt=old)
    if config.objective.corrects_episodes:
        batch = replace(batch, episode_mismatch_bt=over_episodes(old - placed.sampler_logps_bt, placed, mesh=mesh))
    return batch


def with_episode_ratio(
    params: Params, batch: PolicyBatch, *, model: Model, config: GRPOConfig, mesh: Mesh | None = None
) -> PolicyBatch:
    """The micro-batch with the log-ratio of its episodes, the mean over their tokens, between `params` and before."""
    batch = _placed(batch, mesh)
    change = trainer_logprobs(params, batch, model=model, config=config, mesh=mesh) - batch.old_logps_bt
    tokens = over_episodes(jnp.ones_like(change), batch, mesh=mesh)
    mean = over_episodes(change, batch, mesh=mesh) / jnp.maximum(tokens, 1.0)
    return replace(batch, episode_log_ratio_bt=mean)


@partial(jax.jit, static_argnames=("model", "config", "mesh"))
def trainer_logprobs(
    params: Params, batch: PolicyBatch, *, model: Model, config: GRPOConfig, mesh: Mesh | None = None
) -> Array:
    """Logprobs of the targets under `params` at the sampling temperature, float32 [B, T]."""
    batch = _in_mesh_order(batch, mesh)
    x_btd, _ = _hidden(params, batch, model, config, mesh)
    temperature = config.episode.temperature
    logps, _ = token_logprobs(x_btd, model.head_kernel(params), batch.targets_bt, temperature=temperature, mesh=mesh)
    return unzigzag(logps, _context(mesh))


@partial(jax.jit, static_argnames=("mesh",))
def over_episodes(x_bt: Array, batch: PolicyBatch, *, mesh: Mesh | None = None) -> Array:
    """Sum over the sampled tokens of each token's own episode, on each of its tokens, [B, T]; 0 on padding."""
    sampled_bt = jnp.where(batch.mask_bt > 0, x_bt, 0.0)

    def row(x_t: Array, segments_t: Array) -> Array:
        return jax.ops.segment_sum(x_t, segments_t, num_segments=len(x_t) + 1)[segments_t]

    return constrain(jax.vmap(row)(sampled_bt, batch.segment_ids_bt), mesh, BATCH, "context")


# ---------------------------------------------------------------------------------------------------------------------
# Places


def _hidden(
    params: Params, batch: PolicyBatch, model: Model, config: GRPOConfig, mesh: Mesh | None
) -> tuple[Array, RouterSums | None]:
    places = (batch.tokens_bt, batch.positions_bt, batch.segment_ids_bt)
    return model.forward(params, *places, remat=config.remat, mesh=mesh)


def _context(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["context"]


def _in_mesh_order(batch: PolicyBatch, mesh: Mesh | None) -> PolicyBatch:
    return jax.tree.map(lambda x: zigzag(x, _context(mesh)), batch)


def _placed(batch: PolicyBatch, mesh: Mesh | None) -> PolicyBatch:
    return batch if mesh is None else jax.device_put(batch, batch_sharding(mesh))


def _zero_unless(x: Array | None, like: Array) -> Array:
    return jnp.zeros_like(like) if x is None else x
