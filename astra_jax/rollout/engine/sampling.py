"""Drawing tokens from logits, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = Any

BLOCK = 64
"""Tokens of a block: near the root of a vocabulary, so that few numbers are random. Divides Qwen3's 151,936."""


def draw(
    logits_rv: Array, seeds_r: Array, positions_r: Array, temperature_r: Array, top_p_r: Array, *, nucleus: bool
) -> tuple[Array, Array]:
    """One token a row: a block of the vocabulary by its mass, then a token of it, each by the Gumbel-max trick.

    That is a draw from the whole distribution with V / 64 + 64 random numbers instead of V, which made up most of a
    tiny model's step (64 rows of 8,192: 27 ms against 1.8 ms on two cores). A cumulative sum would need one number, but
    rounding shifts all its later bounds, so that a row's tokens would depend on its neighbours now and then.

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
    return _drawn(logits_rv, seeds_r, positions_r, greedy_r)


def _drawn(logits_rv: Array, seeds_r: Array, positions_r: Array, greedy_r: Array) -> tuple[Array, Array]:
    missing = -logits_rv.shape[1] % BLOCK
    padded_rv = jnp.pad(logits_rv, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else logits_rv
    logits_rbw = padded_rv.reshape(len(logits_rv), -1, BLOCK)
    highest_rb = jnp.max(logits_rbw, axis=-1)
    highest_r1 = jnp.max(highest_rb, axis=-1, keepdims=True)
    mass_rb = jnp.sum(jnp.exp(logits_rbw - highest_r1[..., None]), axis=-1)

    def noise(stage: int, n: int) -> Array:
        def row(seed: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), stage)
            return jax.random.gumbel(key, (n,))

        return jnp.where(greedy_r[:, None], 0.0, jax.vmap(row)(seeds_r, positions_r))

    scores_rb = jnp.where(greedy_r[:, None], highest_rb, jnp.log(mass_rb))
    block_r = jnp.argmax(scores_rb + noise(0, scores_rb.shape[1]), axis=-1)
    inside_rw = jnp.take_along_axis(logits_rbw, block_r[:, None, None], axis=1)[:, 0]
    place_r1 = jnp.argmax(inside_rw + noise(1, BLOCK), axis=-1, keepdims=True)
    tokens_r = (block_r * BLOCK + place_r1[:, 0]).astype(jnp.int32)
    logits_r1 = jnp.take_along_axis(inside_rw, place_r1, axis=-1)
    return tokens_r, (logits_r1 - highest_r1)[:, 0] - jnp.log(jnp.sum(mass_rb, axis=-1))


@struct.dataclass
class Shaping:
    """What changes a distribution beside temperature and nucleus; see `policy.Sampling`. All [R] but `ids_rt`.

    Attributes:
        ids_rt: each row's sequence so far, -1 behind its end: what penalties go by.
        drawn_r: where in it the completion begins.
    """

    top_k_r: Array
    min_p_r: Array
    presence_r: Array
    frequency_r: Array
    repetition_r: Array
    ids_rt: Array
    drawn_r: Array


@struct.dataclass
class TokenCounts:
    """What penalties go by.

    Attributes:
        times_rv: float32, how often the completion has a token.
        there_rv: bool, whether the prompt has it, or the completion.
    """

    times_rv: Array
    there_rv: Array

    def and_now(self, tokens_r: Array, active_r: Array) -> TokenCounts:
        """With the tokens that were drawn for the rows that still draw."""
        rows_r = jnp.arange(len(tokens_r))
        at = (rows_r, jnp.where(active_r, tokens_r, self.times_rv.shape[1]))
        return TokenCounts(self.times_rv.at[at].add(1.0, mode="drop"), self.there_rv.at[at].set(True, mode="drop"))


def said_so_far(shaping: Shaping, vocabulary: int) -> TokenCounts:
    """Counted once a chunk, and only where a row is penalised at all."""
    rows = len(shaping.drawn_r)
    nothing = TokenCounts(jnp.zeros((rows, vocabulary), jnp.float32), jnp.zeros((rows, vocabulary), bool))

    def counted() -> TokenCounts:
        at = (jnp.arange(rows)[:, None], jnp.where(shaping.ids_rt < 0, vocabulary, shaping.ids_rt))
        new_rt = (jnp.arange(shaping.ids_rt.shape[1]) >= shaping.drawn_r[:, None]).astype(jnp.float32)
        return TokenCounts(
            nothing.times_rv.at[at].add(new_rt, mode="drop"), nothing.there_rv.at[at].set(True, mode="drop")
        )

    penalised_r = (shaping.presence_r != 0) | (shaping.frequency_r != 0) | (shaping.repetition_r != 1)
    return jax.lax.cond(jnp.any(penalised_r), counted, lambda: nothing)


def draw_shaped(
    logits_rv: Array,
    seeds_r: Array,
    positions_r: Array,
    temperature_r: Array,
    top_p_r: Array,
    shaping: Shaping,
    said: TokenCounts,
    *,
    allowed_rw: Array | None = None,
    alternatives: int,
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """As `draw`, of a distribution that is shaped first: penalties, the mask, temperature, min_p, top_k, nucleus.

    Args:
        allowed_rw: int32, a bit for each token that may be drawn (`policy.Constraint`); None: all may.
        alternatives: how many of the likeliest tokens are returned beside the drawn one; 0 is none.

    Returns:
        (tokens_r, logps_r, (ids_rk, logps_rk) or None). Greedy rows' logprobs are at temperature 1, of what penalties
        and the mask left.
    """
    greedy_r = temperature_r <= 0
    repetition_r1 = shaping.repetition_r[:, None]
    repeated_rv = jnp.where(logits_rv > 0, logits_rv / repetition_r1, logits_rv * repetition_r1)
    logits_rv = jnp.where(said.there_rv, repeated_rv, logits_rv)
    logits_rv = logits_rv - shaping.frequency_r[:, None] * said.times_rv
    logits_rv = logits_rv - shaping.presence_r[:, None] * (said.times_rv > 0)
    if allowed_rw is not None:
        bits_rv = ((allowed_rw[:, :, None] >> jnp.arange(32)) & 1).reshape(len(logits_rv), -1)
        logits_rv = jnp.where(bits_rv[:, : logits_rv.shape[1]] == 1, logits_rv, -jnp.inf)
    logits_rv = logits_rv / jnp.where(greedy_r, 1.0, temperature_r)[:, None]
    logits_rv = _keep_likely(
        logits_rv,
        jnp.where(greedy_r, 0, shaping.top_k_r),
        jnp.where(greedy_r, 0.0, shaping.min_p_r),
        jnp.where(greedy_r, 1.0, top_p_r),
    )
    tokens_r, logps_r = _drawn(logits_rv, seeds_r, positions_r, greedy_r)
    if not alternatives:
        return tokens_r, logps_r, None
    best_rk, ids_rk = jax.lax.top_k(logits_rv, min(alternatives, logits_rv.shape[1]))
    return tokens_r, logps_r, (ids_rk, best_rk - jax.nn.logsumexp(logits_rv, axis=-1, keepdims=True))


def _keep_likely(logits_rv: Array, top_k_r: Array, min_p_r: Array, top_p_r: Array) -> Array:
    """-inf outside what min_p, top_k and top_p leave, each of what the one before left (ties at an edge stay in)."""
    sorted_rv = -jnp.sort(-logits_rv, axis=-1)
    rank_v = jnp.arange(logits_rv.shape[1])
    kept_rv = (rank_v < top_k_r[:, None]) | (top_k_r[:, None] == 0)
    kept_rv &= sorted_rv >= sorted_rv[:, :1] + jnp.log(min_p_r)[:, None]
    mass_rv = jnp.cumsum(jax.nn.softmax(jnp.where(kept_rv, sorted_rv, -jnp.inf), axis=-1), axis=-1)
    before_rv = jnp.concatenate([jnp.zeros_like(mass_rv[:, :1]), mass_rv[:, :-1]], axis=-1)
    kept_rv &= (before_rv < top_p_r[:, None]) | (top_p_r[:, None] >= 1)
    edge_r1 = jnp.min(jnp.where(kept_rv, sorted_rv, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_rv >= edge_r1, logits_rv, -jnp.inf)


def _keep_nucleus(logits_rv: Array, top_p_r: Array) -> Array:
    """-inf outside the smallest set of likeliest tokens whose mass reaches top_p (ties at its edge stay in)."""
    sorted_rv = -jnp.sort(-logits_rv, axis=-1)
    mass_rv = jnp.cumsum(jax.nn.softmax(sorted_rv, axis=-1), axis=-1)
    # A token belongs to the nucleus when the mass before it is below top_p; the last one that does sets the edge.
    before_rv = jnp.concatenate([jnp.zeros_like(mass_rv[:, :1]), mass_rv[:, :-1]], axis=-1)
    edge_r = jnp.min(jnp.where(before_rv < top_p_r[:, None], sorted_rv, jnp.inf), axis=-1)
    return jnp.where((logits_rv >= edge_r[:, None]) | (top_p_r[:, None] >= 1), logits_rv, -jnp.inf)
