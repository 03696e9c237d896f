"""Initial values of a layer's parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from astra_jax.models.layers.sizes import Sizes


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, model: Sizes) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.dtype(model.param_dtype)))


def filled(value: float, shape: tuple[int, ...], model: Sizes) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.dtype(model.param_dtype)))
