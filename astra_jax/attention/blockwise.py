"""Attention in plain JAX: an online softmax over key blocks, with its own VJP. O(T) memory, runs anywhere.

The forward pass keeps a running maximum and sum over key blocks. The backward pass recomputes the scores from the
log-sum-exp, so no array of size T x S is kept.

In this module heads come first, and the G query heads of a K/V head are additional rows of one matmul (R = G x rows of
a query block). On CPUs a matmul with any other batch axes takes three to five times as long.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from astra_jax.attention.documents import same_or_before
from astra_jax.attention.residuals import RESIDUALS
from astra_jax.cpu import programs as cpu

Array = jax.Array

QUERY_BLOCK, KEY_BLOCK = 256, 256
"""Block lengths.

They are small, so that few scores of the diagonal blocks are wasted, but large enough for an efficient matmul (128:
twice as slow at 4,096 tokens).
"""

MASKED = -1e30
"""Replacement for -inf: its differences are finite, so that a fully masked block gives no NaN."""

Places = tuple[Array, Array, Array, Array]

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend(q_btnh: Array, k_bskh: Array, v_bskh: Array, places: Places, *, columns: int = KEY_BLOCK) -> Array:
    """Compute attention of queries over keys, which may be of other tokens. Returns [B, T, N, H] in q's dtype.

    Args:
        places: segment ids of queries and keys, then their positions: int32, [B, T] or [B, S].
        columns: keys of a block.
    """
    b, t, n, h = q_btnh.shape
    s, k = k_bskh.shape[1:3]
    rows, columns = min(QUERY_BLOCK, t), min(columns, s)
    more_t, more_s = -t % rows, -s % columns
    segments_q, segments_k, positions_q, positions_k = places
    # Padding gets segment 0, which attends to nothing.
    padded = (
        pad_tokens(segments_q, more_t),
        pad_tokens(segments_k, more_s),
        pad_tokens(positions_q, more_t),
        pad_tokens(positions_k, more_s),
    )
    # Scaled here, once: for a factor of the scores XLA's CPU backend would allocate an array of their size.
    q_btnh = q_btnh * h**-0.5
    q_bkgth = pad_tokens(q_btnh, more_t).reshape(b, t + more_t, k, n // k, h).transpose(0, 2, 3, 1, 4)
    k_bksh, v_bksh = (pad_tokens(x, more_s).transpose(0, 2, 1, 3) for x in (k_bskh, v_bskh))
    o_bkgth = _attend(q_bkgth, k_bksh, v_bksh, padded, rows, columns)
    return o_bkgth.transpose(0, 3, 1, 2, 4).reshape(b, t + more_t, n, h)[:, :t]


def pad_tokens(x: Array, more: int) -> Array:
    """Pad tokens with zeros: [B, T, …] → [B, T + more, …]."""
    return jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2)) if more else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q: Array, k: Array, v: Array, places: Places, rows: int, columns: int) -> Array:
    return _attend_forward(q, k, v, places, rows, columns)[0]


def _blocks(x: Array, axis: int, length: int) -> Array:
    """Split an axis into blocks to scan over: […, T, …] → [T / length, …, length, …]."""
    shape = x.shape[:axis] + (x.shape[axis] // length, length) + x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _unblocks(x: Array, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(x.shape[:axis] + (-1,) + x.shape[axis + 2 :])


def _merge_groups(x_bkgt: Array) -> Array:
    """Merge query groups into rows: [B, K, G, rows, …] → [B, K, R, …]."""
    return x_bkgt.reshape(*x_bkgt.shape[:2], -1, *x_bkgt.shape[4:])


def _hidden(visible_bts: Array, groups: int) -> Array:
    """Return the mask to add to scores [B, K, R, S]: 0 for visible keys, else a number that makes the weight 0."""
    bias_bts = jnp.where(visible_bts, 0.0, MASKED)
    return jnp.tile(bias_bts, (1, groups, 1))[:, None]


def visible_pairs(segments_q: Array, positions_q: Array, segments_k: Array, positions_k: Array) -> Array:
    """Return which of [..., rows] may attend to which of [..., columns]: bool [..., rows, columns]."""
    seen = same_or_before(segments_q[..., :, None], segments_k[..., None, :])
    return seen & (positions_q[..., :, None] >= positions_k[..., None, :])


def _where_any(visible: Array, extend: Any, state: Any, *, only: bool) -> Any:
    """Return `extend(state)`, or `state` if nothing is visible: half of all blocks, or more, are fully masked."""
    return extend(state) if only else jax.lax.cond(visible.any(), extend, lambda unchanged: unchanged, state)


def _attend_forward(q: Array, k: Array, v: Array, places: Places, rows: int, columns: int) -> tuple[Array, Any]:
    segments_q, segments_k, positions_q, positions_k = places
    keys = (*(_blocks(x, 2, columns) for x in (k, v)), *(_blocks(x, 1, columns) for x in (segments_k, positions_k)))

    def query_block(block: tuple[Array, ...]) -> tuple[Array, Array]:
        q_bkgth, segments, positions = block
        q_bkrh = _merge_groups(q_bkgth)

        def key_block(carry: Any, block: tuple[Array, ...]) -> tuple[Any, None]:
            k_bksh, v_bksh, segments_k, positions_k = block
            visible = visible_pairs(segments, positions, segments_k, positions_k)

            def extend(carry: tuple[Array, ...]) -> tuple[Array, ...]:
                highest, total, o = carry
                s = _einsum("bkrh,bksh->bkrs", q_bkrh, k_bksh) + _hidden(visible, q.shape[2])
                new = jnp.maximum(highest, s.max(-1))
                p = jnp.exp(s - new[..., None])
                fade = jnp.exp(highest - new)
                o = o * fade[..., None] + _einsum("bkrs,bksh->bkrh", p.astype(v.dtype), v_bksh)
                return new, total * fade + p.sum(-1), o

            return _where_any(visible, extend, carry, only=len(keys[0]) == 1), None

        # The maximum starts above any masked score: masked scores weigh exp(-huge) = 0 in fully masked rows too.
        start = (
            jnp.full(q_bkrh.shape[:-1], MASKED / 10, jnp.float32),
            jnp.zeros(q_bkrh.shape[:-1], jnp.float32),
            jnp.zeros(q_bkrh.shape, jnp.float32),
        )
        (highest, total, o), _ = jax.lax.scan(key_block, start, keys)
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        o = jnp.where(seen[..., None], o / total[..., None], 0.0)
        # +inf for a fully masked row: its recomputed weights are exp(-inf) = 0.
        log_sum = jnp.where(seen, highest + jnp.log(total), jnp.inf)
        return o.reshape(q_bkgth.shape).astype(q.dtype), log_sum.reshape(q_bkgth.shape[:-1])

    queries = (_blocks(q, 3, rows), _blocks(segments_q, 1, rows), _blocks(positions_q, 1, rows))
    o, log_sum = (cpu.named(_unblocks(x, 3), RESIDUALS, None) for x in jax.lax.map(query_block, queries))
    return o, (q, k, v, places, o, log_sum)


def _attend_backward(rows: int, columns: int, residuals: Any, do: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, (segments_q, segments_k, positions_q, positions_k), o, log_sum = residuals
    delta = cpu.sum_of_products(do, o)  # [B, K, G, T]
    keys = (*(_blocks(x, 2, columns) for x in (k, v)), *(_blocks(x, 1, columns) for x in (segments_k, positions_k)))

    def query_block(carry: Any, block: tuple[Array, ...]) -> tuple[Any, Array]:
        *heads, segments, positions = block
        q_bkrh, do_bkrh, log_sum_bkr, delta_bkr = (_merge_groups(x) for x in heads)
        q_bkhr, do_bkhr = cpu.turned_apart(q_bkrh, do_bkrh)

        def key_block(dq: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            k_bksh, v_bksh, segments_k, positions_k, dk, dv = block
            visible = visible_pairs(segments, positions, segments_k, positions_k)

            def extend(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                dq, dk, dv = state
                s = _einsum("bkrh,bksh->bkrs", q_bkrh, k_bksh) + _hidden(visible, q.shape[2])
                p = jnp.exp(s - log_sum_bkr[..., None])
                dp = _einsum("bkrh,bksh->bkrs", do_bkrh, v_bksh)
                ds = (p * (dp - delta_bkr[..., None])).astype(q.dtype)
                dq = dq + _einsum("bkrs,bksh->bkrh", ds, k_bksh)
                dk = dk + _einsum("bkhr,bkrs->bkhs", q_bkhr, ds)
                dv = dv + _einsum("bkhr,bkrs->bkhs", do_bkhr, p.astype(do.dtype))
                return dq, dk, dv

            dq, dk, dv = _where_any(visible, extend, (dq, dk, dv), only=len(keys[0]) == 1)
            return dq, (dk, dv)

        dq, (dk, dv) = jax.lax.scan(key_block, jnp.zeros(q_bkrh.shape, jnp.float32), (*keys, *carry))
        return (dk, dv), dq.reshape(heads[0].shape)

    queries = (
        *(_blocks(x, 3, rows) for x in (q, do, log_sum, delta)),
        *(_blocks(x, 1, rows) for x in (segments_q, positions_q)),
    )
    zeros = tuple(jnp.zeros(x.swapaxes(3, 4).shape, jnp.float32) for x in keys[:2])
    (dk, dv), dq = jax.lax.scan(query_block, zeros, queries)
    dk, dv = (_unblocks(x.swapaxes(3, 4), 2) for x in (dk, dv))
    return _unblocks(dq, 3).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)
