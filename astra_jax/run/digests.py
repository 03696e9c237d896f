"""Digest of an array's bits, independent of its sharding.

Orbax compresses chunks without a checksum, so a flipped bit on a disk is read as another number. Each device computes a
digest of its part, and these are summed modulo 2^32. The result is the same for any sharding and number of hosts, so
one slice can check what another saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from astra_jax.run.moments import on_devices


def digests_of(arrays: Mapping[str, Any], blank: Mapping[str, np.ndarray] = MappingProxyType({})) -> dict[str, str]:
    """Return a digest of each array, 64 bits in hexadecimal. One changed bit always changes it.

    Args:
        arrays: up to 32 bits an element; on several hosts each calls this, with the same arrays.
        blank: by name, booleans that broadcast to the array: true elements count as zero.
    """
    sums = jax.device_get([_of_one(array, blank.get(name)) for name, array in arrays.items()])
    return {name: f"{int(a):08x}{int(b):08x}" for name, (a, b) in zip(arrays, sums, strict=True)}


def digest_of_json(value: Any) -> str:
    """Return the digest of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _of_one(array: Any, blank: np.ndarray | None) -> Any:
    here = on_devices(array)
    sums = _sums(here, blank)
    return sums if here is array else jax.block_until_ready(sums)  # limits how many are on the devices at once


@jax.jit
def _sums(x: jax.Array, blank: np.ndarray | None) -> tuple[jax.Array, jax.Array]:
    """Return two sums over all elements of a hash of an element's bits and position; the second is weighted by
    position.

    The hash is MurmurHash3's finalizer (public domain), which for a given position is injective on 32 bits. So a change
    of one element changes the first sum. The second detects most changes that leave the first equal.
    """
    x = jnp.asarray(x)
    if blank is not None:
        x = jnp.where(blank, jnp.zeros((), x.dtype), x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)  # in the flattened array, without flattening a sharded one
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = bits ^ (place * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    mixed ^= mixed >> 16
    # One reduction for both: with two, XLA would store the hashes, an array as large as the weights.
    zeros = jnp.uint32(0), jnp.uint32(0)
    return jax.lax.reduce(
        (mixed, mixed * (2 * place + 1)), zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(x.ndim))
    )
