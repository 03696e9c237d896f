"""Drawing tokens from logits, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def draw(
    logits_rv: Array, seeds_r: Array, positions_r: Array, temperature_r: Array, top_p_r: Array, *, nucleus: bool
) -> tuple[Array, Array]:
    """One token a row.

    Args:
        logits_rv: float32.
        seeds_r: uint32; with the position it keys the draw, so that a row's tokens do not depend on its neighbours.
        positions_r: the drawn tokens' positions in their sequences.
        temperature_r: 0 is greedy.
        top_p_r: nucleus mass; looked at only with `nucleus`.
        nucleus: False leaves out the sort over the vocabulary: for batches in which every top_p is 1.

    Returns:
        (tokens_r int32, logps_r float32). The logprobs are of the distribution that was drawn from: after temperature
        and nucleus. A greedy row's are the model's own, at temperature 1.
    """
    greedy_r = temperature_r <= 0
    logits_rv = logits_rv / jnp.where(greedy_r, 1.0, temperature_r)[:, None]
    if nucleus:
        logits_rv = _keep_nucleus(logits_rv, jnp.where(greedy_r, 1.0, top_p_r))
    logps_rv = jax.nn.log_softmax(logits_rv, axis=-1)

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logps_rv.shape[1:])

    noise_rv = jnp.where(greedy_r[:, None], 0.0, jax.vmap(noise)(seeds_r, positions_r))
    tokens_r = jnp.argmax(logps_rv + noise_rv, axis=-1).astype(jnp.int32)
    return tokens_r, jnp.take_along_axis(logps_rv, tokens_r[:, None], axis=-1)[:, 0]


def _keep_nucleus(logits_rv: Array, top_p_r: Array) -> Array:
    """-inf outside the smallest set of likeliest tokens whose mass reaches top_p (ties at its edge stay in)."""
    sorted_rv = -jnp.sort(-logits_rv, axis=-1)
    mass_rv = jnp.cumsum(jax.nn.softmax(sorted_rv, axis=-1), axis=-1)
    # A token belongs to the nucleus when the mass before it is below top_p; the last one that does sets the edge.
    before_rv = jnp.concatenate([jnp.zeros_like(mass_rv[:, :1]), mass_rv[:, :-1]], axis=-1)
    edge_r = jnp.min(jnp.where(before_rv < top_p_r[:, None], sorted_rv, jnp.inf), axis=-1)
    return jnp.where((logits_rv >= edge_r[:, None]) | (top_p_r[:, None] >= 1), logits_rv, -jnp.inf)
