"""Linear layers in 8-bit numbers, by the library qwix, which is imported when the first one is traced.

Each row of activations and each output of a matrix has its own scale, from its largest number. Scales are computed in
each step (dynamic quantisation), and nothing is kept between steps. In the backward pass the activations' gradient is
an 8-bit product too, with the matrix quantised again by its inputs. The weights' gradient stays in the model's dtype:
it sums over all tokens, and one large gradient would leave few steps of the scale for the others (SwitchBack, arXiv
2304.13013, found the same).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from astra_jax import axes
from astra_jax.base.errors import UserError
from astra_jax.cpu import programs as cpu
from astra_jax.mesh import WIDTH, AnyMesh, constrain

Array = jax.Array

_TYPES = {"int8": (jnp.int8, jnp.int8), "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2)}
"""Types (of activations and weights, of gradients)."""

INSTALL = "pip install '.[quantized]'"


@functools.cache
def qwix() -> ModuleType:
    """Return the library qwix.

    Raises:
        UserError: it is not installed.
    """
    try:
        import qwix as library
    except ImportError as error:
        raise UserError(f"matmuls in 8 bits need the library qwix ({error}): {INSTALL}") from None
    return library


def forward(x: Array, w: Array, contracted: int, mesh: AnyMesh | None, writes: bool, matmul: str) -> Array:
    """Multiply x [..., in ...] with w [in ..., out ...] → [..., out ...], in x's dtype; see `linear.linear`.

    On a mesh the quantised matrix is gathered: half the bytes of a bfloat16 one.
    """
    kind, _ = _TYPES[matmul]
    rows = x.ndim - contracted
    x_q = _scaled(x, kind, range(rows))
    w_q = _gathered(_scaled(w, kind, range(contracted, w.ndim)), mesh, writes)
    y = _dot(x_q, w_q, range(rows, x.ndim), range(contracted))
    return checkpoint_name(y.astype(x.dtype), cpu.PRODUCT)  # the sums are wider


def backward(dy: Array, w: Array, contracted: int, mesh: AnyMesh | None, writes: bool, matmul: str) -> Array:
    """Multiply dy [..., out ...] with the transposed w → [..., in ...], in dy's dtype."""
    kind, of_gradients = _TYPES[matmul]
    rows = dy.ndim - (w.ndim - contracted)
    dy_q = _scaled(dy, of_gradients, range(rows))
    w_q = _gathered(_scaled(w, kind, range(contracted)), mesh, writes)
    return _dot(dy_q, w_q, range(rows, dy.ndim), range(contracted, w.ndim)).astype(dy.dtype)


def _scaled(x: Array, kind: Any, axes: Iterable[int]) -> Any:
    """Return a `qwix.QArray` with a float32 scale for each index of `axes`."""
    return qwix().quantize(x.astype(jnp.float32), kind, channelwise_axes=tuple(axes))


def _gathered(w: Any, mesh: AnyMesh | None, writes: bool) -> Any:
    """Gather the quantised matrix from its weights' devices over the model's width."""
    if mesh is None:
        return w

    def at(width: Any) -> Any:
        rest = [None] * (w.ndim - 2)
        return ("tensor", *rest, width) if writes else (width, "tensor", *rest)

    values = constrain(constrain(w.qvalue, mesh, *at(WIDTH)), mesh, *at(None))
    return w.replace(qvalue=values)


def _dot(x: Any, y: Any, axes_x: range, axes_y: range) -> Array:
    return qwix().dot_general(x, y, ((tuple(axes_x), tuple(axes_y)), ((), ())))


# ---------------------------------------------------------------------------------------------------------------------
# Matrices stored in 8 bits: for decoding, and under adapters


@functools.partial(jax.jit, static_argnums=1)
def quantize(w: Array, outputs: tuple[int, ...]) -> Any:
    """Return a matrix as a `qwix.QArray` of int8 with a float32 scale for each index of the axes `outputs`."""
    return _scaled(w, jnp.int8, outputs)


def quantized_axes(path: Any) -> tuple[int, ...] | None:
    """Return `outputs`, with layers, of the stacked leaf at a JAX key path; None if it is not a hidden layer's matrix.

    Leaves with None are not stored in 8 bits.
    """
    sides = axes.stacked_matrices(path)
    return None if sides is None else (0, *sides[1])


def is_quantized(w: Any) -> bool:
    """Return whether a matrix is a result of `quantize`."""
    return not isinstance(w, jax.Array) and hasattr(w, "qvalue")


def dequantize(w: Any) -> Array:
    """Return a quantized matrix as float32 numbers."""
    return w.qvalue.astype(jnp.float32) * w.scale


def quantized_shapes(w: Any, sharding: Sharding) -> Any:
    """Return shapes and dtypes of a quantized matrix: its numbers have `sharding`; scales have outputs only."""
    of_scale = sharding
    if isinstance(sharding, NamedSharding):
        spec = [axis if size > 1 else None for axis, size in zip(sharding.spec, w.scale.shape, strict=False)]
        of_scale = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    values, scale = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in ((w.qvalue, sharding), (w.scale, of_scale))
    )
    return w.replace(qvalue=values, scale=scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul_quantized(x: Array, w: Any, contracted: int, mesh: AnyMesh | None, writes: bool) -> Array:
    """Multiply by a quantized matrix, which has no gradient; x and its gradient are not quantised. See `forward`.

    Decoding waits for the weights, and under adapters they fill the memory. So they are read in 8 bits, and the chip
    converts them to x's dtype for the matmul.
    """
    return _matmul_quantized(x, w, contracted, mesh, writes)[0]


def _matmul_quantized(x: Array, w: Any, contracted: int, mesh: AnyMesh | None, writes: bool) -> tuple[Array, Any]:
    rows, there = x.ndim - contracted, _gathered(w, mesh, writes)
    numbers = ((tuple(range(rows, x.ndim)), tuple(range(contracted))), ((), ()))
    y = jax.lax.dot_general(x, there.qvalue.astype(x.dtype), numbers, preferred_element_type=jnp.float32)
    return (y * w.scale.reshape(w.scale.shape[contracted:])).astype(x.dtype), w


def _matmul_quantized_backward(
    contracted: int, mesh: AnyMesh | None, writes: bool, w: Any, dy: Array
) -> tuple[Array, None]:
    rows, there = dy.ndim - (w.ndim - contracted), _gathered(w, mesh, writes)
    scaled = (dy.astype(jnp.float32) * w.scale.reshape(w.scale.shape[contracted:])).astype(dy.dtype)
    numbers = ((tuple(range(rows, dy.ndim)), tuple(range(contracted, w.ndim))), ((), ()))
    dx = jax.lax.dot_general(scaled, there.qvalue.astype(dy.dtype), numbers, preferred_element_type=jnp.float32)
    return dx.astype(dy.dtype), None


matmul_quantized.defvjp(_matmul_quantized, _matmul_quantized_backward)
