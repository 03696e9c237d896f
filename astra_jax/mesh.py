"""The device mesh: five axes, always all of them, so that every program is written once.

    data      batch only
    fsdp      batch; parameters over their model width
    expert    batch; experts over it, other parameters over their model width
    context   sequence; parameters over their model width
    tensor    heads, feed-forward and vocabulary

A sequence is spread over `context` in zig-zag order: it is cut into twice as many chunks as there are devices, and
device i holds chunks i and 2c-1-i, one early and one late, so that causal attention is the same work on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from synthesis.core.refusals import InputError

AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH = ("data", "fsdp", "expert")
"""The axes over which a batch's rows are spread."""
WIDTH = ("fsdp", "expert", "context")
"""The axes over which parameters' model width is spread."""

Array = jax.Array


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of `data * fsdp * expert * context * tensor` devices; one axis may be -1: whatever is left.

    Raises:
        ValueError: the sizes do not make up the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    free = [axis for axis, size in sizes.items() if size == -1]
    product = 1
    for size in sizes.values():
        product *= size if size != -1 else 1
    if len(free) == 1 and len(devices) % product == 0:
        sizes[free[0]] = product = len(devices) // product
        product = len(devices)
    if len(free) > 1 or product != len(devices) or min(sizes.values()) < 1:
        raise InputError(
            f"mesh {sizes} needs {product} devices, there are {len(devices)}; change the sizes, or set one axis to -1"
        )
    # A TPU slice's torus has other sides than the mesh: an axis may be part of a side.
    grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform_of(mesh: Mesh | None) -> str:
    """What a program on this mesh is compiled for; None is JAX's default device."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def constrain(x: Array, mesh: Mesh | None, *spec: str | tuple[str, ...] | None) -> Array:
    """Tell the compiler where `x` lives; without a mesh, `x` as it is."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [B, T]: rows over `data`, `fsdp` and `expert`, the sequence over `context`."""
    return NamedSharding(mesh, PartitionSpec(BATCH, "context"))


def check_batch(mesh: Mesh, rows: int, tokens: int, field: str) -> None:
    """Refuse batches that the mesh does not divide.

    Args:
        rows, tokens: of one micro-batch.
        field: the setting that gives `tokens`, for the message.

    Raises:
        ValueError: names the axes and the numbers.
    """
    over_rows = int(np.prod([mesh.shape[axis] for axis in BATCH]))
    if rows % over_rows:
        raise InputError(
            f"a micro-batch has {rows} rows, which mesh axes {' x '.join(BATCH)} = {over_rows} do not divide; use "
            f"{-(-rows // over_rows) * over_rows} rows, or a smaller mesh axis"
        )
    if tokens % (pieces := pieces_of(mesh.shape["context"])):
        raise InputError(
            f"{field} is {tokens}, which mesh axis 'context' of {mesh.shape['context']} devices cuts into {pieces} "
            f"chunks; use {-(-tokens // pieces) * pieces}"
        )


def pieces_of(context: int) -> int:
    """Into how many chunks a sequence is cut over `context` devices."""
    return 2 * context if context > 1 else 1


def zigzag_order(length: int, context: int) -> np.ndarray:
    """Which position of the sequence is at each place, int32 [length].

    Raises:
        ValueError: `length` is not a multiple of `2 * context`.
    """
    if length % pieces_of(context):
        raise InputError(f"a sequence of {length} does not divide into {2 * context} chunks; see mesh.check_batch")
    return np.asarray(zigzag(np.arange(length, dtype=np.int32)[None], context))[0]


def zigzag(x_bt: Any, context: int) -> Any:
    """Reorder axis 1 so that an even split over `context` devices gives each an early and a late chunk."""
    if context == 1:
        return x_bt
    chunks = x_bt.reshape(x_bt.shape[0], 2 * context, -1, *x_bt.shape[2:])
    order = np.stack([np.arange(context), np.arange(2 * context - 1, context - 1, -1)], axis=1).reshape(-1)
    return chunks[:, order].reshape(x_bt.shape)


def unzigzag(x_bt: Array, context: int) -> Array:
    """The inverse of `zigzag`."""
    if context == 1:
        return x_bt
    chunks = x_bt.reshape(x_bt.shape[0], context, 2, -1, *x_bt.shape[2:])
    both = jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1)
    return both.reshape(x_bt.shape)
