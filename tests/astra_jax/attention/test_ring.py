"""The ring that `benchmarks.compiled_ring` compares with gathered keys computes attention."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_world import program
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec as P

from astra_jax.attention import attention
from astra_jax.mesh import make_mesh, on_each_device, unzigzag, zigzag

ring = program("benchmarks.compiled_ring").ring
DEVICES, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 1024, 2, 1, 128


def kernel(length: int, mask: type) -> splash_attention_kernel.SplashAttentionKernel:
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask((length, length))] * HEADS),
        block_sizes=splash_attention_kernel.BlockSizes(block_q=128, block_kv=128, block_kv_compute=128),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=True,
    )


@pytest.mark.slow
def test_the_ring_that_is_compared_equals_attention() -> None:
    """Over three documents that end in no device's chunk."""
    rng, lengths = np.random.default_rng(0), (300, 500, 224)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, LENGTH, heads, WIDTH)), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    segments = jnp.asarray(np.repeat([1, 2, 3], lengths)[None], jnp.int32)
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in lengths])[None], jnp.int32)
    own = LENGTH // DEVICES
    kernels = kernel(own, splash_attention_mask.CausalMask), kernel(own // 2, splash_attention_mask.FullMask)
    heads, places = P(None, "context", None, None), P(None, "context")
    mesh = make_mesh(context=DEVICES, devices=jax.devices()[:DEVICES])
    part = on_each_device(partial(ring, kernels, DEVICES), mesh, (heads, heads, heads, places), heads)
    found = jax.jit(part)(*(zigzag(x, DEVICES) for x in (q, k, v, segments)))
    want = attention(q, k, v, segments, positions, backend="blockwise")
    np.testing.assert_allclose(unzigzag(found, DEVICES), want, atol=1e-5)
