"""A bfloat16 model on CPUs: what is multiplied how, and how far it is from the float32 one."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_world import trainer_logps

from astra_jax.cpu import programs
from astra_jax.cpu.environment import multiplies_bfloat16_slowly
from astra_jax.mesh import make_mesh
from astra_jax.models.decoder import REMAT_POLICIES
from astra_jax.models.layers.linear import linear
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.planner.hardware import Slice
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.run.batch import PackedBatch
from astra_jax.run.optimizers import initial_state
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import loss_sums, sft_optimizer, train_step

WIDE = LlamaConfig(
    vocab_size=128, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96, tie_embeddings=True
)
NARROW = dataclasses.replace(WIDE, dtype="bfloat16")
TOKENS = 64


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    """A micro-batch of two rows, each of two documents."""
    shape = (1, 2, TOKENS)
    ids = np.random.default_rng(0).integers(0, WIDE.vocab_size, shape).astype(np.int32)
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32) % (TOKENS // 2), shape)
    documents = np.broadcast_to(1 + np.arange(TOKENS, dtype=np.int32) // (TOKENS // 2), shape)
    return PackedBatch(tokens_bt=ids, loss_mask_bt=np.ones_like(ids), segment_ids_bt=documents, positions_bt=places)


def lowered(model: LlamaConfig, batch: PackedBatch, platform: str) -> str:
    """The StableHLO of the loss and its gradients."""
    one = jax.tree.map(lambda x: x[0], batch)
    step = jax.jit(jax.value_and_grad(partial(loss_sums, model=model), has_aux=True))
    return step.trace(model.abstract_params(), one).lower(lowering_platforms=(platform,)).as_text()


def products(text: str) -> set[tuple[str, str]]:
    """The types of each product's operands and of what comes of it, but of sums, which are products with ones."""
    found = re.findall(
        r"dot_general [^\n]*: \(tensor<[^>]*x(\w+)>, tensor<(?!\d+x1xf32)[^>]*x(\w+)>\) -> tensor<[^>]*x(\w+)>", text
    )
    assert found and all(x == y for x, y, _ in found)
    return {(x, out) for x, _, out in found}


@pytest.fixture
def slow_bfloat16(monkeypatch) -> None:
    """A processor that multiplies bfloat16 slowly, with which few rows are many."""
    monkeypatch.setattr(programs, "_slow_bfloat16", lambda: True)
    monkeypatch.setattr(programs, "MANY_ROWS", 100)


def test_all_products_are_of_narrow_operands_with_wide_sums(batch) -> None:
    """So the matrix unit takes them; on accelerators a layer's are asked for in the model's dtype, as ever."""
    assert products(lowered(NARROW, batch, "cpu")) == {("bf16", "f32")}
    assert products(lowered(NARROW, batch, "tpu")) == {("bf16", "f32"), ("bf16", "bf16")}


def test_where_bfloat16_is_slow_a_step_is_float32s(batch, slow_bfloat16) -> None:
    """Nothing in it is narrow, so that it is the same program as of a float32 model."""
    assert "bf16" not in (text := lowered(NARROW, batch, "cpu"))
    assert text == lowered(WIDE, batch, "cpu")


def test_only_a_step_on_cpus_is_float32s(slow_bfloat16) -> None:
    """A host with such a processor compiles for its accelerators too."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install '.[tpu]'")
    tpus = make_mesh(fsdp=4, devices=Slice.parse("v5e:2x2").devices())
    assert programs.trained_dtype("bfloat16", tpus) == "bfloat16"
    assert programs.trained_dtype("bfloat16", make_mesh(devices=jax.devices("cpu")[:1])) == "float32"
    assert programs.trained_dtype("bfloat16", None) == "float32"


def test_many_rows_are_multiplied_as_float32_where_bfloat16_is_slow(slow_bfloat16) -> None:
    """A prompt's, in decoding's programs; not so on accelerators, for which the same process may compile."""
    w = jax.ShapeDtypeStruct((96, 4, 16), jnp.float32)

    def kinds(rows: int, platform: str) -> set[tuple[str, str]]:
        x = jax.ShapeDtypeStruct((2, rows, 96), jnp.bfloat16)
        return products(jax.jit(linear).trace(x, w).lower(lowering_platforms=(platform,)).as_text())

    assert kinds(60, "cpu") == {("f32", "f32")}
    assert kinds(40, "cpu") == {("bf16", "f32")}
    assert kinds(60, "tpu") == {("bf16", "bf16")}


def test_as_float32_a_product_is_the_same(monkeypatch, slow_bfloat16) -> None:
    """Each number is exact in either; only sums are in another order."""
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 60, 96), (96, 4, 16)]))
    narrow = x.astype("bfloat16")

    def both() -> tuple[jax.Array, Any]:
        y, back = jax.vjp(lambda x, w: linear(x, w), narrow, w)
        return y, back(jnp.ones_like(y))

    wide = both()
    monkeypatch.setattr(programs, "_slow_bfloat16", lambda: False)
    for one, other in zip(jax.tree.leaves(wide), jax.tree.leaves(both()), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("vendor", "flags", "slow"),
    [
        ("GenuineIntel", "fpu avx512f avx512_bf16 avx512_fp16", True),
        ("GenuineIntel", "fpu avx512f avx512_bf16 amx_bf16 amx_tile", False),
        ("GenuineIntel", "fpu avx512f avx512_vnni", True),
        ("GenuineIntel", "fpu avx2 fma avx_vnni", True),
        ("AuthenticAMD", "fpu avx512f avx512_bf16", False),
        ("AuthenticAMD", "fpu avx2 fma", True),
    ],
)
def test_which_processors_multiply_bfloat16_slowly(vendor: str, flags: str, slow: bool) -> None:
    core = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\nbugs\t\t:\n\n"
    assert multiplies_bfloat16_slowly(core + core) is slow


@pytest.mark.parametrize("said", ["", "processor\t: 0\nFeatures\t: fp asimd asimdhp\nCPU implementer\t: 0x41\n\n"])
def test_of_other_processors_nothing_is_assumed(said: str) -> None:
    """Arm's say `Features`."""
    assert not multiplies_bfloat16_slowly(said)


@pytest.mark.parametrize("remat", ["heads", "attention", "full"])
def test_what_layers_keep_lies_in_float32(batch, remat: str) -> None:
    """XLA writes a layer's part into a bfloat16 stack by making float32 of all of it, and bfloat16 again."""
    one = jax.tree.map(lambda x: x[0], batch)
    step = jax.jit(jax.value_and_grad(partial(loss_sums, model=NARROW, remat=remat), has_aux=True))
    text = step.lower(NARROW.abstract_params(), one).as_text()
    kept = set(re.findall(rf"tensor<({NARROW.n_layers}x[\dx]+)x(\w+)>", text))
    assert (f"{NARROW.n_layers}x2x{TOKENS}x{NARROW.d_model}", "f32") in kept
    assert not [shape for shape, dtype in kept if dtype == "bf16"]


def test_nothing_of_a_float32_model_is_narrow(batch) -> None:
    text = lowered(WIDE, batch, "cpu")
    assert products(text) == {("f32", "f32")}
    assert "bf16" not in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_linear_layer_and_its_gradients_are_the_rounded_products(dtype: str) -> None:
    """Of several axes, and with either operand the larger one."""
    for inner, outer in (((8,), (3, 16)), ((3, 16), (8,)), ((24,), (8,))):
        x, w, dy = (
            jax.random.normal(jax.random.key(i), shape)
            for i, shape in enumerate(((2, 5, *inner), (*inner, *outer), (2, 5, *outer)))
        )
        y, back = jax.vjp(partial(linear, contracted=len(inner)), x.astype(dtype), w)
        got = (y, *back(dy.astype(dtype)))
        x2, w2, dy2 = (
            np.asarray(one.astype(dtype), np.float64).reshape(size)
            for one, size in (
                (x, (10, -1)),
                (w, (x[0, 0].size, -1)),
                (dy, (10, -1)),
            )
        )
        step = 2.0**-8 if dtype == "bfloat16" else 1e-6
        for ours, plain, exact in zip(got, (x2 @ w2, dy2 @ w2.T, x2.T @ dy2), (False, False, True), strict=True):
            kept = 1e-6 if exact else step  # the weights' gradient is float32 either way
            np.testing.assert_allclose(
                np.asarray(ours, np.float64).reshape(plain.shape), plain, rtol=kept, atol=kept * np.abs(plain).max()
            )


def test_what_is_kept_of_a_product_is_as_narrow_as_it() -> None:
    x, w = jnp.ones((4, 8, 16), jnp.bfloat16), jnp.ones((16, 16), jnp.float32)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(linear(jnp.sin(linear(x, w)), w))

    def kept(policy: str) -> list[Any]:
        _, back = jax.vjp(jax.checkpoint(layer, policy=REMAT_POLICIES[policy]), x, w)
        return sorted(str(one.aval) for one in jax.tree.leaves(back) if one.shape == x.shape)

    assert kept("full") == ["bfloat16[4,8,16]"]
    assert kept("dots") == ["bfloat16[4,8,16]"] * 3


def test_training_goes_as_in_float32(batch) -> None:
    """The loss of each step is float32's to 1 %, while it falls by a quarter."""
    config = SFTConfig(data=DataConfig(seq_len=TOKENS), batch_size=2, steps=8, learning_rate=1e-2, warmup_fraction=0)

    def losses(model: LlamaConfig) -> list[float]:
        state: tuple[Any, Any] = initial_state(model.init(jax.random.key(0)), sft_optimizer(config, 8))
        found = []
        for _ in range(8):
            *state, metrics = train_step(*state, batch, model=model, config=config, steps=8)
            found.append(float(metrics["train/loss"]))
        return found

    wide, narrow = losses(WIDE), losses(NARROW)
    assert wide[-1] < 0.75 * wide[0]
    np.testing.assert_allclose(narrow, wide, rtol=1e-2)


def test_the_engine_says_the_trainers_logprobs() -> None:
    """Both round, at different places: a token's ratio is 1 to a few hundredths, and 1 on average."""
    params = jax.tree.map(lambda x: 2 * x if x.ndim > 2 else x, WIDE.init(jax.random.key(0)))
    prompts = np.random.default_rng(0).integers(0, WIDE.vocab_size, (4, 20)).tolist()

    async def drawn() -> list[Completion]:
        shapes = EngineConfig(slots=4, max_length=64, prefill_chunk=32, decode_chunk=8, min_window=64)
        async with Engine(params, NARROW, shapes) as engine:
            samplings = [Sampling(max_tokens=16, stop_ids=(), seed=i, temperature=1.0) for i in range(4)]
            return await asyncio.gather(*(engine.generate(*one) for one in zip(prompts, samplings, strict=True)))

    apart = []
    for prompt, completion in zip(prompts, asyncio.run(drawn()), strict=True):
        for model, most in ((NARROW, 0.05), (WIDE, 0.1)):
            want = trainer_logps(params, model, prompt, completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs, want, atol=most)
            apart.append(np.asarray(completion.logprobs) - want)
    assert abs(np.exp(np.concatenate(apart)).mean() - 1) < 5e-3
