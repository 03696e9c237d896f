"""Layers that have several forms, or a gradient of their own: each equals the plain one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.cpu.programs import sum_of_products
from astra_jax.models.layers import rotary
from astra_jax.models.layers.elementwise import rms_norm
from astra_jax.models.layers.embedding import embed
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.batch import PackedBatch
from astra_jax.run.gradients import accumulate_scan
from astra_jax.sft.step import loss_sums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rotation_by_a_matmul_is_that_by_halves_to_the_bit(dtype: str) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 16), dtype)
    angles = jax.random.normal(jax.random.key(1), (2, 2, 5, 8))
    for sign in (1, -1):
        halves, matmul = (form(x, angles[0], sign * angles[1]) for form in (rotary._by_halves, rotary._by_matmul))
        assert halves.dtype == matmul.dtype == x.dtype
        np.testing.assert_array_equal(halves, matmul)


def test_the_rotations_gradient_is_autodiffs() -> None:
    x, weight = (jax.random.normal(jax.random.key(i), (2, 5, 3, 16)) for i in (0, 1))
    angles = tuple(jax.random.normal(jax.random.key(2), (2, 2, 5, 8)))
    ours = jax.grad(lambda x: jnp.sum(weight * rotary.rotate(x, angles) ** 2))(x)
    plain = jax.grad(lambda x: jnp.sum(weight * rotary._by_halves(x, *angles) ** 2))(x)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_an_embeddings_gradient_is_autodiffs() -> None:
    table, tokens = jax.random.normal(jax.random.key(0), (11, 6)), jnp.array([[1, 5, 1], [0, 10, 1]])
    ours = jax.grad(lambda table: jnp.sum(embed(table, tokens, "float32", None) ** 3))(table)
    plain = jax.grad(lambda table: jnp.sum(table[tokens] ** 3))(table)
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 5, 8), (2, 3, 8), (1, 5, 3, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norms_gradients_are_autodiffs(shape: tuple[int, ...], dtype: str) -> None:
    x, dy = (jax.random.normal(jax.random.key(i), shape, dtype) for i in (0, 1))
    scale = 1 + 0.1 * jax.random.normal(jax.random.key(2), shape[-1:])

    def plain(x, scale):
        x = x.astype(jnp.float32)
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale

    ours = jax.vjp(partial(rms_norm, eps=1e-5), x, scale)[1](dy)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-2, "atol": 1e-2}
    for got, want in zip(ours, jax.vjp(plain, x, scale)[1](dy.astype(jnp.float32)), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), **tolerance)


def test_a_sum_of_products_is_a_matmul_on_cpus_alone() -> None:
    """XLA is twenty times slower at it there where the rows are one batch; elsewhere it is what it was."""
    x, y = (jax.random.normal(jax.random.key(i), (1, 7, 3, 8)) for i in (0, 1))
    np.testing.assert_allclose(sum_of_products(x, y), (x * y).sum(-1), rtol=1e-6, atol=1e-6)
    for platform, form in (("cpu", "dot_general"), ("tpu", "stablehlo.reduce(")):
        text = jax.jit(sum_of_products).trace(x, y).lower(lowering_platforms=(platform,)).as_text()
        assert [one in text for one in ("dot_general", "stablehlo.reduce(")].count(True) == 1 and form in text


def test_gradients_of_bfloat16_weights_grow_with_the_batch() -> None:
    """1,024 copies of a row have 1,024 times its gradient, of every weight: a bfloat16 stops growing at 256 copies."""
    model = Qwen3Config(
        vocab_size=64,
        d_model=32,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        d_ff=48,
        tie_embeddings=False,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    row = np.random.default_rng(0).integers(0, 64, (1, 8)).astype(np.int32)
    params = model.init(jax.random.key(0))

    def norms(copies: int) -> dict[str, float]:
        tokens = np.repeat(row, copies, axis=0)
        whole = np.ones_like(tokens)
        positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)
        batch = PackedBatch(tokens_bt=tokens, loss_mask_bt=whole, segment_ids_bt=whole, positions_bt=positions)
        batch = jax.tree.map(lambda x: jnp.asarray(x).reshape(1, -1, 8), batch)
        gradients, _ = jax.jit(partial(accumulate_scan, partial(loss_sums, model=model)))(params, None, batch)
        leaves = jax.tree_util.tree_flatten_with_path(gradients)[0]
        return {jax.tree_util.keystr(path): float(jnp.linalg.norm(x.astype(jnp.float32))) for path, x in leaves}

    many = norms(1_024)
    for name, norm in norms(1).items():
        assert many[name] == pytest.approx(1_024 * norm, rel=0.02), name
