"""The linear layer, with a backward pass that is spelled out.

Autodiff of an einsum gives the weight's gradient as a matmul and a transposition; spelled out it is one product over
rows, which has a form of its own on CPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from astra_jax.cpu import programs as cpu

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: Array, w: Array, contracted: int = 1) -> Array:
    """x [..., in ...] times w [in ..., out ...] → [..., out ...], in x's dtype.

    Args:
        x: activations; `w` is cast to their dtype.
        contracted: how many axes the input has: the last ones of `x` and the first ones of `w`.
    """
    return _forward(x, w, contracted)[0]


def _forward(x: Array, w: Array, contracted: int) -> tuple[Array, tuple[Array, Array]]:
    # No call of `linear`: `jax.checkpoint`'s policies would not see the matmul in it.
    return _dot(x, w.astype(x.dtype), range(x.ndim - contracted, x.ndim), range(contracted)), (x, w)


def _backward(contracted: int, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    out, rows = w.ndim - contracted, x.ndim - contracted
    dx = _dot(dy, w.astype(dy.dtype), range(dy.ndim - out, dy.ndim), range(contracted, w.ndim))
    return dx, weight_gradient(x, dy, rows, dtype=w.dtype)


def weight_gradient(x: Array, dy: Array, rows: int = 1, *, dtype: Any) -> Array:
    """x [rows ..., in ...], dy [rows ..., out ...] → [in ..., out ...]: the product, summed over rows.

    Args:
        rows: how many axes the rows have.
        dtype: of the sums and of what is returned, and so of what devices add up.
    """
    product = functools.partial(_row_product, rows, dtype)
    return cpu.product_over_rows(product, rows, dtype, x, dy)


def _row_product(rows: int, dtype: Any, x: Array, dy: Array) -> Array:
    return _dot(x, dy, range(rows), range(rows), dtype)


def _dot(x: Array, y: Array, axes_x: range, axes_y: range, dtype: Any = None) -> Array:
    return jax.lax.dot_general(x, y, ((tuple(axes_x), tuple(axes_y)), ((), ())), preferred_element_type=dtype)


linear.defvjp(_forward, _backward)
