"""Attention: one function with several backends, which agree on the meaning of segments and positions.

A query at t attends to a key at s under two conditions. Both are in the same document (equal segment ids, not 0), or
the query's document continues the key's (`documents.py`). And the key's position is not after the query's. A query
that may attend to nothing (padding) gets zeros and no gradient. No array of size T x T is in memory, forward or
backward.

Backends:
    blockwise   online softmax over key blocks in plain JAX, with its own VJP: runs anywhere, the reference
    splash      JAX's TPU kernel. A row's documents must be contiguous, with ascending positions. Needs
                `has_shared_prefix` if some documents continue others.
    triton      flash attention for GPUs, in Pallas; head_dim a power of two
    auto        splash on TPUs, triton on GPUs that support it, else blockwise

On a mesh each device computes its own rows, heads and part of the sequence. Keys and values are gathered over
`context` (context parallelism: exact, and only N_kv / N of the traffic of gathering queries).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from astra_jax.attention import blockwise, splash, triton
from astra_jax.attention.cache import Cache, Layer, places
from astra_jax.attention.residuals import RESIDUALS
from astra_jax.base.errors import InputError
from astra_jax.cpu import programs as cpu
from astra_jax.mesh import BATCH, AnyMesh, gather_row, on_each_device, platform_of

Array = jax.Array

__all__ = [
    "BACKENDS",
    "RESIDUALS",
    "attention",
    "best_backend",
    "cached_attention",
    "extending_attention",
    "needs_prefix_flag",
]

BACKENDS = ("auto", "blockwise", "splash", "splash_interpret", "triton", "triton_interpret")
"""Backends by name. The interpreted kernels run on any machine, slowly, for tests."""

_FEW = 64
"""Most tokens whose scores against the whole cache are in memory at once."""

_LONG = 4_096
"""Cached positions from which larger blocks of keys are faster: the running sums are read and written per block."""


def attention(
    q_btnh: Array,
    k_btkh: Array,
    v_btkh: Array,
    segment_ids_bt: Array,
    positions_bt: Array,
    *,
    has_shared_prefix: bool = False,
    backend: str = "auto",
    mesh: AnyMesh | None = None,
) -> Array:
    """Compute causal grouped-query attention over packed rows, scaled by H^-1/2. Returns [B, T, N, H] in q's dtype.

    Args:
        q_btnh: queries; N is a multiple of K, query head n uses key-value head n // (N / K).
        segment_ids_bt: int32; 0 is padding.
        positions_bt: int32, counted from the start of the document, or of the document that it continues.
        has_shared_prefix: True if documents may continue others; `splash` needs it (`needs_prefix_flag`).
        backend: see the module's docstring.
        mesh: with axes as `astra_jax.mesh` names them; the sequence is in its zig-zag order. None is one device.

    Raises:
        ValueError: an unknown backend, or heads or a sequence that the mesh does not divide.
    """
    if backend not in BACKENDS:
        raise InputError(f"attention backend is {backend!r}; use one of {', '.join(BACKENDS)}")
    platform = platform_of(mesh)
    if backend == "auto":
        backend = best_backend(q_btnh.shape[-1], platform)
    operands = (q_btnh, k_btkh, v_btkh, segment_ids_bt, positions_bt)
    context = 1 if mesh is None else mesh.shape["context"]
    if not backend.startswith("splash"):
        attend = cpu.in_halves(blockwise.attend, platform)
        if backend.startswith("triton"):
            attend = partial(triton.attend, interpret=backend == "triton_interpret")
        part = partial(_part, attend, context)
        return part(*operands) if mesh is None else _sharded(part, mesh, q_btnh, k_btkh)(*operands)

    tensor = 1 if mesh is None else mesh.shape["tensor"]
    kernel = splash.make_kernel(
        q_btnh.shape[1], q_btnh.shape[2] // tensor, context, interpret=backend == "splash_interpret"
    )
    part = partial(_splash_part, context=context, has_shared_prefix=has_shared_prefix)
    if mesh is None:
        return part(kernel, *operands)
    return _sharded(part, mesh, q_btnh, k_btkh, first=splash.kernel_specs(kernel, context))(kernel, *operands)


def needs_prefix_flag(head_dim: int, mesh: AnyMesh | None) -> bool:
    """Return whether `auto` needs `has_shared_prefix`: JAX's TPU kernel compares ids only."""
    return best_backend(head_dim, platform_of(mesh)) == "splash"


def best_backend(head_dim: int, platform: str) -> str:
    """Return the backend that `auto` selects."""
    if platform == "tpu":
        return "splash"
    return "triton" if platform in ("gpu", "cuda") and triton.supports(head_dim) else "blockwise"


def _sharded(part, mesh: AnyMesh, q_btnh: Array, k_btkh: Array, first=None):
    """Run `part` on each device's rows, heads and part of the sequence; `first` are specs of a leading argument."""
    tensor = mesh.shape["tensor"]
    if k_btkh.shape[2] % tensor:
        raise InputError(
            f"n_kv_heads is {k_btkh.shape[2]}, which mesh axis 'tensor' of {tensor} devices does not divide; "
            "choose a divisor"
        )
    heads, places = P(BATCH, "context", "tensor", None), P(BATCH, "context")
    specs = (heads, heads, heads, places, places)
    return on_each_device(part, mesh, specs if first is None else (first, *specs), heads)


def _part(
    attend: Callable[..., Array], context: int, q: Array, k: Array, v: Array, segments: Array, positions: Array
) -> Array:
    # Keys in the row's order: then the keys that a block of queries sees are contiguous.
    k, v, segments_k, positions_k = (gather_row(x, context) for x in (k, v, segments, positions))
    return attend(q, k, v, (segments, segments_k, positions, positions_k))


def _splash_part(
    kernel: splash.Kernel,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    positions: Array,
    *,
    context: int,
    has_shared_prefix: bool,
) -> Array:
    del positions  # they ascend in each document, so the order of the row is enough
    # In the kernel's order of axes before the gather: on TPUs swapping heads and positions is slow.
    k, v = (gather_row(jnp.moveaxis(x, 2, 1), context, axis=2) for x in (k, v))
    return splash.attend(kernel, q, k, v, segments, gather_row(segments, context), has_shared_prefix=has_shared_prefix)


def extending_attention(
    q_btnh: Array, past: Layer, new: Cache, positions_bt: Array, *, backend: str = "blockwise"
) -> Array:
    """Compute attention of each row's next tokens over its cache and themselves; forward only.

    Few tokens are scored against everything at once, as in decoding. Many tokens are scored in blocks: no array of size
    T x S is in memory, and positions that no row has cached yet are not visited. Returns [B, T, N, H].

    Args:
        past: one layer's cache; a row sees the positions before its first new one.
        new: keys and values of the T new tokens.
        positions_bt: positions of the new tokens, ascending by one; -1, at a row's end, is padding with undefined
            output.
        backend: backend for many tokens: `blockwise`, or on one device `triton` or `triton_interpret`.
    """
    first_b1 = positions_bt[:, :1]
    if q_btnh.shape[1] <= _FEW:
        before_bts = jnp.broadcast_to(jnp.arange(past.length) < first_b1[..., None], (*positions_bt.shape, past.length))
        causal_tt = jnp.tri(positions_bt.shape[1], dtype=bool)
        return cached_attention(q_btnh, (past, before_bts), (new, causal_tt & (positions_bt >= 0)[:, None]))
    at_bs = jnp.broadcast_to(jnp.arange(past.length), (len(positions_bt), past.length))
    segments_bt, segments_bs = (positions_bt >= 0).astype(jnp.int32), (at_bs < first_b1).astype(jnp.int32)
    segments_bz, positions_bz = (
        jnp.concatenate(x, axis=1) for x in ((segments_bs, segments_bt), (at_bs, positions_bt))
    )
    arrays = [*(part for _, part in places(past)), new]
    k_bzkh = jnp.concatenate([x.k_bkhs.transpose(0, 3, 1, 2) for x in arrays], axis=1)
    v_bzkh = jnp.concatenate([x.v_bksh.transpose(0, 2, 1, 3) for x in arrays], axis=1)
    documents = (segments_bt, segments_bz, positions_bt, positions_bz)
    if backend.startswith("triton"):
        return triton.attend(q_btnh, k_bzkh, v_bzkh, documents, interpret=backend == "triton_interpret")
    columns = blockwise.KEY_BLOCK * (4 if past.length >= _LONG else 1)
    return blockwise.attend(q_btnh, k_bzkh, v_bzkh, documents, columns=columns)


def cached_attention(q_btnh: Array, *looked_at: tuple[Layer, Array]) -> Array:
    """Compute attention of new tokens over one cache or several; forward only. Returns [B, T, N, H].

    Args:
        looked_at: pairs of (one layer's keys and values, visible_bts). A query that sees nothing is padding, with
            undefined output.
    """
    pieces = [
        (part, visible_bts[..., at : at + part.length])
        for layer, visible_bts in looked_at
        for at, part in places(layer)
    ]
    b, t, n, h = q_btnh.shape
    k = pieces[0][0].v_bksh.shape[1]
    # The queries of a key head are the rows of one matrix: batched matmuls without a transposition.
    q_bkqh = q_btnh.reshape(b, t, k, n // k, h).transpose(0, 2, 3, 1, 4).reshape(b, k, n // k * t, h)

    def scores(cache: Cache, visible_bts: Array) -> Array:
        all_bkqs = jnp.einsum("bkqh,bkhs->bkqs", q_bkqh, cache.k_bkhs, preferred_element_type=jnp.float32) * h**-0.5
        all_bkgts = all_bkqs.reshape(b, k, n // k, t, -1)
        return jnp.where(visible_bts[:, None, None], all_bkgts, blockwise.MASKED).reshape(all_bkqs.shape)

    # One softmax over all pieces, divided at the end: each piece's weights are read once, by its matmul.
    scored = [scores(*piece) for piece in pieces]
    highest_bkq1 = reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in scored])
    weighted = [jnp.exp(x - highest_bkq1) for x in scored]
    total_bkq1 = reduce(jnp.add, [x.sum(-1, keepdims=True) for x in weighted])
    outputs = (
        jnp.einsum("bkqs,bksh->bkqh", x.astype(cache.v_bksh.dtype), cache.v_bksh, preferred_element_type=jnp.float32)
        for x, (cache, _) in zip(weighted, pieces, strict=True)
    )
    o_bkqh = (reduce(jnp.add, outputs) / total_bkq1).astype(q_btnh.dtype)
    return o_bkqh.reshape(b, k, n // k, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)
