"""Sizes of mesh axes on the command line: `--mesh=fsdp=8,context=2`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.flags import cli

if TYPE_CHECKING:
    from jax.sharding import Mesh


_ELSEWHERE = {
    **dict.fromkeys(("dp", "replica", "ddp"), "data"),
    **dict.fromkeys(("zero", "shard", "sharding", "dp_shard"), "fsdp"),
    **dict.fromkeys(("ep", "experts"), "expert"),
    **dict.fromkeys(("cp", "sp", "seq", "sequence", "ulysses"), "context"),
    **dict.fromkeys(("tp", "mp", "model"), "tensor"),
}
"""Names of axes in other trainers → ours."""


def axis_sizes(flag: flags.FlagHolder[Any], axes: Sequence[str]) -> dict[str, int]:
    """Return sizes by axis; {} without the flag.

    Args:
        axes: names of all axes.

    Raises:
        UsageError: there is no such axis (the message names the nearest), it is named twice, or its size is invalid.
    """
    sizes: dict[str, int] = {}
    for item in flag.value or []:
        axis, _, text = item.partition("=")
        if axis not in axes:
            near = [_ELSEWHERE[axis]] if axis in _ELSEWHERE else difflib.get_close_matches(axis, axes, n=1)
            nearest = f" (the nearest is {near[0]})" if near else ""
            raise cli.UsageError(f"--{flag.name}={item}: write AXIS=SIZE; the axes are {', '.join(axes)}{nearest}")
        if axis in sizes:
            raise cli.UsageError(f"--{flag.name}={item}: {axis} is named twice; give it one size")
        size = int(text) if text.removeprefix("-").isdecimal() and len(text) < 10 else 0
        if size < -1 or not size:
            raise cli.UsageError(
                f"--{flag.name}={item}: write {axis}=SIZE, a number from 1, or -1 for all remaining devices"
            )
        sizes[axis] = size
    return sizes


def made(flag: flags.FlagHolder[Any]) -> Mesh | None:
    """Return the mesh that a flag asks for; None is one device. Starts JAX's backend.

    Raises:
        UsageError: there is no such axis, or a size is not a number.
        BackendError: JAX cannot start its backend.
        InputError: there are fewer devices.
    """
    from astra_jax.mesh import AXES, make_mesh
    from astra_jax.run.backends import start_backend

    sizes = axis_sizes(flag, AXES)
    start_backend()
    return make_mesh(*(sizes.get(axis, 1) for axis in AXES)) if sizes else None
