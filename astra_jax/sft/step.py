"""One step of SFT: the negative logprobs of the assistant's tokens, summed, and divided once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.head import summed_loss
from astra_jax.mesh import BATCH, zigzag
from astra_jax.models.layers.moe import RouterSums, router_metrics
from astra_jax.models.model import Model, Params
from astra_jax.run.optimizers import apply_updates, make_optimizer
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import TokenBatch


def loss_sums(
    params: Params, batch: TokenBatch, *, model: Model, remat: str = "none", mesh: Mesh | None = None
) -> tuple[jax.Array, tuple[jax.Array, RouterSums | None]]:
    """Sum of negative logprobs over the trained tokens; their number, and the router's statistics (None if dense).

    The token at t is predicted at t-1, so a document's first token is never a target, nor is padding.
    """
    context = 1 if mesh is None else mesh.shape["context"]
    places = (batch.tokens_bt, batch.positions_bt, batch.segment_ids_bt, shift(batch.tokens_bt), target_mask(batch))
    tokens_bt, positions_bt, segment_ids_bt, targets_bt, mask_bt = (zigzag(x, context) for x in places)
    x_btd, router = model.forward(params, tokens_bt, positions_bt, segment_ids_bt, remat=remat, mesh=mesh)
    loss, count = summed_loss(_objective, x_btd, model.head_kernel(params), targets_bt, mask_bt, mesh=mesh)
    return loss, (count, router)


def _objective(logps: jax.Array, entropies: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    del entropies
    return -jnp.sum(logps * mask), jnp.sum(mask)


def target_mask(batch: TokenBatch) -> jax.Array:
    """[B, T], float32: 1 at t where the *next* token is trained on and belongs to the same document."""
    same_document_bt = (shift(batch.segment_ids_bt) == batch.segment_ids_bt) & (batch.segment_ids_bt > 0)
    return (shift(batch.loss_mask_bt) * same_document_bt).astype(jnp.float32)


def shift(x_bt: jax.Array) -> jax.Array:
    """Each position's successor; 0 at the end of a row."""
    return jnp.pad(x_bt[:, 1:], ((0, 0), (0, 1)))


def to_device(batch: TokenBatch, accumulation: int, mesh: Mesh | None) -> TokenBatch:
    """Split rows [B, T] into micro-batches [accumulation, B / accumulation, T], and put them where they are needed."""

    def put(x_bt: np.ndarray) -> jax.Array:
        x_abt = x_bt.reshape(accumulation, -1, x_bt.shape[1])
        if mesh is None:
            return jnp.asarray(x_abt)
        sharding = NamedSharding(mesh, PartitionSpec(None, BATCH, "context"))
        return jax.make_array_from_callback(x_abt.shape, sharding, lambda index: x_abt[index])

    return jax.tree.map(put, batch)


def learning_rate(config: SFTConfig, steps: int) -> optax.Schedule:
    """Linear warm-up that reaches the peak with its last step, then a cosine down to `final_fraction` of the peak."""
    warmup = max(1, round(config.warmup_fraction * steps))

    def schedule(count: jax.Array) -> jax.Array:
        ramp = (count + 1) / warmup
        progress = jnp.clip((count + 1 - warmup) / max(1, steps - warmup), 0.0, 1.0)
        cosine = config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return config.learning_rate * jnp.where(count < warmup, ramp, cosine)

    return schedule


def sft_optimizer(config: SFTConfig, steps: int) -> optax.GradientTransformation:
    """The configured optimizer on the schedule of a run of `steps` steps."""
    return make_optimizer(
        config.optimizer,
        learning_rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


@partial(jax.jit, static_argnames=("model", "config", "steps", "mesh"), donate_argnames=("params", "opt_state"))
def train_step(
    params: Params,
    opt_state: Any,
    batch: TokenBatch,
    *,
    model: Model,
    config: SFTConfig,
    steps: int,
    mesh: Mesh | None = None,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """One optimizer step on a batch whose arrays are [accumulation, rows / accumulation, T].

    Returns:
        (params, optimizer state, metrics on the device).
    """
    grad_fn = jax.value_and_grad(partial(loss_sums, model=model, remat=config.remat, mesh=mesh), has_aux=True)

    def micro_batch(micro: TokenBatch) -> Any:
        (loss, sums), gradients = grad_fn(params, micro)
        return gradients, loss, sums

    if config.accumulation == 1:  # no second copy of the gradients
        gradients, loss, (count, router) = micro_batch(jax.tree.map(lambda x: x[0], batch))
    else:
        shapes = jax.eval_shape(micro_batch, jax.tree.map(lambda x: x[0], batch))
        zeros = jax.tree.map(jnp.zeros_like, params), *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1:])

        def add(carry: Any, micro: TokenBatch) -> tuple[Any, None]:
            # The barrier keeps the gradients' reduce-scatter in the loop: XLA would move it behind, where each device
            # holds whole gradients (and its TPU compiler fails while it tries).
            new = jax.lax.optimization_barrier(micro_batch(micro))
            return jax.tree.map(jnp.add, carry, new), None

        (gradients, loss, (count, router)), _ = jax.lax.scan(add, zeros, batch)
    gradients = jax.tree.map(lambda g: g / count.astype(g.dtype), gradients)
    updates, opt_state = sft_optimizer(config, steps).update(gradients, opt_state, params)
    count_of_steps = optax.tree.get_all_with_path(opt_state, "count")[0][1]
    params = apply_updates(params, updates, rounding=config.rounding, seed=count_of_steps)
    metrics = {"loss": loss / count, "trained_tokens": count, "gradient_norm": optax.tree.norm(gradients)}
    if router is not None:
        metrics |= router_metrics(router)
    return params, opt_state, metrics
