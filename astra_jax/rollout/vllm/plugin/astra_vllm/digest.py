"""Digest of an array's values, independent of their positions.

A server on TPUs stores a tensor transposed, sharded over chips, and padded with zeros. The sum of a hash of each
element's bits is the same for all of these layouts. It changes if any element changes, except in one of 2**32 cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CHUNK = 1 << 18  # elements hashed at once, to fit the processor's cache


def hashed(bits: Any) -> Any:
    """Return each element's hash by MurmurHash3's finalizer, which maps zero to zero.

    Args:
        bits: uint32, of numpy or JAX.
    """
    bits = bits ^ (bits >> 16)
    bits = bits * np.uint32(0x85EBCA6B)
    bits = bits ^ (bits >> 13)
    bits = bits * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of a CPU tensor with 16- or 32-bit elements; below 2**32."""
    kind = (torch.int16, np.uint16) if tensor.element_size() == 2 else (torch.int32, np.uint32)
    bits = tensor.reshape(-1).view(kind[0]).numpy().view(kind[1])
    total = 0
    for start in range(0, bits.size, CHUNK):
        total += int(hashed(bits[start : start + CHUNK].astype(np.uint32)).sum(dtype=np.uint64))
    return total % 2**32
