"""Splash attention, JAX's TPU kernel: flash attention that skips blocks which the causal mask hides.

It is made for the whole sequence at once, with the places of its queries as data, so that over a `context` axis each
device gets its own part of the block schedule. Of that schedule a device visits what the documents of any of its rows
see (`_visiting`): a block of keys that is of other documents in all of them costs neither arithmetic nor memory
traffic. Its backward pass is a kernel of ours (`splash_backward.py`).
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
from astra_jax.mesh import pieces_of, zigzag_order
from synthesis.core.refusals import InputError

Array = jax.Array
Kernel = splash_attention_kernel.SplashAttentionKernel

BLOCK = 128
"""The least block length; a TPU's lanes. Sequences are padded to it; over a context axis they must divide into it."""
LARGEST_BLOCK = 1024
GOOD_BLOCK = 512
"""From here on a block's matmuls take longer than what comes with each block; see `good_length`."""
_NONE = -1
"""A segment that no key is of."""


class _Causal(splash_attention_mask.CausalMask):
    """Causal over the row's order, with the queries in any order of blocks."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__((length, length))
        self.q_sequence = zigzag_order(length, context)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Of a block, all that the kernel's schedule is made of: whether any of it is visible, and whether all is.

        The kernel computes what is within (`mask_function`). To make each block here takes 14 s of a row of 77,824
        tokens on 16 devices.
        """
        rows, columns = block
        first, last = self.q_sequence[rows.start], self.q_sequence[rows.stop - 1]  # a block's queries ascend
        return np.array([[last >= columns.start, first >= columns.stop - 1]])

    __hash__ = splash_attention_mask.CausalMask.__hash__


def padded_length(length: int) -> int:
    """The least multiple of `BLOCK` that holds a sequence."""
    return -(-length // BLOCK) * BLOCK


def block_of(length: int) -> int:
    """The largest block that divides a length."""
    return max(block for block in range(BLOCK, LARGEST_BLOCK + 1, BLOCK) if length % block == 0)


def good_length(tokens: int, context: int) -> int:
    """The least row length of at least `tokens` whose blocks are large, on each of `context` devices.

    Each device has two chunks of a row, so blocks divide a chunk: 77,824 tokens over 16 devices are chunks of 19 times
    128, with blocks of 128; 81,920 have blocks of 640. The least that a kernel takes is `padded_length`, over devices a
    multiple of 2 x context x `BLOCK`; rows that are short for large blocks are a multiple of that.
    """
    pieces = pieces_of(context)
    chunk = padded_length(-(-tokens // pieces))
    if chunk > GOOD_BLOCK:
        chunk = next(length for length in range(chunk, 2 * chunk, BLOCK) if block_of(length) >= GOOD_BLOCK)
    return pieces * chunk


@functools.lru_cache(maxsize=32)
def make_kernel(length: int, heads: int, context: int, *, interpret: bool = False) -> Kernel:
    """The kernel for sequences of `length` with `heads` query heads on each device.

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
    # Concrete arrays, also when called while a program is traced: the kernel is kept for the next trace.
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
    """The kernel's partition specs as an argument of `shard_map`: its schedule over `context`."""
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
    go_on: bool = False,
) -> Array:
    """Keys and values heads first, in the row's order; the queries as the kernel was made for. Returns [B, T, N, H].

    Args:
        go_on: documents may go on from others. The kernel compares ids alone, so it runs twice: over each query's own
            document, and over the one before.
    """
    length, h = q_btnh.shape[1], q_btnh.shape[3]
    q, k, v = (_padded(x, 2) for x in (jnp.moveaxis(q_btnh * h**-0.5, 2, 1), k_bksh, v_bksh))
    segments = splash_attention_kernel.SegmentIds(q=_padded(segments_q_bt, 1), kv=_padded(segments_k_bs, 1))
    sizes = kernel.kwargs["block_sizes"]
    blocks = (sizes.block_q, sizes.block_kv)
    shared_ij = sharing(segments.q, segments.kv, blocks)
    kernels, before_bt = [_visiting(kernel, shared_ij)], None
    if go_on:
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
    """Of which blocks of queries and of keys documents may be the same, in any of these rows: [T / block, S / block],
    bool. Each device has a row or two, for which one schedule will do.

    By the least and the greatest of a block's documents, which follow one another in a row; padding is none.

    Args:
        ids_bt: segment ids that queries see; what is not above 0 is none.
    """

    def bounds(ids: Array, block: int) -> tuple[Array, Array]:
        shape = (len(ids), -1, block)
        own, there = numbers(ids).reshape(shape), (ids > 0).reshape(shape)
        return jnp.min(jnp.where(there, own, MOST + 1), axis=2), jnp.max(jnp.where(there, own, 0), axis=2)

    (least_bi, most_bi), (least_bj, most_bj) = bounds(ids_bt, blocks[0]), bounds(ids_bs, blocks[1])
    shared_bij = (least_bi[:, :, None] <= most_bj[:, None]) & (least_bj[:, None] <= most_bi[:, :, None])
    return shared_bij.any(axis=0)


def _visiting(kernel: Kernel, shared_ij: Array) -> Kernel:
    """The kernel, with the blocks left out that documents do not share.

    Each block of queries visits one at least, that on the diagonal: the kernel divides by what it has summed.
    What it fetches while it skips is what it visits next.
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
    """One row.

    Args:
        kernels: for the document of each query, and, where there is one, for that before it.
        shared_ij: the blocks that either visits, but for the diagonal.
    """
    del shared_ij
    return _both(kernels, q_nth, k_ksh, v_ksh, segments, before_t)[0]


def _both(
    kernels: list[Kernel], q_nth: Array, k_ksh: Array, v_ksh: Array, segments: Any, before_t: Array | None
) -> tuple[Array, Array]:
    """The output, and the log of the scores' sum: over both documents that a query sees, each as the kernel has it.
    Where one has nothing to see, the kernel's sum is as small as float32 can say, and its output weighs nothing."""
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
