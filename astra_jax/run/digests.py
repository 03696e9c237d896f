"""A digest of an array's bits that says nothing of where they lie.

Orbax compresses chunks without a checksum, so that a flipped bit on a disk comes back as another number. A digest is
made on the devices, of what each of them holds, and summed modulo 2^32 over all: it is the same whatever the sharding
and the number of hosts, so that what one slice saved another can check.
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
    """A digest of each array, 64 bits in hexadecimal. One changed bit always changes it.

    Args:
        arrays: of up to 32 bits an element; on several hosts each calls this, with the same arrays.
        blank: for some of them booleans that broadcast to the array: elements that count as zero, whatever they are.
    """
    sums = jax.device_get([_of_one(array, blank.get(name)) for name, array in arrays.items()])
    return {name: f"{int(a):08x}{int(b):08x}" for name, (a, b) in zip(arrays, sums, strict=True)}


def digest_of_json(value: Any) -> str:
    """Of a JSON value, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _of_one(array: Any, blank: np.ndarray | None) -> Any:
    here = on_devices(array)
    sums = _sums(here, blank)
    return sums if here is array else jax.block_until_ready(sums)  # or many would be there at once


@jax.jit
def _sums(x: jax.Array, blank: np.ndarray | None) -> tuple[jax.Array, jax.Array]:
    """Two sums over all elements of a mix of an element's bits with its place; the second weighted with the place.

    The mix is MurmurHash3's finalizer (public domain), which for a given place maps each 32 bits to others: an element
    that changes alone changes the first sum. The second one tells apart most of what leaves the first as it was.
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
    # One reduction of both: of two XLA would keep the mix between them, an array as large as the weights.
    zeros = jnp.uint32(0), jnp.uint32(0)
    return jax.lax.reduce(
        (mixed, mixed * (2 * place + 1)), zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(x.ndim))
    )
