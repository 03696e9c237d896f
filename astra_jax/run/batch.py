"""Packed training batches, and the rule for which tokens are trained on.

All values of a token are at its own position: its mask, the logprob with which it was sampled, its advantage. The token
at t is predicted at t - 1, so inside a step all values are shifted left by one (`shift`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.mesh import BATCH, AnyMesh, zigzag

if TYPE_CHECKING:
    from astra_jax.run.config import TrainingConfig

Array = Any
Config = TypeVar("Config", bound="TrainingConfig")


@struct.dataclass
class PackedBatch:
    """Packed rows, each [B, T]; created as numpy arrays, and a pytree, so they can be put on devices.

    Attributes:
        tokens_bt: int32 token ids; 0 on padding.
        loss_mask_bt: nonzero on tokens that the model must emit, 0 elsewhere. In SFT float32, the weight in the loss,
            by default 1; in GRPO int32, 1 on sampled tokens. It belongs to the token itself: predicting token t + 1
            from token t counts if `loss_mask_bt[t + 1]` is not 0 and both are in one segment. So the first token of a
            document is never trained on.
        segment_ids_bt: int32, 0 on padding, then 1, 2, … for the documents of a row.
        positions_bt: int32, within the document, from 0.
    """

    tokens_bt: Array
    loss_mask_bt: Array
    segment_ids_bt: Array
    positions_bt: Array


def shift(x_bt: jax.Array) -> jax.Array:
    """Return each position's successor; 0 at the end of a row."""
    return jnp.pad(x_bt[:, 1:], ((0, 0), (0, 1)))


def unshift(x_bt: jax.Array) -> jax.Array:
    """Move values from where a token is predicted to the token itself; 0 at the start of a row."""
    return jnp.pad(x_bt[:, :-1], ((0, 0), (1, 0)))


def same_document(batch: PackedBatch) -> jax.Array:
    """Return [B, T], bool: true if the *next* token belongs to the same document; false on padding."""
    return (shift(batch.segment_ids_bt) == batch.segment_ids_bt) & (batch.segment_ids_bt > 0)


def target_mask(batch: PackedBatch) -> jax.Array:
    """Return [B, T], float32: the weight at t of the *next* token; 0 if that belongs to another document."""
    return (shift(batch.loss_mask_bt) * same_document(batch)).astype(jnp.float32)


def bucket_index(batch: PackedBatch, lengths: Sequence[int], micro_batches: int) -> np.ndarray:
    """Return the smallest length that fits all rows of each micro-batch: int32 [A], indices into `lengths`.

    Args:
        batch: of numpy arrays.
        lengths: ascending; the last is the row length.
    """
    rows_bt = np.greater(batch.segment_ids_bt, 0)
    used_at = rows_bt.reshape(micro_batches, -1, rows_bt.shape[1]).any(axis=1)
    need_a = np.where(used_at.any(axis=1), used_at.shape[1] - np.argmax(used_at[:, ::-1], axis=1), 0)
    return np.searchsorted(lengths, need_a).astype(np.int32)


def context_size(mesh: AnyMesh | None) -> int:
    """Return the number of devices that share a sequence."""
    return 1 if mesh is None else mesh.shape["context"]


def on_mesh(config: Config, mesh: Any) -> Config:
    """Return the configuration with the mesh's micro-batch size if it has none: one row per shard of the batch axes.

    Args:
        mesh: a mesh or abstract mesh; None leaves the configuration unchanged.
    """
    if mesh is None or config.micro_batch_size is not None:
        return config
    return dataclasses.replace(config, micro_batch_size=math.prod(mesh.shape[axis] for axis in BATCH))


def in_mesh_order(tree: Any, mesh: AnyMesh | None) -> Any:
    """Return arrays [B, T] with their positions in the order of the devices of `context`."""
    return jax.tree.map(lambda x: zigzag(x, context_size(mesh)), tree)


def to_each_device(x: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Put an array, the same on every host, on each device completely."""
    return _put(x, mesh, PartitionSpec())


def to_device(batch: Any, mesh: Mesh | None, *, micro_batches: int | None = None) -> Any:
    """Put the arrays [B, T] of a batch on their devices.

    Args:
        micro_batches: split the rows into this many, [A, B / A, T]; None leaves [B, T].
    """

    def put(x_bt: np.ndarray) -> jax.Array:
        if micro_batches is None:
            return _put(x_bt, mesh, PartitionSpec(BATCH, "context"))
        return _put(x_bt.reshape(micro_batches, -1, x_bt.shape[1]), mesh, PartitionSpec(None, BATCH, "context"))

    return jax.tree.map(put, batch)


def _put(x: np.ndarray, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    if mesh is None:
        return jnp.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])
