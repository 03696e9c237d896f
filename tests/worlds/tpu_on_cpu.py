"""A plugin of vLLM with which tpu-inference 0.32 serves on JAX's CPU devices.

What only a TPU has is replaced: where its chips lie in the mesh, how much memory they have, options of its compiler,
and the attention kernel, whose meaning is written here in JAX. Runner, model, loaders, scheduler and HTTP are its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MEMORY_BYTES = 64 << 20  # of a device; less the weights, it becomes the KV cache


def register() -> None:
    """Called by vLLM in each of its processes."""
    from tpu_inference.models.common import compiler_options

    # Taken when the modules below are imported.
    compiler_options.get_step_fn_compiler_options = dict
    compiler_options.get_sampling_compiler_options = dict

    from tpu_inference import utils
    from tpu_inference.layers.common import attention_interface
    from tpu_inference.runner import tpu_runner

    def mesh(shape, names, *, devices):
        return jax.sharding.Mesh(np.asarray(devices).reshape(shape), names)

    tpu_runner.make_optimized_mesh = mesh
    utils.hbm_usage_bytes = lambda devices: [(0, MEMORY_BYTES) for _ in devices]
    attention_interface.ragged_paged_attention = attend


def attend(q_tnh, k_tkh, v_tkh, cache, lengths_b, pages, starts, distribution, *, sm_scale: float, **_):
    """`tpu_inference.kernels.ragged_paged_attention.v3`, for causal attention without quantisation.

    Args:
        cache: [pages, page size, 2 K / packing, packing, H], keys and values interleaved.
        lengths_b: of each sequence with its new tokens.
        pages: [B * pages of a sequence], of each sequence one after the other.
        starts: [B + 1], where in T each sequence's new tokens begin.
        distribution: its last element is the number of sequences.
    """
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv

    T, N, H = q_tnh.shape
    K, B, page = k_tkh.shape[1], lengths_b.shape[0], cache.shape[1]
    pages = pages.reshape(B, -1)
    t = jnp.arange(T)
    b = jnp.clip(jnp.searchsorted(starts[1:], t, side="right"), 0, B - 1)
    place = lengths_b[b] - (starts[b + 1] - t)  # in its sequence
    slot = jnp.where(t < starts[distribution[-1]], pages[b, place // page] * page + place % page, cache.shape[0] * page)
    flat = cache.reshape(-1, *cache.shape[2:]).at[slot].set(merge_kv(k_tkh, v_tkh), mode="drop")
    cache = flat.reshape(cache.shape)
    q_tkgh = q_tnh.astype(jnp.float32).reshape(T, K, N // K, H)

    def one(i, out_tkgh):
        kv = cache[pages[i]].astype(jnp.float32).reshape(pages.shape[1] * page, -1, cache.shape[-1])
        k_skh, v_skh = kv[:, 0 : 2 * K : 2, :H], kv[:, 1 : 2 * K : 2, :H]
        scores = jnp.einsum("tkgh,skh->tkgs", q_tkgh, k_skh) * sm_scale
        seen = jnp.arange(scores.shape[-1]) <= place[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.where((b == i)[:, None, None, None], jnp.einsum("tkgs,skh->tkgh", weights, v_skh), out_tkgh)

    out_tkgh = jax.lax.fori_loop(0, distribution[-1], one, jnp.zeros_like(q_tkgh))
    return out_tkgh.reshape(T, N, H).astype(q_tnh.dtype), cache
