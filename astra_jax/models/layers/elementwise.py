"""RMS norm and SwiGLU's gate, with explicit backward passes that keep inputs and no intermediate arrays.

Autodiff would keep intermediate arrays. The scan over layers would write them into stacks and read them back, which
takes longer than recomputing them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from astra_jax.cpu import programs as cpu

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Return x / sqrt(mean(x²) + eps) * scale over the last axis, computed in float32, in x's dtype."""
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x: Array, scale: Array, eps: float) -> tuple[Array, tuple[Array, Array, Array]]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(eps: float, residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    del eps
    x, scale, inverse = residuals
    normed, dy32 = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    dscale = jnp.sum(dy32 * normed, axis=range(x.ndim - 1))
    dnormed = dy32 * scale.astype(jnp.float32)
    along = cpu.sum_of_products(dnormed, normed)[..., None] / x.shape[-1]
    dx = inverse * (dnormed - normed * along)
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def swiglu(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up, both [..., F]."""
    return cpu.in_float32(_gated, gate, up)


def _gated(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    return cpu.in_float32(_gated_backward, *residuals, dy)


def _gated_backward(gate: Array, up: Array, dy: Array) -> tuple[Array, Array]:
    share = jax.nn.sigmoid(gate)
    return dy * up * share * (1 + gate * (1 - share)), dy * gate * share


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
