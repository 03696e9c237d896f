"""A number that tells which values an array holds, wherever they lie in it.

A server on TPUs holds a tensor transposed, split over chips, and filled up with zeros. The sum of a hash of each
element's bits is the same in all of these, and another one as soon as an element has another value (but for one case in
2**32).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CHUNK = 1 << 18  # elements that are hashed at once, so that they stay in the processor's cache


def hashed(bits: Any) -> Any:
    """Each element's hash: the steps of MurmurHash3's finalizer, of which zero's is zero.

    Args:
        bits: uint32, of numpy or JAX.
    """
    bits = bits ^ (bits >> 16)
    bits = bits * np.uint32(0x85EBCA6B)
    bits = bits ^ (bits >> 13)
    bits = bits * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def digest(tensor: torch.Tensor) -> int:
    """Of a tensor of 16 or 32 bits an element, on the CPU; below 2**32."""
    kind = (torch.int16, np.uint16) if tensor.element_size() == 2 else (torch.int32, np.uint32)
    bits = tensor.reshape(-1).view(kind[0]).numpy().view(kind[1])
    total = 0
    for start in range(0, bits.size, CHUNK):
        total += int(hashed(bits[start : start + CHUNK].astype(np.uint32)).sum(dtype=np.uint64))
    return total % 2**32
