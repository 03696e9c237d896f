"""The rotary embedding, and its scaling beyond the trained length."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from astra_jax.models.layers.sizes import Sizes

Array = jax.Array


def rotary_angles(positions_bt: Array, model: Sizes) -> tuple[Array, Array]:
    """(cos, sin), each [B, T, H / 2], float32; with `model.yarn` stretched, and scaled by its attention factor."""
    exponent = jnp.arange(0, model.head_dim, 2, dtype=jnp.float32) / model.head_dim
    positions_bt1 = positions_bt[..., None].astype(jnp.float32)
    if (yarn := model.yarn) is None:
        angles = positions_bt1 / model.rope_theta**exponent
        return jnp.cos(angles), jnp.sin(angles)

    def dimension(turns: float) -> float:
        """Which pair of dimensions turns so often over the original length."""
        ratio = math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / math.log(model.rope_theta)
        return ratio * model.head_dim / 2

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # HF bounds by head_dim - 1, not by the number of pairs; the weights were made with that.
    low, high = max(low, 0), min(high, model.head_dim - 1)
    ramp = jnp.clip((jnp.arange(model.head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    frequencies = (1 - ramp + ramp / yarn.factor) / model.rope_theta**exponent
    angles = positions_bt1 * frequencies
    return jnp.cos(angles) * yarn.scale, jnp.sin(angles) * yarn.scale


def rotate(x_btnh: Array, angles_bth: tuple[Array, Array]) -> Array:
    """Rotary embedding over pairs (i, i + H/2), as in Hugging Face's layout."""
    cos, sin = (a[:, :, None] for a in angles_bth)
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)
