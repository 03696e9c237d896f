"""Gradients of sums, added up over micro-batches: N small batches give what one large one would.

A loss function returns *sums* over tokens and counts, never means: what they are divided by is applied once, with the
optimizer's step (`optimizers.apply_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LossFunction = Callable[[Any, Any], tuple[jax.Array, Any]]
"""(params, batch) → (summed loss, other sums)."""


def zero_gradients(params: Any) -> Any:
    """Where gradients are added up: float32, whatever the weights are, and on each weight's devices. In bfloat16 a sum
    stops growing at 256 times what is added to it."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), params)


def gradients_of(loss: LossFunction, params: Any, batch: Any) -> tuple[Any, Any]:
    """(gradients, (summed loss, other sums)) of one micro-batch."""
    sums, gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return gradients, sums


def add(total: Any, more: Any) -> Any:
    """Leaf by leaf, in the type of `total`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, more)


def accumulated(loss: LossFunction, params: Any, batch: Any) -> tuple[Any, Any]:
    """(gradients, (summed loss, other sums)) of all micro-batches of a batch whose leaves are [A, B / A, T]."""
    first = jax.tree.map(lambda x: x[0], batch)
    if jax.tree.leaves(batch)[0].shape[0] == 1:  # no second copy of the gradients
        return gradients_of(loss, params, first)
    shapes = jax.eval_shape(lambda micro: gradients_of(loss, params, micro), first)
    zeros = zero_gradients(params), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])

    def step(total: Any, micro: Any) -> tuple[Any, None]:
        # The barrier keeps the gradients' reduce-scatter in the loop: XLA would move it behind, where each device
        # holds whole gradients (and its TPU compiler fails while it tries).
        return add(total, jax.lax.optimization_barrier(gradients_of(loss, params, micro))), None

    return jax.lax.scan(step, zeros, batch)[0]
