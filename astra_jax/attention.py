"""Attention: one function, one meaning of segments and positions, a backend each for what runs it.

A query at t attends to a key at s exactly when both are in the same document (equal segment ids, not 0) and the key's
position is not after the query's. A query that may attend to nothing (padding) gets zeros and no gradient.

Backends:
    blockwise   online softmax over key blocks in plain JAX, with its own VJP: O(T) memory, runs anywhere, the reference.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

QUERY_BLOCK, KEY_BLOCK = 512, 1024
"""Block lengths of `blockwise`: the scores of one block of one head are 2 MB in float32, which a CPU's L2 holds."""

_MASKED = -1e30
"""Stands for -inf: its differences are finite, so that a fully masked block gives no NaN."""


def attention(
    q_btnh: Array,
    k_bskh: Array,
    v_bskh: Array,
    *,
    segment_ids_q_bt: Array,
    segment_ids_k_bs: Array,
    positions_q_bt: Array,
    positions_k_bs: Array,
    backend: str = "blockwise",
) -> Array:
    """Causal grouped-query attention over packed rows, scaled by H^-1/2. Returns [B, T, N, H] in q's dtype.

    Args:
        q_btnh: queries; N is a multiple of K, query head n uses key-value head n // (N / K).
        segment_ids_q_bt, segment_ids_k_bs: int32; 0 is padding.
        positions_q_bt, positions_k_bs: int32, within the document.
        backend: see the module's docstring.

    Raises:
        ValueError: an unknown backend.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"attention backend is {backend!r}; use one of {', '.join(_BACKENDS)}")
    places = (segment_ids_q_bt, segment_ids_k_bs, positions_q_bt, positions_k_bs)
    return _BACKENDS[backend](q_btnh, k_bskh, v_bskh, places)


def cached_attention(q_btnh: Array, k_bskh: Array, v_bskh: Array, positions_bt: Array) -> Array:
    """Attention of new tokens over a cache in which slot s holds position s; forward only. Returns [B, T, N, H].

    Args:
        positions_bt: of the queries; each attends to the slots up to its own. -1 is padding: its output is meaningless.
    """
    b, t, n, h = q_btnh.shape
    k = k_bskh.shape[2]
    q_btkgh = q_btnh.reshape(b, t, k, n // k, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_btkgh, k_bskh, preferred_element_type=jnp.float32) * h**-0.5
    visible_bts = jnp.arange(k_bskh.shape[1]) <= positions_bt[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible_bts[:, None, None], scores, _MASKED), axis=-1)
    o_btkgh = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_bskh.dtype), v_bskh)
    return o_btkgh.reshape(b, t, n, h)


# ---------------------------------------------------------------------------------------------------------------------
# blockwise: the forward pass keeps a running maximum and sum over key blocks; the backward pass computes the scores again
# from the log-sum-exp, so nothing of size T x S is ever kept.

Places = tuple[Array, Array, Array, Array]


def _blockwise(q_btnh: Array, k_bskh: Array, v_bskh: Array, places: Places) -> Array:
    b, t, n, h = q_btnh.shape
    s, k = k_bskh.shape[1:3]
    rows, columns = min(QUERY_BLOCK, t), min(KEY_BLOCK, s)
    more_t, more_s = -t % rows, -s % columns
    segments_q, segments_k, positions_q, positions_k = places
    # Padding gets segment 0, so it takes part in nothing.
    padded = (
        _pad(segments_q, more_t),
        _pad(segments_k, more_s),
        _pad(positions_q, more_t),
        _pad(positions_k, more_s),
    )
    q = _pad(q_btnh, more_t).reshape(b, t + more_t, k, n // k, h)
    o = _attend(q, _pad(k_bskh, more_s), _pad(v_bskh, more_s), padded, rows, columns)
    return o.reshape(b, t + more_t, n, h)[:, :t]


def _pad(x: Array, more: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2)) if more else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, places: Places, rows: int, columns: int) -> Array:
    return _attend_forward(q, k, v, places, rows, columns)[0]


def _blocks(x: Array, length: int) -> Array:
    """[B, T, …] → [T / length, B, length, …], to scan over."""
    b, t = x.shape[:2]
    return jnp.moveaxis(x.reshape(b, t // length, length, *x.shape[2:]), 1, 0)


def _unblocks(x: Array) -> Array:
    n, b, length = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(b, n * length, *x.shape[3:])


def _visible(segments_q: Array, positions_q: Array, segments_k: Array, positions_k: Array) -> Array:
    """[B, rows, columns], bool."""
    same = (segments_q[:, :, None] == segments_k[:, None]) & (segments_q[:, :, None] > 0)
    return same & (positions_q[:, :, None] >= positions_k[:, None])


def _scores(q: Array, k: Array, visible: Array) -> Array:
    """[B, K, G, rows, columns], float32."""
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    return jnp.where(visible[:, None, None], s, _MASKED)


def _attend_forward(q: Array, k: Array, v: Array, places: Places, rows: int, columns: int) -> tuple[Array, Any]:
    segments_q, segments_k, positions_q, positions_k = places
    keys = tuple(_blocks(x, columns) for x in (k, v, segments_k, positions_k))

    def query_block(block: tuple[Array, ...]) -> tuple[Array, Array]:
        q, segments, positions = block
        b, t, heads, groups, h = q.shape

        def key_block(carry: tuple[Array, ...], block: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
            k, v, segments_k, positions_k = block
            visible = _visible(segments, positions, segments_k, positions_k)

            def extend(carry: tuple[Array, ...]) -> tuple[Array, ...]:
                highest, total, o = carry
                s = _scores(q, k, visible)
                new = jnp.maximum(highest, s.max(-1))
                p = jnp.exp(s - new[..., None]) * visible[:, None, None]
                fade = jnp.exp(highest - new)
                o = o * fade[..., None] + jnp.einsum(
                    "bkgts,bskh->bkgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32
                )
                return new, total * fade + p.sum(-1), o

            # Half of all blocks, and more with packing, are masked out as a whole.
            return (
                extend(carry) if len(keys[0]) == 1 else jax.lax.cond(visible.any(), extend, lambda c: c, carry)
            ), None

        start = (
            jnp.full((b, heads, groups, t), _MASKED, jnp.float32),
            jnp.zeros((b, heads, groups, t), jnp.float32),
            jnp.zeros((b, heads, groups, t, h), jnp.float32),
        )
        (highest, total, o), _ = jax.lax.scan(key_block, start, keys)
        seen = total > 0
        o = jnp.where(seen[..., None], o / jnp.where(seen, total, 1.0)[..., None], 0.0)
        # +inf for a row that sees nothing: its recomputed weights are exp(-inf) = 0.
        log_sum = jnp.where(seen, highest + jnp.log(jnp.where(seen, total, 1.0)), jnp.inf)
        return jnp.einsum("bkgth->btkgh", o).astype(q.dtype), jnp.einsum("bkgt->btkg", log_sum)

    queries = tuple(_blocks(x, rows) for x in (q, segments_q, positions_q))
    o, log_sum = (_unblocks(x) for x in jax.lax.map(query_block, queries))
    return o, (q, k, v, places, o, log_sum)


def _attend_backward(rows: int, columns: int, residuals: Any, do: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, (segments_q, segments_k, positions_q, positions_k), o, log_sum = residuals
    scale = q.shape[-1] ** -0.5
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)  # [B, T, K, G]
    keys = tuple(_blocks(x, columns) for x in (k, v, segments_k, positions_k))

    def query_block(carry: tuple[Array, Array], block: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        q, segments, positions, do, log_sum, delta = block
        log_sum, delta = (jnp.einsum("btkg->bkgt", x)[..., None] for x in (log_sum, delta))

        def key_block(dq: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            k, v, segments_k, positions_k, dk, dv = block
            visible = _visible(segments, positions, segments_k, positions_k)

            def extend(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                dq, dk, dv = state
                p = jnp.exp(_scores(q, k, visible) - log_sum)
                dp = jnp.einsum("btkgh,bskh->bkgts", do, v, preferred_element_type=jnp.float32)
                ds = (p * (dp - delta) * scale).astype(q.dtype)
                dq = dq + jnp.einsum("bkgts,bskh->btkgh", ds, k, preferred_element_type=jnp.float32)
                dk = dk + jnp.einsum("bkgts,btkgh->bskh", ds, q, preferred_element_type=jnp.float32)
                dv = dv + jnp.einsum("bkgts,btkgh->bskh", p.astype(do.dtype), do, preferred_element_type=jnp.float32)
                return dq, dk, dv

            state = (dq, dk, dv)
            dq, dk, dv = extend(state) if len(keys[0]) == 1 else jax.lax.cond(visible.any(), extend, lambda c: c, state)
            return dq, (dk, dv)

        dq, (dk, dv) = jax.lax.scan(key_block, jnp.zeros(q.shape, jnp.float32), (*keys, *carry))
        return (dk, dv), dq

    queries = tuple(_blocks(x, rows) for x in (q, segments_q, positions_q, do, log_sum, delta))
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2])
    (dk, dv), dq = jax.lax.scan(query_block, zeros, queries)
    return _unblocks(dq).astype(q.dtype), _unblocks(dk).astype(k.dtype), _unblocks(dv).astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)

_BACKENDS = {"blockwise": _blockwise}
