"""Device mesh: always the same five axes, so that every program is written once.

- data: batch only
- fsdp: batch; parameters over their model width
- expert: batch; experts over it, other parameters over their model width
- context: sequence; parameters over their model width
- tensor: heads, feed-forward and vocabulary

Several TPU slices are one mesh. Each has its own indices on `data`, since only the data centre's network connects
slices. The devices of one index on `data` are a replica: they hold a copy of the weights. They sum gradients of all
micro-batches before replicas exchange theirs (`run/gradients.py`).

A sequence is spread over `context` in zig-zag order: it is split into twice as many chunks as there are devices.
Device i holds chunks i and 2c-1-i, one early and one late, so that causal attention is the same work on each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from astra_jax.base.errors import InputError

AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH = ("data", "fsdp", "expert")
"""Axes over which a batch's rows are spread."""
WIDTH = ("fsdp", "expert", "context")
"""Axes over which parameters' model width is spread."""

Array = jax.Array
AnyMesh = Mesh | AbstractMesh
"""Concrete or abstract mesh. In a replica's part of a program it is abstract, and arrays are not spread over `data`."""


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Make a mesh of `data * fsdp * expert * context * tensor` devices; one axis may be -1, for all remaining devices.

    Devices of several TPU slices are spread by `data` first: no other axis crosses slices.

    Raises:
        ValueError: the sizes do not make up the number of devices, or the slices do not divide `data`.
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
    if (slices := slice_count(devices)) == 1:
        grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    else:
        if sizes["data"] % slices:
            raise InputError(
                f"mesh {sizes}: the devices are {slices} slices, and no axis but 'data' may cross from one to another; "
                f"'data' is {sizes['data']}, make it a multiple of {slices}"
            )
        within = (sizes["data"] // slices, *(size for axis, size in sizes.items() if axis != "data"))
        between = (slices,) + (1,) * (len(AXES) - 1)
        grid = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_count(devices: Sequence[Any]) -> int:
    """Return the number of TPU slices. GPUs number their hosts the same way, but all axes may cross hosts.

    Raises:
        ValueError: the slices are of different sizes.
    """
    of_each = Counter(device.slice_index for device in devices if hasattr(device, "slice_index"))
    if devices[0].platform != "tpu" or len(of_each) < 2:
        return 1
    if len(set(of_each.values())) > 1:
        sizes = ", ".join(f"slice {index} has {count}" for index, count in sorted(of_each.items()))
        raise InputError(
            f"all slices of a mesh must have the same number of devices, but {sizes} devices; leave out what is more"
        )
    return len(of_each)


def platform_of(mesh: AnyMesh | None) -> str:
    """Return the platform for which a program on this mesh is compiled; None is JAX's default device."""
    platform: str = _device(mesh).platform
    return platform


def device_kind_of(mesh: AnyMesh | None) -> str:
    """Return the kind of the mesh's devices by JAX's name; None is JAX's default device."""
    kind: str = _device(mesh).device_kind
    return kind


def _device(mesh: AnyMesh | None) -> Any:
    if mesh is None:
        return jax.devices()[0]
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device


# ---------------------------------------------------------------------------------------------------------------------
# The same program for the whole mesh and for a replica's part of it, where arrays are not spread over `data`.


def free(mesh: AnyMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Return those of some axes over which a program on this mesh spreads and sums; inside a replica not `data`."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(axis for axis in axes if kinds[axis] != AxisType.Manual)


def place(mesh: AnyMesh, spec: PartitionSpec) -> PartitionSpec:
    """Convert a spec for the whole mesh to this one: without the axes that are not `free`."""

    def left(one: Any) -> Any:
        return one if one is None else free(mesh, (one,) if isinstance(one, str) else one) or None

    return PartitionSpec(*map(left, spec))


def on_each_device(part: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Run `part` on each device's part of the arrays; specs are for the whole mesh.

    Every output mentions every axis, so there is no replication to check; kernels have no rules for it.
    """
    in_specs, out_specs = jax.tree.map(
        lambda spec: place(mesh, spec), (in_specs, out_specs), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    axes = set(free(mesh, mesh.axis_names))
    return jax.shard_map(part, mesh=mesh, axis_names=axes, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(x: Array, mesh: AnyMesh | None, *spec: str | tuple[str, ...] | None) -> Array:
    """Set the sharding of `x` for the compiler; without a mesh, return `x` unchanged."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, place(mesh, PartitionSpec(*spec))))


def in_each_replica(
    function: Callable[..., Any], mesh: AnyMesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Run `function(*arguments, mesh)` in each replica, with its own rows and no exchange between replicas.

    Args:
        in_specs, out_specs: positions of `data` in the arrays; unused without replicas.
    """
    if mesh is None or mesh.shape["data"] == 1:
        return lambda *arguments: function(*arguments, mesh)
    return jax.shard_map(
        lambda *arguments: function(*arguments, jax.sharding.get_abstract_mesh()),
        mesh=mesh,
        axis_names={"data"},
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays [B, T]: rows over `data`, `fsdp` and `expert`, the sequence over `context`."""
    return NamedSharding(mesh, PartitionSpec(BATCH, "context"))


def check_batch(mesh: Mesh, rows: int, tokens: int, field: str) -> None:
    """Check that the mesh divides a batch.

    Args:
        rows, tokens: of one micro-batch.
        field: the setting of `tokens`, for the message.

    Raises:
        ValueError: it does not; the message has the axes and the numbers.
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
    """Return the number of chunks of a sequence over `context` devices."""
    return 2 * context if context > 1 else 1


def zigzag_order(length: int, context: int) -> np.ndarray:
    """Return the position of the sequence at each index, int32 [length].

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
    # Not a look-up of chunks by number: XLA cannot spread that over the devices of one of several replicas.
    halves = x_bt.reshape(x_bt.shape[0], 2, context, -1, *x_bt.shape[2:])
    stack = np.stack if isinstance(x_bt, np.ndarray) else jnp.stack
    return stack([halves[:, 0], halves[:, 1, ::-1]], axis=2).reshape(x_bt.shape)


def unzigzag(x_bt: Array, context: int) -> Array:
    """Invert `zigzag`."""
    if context == 1:
        return x_bt
    chunks = x_bt.reshape(x_bt.shape[0], context, 2, -1, *x_bt.shape[2:])
    both = jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1)
    return both.reshape(x_bt.shape)


def gather_row(x: Array, context: int, axis: int = 1) -> Array:
    """Gather the whole row, in its order, on each device, from the devices' parts in zig-zag order.

    Use it within `on_each_device`. Each device's late chunk is first sent to its place in the order, so that the
    gathered row needs no splitting and joining. For keys and values over 16 devices those took a sixth of a step
    (docs/scale.md).

    Args:
        x: [..., T / context, ...].
        axis: the row's axis.
    """
    if context == 1:
        return x
    early, late = jnp.split(x, 2, axis)
    late = jax.lax.ppermute(late, "context", [(i, context - 1 - i) for i in range(context)])
    halves = jnp.stack([early, late], axis)
    whole = jnp.moveaxis(jax.lax.all_gather(halves, "context"), 0, axis + 1)
    return whole.reshape(*x.shape[:axis], context * x.shape[axis], *x.shape[axis + 1 :])
