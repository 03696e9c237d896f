"""Where the engine's cache lives, and whether there is room for it."""

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
from astra_jax.cpu.programs import kept_dtype, kept_part
from astra_jax.mesh import platform_of
from astra_jax.models.model import Model
from astra_jax.run.chips import GIB, chip_of
from sandbox.settings import SettingError


def mesh_of(params: Any) -> Mesh | None:
    """The mesh of several devices that parameters are spread over; None is one device."""
    sharding = jax.tree.leaves(params)[0].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def empty_cache(model: Model, slots: int, max_length: int, mesh: Mesh | None, *, stacked: bool) -> Caches:
    """A cache on its devices; made there, since the whole may be more than one of them holds."""
    platform = platform_of(mesh)
    dtype, part = kept_dtype(model.dtype, platform), kept_part(platform)
    make = partial(model.cache, slots, max_length, stacked=stacked, dtype=dtype, part=part)
    return committed(make()) if mesh is None else jax.jit(make, out_shardings=model.cache_sharding(mesh))()


def committed(arrays: Any) -> Any:
    """The same arrays, tied to the devices that they lie on; not copied.

    Weights from a checkpoint are, those that were just made are not, and JAX compiles a program for either: an engine
    given the one and then the other had all of its programs compiled twice.
    """
    return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding, arrays))


def check_room(
    model: Model,
    slots: int,
    max_length: int,
    mesh: Mesh | None,
    stored: str = "none",
    *,
    settings: str = "--slots or --max_length",
) -> None:
    """Refuse a cache that no device has room for beside the weights, before anything is allocated.

    Args:
        stored: see `EngineConfig.stored`.
        settings: what the user sets `slots` and `max_length` by, for the message.

    Raises:
        SettingError: says how much of what there is.
        InputError, Refusal: the model's matrices cannot be stored so, see `Model.check_matmul`.
    """
    keys, weights = bytes_wanted(model, slots, max_length, mesh, stored, platform_of(mesh))
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if keys + weights > (there := memory_of(device)):
        raise SettingError(
            f"slots x max_length = {slots} x {max_length} want {keys / GIB:.1f} GiB of keys and values on each device, "
            f"and the weights {weights / GIB:.1f}; a {device.device_kind} has {there / GIB:.1f}. Lower {settings}, or "
            "use a larger --mesh"
        )


def decodes_written_out(
    model: Model, slots: int, max_length: int, mesh: Mesh | None, stored: str, *, device: jax.Device
) -> bool:
    """Whether decoding wants the parameters' layers apart (`Model.for_decoding`), and written out.

    Scanned, they compile sooner, and a TPU reads them where they lie. For CPUs and GPUs XLA copies each layer's
    weights, keys and values before it reads them: 30 million parameters, one row on a CPU, 35 ms a step against 16; on
    an H200, 0.6B and one row of 1,280, copies were over a third of what the device did. On a GPU there has to be twice
    the room: the layers are taken apart beside the whole, and so is what is read of the cache.
    """
    platform = device.platform
    if mesh is not None or platform not in ("cpu", "gpu", "cuda"):
        return False
    return platform == "cpu" or 2 * sum(bytes_wanted(model, slots, max_length, mesh, stored, platform)) <= memory_of(
        device
    )


def bytes_wanted(
    model: Model, slots: int, max_length: int, mesh: Mesh | None, stored: str, platform: str
) -> tuple[int, int]:
    """Bytes of a device for keys and values, and for weights. Raises as `check_room` does of what cannot be stored."""
    model.check_matmul(stored, "stored")
    dtype = kept_dtype(model.dtype, platform)
    cache = jax.eval_shape(partial(model.cache, slots, max_length, dtype=dtype))
    params = model.abstract_params()
    width = jnp.dtype(model.dtype).itemsize

    def held(path: Any, count: int) -> int:
        return count * (1 if stored != "none" and stacked_matrices(path) is not None else width)

    if mesh is None:
        keys = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        counts = jax.tree.map(lambda x: x.size, params)
    else:
        place = model.cache_sharding(mesh)
        keys = sum(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(cache))
        counts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), params, model.param_shardings(mesh))
    return keys, sum(jax.tree.leaves(jax.tree.map_with_path(held, counts)))


def memory_of(device: jax.Device) -> int:
    """Bytes that a device has for all programs: as its kind has, as it says itself, or, of CPUs, the machine's."""
    if chip := chip_of(device.device_kind):
        return chip.hbm_bytes
    own = device in jax.local_devices()  # others do not say
    stated = (device.memory_stats() or {}).get("bytes_limit") if own else None
    return int(stated or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
