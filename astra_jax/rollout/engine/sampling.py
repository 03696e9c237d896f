"""Sampling of tokens from logits, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = Any

BLOCK = 64
"""Tokens in a block: near the square root of a vocabulary, to need few random numbers. Divides Qwen3's 151,936."""


def draw(
    logits_rv: Array, seeds_r: Array, positions_r: Array, temperature_r: Array, top_p_r: Array, *, nucleus: bool
) -> tuple[Array, Array]:
    """Sample one token for each row: first a block of the vocabulary by its mass, then a token of it, both by the
    Gumbel-max trick.

    The result follows the whole distribution with V / 64 + 64 random numbers instead of V, which would dominate a tiny
    model's step (64 rows of 8,192: 1.8 ms instead of 27 on two cores). A cumulative sum would need one number. But its
    rounding shifts all later bounds, so a row's tokens could depend on its neighbours.

    Args:
        logits_rv: float32.
        seeds_r: uint32; the random key is (seed, position), so a row's tokens do not depend on its neighbours.
        positions_r: positions of the sampled tokens in their sequences.
        temperature_r: 0 is greedy.
        top_p_r: nucleus mass; used only with `nucleus`.
        nucleus: False omits the sort over the vocabulary, for batches in which every top_p is 1.

    Returns:
        (tokens_r int32, logps_r float32). Logprobs are those of the sampled distribution, after temperature and
        nucleus. Greedy rows use the model's own distribution, at temperature 1.
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
class LogitsProcessing:
    """Options that change a distribution besides temperature and nucleus; see `sampler.Sampling`. All [R] but `ids_rt`.

    `drawn_r` is the index in `ids_rt` at which each completion starts.

    Attributes:
        ids_rt: each row's sequence so far, padded with -1; penalties use it.
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
    """Token occurrences for the penalties.

    Attributes:
        times_rv: float32, occurrences of each token in the completion.
        there_rv: bool, true if the prompt or completion contains the token.
    """

    times_rv: Array
    there_rv: Array

    def and_now(self, tokens_r: Array, active_r: Array) -> TokenCounts:
        """Return the counts including the tokens just sampled for active rows."""
        rows_r = jnp.arange(len(tokens_r))
        at = (rows_r, jnp.where(active_r, tokens_r, self.times_rv.shape[1]))
        return TokenCounts(self.times_rv.at[at].add(1.0, mode="drop"), self.there_rv.at[at].set(True, mode="drop"))


def said_so_far(shaping: LogitsProcessing, vocabulary: int) -> TokenCounts:
    """Return the token counts, computed once per chunk and only if a row has a penalty."""
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
    shaping: LogitsProcessing,
    said: TokenCounts,
    *,
    allowed_rw: Array | None = None,
    alternatives: int,
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Sample like `draw`, after applying penalties, mask, temperature, min_p, top_k and nucleus.

    Args:
        allowed_rw: int32, one bit for each allowed token (`sampler.Constraint`); None allows all.
        alternatives: number of likeliest tokens to return for each sampled one; 0 for none.

    Returns:
        (tokens_r, logps_r, (ids_rk, logps_rk) or None). Greedy rows' logprobs are at temperature 1, after penalties and
        mask.
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
    """Set logits to -inf that min_p, top_k or top_p exclude, each applied to the result of the previous (ties at an
    edge stay)."""
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
    """Set logits to -inf outside the smallest set of likeliest tokens with mass top_p (ties at its edge stay)."""
    sorted_rv = -jnp.sort(-logits_rv, axis=-1)
    mass_rv = jnp.cumsum(jax.nn.softmax(sorted_rv, axis=-1), axis=-1)
    # A token is in the nucleus if the mass before it is below top_p; the last such token sets the edge.
    before_rv = jnp.concatenate([jnp.zeros_like(mass_rv[:, :1]), mass_rv[:, :-1]], axis=-1)
    edge_r = jnp.min(jnp.where(before_rv < top_p_r[:, None], sorted_rv, jnp.inf), axis=-1)
    return jnp.where((logits_rv >= edge_r[:, None]) | (top_p_r[:, None] >= 1), logits_rv, -jnp.inf)
