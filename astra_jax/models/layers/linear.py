"""The linear layer, with a backward pass that is spelled out.

Autodiff of an einsum gives the weight's gradient as a matmul and a transposition; spelled out it is one product over
rows, which has a form of its own on CPUs, whose sums are float32, and of which each device is sent its own part.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from astra_jax.cpu import programs as cpu
from astra_jax.mesh import BATCH, WIDTH

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def linear(x: Array, w: Array, contracted: int = 1, mesh: Mesh | None = None, writes: bool = False) -> Array:
    """x [..., in ...] times w [in ..., out ...] → [..., out ...], in x's dtype.

    Args:
        x: activations; `w` is cast to their dtype.
        contracted: how many axes the input has: the last ones of `x` and the first ones of `w`.
        mesh: where both are, x as [B, T, in ...]; None is one device.
        writes: on a mesh: whether the model's width is the output, and not the input; see `axes`.
    """
    return _forward(x, w, contracted, mesh, writes)[0]


def _forward(x: Array, w: Array, contracted: int, mesh: Mesh | None, writes: bool) -> tuple[Array, tuple[Array, Array]]:
    del mesh, writes
    # No call of `linear`: `jax.checkpoint`'s policies would not see the matmul in it.
    return _dot(x, w.astype(x.dtype), range(x.ndim - contracted, x.ndim), range(contracted)), (x, w)


def _backward(
    contracted: int, mesh: Mesh | None, writes: bool, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, w = residuals
    out, rows = w.ndim - contracted, x.ndim - contracted
    dx = _dot(dy, w.astype(dy.dtype), range(dy.ndim - out, dy.ndim), range(contracted, w.ndim))
    gradient = functools.partial(weight_gradient, rows=rows)
    if mesh is not None:
        wide, split = P(BATCH, "context"), P(BATCH, "context", "tensor")
        gradient = jax.shard_map(
            functools.partial(_own_part, gradient, w.ndim - 1 if writes else 0),
            mesh=mesh,
            in_specs=(split, wide) if writes else (wide, split),
            out_specs=P("tensor", *[None] * (w.ndim - 2), WIDTH) if writes else P(WIDTH, "tensor"),
            check_vma=False,
        )
    return dx, gradient(x, dy).astype(w.dtype)


def _own_part(gradient: Any, axis: int, x: Array, dy: Array) -> Array:
    # XLA would sum whole gradients on every device, and then take a part of them.
    return jax.lax.psum_scatter(jax.lax.psum(gradient(x, dy), "data"), WIDTH, scatter_dimension=axis, tiled=True)


def weight_gradient(x: Array, dy: Array, rows: int = 1) -> Array:
    """x [rows ..., in ...], dy [rows ..., out ...] → [in ..., out ...]: the product, summed over rows, in float32.

    Args:
        rows: how many axes the rows have.
    """
    return cpu.product_over_rows(functools.partial(_row_product, rows), rows, jnp.float32, x, dy)


def _row_product(rows: int, x: Array, dy: Array) -> Array:
    return _dot(x, dy, range(rows), range(rows), jnp.float32)


def _dot(x: Array, y: Array, axes_x: range, axes_y: range, dtype: Any = None) -> Array:
    return jax.lax.dot_general(x, y, ((tuple(axes_x), tuple(axes_y)), ((), ())), preferred_element_type=dtype)


linear.defvjp(_forward, _backward)
