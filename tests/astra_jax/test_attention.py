"""The attention backends against attention written out over one full score matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import astra_jax.attention
from astra_jax.attention import attention, cached_attention

B, T, N, K, H = 2, 80, 4, 2, 8


def reference(q, k, v, segments, positions):
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    same = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)
    visible = (same & (positions[:, :, None] >= positions[:, None]))[:, None]
    weights = jnp.where(visible, jnp.exp(scores), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.fixture
def packed():
    """Queries, keys, values, and three documents with padding behind them in each row."""
    rng = np.random.default_rng(0)
    q = jnp.array(rng.normal(size=(B, T, N, H)), jnp.float32)
    k, v = (jnp.array(rng.normal(size=(B, T, K, H)), jnp.float32) for _ in range(2))
    lengths = [[30, 1, 40, 9], [16, 16, 16, 32]]
    segments = np.stack([np.repeat([1, 2, 3, 0], row) for row in lengths])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    return q, k, v, jnp.array(segments), jnp.array(positions)


def run(q, k, v, segments, positions, **options):
    places = {"segment_ids_q_bt": segments, "segment_ids_k_bs": segments}
    places |= {"positions_q_bt": positions, "positions_k_bs": positions}
    return attention(q, k, v, **places, **options)


@pytest.mark.parametrize("blocks", [(512, 1024), (16, 32), (24, 16), (80, 7)])
def test_blockwise_equals_the_full_matrix_forward_and_backward(packed, blocks, monkeypatch) -> None:
    monkeypatch.setattr(astra_jax.attention, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(astra_jax.attention, "KEY_BLOCK", blocks[1])
    q, k, v, segments, positions = packed
    weights = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    np.testing.assert_allclose(run(*packed), reference(*packed), atol=2e-6)
    ours, theirs = (
        jax.grad(lambda *qkv, f=f: (f(*qkv, segments, positions) * weights).sum(), argnums=(0, 1, 2))(q, k, v)
        for f in (run, reference)
    )
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, atol=5e-6)


def test_padding_gets_zeros_and_no_gradient(packed) -> None:
    q, k, v, segments, positions = packed
    padding = np.asarray(segments) == 0
    assert not np.asarray(run(*packed))[padding].any()
    for gradient in jax.grad(lambda *qkv: (run(*qkv, segments, positions) ** 2).sum(), argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[padding].any()


def test_documents_of_a_row_do_not_see_each_other(packed) -> None:
    q, k, v, segments, positions = packed
    before = np.asarray(run(*packed))
    after = np.asarray(run(q, k.at[:, :16].add(3.0), v.at[:, :16].add(3.0), segments, positions))
    np.testing.assert_array_equal(before[1, 16:], after[1, 16:])
    assert not np.allclose(before[1, 15], after[1, 15])


def test_cached_attention_equals_attention_over_one_document(packed) -> None:
    q, k, v, *_ = packed
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    whole = run(q, k, v, jnp.ones((B, T), jnp.int32), positions)
    last = cached_attention(q[:, -3:], k, v, positions[:, -3:])
    np.testing.assert_allclose(last, whole[:, -3:], atol=2e-6)


def test_unknown_backend_names_the_known_ones(packed) -> None:
    with pytest.raises(ValueError, match="'flash'; use one of blockwise"):
        run(*packed, backend="flash")
