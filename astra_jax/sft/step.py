"""SFT training step. The loss is the weighted sum of negative logprobs of assistant tokens, divided by the sum of
weights."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.base.errors import InputError
from astra_jax.head import summed_loss
from astra_jax.mesh import BATCH, AnyMesh
from astra_jax.models import adapters
from astra_jax.models.layers.moe import RouterSums, router_metrics
from astra_jax.models.lora import FULL, LoRA
from astra_jax.models.model import Model, Params
from astra_jax.run.batch import (
    PackedBatch,
    bucket_index,
    in_mesh_order,
    shift,
    target_mask,
    to_device,
    to_each_device,
)
from astra_jax.run.compiler import program
from astra_jax.run.config import JitKey
from astra_jax.run.gradients import accumulate_scan
from astra_jax.run.optimizers import abstract_state, apply_gradients, learning_rate, make_optimizer
from astra_jax.sft.config import SFTConfig


def loss_sums(
    params: Params,
    batch: PackedBatch,
    *,
    model: Model,
    base: Params | None = None,
    lora: LoRA = FULL,
    remat: str = "none",
    matmul: str = "none",
    mesh: AnyMesh | None = None,
) -> tuple[jax.Array, tuple[jax.Array, RouterSums | None]]:
    """Return the weighted sum of negative logprobs over trained tokens, the sum of the weights, and the router's
    statistics (None if dense). The sum of the weights is the token count if all are 1.

    Args:
        base: frozen weights if `params` are adapters; None if `params` are all weights.
    """
    params = adapters.attach_lora(params, base, lora)
    places = (batch.tokens_bt, batch.positions_bt, batch.segment_ids_bt, shift(batch.tokens_bt), target_mask(batch))
    tokens_bt, positions_bt, segment_ids_bt, targets_bt, mask_bt = in_mesh_order(places, mesh)
    how: dict[str, Any] = {"remat": remat, "matmul": matmul, "mesh": mesh}
    x_btd, router = model.forward(params, tokens_bt, positions_bt, segment_ids_bt, **how)
    loss, count = summed_loss(
        _objective, x_btd, model.head_weights(params), targets_bt, terms=mask_bt, counted_bt=mask_bt, mesh=mesh
    )
    return loss, (count, router)


def _objective(logps: jax.Array, entropies: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    del entropies
    return -jnp.sum(logps * mask), jnp.sum(mask)


def sft_optimizer(config: SFTConfig | JitKey, steps: int) -> optax.GradientTransformation:
    """Return the configured optimizer with the schedule of `steps` steps."""
    return make_optimizer(config, learning_rate(config, steps))


class StepInputs(NamedTuple):
    """Inputs of `train_step` for a batch.

    Attributes:
        batch: on the devices, [A, B / A, T].
        bucket_ids_a: see `train_step`.
        metrics: `data/mask_share` of the real tokens, `data/padding_share` of the computed positions, and
            `data/row_tokens` computed per row.
    """

    batch: PackedBatch
    bucket_ids_a: jax.Array | None
    metrics: dict[str, float]


def step_inputs(batch: PackedBatch, step: int, config: SFTConfig, mesh: Mesh | None) -> StepInputs:
    """Put a batch of numpy arrays on the devices.

    Args:
        step: its number, for messages.

    Raises:
        InputError: no token or every token is trained on, so renderer and tokenizer disagree.
    """
    lengths = list(config.row_lengths)
    bucket_ids_a = bucket_index(batch, lengths, config.micro_batches)
    real_bt = batch.segment_ids_bt > 0
    mask_share = float(np.count_nonzero(batch.loss_mask_bt[real_bt]) / real_bt.sum())
    if mask_share in (0.0, 1.0):
        raise InputError(
            f"step {step}: the loss mask covers {mask_share:.0%} of the batch's tokens; assistant tokens must be some, "
            "and not all: check the dataset's messages and the tokenizer"
        )
    row_tokens = float(np.take(lengths, bucket_ids_a).mean())
    padding_share = 1 - float(real_bt.sum()) / (len(real_bt) * row_tokens)
    return StepInputs(
        to_device(batch, mesh, micro_batches=config.micro_batches),
        to_each_device(bucket_ids_a, mesh) if config.row_buckets else None,
        {"data/mask_share": mask_share, "data/padding_share": padding_share, "data/row_tokens": row_tokens},
    )


@program(
    settings="config", static_argnames=("model", "config", "steps", "mesh"), donate_argnames=("params", "opt_state")
)
def train_step(
    params: Params,
    opt_state: Any,
    batch: PackedBatch,
    *,
    model: Model,
    config: JitKey,
    steps: int,
    base: Params | None = None,
    bucket_ids_a: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """Run one optimizer step on a batch whose arrays are [A, B / A, T]: A micro-batches.

    Args:
        config: callers pass the `SFTConfig`.
        base: see `loss_sums`; not donated.
        bucket_ids_a: int32, for each micro-batch an index into the ascending row lengths
            (`SFTConfig.row_lengths`); None if there is only one length.

    Returns:
        (params, optimizer state, metrics on the device). If `train/grad_norm` is not finite, nothing changes.
    """
    loss_of = partial(loss_sums, model=model, lora=config.lora, remat=config.remat, matmul=config.matmul_quantization)
    gradients, (loss, (count, router)) = accumulate_scan(
        loss_of, params, base, batch, mesh, lengths=(*sorted({*config.row_buckets}), None), bucket_ids_a=bucket_ids_a
    )
    optimizer = sft_optimizer(config, steps)
    params, opt_state, taken = apply_gradients(
        params, opt_state, gradients, count, optimizer=optimizer, rounding=config.rounding
    )
    metrics = {"train/loss": loss / count, "train/trained_tokens": count, **taken}
    if router is not None:
        metrics |= router_metrics(router)
    return params, opt_state, metrics


def abstract_arguments(model: Model, config: SFTConfig, steps: int, mesh: Mesh | None) -> tuple[Any, Any, PackedBatch]:
    """Return shapes, dtypes and shardings of `train_step`'s arguments, except those of `adapters.abstract_base` and
    `abstract_bucket_ids`."""
    trained = adapters.abstract_trained(model, config.lora)
    shardings = adapters.trained_shardings(model, config.lora, mesh)
    optimizer = sft_optimizer(config, steps)
    params, opt_state = abstract_state(trained, optimizer, shardings, offload=config.optimizer_offload)
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec(None, BATCH, "context"))
    shape = (config.micro_batches, config.micro_batch_rows, config.data.seq_len)
    one, mask = (jax.ShapeDtypeStruct(shape, dtype, sharding=place) for dtype in (jnp.int32, jnp.float32))
    return params, opt_state, PackedBatch(one, mask, one, one)


def abstract_bucket_ids(config: SFTConfig, mesh: Mesh | None) -> jax.ShapeDtypeStruct | None:
    """Return shape, dtype and sharding of `train_step`'s `bucket_ids_a`."""
    if not config.row_buckets:
        return None
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((config.micro_batches,), jnp.int32, sharding=place)
