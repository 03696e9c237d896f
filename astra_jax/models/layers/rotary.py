"""Rotary embedding, and its scaling beyond the trained length."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from astra_jax.models.layers.sizes import Llama3Scaling, Sizes, Yarn

Array = jax.Array


def rotary_angles(positions_bt: Array, model: Sizes) -> tuple[Array, Array]:
    """Return (cos, sin), each [B, T, H / 2], float32, scaled by `model.yarn`, `model.llama3` or `model.linear`."""
    exponent = jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim
    positions_bt1 = positions_bt[..., None].astype(jnp.float32)
    if model.yarn is not None:
        angles = positions_bt1 * (_kept_by_yarn(model.yarn, model) / model.rope_theta**exponent)
        return jnp.cos(angles) * model.yarn.scale, jnp.sin(angles) * model.yarn.scale
    if model.llama3 is not None:
        frequencies = 1 / model.rope_theta**exponent
        angles = positions_bt1 * (_kept_by_llama3(model.llama3, frequencies) * frequencies)
    else:
        angles = positions_bt1 / model.rope_theta**exponent
        if model.linear is not None:
            angles = angles / model.linear
    return jnp.cos(angles), jnp.sin(angles)


def _kept_by_yarn(yarn: Yarn, model: Sizes) -> Array:
    """Return the share that YaRN keeps of each pair's frequency, [H / 2]."""

    def dimension(turns: float) -> float:
        """Return the pair of dimensions that makes this many turns over the original length."""
        ratio = math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / math.log(model.rope_theta)
        return ratio * model.head_dim / 2

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # HF's bound is head_dim - 1, not the number of pairs; the weights were trained with that.
    low, high = max(low, 0), min(high, model.head_dim - 1)
    ramp = jnp.clip((jnp.arange(model.head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return 1 - ramp + ramp / yarn.factor


def _kept_by_llama3(scaling: Llama3Scaling, frequencies: Array) -> Array:
    """Return the share that Llama 3's scaling keeps of each pair's frequency, [H / 2]."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    ramp = jnp.clip((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns), 0.0, 1.0)
    return ramp + (1 - ramp) / scaling.factor


@jax.custom_vjp
def rotate(x_btnh: Array, angles_bth: tuple[Array, Array]) -> Array:
    """Apply the rotary embedding to pairs (i, i + H/2), as in Hugging Face's layout, in float32. Returns x's dtype.

    The backward pass rotates in the opposite direction. No gradient flows to the angles.
    """
    return jax.lax.platform_dependent(x_btnh, *angles_bth, tpu=_by_matmul, default=_by_halves)


def _rotate_forward(x_btnh: Array, angles_bth: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
    return rotate(x_btnh, angles_bth), angles_bth


def _rotate_backward(angles_bth: tuple[Array, Array], dy_btnh: Array) -> tuple[Array, None]:
    cos, sin = angles_bth
    return rotate(dy_btnh, (cos, -sin)), None


rotate.defvjp(_rotate_forward, _rotate_backward)


def _by_halves(x_btnh: Array, cos_bth: Array, sin_bth: Array) -> Array:
    cos, sin = cos_bth[:, :, None], sin_bth[:, :, None]
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)


def _by_matmul(x_btnh: Array, cos_bth: Array, sin_bth: Array) -> Array:
    # Halves of a head are half of a TPU's lanes, and concatenating them moves every register. A matrix that moves each
    # number to its partner's place is exact, also in bfloat16, and runs on the matrix unit.
    cos, sin = (jnp.concatenate([x, x], axis=-1)[:, :, None] for x in (cos_bth, sin_bth))
    half = x_btnh.shape[-1] // 2
    partner_hg = np.zeros((2 * half, 2 * half), np.float32)
    partner_hg[np.arange(half), np.arange(half) + half] = 1.0
    partner_hg[np.arange(half) + half, np.arange(half)] = -1.0
    precision = jax.lax.Precision.HIGHEST if x_btnh.dtype == jnp.float32 else None
    turned = jnp.einsum("btnh,hg->btng", x_btnh, partner_hg.astype(x_btnh.dtype), precision=precision)
    return (x_btnh.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin).astype(x_btnh.dtype)
