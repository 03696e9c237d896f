"""The engine's compiled programs: copy, prefill and decode on rows of the KV cache.

A row is one slot's K/V; `index_r` names the slots. Each program takes its rows' first `window` positions out of the
(donated) cache, works on them, and puts back only what is new. Padding rows have the index `slots`: out of bounds, so
putting drops them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from astra_jax.models.model import Cache, Model
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
def copy(cache: Any, source_r: Array, target_r: Array, *, window: int) -> Any:
    """Copy the K/V of the first `window` positions from slots to slots."""
    taken = _take(cache, source_r, window)
    return _each(
        lambda x, new: x.at[..., target_r, :, :, :window].set(new, mode="drop"),
        lambda x, new: x.at[..., target_r, :, :window, :].set(new, mode="drop"),
        cache,
        taken,
    )


@partial(jax.jit, static_argnames=("model", "window"), donate_argnames=("cache",))
def prefill(
    params: Any, cache: Any, index_r: Array, tokens_rt: Array, positions_rt: Array, *, model: Model, window: int
) -> Any:
    """Put K/V of `tokens_rt` at `positions_rt` (-1 is padding) into the cache."""
    _, rows = model.forward_cached(params, tokens_rt, positions_rt, _take(cache, index_r, window))
    return _put(cache, index_r, rows, jnp.maximum(positions_rt, 0), positions_rt)


@partial(jax.jit, static_argnames=("model", "window", "steps", "nucleus", "whole"), donate_argnames=("cache",))
def decode(
    params: Any,
    cache: Any,
    rows: DecodeRows,
    *,
    model: Model,
    window: int,
    steps: int,
    nucleus: bool,
    whole: bool,
) -> tuple[Any, Array, Array]:
    """Draw up to `steps` tokens a row.

    Args:
        nucleus: any row has top_p < 1.
        whole: row i is slot i, for all slots: taking the rows is then one slice instead of a gather.

    Returns:
        (cache, tokens_rt, logps_rt): the drawn tokens, -1 where a finished row drew none; every drawn token but a row's
        last has its K/V in the cache.
    """
    past = _take(cache, None if whole else rows.index_r, window)
    recent = _each(
        lambda k: jnp.zeros((*k.shape[:-1], steps), k.dtype),
        lambda v: jnp.zeros((*v.shape[:-2], steps, v.shape[-1]), v.dtype),
        past,
    )
    w_dv = model.head_kernel(params)
    n = rows.last_r.shape[0]

    def more(state: tuple[Any, ...]) -> Array:
        step, _, _, active_r, _, _ = state
        return (step < steps) & jnp.any(active_r)

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, recent, last_r, active_r, tokens_rt, logps_rt = state
        at_r = rows.positions_r + step  # a row that is still active has drawn in every step so far
        at_r1 = jnp.where(active_r, at_r, -1)[:, None]
        x_r1d, recent = model.forward_next(params, last_r[:, None], at_r1, past, recent, step)
        logits_rv = jnp.einsum("rd,dv->rv", x_r1d[:, 0], w_dv, preferred_element_type=jnp.float32)
        drawn_r, logps_r = draw(logits_rv, rows.seeds_r, at_r + 1, rows.temperature_r, rows.top_p_r, nucleus=nucleus)
        tokens_rt = tokens_rt.at[:, step].set(jnp.where(active_r, drawn_r, -1))
        logps_rt = logps_rt.at[:, step].set(logps_r)
        stopped_r = jnp.any(drawn_r[:, None] == rows.stops_rk, axis=-1)
        return step + 1, recent, drawn_r, active_r & ~stopped_r & (step + 1 < rows.budget_r), tokens_rt, logps_rt

    tokens_rt, logps_rt = jnp.full((n, steps), -1, jnp.int32), jnp.zeros((n, steps), jnp.float32)
    start = (0, recent, rows.last_r, rows.budget_r > 0, tokens_rt, logps_rt)
    _, recent, _, _, tokens_rt, logps_rt = jax.lax.while_loop(more, body, start)
    # Step i fed a token, and so made K/V, exactly when it drew one.
    made_rt = jnp.broadcast_to(jnp.arange(steps), (n, steps))
    written_rt = jnp.where(tokens_rt >= 0, rows.positions_r[:, None] + made_rt, -1)
    return _put(cache, rows.index_r, recent, made_rt, written_rt), tokens_rt, logps_rt


def _take(cache: Any, index_r: Array | None, window: int) -> Any:
    """The first `window` positions of the rows; None is all rows."""

    def rows(x: Array) -> Array:
        return x if index_r is None else jnp.take(x, index_r, axis=-4, mode="clip")

    return _each(lambda k: rows(k[..., :window]), lambda v: rows(v[..., :window, :]), cache)


def _put(cache: Any, index_r: Array, rows: Any, from_rt: Array, to_rt: Array) -> Any:
    """Put the rows' K/V at positions `from_rt` into the cache at `to_rt`; -1 puts nothing."""
    slot_rt = jnp.where(to_rt < 0, jax.tree.leaves(cache)[0].shape[-4], index_r[:, None])
    row_r1 = jnp.arange(len(to_rt))[:, None]
    return _each(
        lambda x, new: x.at[..., slot_rt, :, :, to_rt].set(new[..., row_r1, :, :, from_rt], mode="drop"),
        lambda x, new: x.at[..., slot_rt, :, to_rt, :].set(new[..., row_r1, :, from_rt, :], mode="drop"),
        cache,
        rows,
    )


def _each(on_k: Callable[..., Array], on_v: Callable[..., Array], *caches: Any) -> Any:
    """Keys and values have their positions on different axes. Functions of arrays whose last four are a layer's."""
    if not isinstance(caches[0], Cache):
        return tuple(_each(on_k, on_v, *layers) for layers in zip(*caches, strict=True))
    return Cache(on_k(*(cache.k_bkhs for cache in caches)), on_v(*(cache.v_bksh for cache in caches)))
