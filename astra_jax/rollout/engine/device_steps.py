"""Compiled programs of the engine: copy, prefill and decode on rows of the KV cache.

A row is one slot's keys and values; `index_r` names the slots. Each program reads the first `window` positions of its
rows from the (donated) cache, and writes back only new entries. Padding rows have the index `slots`, which is out of
bounds, so their writes are dropped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from astra_jax.attention.cache import Cache, Caches, each, first, put
from astra_jax.models.decoder import fewest_rows
from astra_jax.models.model import CacheView, Model
from astra_jax.rollout.engine.sampling import LogitsProcessing, draw, draw_shaped, said_so_far

Array = Any

SCORED_TOGETHER = 64
"""Positions whose logits exist at once during prompt scoring: 39 MB with 151,936 vocabulary entries."""


@struct.dataclass
class DecodeRows:
    """Rows that decode, one per sequence. All [R] but `stops_rk`.

    Attributes:
        index_r: the slot; `slots` is padding.
        last_r: the last token, not yet in the cache.
        positions_r: its position.
        budget_r: tokens that may be sampled now; 0 is padding.
        seeds_r, temperature_r, top_p_r: see `sampling.draw`.
        stops_rk: stop ids; -1 is none.
    """

    index_r: Array
    last_r: Array
    positions_r: Array
    budget_r: Array
    seeds_r: Array
    temperature_r: Array
    top_p_r: Array
    stops_rk: Array


@partial(jax.jit, static_argnames=("window",), donate_argnames=("cache",))
def copy(cache: Caches, source_r: Array, target_r: Array, *, window: int) -> Caches:
    """Copy the K/V of the first `window` positions from slots to slots."""
    return each(lambda layer: layer.copied(source_r, target_r, window), cache)


@partial(jax.jit, static_argnames=("model", "window", "platform"), donate_argnames=("cache",))
def prefill(
    params: Any,
    cache: Caches,
    index_r: Array,
    tokens_rt: Array,
    positions_rt: Array,
    *,
    model: Model,
    window: int,
    platform: str | None = None,
) -> Caches:
    """Put K/V of `tokens_rt` at `positions_rt` (-1, at a row's end, is padding) into the cache.

    Args:
        window: at least the cached length of these rows.
        platform: see `Decoder.forward_cached`.
    """
    return _prefilled(params, cache, index_r, tokens_rt, positions_rt, model, window, platform)[0]


@partial(jax.jit, static_argnames=("model", "window", "alternatives", "platform"), donate_argnames=("cache",))
def prefill_scored(
    params: Any,
    cache: Caches,
    index_r: Array,
    tokens_rt: Array,
    positions_rt: Array,
    next_rt: Array,
    *,
    model: Model,
    window: int,
    alternatives: int,
    platform: str | None = None,
) -> tuple[Caches, Array, tuple[Array, Array] | None]:
    """Prefill, and return the logprob of each next token under the model's own distribution.

    The head is computed for `SCORED_TOGETHER` positions at a time: the logits of a long prompt would take gigabytes.

    Args:
        next_rt: the token that follows each of `tokens_rt`.
        alternatives: number of likeliest tokens to return at each position.

    Returns:
        (cache, logps_rt, (ids_rtk, logps_rtk) or None), float32.
    """
    cache, x_rtd = _prefilled(params, cache, index_r, tokens_rt, positions_rt, model, window, platform)
    w_dv = model.head_kernel(params)

    def score(place: tuple[Array, Array]) -> tuple[Array, Any]:
        x_d, next_token = place
        logits_v = jnp.einsum("d,dv->v", x_d, w_dv, preferred_element_type=jnp.float32)
        logps_v = logits_v - jax.nn.logsumexp(logits_v)
        if not alternatives:
            return logps_v[next_token], None
        best_k, ids_k = jax.lax.top_k(logps_v, min(alternatives, len(logps_v)))
        return logps_v[next_token], (ids_k, best_k)

    places = x_rtd.reshape(-1, x_rtd.shape[-1]), next_rt.reshape(-1)
    found = jax.lax.map(score, places, batch_size=SCORED_TOGETHER)
    logps_rt, others = jax.tree.map(lambda x: x.reshape(*next_rt.shape, *x.shape[1:]), found)
    return cache, logps_rt, others


@partial(
    jax.jit,
    static_argnames=("model", "window", "steps", "nucleus", "whole", "alternatives", "platform"),
    donate_argnames=("cache",),
)
def decode(
    params: Any,
    cache: Caches,
    rows: DecodeRows,
    *,
    model: Model,
    window: int,
    steps: int,
    nucleus: bool,
    whole: bool,
    shaping: LogitsProcessing | None = None,
    alternatives: int = 0,
    platform: str | None = None,
) -> tuple[Caches, Array, Array, tuple[Array, Array] | None]:
    """Sample up to `steps` tokens for each row.

    Args:
        nucleus: any row has top_p < 1; used only without `shaping`.
        whole: row i is slot i, for all slots, so rows are read with one slice instead of a gather.
        shaping: options of rows with shaped distributions; None compiles plain `draw`.
        alternatives: number of likeliest tokens to return at each position; only with `shaping`.
        platform: see `Decoder.forward_cached`.

    Returns:
        (cache, tokens_rt, logps_rt, (ids_rtk, logps_rtk) or None): sampled tokens, -1 for finished rows, and the
        alternatives. Every sampled token except a row's last has its keys and values in the cache.
    """
    n = rows.last_r.shape[0]
    past, look = _read(cache, None if whole else rows.index_r, window)
    recent = model.cache(n, steps, stacked=isinstance(cache, Cache), dtype=first(cache).dtype)
    w_dv = model.head_kernel(params)
    more_rows = max(0, fewest_rows(cache, platform) - n)
    how: dict[str, Any] = {"look": look, "platform": platform}

    def more(state: tuple[Any, ...]) -> Array:
        return (state[0] < steps) & jnp.any(state[3])

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, recent, last_r, active_r, tokens_rt, logps_rt, said, others = state
        at_r = rows.positions_r + step  # an active row has sampled in every step so far
        at_r1 = jnp.where(active_r, at_r, -1)[:, None]
        x_r1d, recent = model.forward_next(params, last_r[:, None], at_r1, past, recent, step, **how)
        logits_rv = _logits(x_r1d, w_dv, more_rows)
        given = (logits_rv, rows.seeds_r, at_r + 1, rows.temperature_r, rows.top_p_r)
        if shaping is None:
            drawn_r, logps_r = draw(*given, nucleus=nucleus)
        else:
            drawn_r, logps_r, best = draw_shaped(*given, shaping, said, alternatives=alternatives)
            said = said.and_now(drawn_r, active_r)
            others = jax.tree.map(lambda all_rtk, one_rk: all_rtk.at[:, step].set(one_rk), others, best)
        tokens_rt = tokens_rt.at[:, step].set(jnp.where(active_r, drawn_r, -1))
        logps_rt = logps_rt.at[:, step].set(logps_r)
        stopped_r = jnp.any(drawn_r[:, None] == rows.stops_rk, axis=-1)
        active_r = active_r & ~stopped_r & (step + 1 < rows.budget_r)
        return step + 1, recent, drawn_r, active_r, tokens_rt, logps_rt, said, others

    tokens_rt, logps_rt = jnp.full((n, steps), -1, jnp.int32), jnp.zeros((n, steps), jnp.float32)
    said = None if shaping is None else said_so_far(shaping, model.vocab_size)
    places = (n, steps, min(alternatives, model.vocab_size))
    others = (jnp.zeros(places, jnp.int32), jnp.zeros(places, jnp.float32)) if alternatives else None
    start = (0, recent, rows.last_r, rows.budget_r > 0, tokens_rt, logps_rt, said, others)
    _, recent, _, _, tokens_rt, logps_rt, _, others = jax.lax.while_loop(more, body, start)
    # Step i fed a token, and so made keys and values, exactly if it sampled one.
    count_r = jnp.sum(tokens_rt >= 0, axis=1)
    cache = put(cache, rows.index_r, rows.positions_r, count_r, recent)
    return cache, tokens_rt, logps_rt, others


@partial(jax.jit, static_argnames=("model", "window", "whole", "platform"), donate_argnames=("cache",))
def feed(
    params: Any,
    cache: Caches,
    rows: DecodeRows,
    *,
    model: Model,
    window: int,
    whole: bool,
    platform: str | None = None,
) -> tuple[Caches, Array]:
    """Run the part of a step that no constraint affects. Return (cache with the last tokens' keys and values, next
    logits_rv)."""
    n = rows.last_r.shape[0]
    past, look = _read(cache, None if whole else rows.index_r, window)
    recent = model.cache(n, 1, stacked=isinstance(cache, Cache), dtype=first(cache).dtype)
    active_r = rows.budget_r > 0
    at_r1 = jnp.where(active_r, rows.positions_r, -1)[:, None]
    w_dv = model.head_kernel(params)
    more_rows = max(0, fewest_rows(cache, platform) - n)
    how: dict[str, Any] = {"look": look, "platform": platform}

    def body(step: Array, state: tuple[Caches, Array]) -> tuple[Caches, Array]:
        x_r1d, new = model.forward_next(params, rows.last_r[:, None], at_r1, past, state[0], step, **how)
        return new, _logits(x_r1d, w_dv, more_rows)

    count_r = active_r.astype(jnp.int32)
    # One step, as a loop, so that reads of the cache precede the writes; see `put`.
    start = recent, jnp.zeros((n, model.vocab_size), jnp.float32)
    recent, logits_rv = jax.lax.fori_loop(0, jnp.max(count_r), body, start)
    return put(cache, rows.index_r, rows.positions_r, count_r, recent), logits_rv


@partial(jax.jit, static_argnames=("alternatives",))
def pick(
    logits_rv: Array, rows: DecodeRows, shaping: LogitsProcessing, allowed_rw: Array, *, alternatives: int
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Sample one allowed token for each row after `feed`. Arguments and results as in `draw_shaped`."""
    return draw_shaped(
        logits_rv,
        rows.seeds_r,
        rows.positions_r + 1,
        rows.temperature_r,
        rows.top_p_r,
        shaping,
        said_so_far(shaping, logits_rv.shape[1]),
        allowed_rw=allowed_rw,
        alternatives=alternatives,
    )


def _prefilled(
    params: Any,
    cache: Caches,
    index_r: Array,
    tokens_rt: Array,
    positions_rt: Array,
    model: Model,
    window: int,
    platform: str | None,
) -> tuple[Caches, Array]:
    """Return (cache with the tokens' keys and values, their hidden states)."""
    past, look = _read(cache, index_r, window)
    x_rtd, new = model.forward_cached(params, tokens_rt, positions_rt, past, look=look, platform=platform)
    count_r = jnp.sum(positions_rt >= 0, axis=1)
    return put(cache, index_r, positions_rt[:, 0], count_r, new), x_rtd


def _logits(x_r1d: Array, w_dv: Array, more_rows: int) -> Array:
    x_rd = jnp.pad(x_r1d[:, 0], ((0, more_rows), (0, 0)))
    return jnp.einsum("rd,dv->rv", x_rd, w_dv, preferred_element_type=jnp.float32)[: len(x_r1d)]


def _read(cache: Caches, index_r: Array | None, window: int) -> tuple[Caches, CacheView]:
    """Return what a program reads of the cache, and each layer's view of it: the first `window` positions of the rows;
    None is all rows.

    If layers are separate arrays, the window is copied once, since attention is fast on its own array. Otherwise each
    layer reads the cache in place, since memory may not allow a second copy.
    """

    if isinstance(cache, Cache):
        return cache, lambda layer: layer.window(window) if index_r is None else layer.window(window).sliced(index_r)
    taken = each(lambda layer: layer.window(window), cache)
    return taken if index_r is None else each(lambda layer: layer.gather_rows(index_r), taken), lambda layer: layer
