"""Splash attention, JAX's TPU kernel: flash attention that skips blocks which the causal mask hides.

The kernel is made for the whole sequence at once, with the positions of its queries as data. So over a `context` axis
each device gets its own part of the block schedule. Of that part a device visits only blocks that documents of its
rows share (`_visiting`): other blocks cost neither arithmetic nor memory traffic. The backward pass is our own kernel
(`splash_backward.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from astra_jax.attention import splash_backward
from astra_jax.attention.documents import MOST, before, numbers
from astra_jax.attention.residuals import RESIDUALS
from astra_jax.base.errors import InputError
from astra_jax.mesh import pieces_of, zigzag_order

Array = jax.Array
Kernel = splash_attention_kernel.SplashAttentionKernel

BLOCK = 128
"""Smallest block length, a TPU's lanes. Sequences are padded to a multiple; over a context axis they must be one."""
LARGEST_BLOCK = 1024
GOOD_BLOCK = 512
"""Block length from which a block's matmuls take longer than its overhead; see `good_length`."""
_NONE = -1
"""Segment id that no key has."""


class _Causal(splash_attention_mask.CausalMask):
    """Causal mask over the row's order, with the queries in any order of blocks."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__((length, length))
        self.q_sequence = zigzag_order(length, context)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Return two entries for a block, enough for the kernel's schedule: is any of it visible, and is all of it?

        The kernel computes the mask inside (`mask_function`). To make each whole block here would take 14 s for a row
        of 77,824 tokens on 16 devices.
        """
        rows, columns = block
        first, last = self.q_sequence[rows.start], self.q_sequence[rows.stop - 1]  # the queries of a block ascend
        return np.array([[last >= columns.start, first >= columns.stop - 1]])

    __hash__ = splash_attention_mask.CausalMask.__hash__


def padded_length(length: int) -> int:
    """Return the smallest multiple of `BLOCK` that is at least a sequence's length."""
    return -(-length // BLOCK) * BLOCK


def block_of(length: int) -> int:
    """Return the largest block that divides a length."""
    return max(block for block in range(BLOCK, LARGEST_BLOCK + 1, BLOCK) if length % block == 0)


def good_length(tokens: int, context: int) -> int:
    """Return the smallest row length of at least `tokens` with large blocks, on each of `context` devices.

    Each device has two chunks of a row, and blocks divide a chunk. For example, 77,824 tokens over 16 devices give
    chunks of 19 times 128, with blocks of 128; 81,920 tokens have blocks of 640. The kernel's minimum is
    `padded_length`, over devices a multiple of 2 x context x `BLOCK`. Rows too short for large blocks are such a
    multiple.
    """
    pieces = pieces_of(context)
    chunk = padded_length(-(-tokens // pieces))
    if chunk > GOOD_BLOCK:
        chunk = next(length for length in range(chunk, 2 * chunk, BLOCK) if block_of(length) >= GOOD_BLOCK)
    return pieces * chunk


@functools.lru_cache(maxsize=32)
def make_kernel(length: int, heads: int, context: int, *, interpret: bool = False) -> Kernel:
    """Make the kernel for sequences of `length` with `heads` query heads on each device.

    Raises:
        ValueError: `length` does not divide into two chunks of blocks for each of `context` devices.
    """
    if context > 1 and length % (2 * context * BLOCK):
        step = 2 * context * BLOCK
        raise InputError(
            f"rows of {length} tokens over a context axis of {context}: splash attention needs a multiple of {step}; "
            f"use {-(-length // step) * step}"
        )
    length = padded_length(length)
    block_q, block_kv = block_of(length // pieces_of(context)), block_of(length)
    mask = splash_attention_mask.MultiHeadMask([_Causal(length, context)] * heads)
    sizes = splash_attention_kernel.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv)
    # Concrete arrays, even while a program is traced: the kernel is cached for the next trace.
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=context,
            save_residuals=True,
            interpret=interpret,
        )


def kernel_specs(kernel: Kernel, context: int) -> Any:
    """Return the kernel's partition specs as an argument of `shard_map`: its schedule over `context`."""
    mesh = AbstractMesh((context,), ("context",))
    return kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "context")))


def attend(
    kernel: Kernel,
    q_btnh: Array,
    k_bksh: Array,
    v_bksh: Array,
    segments_q_bt: Array,
    segments_k_bs: Array,
    *,
    has_shared_prefix: bool = False,
) -> Array:
    """Compute attention, with keys and values heads first and in the row's order. Returns [B, T, N, H].

    The queries are in the order for which the kernel was made.

    Args:
        has_shared_prefix: True if documents may continue others. The kernel compares only ids, so it runs twice: over
            each query's own document, and over the one that it continues.
    """
    length, h = q_btnh.shape[1], q_btnh.shape[3]
    q, k, v = (_padded(x, 2) for x in (jnp.moveaxis(q_btnh * h**-0.5, 2, 1), k_bksh, v_bksh))
    segments = splash_attention_kernel.SegmentIds(q=_padded(segments_q_bt, 1), kv=_padded(segments_k_bs, 1))
    sizes = kernel.kwargs["block_sizes"]
    blocks = (sizes.block_q, sizes.block_kv)
    shared_ij = sharing(segments.q, segments.kv, blocks)
    kernels, before_bt = [_visiting(kernel, shared_ij)], None
    if has_shared_prefix:
        before_bt = jnp.where(before(segments.q) > 0, before(segments.q), _NONE)
        others_ij = sharing(before_bt, segments.kv, blocks)
        kernels.append(_visiting(kernel, others_ij))
        shared_ij |= others_ij
    for_each = jax.vmap(_attend, in_axes=(None, None, 0, 0, 0, 0, 0))
    o_bnth: Any = for_each(kernels, shared_ij, q, k, v, segments, before_bt)
    o_btnh = jnp.moveaxis(o_bnth, 1, 2)[:, :length].astype(q_btnh.dtype)
    # The kernel lets padding attend to padding.
    return jnp.where((segments_q_bt > 0)[..., None, None], o_btnh, 0)


def sharing(ids_bt: Array, ids_bs: Array, blocks: tuple[int, int]) -> Array:
    """Return which blocks of queries and of keys may share a document in any of the rows: bool [T / block, S / block].

    It compares the smallest and largest document of each block, since documents are contiguous in a row; padding has
    none. A device has only a row or two, so one schedule is enough.

    Args:
        ids_bt: segment ids that queries see; values below 1 are none.
    """

    def bounds(ids: Array, block: int) -> tuple[Array, Array]:
        shape = (len(ids), -1, block)
        own, there = numbers(ids).reshape(shape), (ids > 0).reshape(shape)
        return jnp.min(jnp.where(there, own, MOST + 1), axis=2), jnp.max(jnp.where(there, own, 0), axis=2)

    (least_bi, most_bi), (least_bj, most_bj) = bounds(ids_bt, blocks[0]), bounds(ids_bs, blocks[1])
    shared_bij = (least_bi[:, :, None] <= most_bj[:, None]) & (least_bj[:, None] <= most_bi[:, :, None])
    return shared_bij.any(axis=0)


def _visiting(kernel: Kernel, shared_ij: Array) -> Kernel:
    """Return the kernel without the blocks that share no document.

    Each block of queries visits at least the block on the diagonal, since the kernel divides by its sum. While the
    kernel skips blocks, it fetches the next block to visit.
    """
    info = kernel.fwd_mask_info
    assert info.data_next is not None and info.block_mask is not None, "a causal mask has a schedule"
    (places_ij,), (kinds_ij,) = info.data_next, info.block_mask
    visible_ij = kinds_ij > 0
    visited_ij = visible_ij & jnp.take_along_axis(shared_ij, places_ij.astype(jnp.int32), axis=1)
    diagonal_ij = visible_ij & (jnp.cumsum(visible_ij, axis=1) == visible_ij.sum(axis=1, keepdims=True))
    visited_ij |= diagonal_ij & ~visited_ij.any(axis=1, keepdims=True)
    count = visited_ij.size
    steps = jnp.where(visited_ij.reshape(-1), jnp.arange(count), count)
    following = jax.lax.cummin(steps, reverse=True)
    last = jnp.max(jnp.where(steps < count, steps, 0))
    fetched_ij = places_ij.reshape(-1)[jnp.where(following < count, following, last)].reshape(places_ij.shape)
    kinds_ij = jnp.where(visited_ij, kinds_ij, jnp.zeros_like(kinds_ij))
    info = info._replace(data_next=fetched_ij[None], block_mask=kinds_ij[None])
    return Kernel(info, kernel.dq_mask_info, kernel.dkv_mask_info, **kernel.kwargs)


@jax.custom_vjp
def _attend(
    kernels: list[Kernel], shared_ij: Array, q_nth: Array, k_ksh: Array, v_ksh: Array, segments: Any, before_t: Any
) -> Array:
    """Compute attention of one row.

    Args:
        kernels: for the document of each query and, if there is one, for the document that it continues.
        shared_ij: the blocks that either visits, besides the diagonal.
    """
    del shared_ij
    return _both(kernels, q_nth, k_ksh, v_ksh, segments, before_t)[0]


def _both(
    kernels: list[Kernel], q_nth: Array, k_ksh: Array, v_ksh: Array, segments: Any, before_t: Array | None
) -> tuple[Array, Array]:
    """Return the output and the log-sum-exp of the scores over both documents that a query sees.

    Where a query sees nothing of one document, the kernel's sum is the smallest float32, and its output weighs nothing.
    """
    o_nth, (logsumexp_nt,) = kernels[0](q_nth, k_ksh, v_ksh, segments)
    if before_t is None:
        return o_nth, logsumexp_nt
    other_nth, (other_nt,) = kernels[1](q_nth, k_ksh, v_ksh, segments._replace(q=before_t))
    both_nt = jnp.logaddexp(logsumexp_nt, other_nt)
    weights = (jnp.exp(x - both_nt)[..., None] for x in (logsumexp_nt, other_nt))
    parts = (x.astype(jnp.float32) * weight for x, weight in zip((o_nth, other_nth), weights, strict=True))
    own, others = parts
    return (own + others).astype(o_nth.dtype), both_nt


def _forward(
    kernels: list[Kernel], shared_ij: Array, q_nth: Array, k_ksh: Array, v_ksh: Array, segments: Any, before_t: Any
) -> tuple[Array, Any]:
    o_nth, logsumexp_nt = _both(kernels, q_nth, k_ksh, v_ksh, segments, before_t)
    o_nth, logsumexp_nt = checkpoint_name(o_nth, RESIDUALS), checkpoint_name(logsumexp_nt, RESIDUALS)
    return o_nth, (kernels[0], shared_ij, q_nth, k_ksh, v_ksh, segments, before_t, o_nth, logsumexp_nt)


def _backward(residuals: Any, do_nth: Array) -> tuple[None, None, Array, Array, Array, None, None]:
    kernel, shared_ij, q_nth, k_ksh, v_ksh, segments, before_t, o_nth, logsumexp_nt = residuals
    delta_nt = jnp.sum(o_nth.astype(jnp.float32) * do_nth.astype(jnp.float32), axis=-1)
    places_t, sizes = kernel.fwd_mask_info.q_sequence, kernel.kwargs["block_sizes"]
    dq, dk, dv = splash_backward.gradients(
        q_nth,
        k_ksh,
        v_ksh,
        do_nth,
        logsumexp_nt,
        delta_nt,
        segments.q,
        segments.kv,
        places_t,
        before_t,
        shared_ij=shared_ij,
        blocks=(sizes.block_q, sizes.block_kv),
        interpret=kernel.kwargs["interpret"],
    )
    return None, None, dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)


def _padded(x: Array, axis: int) -> Array:
    more = padded_length(x.shape[axis]) - x.shape[axis]
    return jnp.pad(x, [(0, more if each == axis else 0) for each in range(x.ndim)])
