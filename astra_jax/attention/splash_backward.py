"""Backward pass of attention on TPUs: one Pallas kernel for all three gradients.

Splash has two kernels, which both recompute the scores: 7 matmuls per block and two exponentials, where one kernel
needs 5 and one. Splash's own single-kernel mode writes a part of the queries' gradient for each block of keys, and
their sum takes longer than the saving (docs/scale.md).

Here the queries' gradient stays in the chip's vector memory, in float32, while the kernel visits a key head's blocks of
keys. A block of keys meets all its queries before the next one, so the gradients of keys and values are summed there
too. Each is written once.

The query heads of a key head are one sequence of rows, one head after the other. It is cut into `parts` whose gradient
fits. Key heads are independent, and divided over the cores of chips that have two.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Array = jax.Array

NAME = "attention_backward"
"""Name of the kernel, by which the planner recognises it."""
MEMORY = 26 * 2**20
"""Bytes for the queries' gradient; with `_BESIDE` they fit a v5p core's vector memory."""
_BESIDE = 30 * 2**20
"""Bytes for blocks and their intermediate values, at blocks of 1,024."""


class _Blocks(NamedTuple):
    """Sizes of the grid, and where each of its steps reads and writes.

    Attributes:
        block_q, block_kv: lengths of a block of queries and of keys.
        h: width of a head.
        each: blocks of a head's queries.
        group: heads of queries that share one of keys.
        key_blocks: blocks of keys.
        rows: blocks of queries in a part.
    """

    block_q: int
    block_kv: int
    h: int
    each: int
    group: int
    key_blocks: int
    rows: int

    @classmethod
    def of(cls, q: tuple[int, ...], k: tuple[int, ...], blocks: tuple[int, int]) -> tuple[_Blocks, int]:
        """Return the sizes for shapes [N, T, H] and [K, S, H], and in how many parts a group's queries are taken."""
        (n, t, h), (heads, s, _), (block_q, block_kv) = q, k, blocks
        each, group = t // block_q, n // heads
        divisors = (parts for parts in range(1, group * each + 1) if group * each % parts == 0)
        parts = next(parts for parts in divisors if 4 * h * group * t <= parts * MEMORY or parts == group * each)
        return cls(block_q, block_kv, h, each, group, s // block_kv, group * each // parts), parts

    def seen(self, shared_ij: Array, places_t: Array) -> tuple[Array, Array]:
        """Return the first and the last block of queries that see any of each block of keys, by the diagonal and by
        segments; int32, [J]."""
        ends_i = places_t[self.block_q - 1 :: self.block_q, None]
        seen_ij = shared_ij & (ends_i >= jnp.arange(self.key_blocks) * self.block_kv)
        first_j = jnp.where(seen_ij.any(axis=0), jnp.argmax(seen_ij, axis=0), self.each).astype(jnp.int32)
        return first_j, (self.each - 1 - jnp.argmax(seen_ij[::-1], axis=0)).astype(jnp.int32)

    def at(self, p: Array, j: Array, i: Array, first_ref: Any, last_ref: Any) -> tuple[Array, Array]:
        """(which head of the group, which of its blocks); where nothing is seen, the block that comes next, or the last
        one that came."""
        row = p * self.rows + i
        return row // self.each, jnp.minimum(
            jnp.maximum(jnp.minimum(row % self.each, last_ref[j]), first_ref[j]), self.each - 1
        )

    def of_rows(self, k: Array, p: Array, j: Array, i: Array, *seen: Any) -> tuple[Any, ...]:
        head, block = self.at(p, j, i, *seen)
        return k * self.group + head, block, 0

    def of_numbers(self, k: Array, p: Array, j: Array, i: Array, *seen: Any) -> tuple[Any, ...]:
        head, block = self.at(p, j, i, *seen)
        return k * self.group + head, 0, block

    def written(self, k: Array, p: Array, j: Array, i: Array, *seen: Any) -> tuple[Any, ...]:
        del seen
        row = p * self.rows + jnp.where(
            j == self.key_blocks - 1, i, 0
        )  # the first block waits in its place until it is whole
        return k * self.group + row // self.each, row % self.each, 0


def _kernel(  # type: ignore[no-untyped-def]
    sizes, first_ref, last_ref, q_ref, do_ref, sum_ref, delta_ref, at_ref, k_ref, v_ref, sk_ref, *refs,
):  # fmt: skip
    """Add a block of queries and keys to the three gradients."""
    block_q, block_kv, h, each, _, count, rows = sizes
    *seen_refs, dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum = refs
    p, j, i = (pl.program_id(axis) for axis in (1, 2, 3))
    here = pl.ds(i * block_q, block_q)
    block = (p * rows + i) % each

    @pl.when(i == 0)
    def start_keys() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(j == 0)
    def start_queries() -> None:
        dq_sum[here, :] = jnp.zeros((block_q, h), jnp.float32)

    @pl.when((block >= first_ref[j]) & (block <= last_ref[j]))
    def add() -> None:
        q, do, k = q_ref[...], do_ref[...], k_ref[...]
        key_s1 = j * block_kv + jax.lax.broadcasted_iota(jnp.int32, (block_kv, block_q), 0)
        of_keys = sk_ref[...]
        same_st = functools.reduce(jnp.logical_or, [of_keys == one[...] for one in seen_refs])
        visible_st = same_st & (key_s1 <= at_ref[...])
        scores_st = _dot(k, q, 1, 1)
        weights_st = jnp.where(visible_st, jnp.exp(scores_st - sum_ref[...]), 0.0)
        dv_sum[...] += _dot(weights_st.astype(do.dtype), do, 1, 0)
        ds_st = ((_dot(v_ref[...], do, 1, 1) - delta_ref[...]) * weights_st).astype(q.dtype)
        dk_sum[...] += _dot(ds_st, q, 1, 0)
        dq_sum[here, :] += _dot(ds_st, k, 0, 0)

    @pl.when(j == count - 1)
    def end_queries() -> None:
        dq_ref[...] = dq_sum[here, :].astype(dq_ref.dtype)

    @pl.when(i == rows - 1)
    def end_keys() -> None:
        dk_ref[...] = dk_sum[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)


def gradients(
    q_nth: Array,
    k_ksh: Array,
    v_ksh: Array,
    do_nth: Array,
    logsumexp_nt: Array,
    delta_nt: Array,
    segments_t: Array,
    segments_s: Array,
    places_t: Array,
    before_t: Array | None = None,
    *,
    shared_ij: Array,
    blocks: tuple[int, int],
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of one row's queries (already scaled), keys and values, in their dtypes.

    Args:
        logsumexp_nt: log-sum-exp of the scores, float32.
        delta_nt: sum of output times its gradient, float32.
        places_t: each query's index among the keys, int32, ascending: it sees the keys of its segment up to there.
        before_t: another segment that each query sees; None: only its own.
        shared_ij: whether blocks of queries and of keys may share a segment.
        blocks: lengths of a block of queries and of keys, which divide them.
    """
    heads, s, h = k_ksh.shape
    sizes, parts = _Blocks.of(q_nth.shape, k_ksh.shape, blocks)
    block_q, block_kv, _, _, _, count, rows = sizes
    first_j, last_j = sizes.seen(shared_ij, places_t)
    queries = pl.BlockSpec((None, block_q, h), sizes.of_rows)
    numbers = pl.BlockSpec((None, 1, block_q), sizes.of_numbers)
    of_queries = pl.BlockSpec((1, block_q), lambda k, p, j, i, *seen: (0, sizes.at(p, j, i, *seen)[1]))
    keys = pl.BlockSpec((None, block_kv, h), lambda k, p, j, i, *seen: (k, j, 0))
    of_keys = pl.BlockSpec((block_kv, 1), lambda k, p, j, i, *seen: (j, 0))
    sums = pl.BlockSpec((None, None, block_kv, h), lambda k, p, j, i, *seen: (p, k, j, 0))
    summed = (k_ksh.dtype, v_ksh.dtype) if parts == 1 else (jnp.float32, jnp.float32)
    seen = [segments_t] if before_t is None else [segments_t, before_t]
    dq_nth, *keys_pksh = pl.pallas_call(
        functools.partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads, parts, count, rows),
            in_specs=[queries, queries, numbers, numbers, of_queries, keys, keys, of_keys, *[of_queries] * len(seen)],
            out_specs=[pl.BlockSpec((None, block_q, h), sizes.written), sums, sums],
            scratch_shapes=[
                pltpu.VMEM((rows * block_q, h), jnp.float32),
                pltpu.VMEM((block_kv, h), jnp.float32),
                pltpu.VMEM((block_kv, h), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_nth.shape, q_nth.dtype),
            *(jax.ShapeDtypeStruct((parts, heads, s, h), dtype) for dtype in summed),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=MEMORY + _BESIDE,
        ),
        name=NAME,
        metadata={"xprof_metadata": json.dumps({"block_q": block_q, "block_kv": block_kv})},
        interpret=interpret,
    )(
        first_j,
        last_j,
        q_nth,
        do_nth,
        logsumexp_nt[:, None],
        delta_nt[:, None],
        places_t[None],
        k_ksh,
        v_ksh,
        segments_s[:, None],
        *(x[None] for x in seen),
    )
    # Part by part: a reduction over all parts takes ten times the compiler's cycles.
    dk_ksh, dv_ksh = (functools.reduce(jnp.add, list(x)) for x in keys_pksh)
    return dq_nth, dk_ksh.astype(k_ksh.dtype), dv_ksh.astype(v_ksh.dtype)


def _dot(x: Array, y: Array, of_x: int, of_y: int) -> Array:
    return jax.lax.dot_general(x, y, (((of_x,), (of_y,)), ((), ())), preferred_element_type=jnp.float32)
