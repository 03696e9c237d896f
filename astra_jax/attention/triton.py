"""Flash attention for GPUs: three Pallas kernels that Triton compiles (Dao, arXiv 2307.08691), with their own VJP.

Like the reference they use only segment ids and positions, so any order of the row is correct. For speed, keys should
be in the row's order. Each block of queries then visits one range of key blocks, and each block of keys one range of
query blocks. The ranges come from the blocks' smallest and largest segment and position. Other documents and the
causal half are not visited. The G query heads of a K/V head share its keys without a copy.

Scores are kept in base 2, as the hardware's exponential is.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from astra_jax.attention.blockwise import MASKED, Places, pad_tokens, visible_pairs
from astra_jax.attention.documents import before
from astra_jax.attention.residuals import RESIDUALS
from astra_jax.base.errors import InputError

Array = jax.Array

BLOCKS = (128, 64), (64, 64)
"""(rows of queries, rows of keys) of the forward and of the backward kernels.

This is the capacity of a streaming multiprocessor's shared memory at 128 dimensions per head in bfloat16.
"""


class _Sizes(NamedTuple):
    """Static sizes."""

    rows: int
    columns: int
    interpret: bool

    @property
    def options(self) -> dict[str, Any]:
        if self.interpret:
            return {"interpret": True}
        return {"compiler_params": plt.CompilerParams(num_warps=8 if self.rows > 64 else 4, num_stages=2)}


def supports(head_dim: int) -> bool:
    """Return whether Triton supports a head size: its tiles are powers of two, and its matmuls at least 16 wide."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def attend(q_btnh: Array, k_bskh: Array, v_bskh: Array, places: Places, *, interpret: bool = False) -> Array:
    """Compute attention; see `blockwise.attend`.

    Raises:
        ValueError: H is not a power of two, or is below 16.
    """
    b, t, n, h = q_btnh.shape
    k = k_bskh.shape[2]
    if not supports(h):
        raise InputError(f"head_dim is {h}; attention backend 'triton' needs a power of two from 16; use 'blockwise'")
    longest = max(max(pair) for pair in BLOCKS)
    more_t, more_s = -t % longest, -k_bskh.shape[1] % longest
    segments_q, segments_k, positions_q, positions_k = places
    # Padding gets segment 0, which attends to nothing.
    padded = tuple(
        pad_tokens(x, more)
        for x, more in ((segments_q, more_t), (segments_k, more_s), (positions_q, more_t), (positions_k, more_s))
    )
    q, k_, v = (
        pad_tokens(x, more).transpose(0, 2, 1, 3) for x, more in ((q_btnh, more_t), (k_bskh, more_s), (v_bskh, more_s))
    )
    o_bkgth = _attend(q.reshape(b, k, n // k, t + more_t, h), k_, v, padded, interpret)
    return o_bkgth.reshape(b, n, t + more_t, h).transpose(0, 2, 1, 3)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, places: Any, interpret: bool) -> Array:
    return _forward(q, k, v, places, interpret)[0]


def _ranges(places: Any, sizes: _Sizes) -> tuple[Array, Array]:
    """Return the blocks that can see each other, int32, [B, blocks, 2].

    For each block of queries: the first key block and the one after the last. For each block of keys: the same of query
    blocks.
    """

    def bounds(segments: Array, positions: Array, length: int) -> tuple[Array, ...]:
        blocks = [x.reshape(x.shape[0], -1, length) for x in (segments, positions)]
        real = blocks[0] > 0
        least = [jnp.where(real, x, jnp.iinfo(x.dtype).max).min(-1) for x in blocks]
        greatest = [jnp.where(real, x, -1).max(-1) for x in blocks]
        return *least, *greatest

    segments_q, segments_k, positions_q, positions_k = places
    first_q, _, last_q, latest_q = (x[:, :, None] for x in bounds(segments_q, positions_q, sizes.rows))
    # Among documents that continue others the continued ones come first: their ids are smaller.
    others_q = jnp.where(before(segments_q) > 0, before(segments_q), segments_q)
    first_q = jnp.minimum(first_q, bounds(others_q, positions_q, sizes.rows)[0][:, :, None])
    first_k, earliest_k, last_k, _ = (x[:, None, :] for x in bounds(segments_k, positions_k, sizes.columns))
    visible_bij = (first_q <= last_k) & (first_k <= last_q) & (earliest_k <= latest_q)

    def span(visible: Array) -> Array:
        count = visible.shape[-1]
        index = jnp.arange(count)
        first = jnp.where(visible, index, count).min(-1)
        after = jnp.where(visible, index + 1, 0).max(-1)
        return jnp.stack([jnp.minimum(first, after), after], -1).astype(jnp.int32)

    return span(visible_bij), span(visible_bij.swapaxes(1, 2))


def _dot(x: Array, y: Array) -> Array:
    # full float32: Triton would round its operands to 10 bits
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _whole(*shape: int) -> pl.BlockSpec:
    """Return the spec of one row of a [B, …] array, in memory; the kernel loads parts of it."""
    return pl.BlockSpec((None, *shape), lambda i, n, b: (b, *(0,) * len(shape)))


def _place_specs(t: int, s: int) -> list[pl.BlockSpec]:
    return [_whole(t), _whole(s), _whole(t), _whole(s)]


def _row_specs(rows: int, s: int, g: int, h: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Return specs of a block of a head's queries, of one number per query, and of all keys of their key head."""
    return (
        pl.BlockSpec((None, None, None, rows, h), lambda i, n, b: (b, n // g, n % g, i, 0)),
        pl.BlockSpec((None, None, None, rows), lambda i, n, b: (b, n // g, n % g, i)),
        pl.BlockSpec((None, None, s, h), lambda i, n, b: (b, n // g, 0, 0)),
    )


def _scale(h: int) -> float:
    """Return the scale of scores in base 2."""
    return h**-0.5 * math.log2(math.e)


def _forward(q: Array, k: Array, v: Array, places: Any, interpret: bool) -> tuple[Array, Any]:
    sizes = _Sizes(*BLOCKS[0], interpret)
    b, kh, g, t, h = q.shape
    s = k.shape[2]
    rows, columns, scale = sizes.rows, sizes.columns, _scale(h)

    def kernel(span_ref, sq_ref, sk_ref, pq_ref, pk_ref, q_ref, k_ref, v_ref, o_ref, sum_ref):  # type: ignore[no-untyped-def]
        i = pl.program_id(0)
        here = pl.ds(i * rows, rows)
        q_rh = q_ref[...]
        segments_q, positions_q = sq_ref[here], pq_ref[here]

        def block(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            highest, total, o_rh = carry
            there = pl.ds(j * columns, columns)
            visible = visible_pairs(segments_q, positions_q, sk_ref[there], pk_ref[there])
            scores = jnp.where(visible, _dot(q_rh, k_ref[there, :].T) * scale, MASKED)
            new = jnp.maximum(highest, scores.max(-1))
            p = jnp.exp2(scores - new[:, None])
            fade = jnp.exp2(highest - new)
            o_rh = o_rh * fade[:, None] + _dot(p.astype(v_ref.dtype), v_ref[there, :])
            return new, total * fade + p.sum(-1), o_rh

        # The maximum starts above any masked score: masked scores weigh exp(-huge) = 0 in fully masked rows too.
        start = (
            jnp.full((rows,), MASKED / 10, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, h), jnp.float32),
        )
        highest, total, o_rh = jax.lax.fori_loop(span_ref[i, 0], span_ref[i, 1], block, start)
        seen = total > 0
        safe = jnp.where(seen, total, 1.0)
        o_ref[...] = jnp.where(seen[:, None], o_rh / safe[:, None], 0.0).astype(o_ref.dtype)
        # huge for a fully masked row: its weights are 0
        sum_ref[...] = jnp.where(seen, highest + jnp.log2(safe), -MASKED)

    heads, per_row, keys = _row_specs(rows, s, g, h)
    o, log_sum = pl.pallas_call(
        kernel,
        grid=(t // rows, kh * g, b),
        in_specs=[_whole(t // rows, 2), *_place_specs(t, s), heads, keys, keys],
        out_specs=[heads, per_row],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)],
        name="attention_forward",
        **sizes.options,
    )(_ranges(places, sizes)[0], *places, q, k, v)
    o, log_sum = checkpoint_name(o, RESIDUALS), checkpoint_name(log_sum, RESIDUALS)
    return o, (q, k, v, places, o, log_sum)


def _backward(interpret: bool, residuals: Any, do: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, places, o, log_sum = residuals
    sizes = _Sizes(*BLOCKS[1], interpret)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
    of_queries, of_keys = _ranges(places, sizes)
    dq = _dq(of_queries, places, q, k, v, do, log_sum, delta, sizes)
    dk, dv = _dk_dv(of_keys, places, q, k, v, do, log_sum, delta, sizes)
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _dq(
    spans: Array, places: Any, q: Array, k: Array, v: Array, do: Array, log_sum: Array, delta: Array, sizes: _Sizes
) -> Array:
    b, kh, g, t, h = q.shape
    s = k.shape[2]
    rows, columns, scale = sizes.rows, sizes.columns, _scale(h)

    def kernel(span_ref, sq_ref, sk_ref, pq_ref, pk_ref, q_ref, k_ref, v_ref, do_ref, sum_ref, delta_ref, dq_ref):  # type: ignore[no-untyped-def]
        i = pl.program_id(0)
        here = pl.ds(i * rows, rows)
        q_rh, do_rh, log_sum_r, delta_r = q_ref[...], do_ref[...], sum_ref[...], delta_ref[...]
        segments_q, positions_q = sq_ref[here], pq_ref[here]

        def block(j: Array, dq_rh: Array) -> Array:
            there = pl.ds(j * columns, columns)
            k_ch = k_ref[there, :]
            visible = visible_pairs(segments_q, positions_q, sk_ref[there], pk_ref[there])
            p = jnp.exp2(jnp.where(visible, _dot(q_rh, k_ch.T) * scale, MASKED) - log_sum_r[:, None])
            ds = p * (_dot(do_rh, v_ref[there, :].T) - delta_r[:, None])
            return dq_rh + _dot(ds.astype(k_ch.dtype), k_ch)

        dq_rh = jax.lax.fori_loop(span_ref[i, 0], span_ref[i, 1], block, jnp.zeros((rows, h), jnp.float32))
        dq_ref[...] = (dq_rh * h**-0.5).astype(dq_ref.dtype)

    heads, per_row, keys = _row_specs(rows, s, g, h)
    return pl.pallas_call(
        kernel,
        grid=(t // rows, kh * g, b),
        in_specs=[_whole(t // rows, 2), *_place_specs(t, s), heads, keys, keys, heads, per_row, per_row],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="attention_dq",
        **sizes.options,
    )(spans, *places, q, k, v, do, log_sum, delta)


def _dk_dv(
    spans: Array, places: Any, q: Array, k: Array, v: Array, do: Array, log_sum: Array, delta: Array, sizes: _Sizes
) -> tuple[Array, Array]:
    """Return the gradients of keys and values. Each program sums over the G query heads of its keys."""
    b, kh, g, t, h = q.shape
    s = k.shape[2]
    rows, columns, scale = sizes.rows, sizes.columns, _scale(h)

    def kernel(
        span_ref, sq_ref, sk_ref, pq_ref, pk_ref, q_ref, k_ref, v_ref, do_ref, sum_ref, delta_ref, dk_ref, dv_ref
    ):  # type: ignore[no-untyped-def]
        j = pl.program_id(0)
        here = pl.ds(j * columns, columns)
        k_ch, v_ch = k_ref[...], v_ref[...]
        segments_k, positions_k = sk_ref[here], pk_ref[here]
        first, after = span_ref[j, 0], span_ref[j, 1]

        def block(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk_ch, dv_ch = carry
            count = after - first
            head, i = step // count, first + step % count
            there = pl.ds(i * rows, rows)
            q_rh, do_rh = q_ref[head, there, :], do_ref[head, there, :]
            visible = visible_pairs(sq_ref[there], pq_ref[there], segments_k, positions_k)
            p = jnp.exp2(jnp.where(visible, _dot(q_rh, k_ch.T) * scale, MASKED) - sum_ref[head, there][:, None])
            ds = p * (_dot(do_rh, v_ch.T) - delta_ref[head, there][:, None])
            return dk_ch + _dot(ds.astype(q_rh.dtype).T, q_rh), dv_ch + _dot(p.astype(do_rh.dtype).T, do_rh)

        zeros = jnp.zeros((columns, h), jnp.float32)
        dk_ch, dv_ch = jax.lax.fori_loop(0, (after - first) * g, block, (zeros, zeros))
        dk_ref[...] = (dk_ch * h**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_ch.astype(dv_ref.dtype)

    heads = pl.BlockSpec((None, None, g, t, h), lambda j, n, b: (b, n, 0, 0, 0))
    per_row = pl.BlockSpec((None, None, g, t), lambda j, n, b: (b, n, 0, 0))
    keys = pl.BlockSpec((None, None, columns, h), lambda j, n, b: (b, n, j, 0))
    return pl.pallas_call(
        kernel,
        grid=(s // columns, kh, b),
        in_specs=[_whole(s // columns, 2), *_place_specs(t, s), heads, keys, keys, heads, per_row, per_row],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        name="attention_dk_dv",
        **sizes.options,
    )(spans, *places, q, k, v, do, log_sum, delta)
