"""Matrices with a low-rank adapter (arXiv 2106.09685): W + scale · A B, in which only A and B are trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

from astra_jax.models.layers import quantized

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("w", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class LoRAWeight:
    """Linear layer's matrix and its adapter, of one layer or, with a leading axis, stacked over layers.

    Attributes:
        w: [in ..., out ...], the frozen weights, or the result of `quantized.quantize`.
        a: [in ..., rank], float32.
        b: [rank, out ...], float32.
        scale: factor of the product.
    """

    w: Any
    a: Any
    b: Any
    scale: float

    def __getitem__(self, index: EllipsisType) -> LoRAWeight:
        """Return the object itself, since layers read an NNX variable with `[...]`."""
        return self


def is_adapted(w: Any) -> bool:
    """Return whether a matrix has an adapter."""
    return isinstance(w, LoRAWeight)


def is_wrapped(w: Any) -> bool:
    """Return whether a matrix is adapted or stored in 8 bits, and so not a plain array."""
    return is_adapted(w) or quantized.is_quantized(w)


def materialize(w: Any, dtype: Any = None) -> Array:
    """Return a matrix as one plain array that computes the same; arrays are returned unchanged."""
    if quantized.is_quantized(w):
        return quantized.dequantize(w)
    return merged(w, dtype) if is_adapted(w) else w


def merged(w: LoRAWeight, dtype: Any = None) -> Array:
    """Return one matrix that computes the same, stacked as `w` is.

    It is summed in float32, then cast to `dtype`, or by default to w's own; for a stored `w` to float32.
    """
    stacked = (0,) if w.a.ndim + w.b.ndim - 2 > w.w.ndim else ()
    over = ((w.a.ndim - 1,), (len(stacked),))
    product = jax.lax.dot_general(w.a, w.b, (over, (stacked, stacked)), precision=jax.lax.Precision.HIGHEST)
    under = materialize(w.w)
    return (under.astype(jnp.float32) + w.scale * product).astype(dtype or under.dtype)
