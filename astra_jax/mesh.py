"""The device mesh: four axes, always all of them, so that every program is written once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "context", "tensor")
"""`data`: batch only. `fsdp`: batch, and parameters over their model width. `context`: sequence. `tensor`: heads,
feed-forward and vocabulary."""


def make_mesh(
    data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * fsdp * context * tensor` devices; one axis may be -1: whatever is left.

    Raises:
        ValueError: the sizes do not make up the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    free = [axis for axis, size in sizes.items() if size == -1]
    product = 1
    for size in sizes.values():
        product *= size if size != -1 else 1
    if len(free) == 1 and len(devices) % product == 0:
        sizes[free[0]] = product = len(devices) // product
        product = len(devices)
    if len(free) > 1 or product != len(devices) or min(sizes.values()) < 1:
        raise ValueError(
            f"mesh {sizes} needs {product} devices, there are {len(devices)}; change the sizes, or set one axis to -1"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)
