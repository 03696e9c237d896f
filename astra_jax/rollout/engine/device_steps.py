"""The engine's compiled programs: copy, prefill and decode on rows of the KV cache.

A row is one slot's K/V; `index_r` names the slots. Each program takes its rows' first `window` positions out of the
(donated) cache, works on them, and puts back only what is new. Padding rows have the index `slots`: out of bounds, so
putting drops them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from astra_jax.attention.cache import Cache, Caches, each
from astra_jax.models.decoder import FEWEST_ROWS
from astra_jax.models.model import Look, Model
from astra_jax.rollout.engine.sampling import draw

Array = Any


@struct.dataclass
class DecodeRows:
    """One row for each sequence that decodes. All [R] but `stops_rk`.

    Attributes:
        index_r: the slot; `slots` is padding.
        last_r: the last token, not yet in the cache.
        positions_r: its position.
        budget_r: how many tokens may be drawn now; 0 is padding.
        seeds_r, temperature_r, top_p_r: see `sampling.draw`.
        stops_rk: stop ids, -1 is none.
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


@partial(jax.jit, static_argnames=("model", "window"), donate_argnames=("cache",))
def prefill(
    params: Any, cache: Caches, index_r: Array, tokens_rt: Array, positions_rt: Array, *, model: Model, window: int
) -> Caches:
    """Put K/V of `tokens_rt` at `positions_rt` (-1, at a row's end, is padding) into the cache.

    Args:
        window: holds all that is cached of these rows.
    """
    past, look = _read(cache, index_r, window)
    _, new = model.forward_cached(params, tokens_rt, positions_rt, past, look=look)
    count_r = jnp.sum(positions_rt >= 0, axis=1)
    return each(lambda layer, more: layer.put(index_r, positions_rt[:, 0], count_r, more), cache, new)


@partial(jax.jit, static_argnames=("model", "window", "steps", "nucleus", "whole"), donate_argnames=("cache",))
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
) -> tuple[Caches, Array, Array]:
    """Draw up to `steps` tokens a row.

    Args:
        nucleus: any row has top_p < 1.
        whole: row i is slot i, for all slots: taking the rows is then one slice instead of a gather.

    Returns:
        (cache, tokens_rt, logps_rt): the drawn tokens, -1 where a finished row drew none; every drawn token but a row's
        last has its K/V in the cache.
    """
    n = rows.last_r.shape[0]
    past, look = _read(cache, None if whole else rows.index_r, window)
    recent = model.cache(n, steps, stacked=isinstance(cache, Cache))
    w_dv = model.head_kernel(params)
    more_rows = max(0, FEWEST_ROWS - n) if isinstance(cache, Cache) else 0

    def more(state: tuple[Any, ...]) -> Array:
        step, _, _, active_r, _, _ = state
        return (step < steps) & jnp.any(active_r)

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, recent, last_r, active_r, tokens_rt, logps_rt = state
        at_r = rows.positions_r + step  # a row that is still active has drawn in every step so far
        at_r1 = jnp.where(active_r, at_r, -1)[:, None]
        x_r1d, recent = model.forward_next(params, last_r[:, None], at_r1, past, recent, step, look=look)
        x_rd = jnp.pad(x_r1d[:, 0], ((0, more_rows), (0, 0)))
        logits_rv = jnp.einsum("rd,dv->rv", x_rd, w_dv, preferred_element_type=jnp.float32)[:n]
        drawn_r, logps_r = draw(logits_rv, rows.seeds_r, at_r + 1, rows.temperature_r, rows.top_p_r, nucleus=nucleus)
        tokens_rt = tokens_rt.at[:, step].set(jnp.where(active_r, drawn_r, -1))
        logps_rt = logps_rt.at[:, step].set(logps_r)
        stopped_r = jnp.any(drawn_r[:, None] == rows.stops_rk, axis=-1)
        return step + 1, recent, drawn_r, active_r & ~stopped_r & (step + 1 < rows.budget_r), tokens_rt, logps_rt

    tokens_rt, logps_rt = jnp.full((n, steps), -1, jnp.int32), jnp.zeros((n, steps), jnp.float32)
    start = (0, recent, rows.last_r, rows.budget_r > 0, tokens_rt, logps_rt)
    _, recent, _, _, tokens_rt, logps_rt = jax.lax.while_loop(more, body, start)
    # Step i fed a token, and so made K/V, exactly when it drew one.
    count_r = jnp.sum(tokens_rt >= 0, axis=1)
    cache = each(lambda layer, new: layer.put(rows.index_r, rows.positions_r, count_r, new), cache, recent)
    return cache, tokens_rt, logps_rt


def _read(cache: Caches, index_r: Array | None, window: int) -> tuple[Caches, Look]:
    """What a program reads, and how each layer looks at it: the first `window` positions of the rows; None is all rows.

    Where layers are apart, on CPUs, it is taken out once; attention is fast on an array of its own. Otherwise each
    layer reads it in the cache, of which there may be no room for a second.
    """

    if isinstance(cache, Cache):
        return cache, lambda layer: layer.window(window) if index_r is None else layer.window(window).sliced(index_r)
    taken = each(lambda layer: layer.window(window), cache)
    return taken if index_r is None else each(lambda layer: layer.taken(index_r), taken), lambda layer: layer
