"""Device placement of the engine's cache, and the check that it fits in memory."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from astra_jax.attention.cache import Caches
from astra_jax.axes import stacked_matrices
from astra_jax.base.settings import SettingError
from astra_jax.cpu.programs import kept_dtype, kept_part
from astra_jax.mesh import platform_of
from astra_jax.models.model import Model
from astra_jax.run.chips import GIB, chip_of


def mesh_of(params: Any) -> Mesh | None:
    """Return the mesh over which parameters are sharded, or None for a single device."""
    sharding = jax.tree.leaves(params)[0].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def empty_cache(model: Model, slots: int, max_length: int, mesh: Mesh | None, *, stacked: bool) -> Caches:
    """Create a cache on its devices. It may be larger than one device's memory, so it is created sharded."""
    platform = platform_of(mesh)
    dtype, part = kept_dtype(model.dtype, platform), kept_part(platform)
    make = partial(model.cache, slots, max_length, stacked=stacked, dtype=dtype, part=part)
    return committed(make()) if mesh is None else jax.jit(make, out_shardings=model.cache_sharding(mesh))()


def committed(arrays: Any) -> Any:
    """Return the same arrays committed to their devices, without a copy.

    Weights from a checkpoint are committed and newly created ones are not. JAX compiles each program separately for
    both, so an engine given both would compile everything twice.
    """
    return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding, arrays))


def check_cache_fits(
    model: Model,
    slots: int,
    max_length: int,
    mesh: Mesh | None,
    weight_quantization: str = "none",
    *,
    settings: str = "--slots or --max_length",
) -> None:
    """Raise an error before allocation if the cache does not fit beside the weights.

    Args:
        weight_quantization: see `EngineConfig`.
        settings: names of the user's settings for `slots` and `max_length`, for the message.

    Raises:
        SettingError: the message has the required and available memory.
        InputError, UserError: the model's matrices cannot be kept in this form, see `Model.check_matmul`.
    """
    keys, weights = bytes_wanted(model, slots, max_length, mesh, weight_quantization, platform_of(mesh))
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if keys + weights > (there := memory_of(device)):
        raise SettingError(
            f"slots x max_length = {slots} x {max_length} need {keys / GIB:.1f} GiB for keys and values on each "
            f"device, and the weights need {weights / GIB:.1f}; a {device.device_kind} has {there / GIB:.1f}. Lower "
            f"{settings}, or "
            "use a larger --mesh"
        )


def unroll_decode_layers(
    model: Model, slots: int, max_length: int, mesh: Mesh | None, weight_quantization: str, *, device: jax.Device
) -> bool:
    """Return whether decoding should use separate arrays per layer (`Model.for_decoding`) and an unrolled loop.

    Scanned layers compile faster, and TPUs read them in place. On CPUs and GPUs XLA first copies each layer's weights,
    keys and values. On a CPU, 30 million parameters with one row take 35 ms a step instead of 16. On an H200 with 0.6B
    and one row of 1,280, copies were over a third of the device time. On a GPU twice the memory is needed, since the
    separated layers and the window read from the cache exist beside the originals.
    """
    platform = device.platform
    if mesh is not None or platform not in ("cpu", "gpu", "cuda"):
        return False
    return platform == "cpu" or 2 * sum(
        bytes_wanted(model, slots, max_length, mesh, weight_quantization, platform)
    ) <= memory_of(device)


def bytes_wanted(
    model: Model, slots: int, max_length: int, mesh: Mesh | None, weight_quantization: str, platform: str
) -> tuple[int, int]:
    """Return bytes per device for keys and values, and for weights. Raises as `check_cache_fits`."""
    model.check_matmul(weight_quantization, "weight_quantization")
    dtype = kept_dtype(model.dtype, platform)
    cache = jax.eval_shape(partial(model.cache, slots, max_length, dtype=dtype))
    params = model.abstract_params()
    width = jnp.dtype(model.dtype).itemsize

    def held(path: Any, count: int) -> int:
        return count * (1 if weight_quantization != "none" and stacked_matrices(path) is not None else width)

    if mesh is None:
        keys = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        counts = jax.tree.map(lambda x: x.size, params)
    else:
        place = model.cache_sharding(mesh)
        keys = sum(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(cache))
        counts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), params, model.param_shardings(mesh))
    return keys, sum(jax.tree.leaves(jax.tree.map_with_path(held, counts)))


def memory_of(device: jax.Device) -> int:
    """Return a device's memory in bytes: by its kind, as it reports, or for CPUs the machine's memory."""
    if chip := chip_of(device.device_kind):
        return chip.hbm_bytes
    own = device in jax.local_devices()  # other devices do not report
    stated = (device.memory_stats() or {}).get("bytes_limit") if own else None
    return int(stated or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
