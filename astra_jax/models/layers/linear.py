"""Linear layer, with an explicit backward pass.

Autodiff of an einsum computes the weight's gradient as a matmul and a transposition. The explicit form is one product
over rows, with a special form on CPUs. Its sums are float32, and each device receives its own part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from astra_jax.cpu import programs as cpu
from astra_jax.mesh import BATCH, WIDTH, AnyMesh, free, on_each_device
from astra_jax.models.layers import quantized
from astra_jax.models.layers.adapted import is_adapted

Array = jax.Array


def linear(
    x: Array, w: Any, contracted: int = 1, mesh: AnyMesh | None = None, writes: bool = False, matmul: str = "none"
) -> Array:
    """Multiply x [..., in ...] with w [in ..., out ...] → [..., out ...], in x's dtype.

    Args:
        x: activations; `w` is cast to their dtype.
        w: an array; or a result of `quantized.quantize`, which has no gradient; or an `adapted.LoRAWeight` one of
            either.
        contracted: number of input axes: the last ones of `x` and the first ones of `w`.
        mesh: mesh of both, x as [B, T, in ...]; None is one device.
        writes: on a mesh: whether the model's width is the output, and not the input; see `axes`.
        matmul: a name of `matmuls.MATMUL_QUANTIZATIONS`.
    """
    if quantized.is_quantized(w):
        return quantized.matmul_quantized(x, w, contracted, mesh, writes)
    if is_adapted(w):
        y = linear(x, w.w, contracted, mesh, writes, matmul)
        # Thin matrices, such as a router: their gradients are summed whole, and matmuls in `x`'s dtype are fast.
        through = _linear(_linear(x, w.a, contracted, None, False, "none"), w.b, 1, None, False, "none")
        return y + (w.scale * through).astype(y.dtype)
    return _linear(x, w, contracted, mesh, writes, matmul)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _linear(x: Array, w: Array, contracted: int, mesh: AnyMesh | None, writes: bool, matmul: str) -> Array:
    return _forward(x, w, contracted, mesh, writes, matmul)[0]


def _forward(
    x: Array, w: Array, contracted: int, mesh: AnyMesh | None, writes: bool, matmul: str
) -> tuple[Array, tuple[Array, Array]]:
    if matmul != "none":
        return quantized.forward(x, w, contracted, mesh, writes, matmul), (x, w)
    # Not a call of `_linear`: `jax.checkpoint`'s policies would not see the matmul in it.
    over = range(x.ndim - contracted, x.ndim), range(contracted)
    return cpu.product(x, w.astype(x.dtype), over, mesh), (x, w)


def _backward(
    contracted: int, mesh: AnyMesh | None, writes: bool, matmul: str, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, w = residuals
    out, rows = w.ndim - contracted, x.ndim - contracted
    if matmul == "none":
        over = range(dy.ndim - out, dy.ndim), range(contracted, w.ndim)
        dx = cpu.product(dy, w.astype(dy.dtype), over, mesh)
    else:
        dx = quantized.backward(dy, w, contracted, mesh, writes, matmul)
    gradient: Callable[[Array, Array], Array] = functools.partial(weight_gradient, rows=rows)
    if mesh is not None:
        wide, split = P(BATCH, "context"), P(BATCH, "context", "tensor")
        gradient = on_each_device(
            functools.partial(_own_part, gradient, w.ndim - 1 if writes else 0, free(mesh, ["data"])),
            mesh,
            (split, wide) if writes else (wide, split),
            P("tensor", *[None] * (w.ndim - 2), WIDTH) if writes else P(WIDTH, "tensor"),
        )
    return dx, gradient(x, dy).astype(w.dtype)


@jax.custom_vjp
def add_bias(x: Array, bias: Array) -> Array:
    """Add a bias [...] to the last axes of x [B, T, …], in x's dtype; the bias's gradient is summed in float32."""
    return x + bias.astype(x.dtype)


def _bias_forward(x: Array, bias: Array) -> tuple[Array, Array]:
    return add_bias(x, bias), bias


def _bias_backward(bias: Array, dy: Array) -> tuple[Array, Array]:
    return dy, dy.sum(range(dy.ndim - bias.ndim), dtype=jnp.float32).astype(bias.dtype)


add_bias.defvjp(_bias_forward, _bias_backward)


def _own_part(gradient: Any, axis: int, copies: tuple[str, ...], x: Array, dy: Array) -> Array:
    # XLA would sum whole gradients on every device, and then take a part of them.
    return jax.lax.psum_scatter(jax.lax.psum(gradient(x, dy), copies), WIDTH, scatter_dimension=axis, tiled=True)


def weight_gradient(x: Array, dy: Array, rows: int = 1) -> Array:
    """Return the weight's gradient in float32: x [rows ..., in ...], dy [rows ..., out ...] → [in ..., out ...].

    Args:
        rows: number of axes of the rows, over which the product is summed.
    """
    return cpu.product_over_rows(functools.partial(_row_product, rows), rows, jnp.float32, x, dy)


def _row_product(rows: int, x: Array, dy: Array) -> Array:
    over = tuple(range(rows))
    return jax.lax.dot_general(x, dy, ((over, over), ((), ())), preferred_element_type=jnp.float32)


_linear.defvjp(_forward, _backward)
