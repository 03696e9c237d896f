"""The engine with the layers' matrices in 8 bits: it draws what a plain forward pass with those numbers would."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import decisive, engine_model

from astra_jax.axes import stacked_matrices
from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from astra_jax.mesh import make_mesh
from astra_jax.models.flops import decoding_bytes
from astra_jax.models.layers import quantized
from astra_jax.planner.decoding import lower_decode
from astra_jax.planner.hardware import Slice
from astra_jax.rollout.engine import worker
from astra_jax.rollout.engine.cache_memory import check_cache_fits
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.sampler import Completion, Sampling

pytest.importorskip("qwix", reason=f"8 bits want {quantized.INSTALL}")
MODEL = engine_model(62)
SHAPES = EngineConfig(slots=4, max_length=64, prefill_chunk=8, decode_chunk=4, min_window=64, stored="int8")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def weights(seed: int):
    return decisive(MODEL, seed)


def rounded(params):
    """The weights that 8 bits and a scale for each output make of these."""

    def one(path, x):
        if (sides := stacked_matrices(path)) is None:
            return x
        kept = quantized.stored(x, (0, *sides[1]))
        assert kept.qvalue.dtype == jnp.int8 and kept.scale.size == x.size // np.prod([x.shape[i] for i in sides[0]])
        return kept.qvalue * kept.scale

    return jax.tree.map_with_path(one, params)


def drawn(*params, config=SHAPES) -> list[Completion]:
    """Greedy, by each of these weights in turn."""

    async def main() -> list[Completion]:
        async with Engine(params[0], MODEL, config) as engine:
            found = []
            for version, each in enumerate(params):
                if version:
                    await engine.update(each, version)
                sampling = Sampling(max_tokens=12, stop_ids=(), seed=0, temperature=0)
                found.append(await engine.generate(PROMPT, sampling))
            return found

    return asyncio.run(main())


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    """By an engine of the rounded weights, as they are."""
    return drawn(rounded(weights(0)), rounded(weights(1)), config=dataclasses.replace(SHAPES, stored="none"))


@pytest.mark.parametrize("sizes", [None, {}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_it_draws_by_the_rounded_weights(expected, monkeypatch, sizes) -> None:
    """Layers written out, scanned, and on a mesh; and by those that it is given later."""
    given = [weights(0), weights(1)]
    if sizes is not None:
        monkeypatch.setattr(worker, "unroll_decode_layers", lambda *model, device: False)
    if sizes:
        shardings = MODEL.param_shardings(make_mesh(**sizes, devices=jax.devices()[:4]))
        given = [jax.device_put(one, shardings) for one in given]
    for one, wanted in zip(drawn(*given), expected, strict=True):
        assert one.token_ids == wanted.token_ids
        np.testing.assert_allclose(one.logprobs, wanted.logprobs, atol=1e-4)
    assert [one.policy_version for one in expected] == [0, 1]


def test_a_steps_floor_is_what_it_keeps() -> None:
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    kept = jax.eval_shape(lambda: model.for_decoding(model.init(jax.random.key(0)), apart=False, stored="int8"))
    layers = jax.tree_util.tree_leaves_with_path(kept["layers"])
    matrices = sum(x.size * x.dtype.itemsize for path, x in layers if "norm" not in jax.tree_util.keystr(path))
    assert decoding_bytes(model, 0, 0, "int8") == matrices + 2 * model.d_model * model.vocab_size
    assert decoding_bytes(model, 3, 9, "int8") - decoding_bytes(model, 0, 0, "int8") == decoding_bytes(
        model, 3, 9
    ) - decoding_bytes(model, 0, 0)


def test_room_is_for_what_is_kept(monkeypatch) -> None:
    model = dataclasses.replace(MODEL, d_model=256, d_ff=1024)
    params = model.abstract_params()
    whole = sum(4 * x.size for x in jax.tree.leaves(params))
    monkeypatch.setattr("astra_jax.rollout.engine.cache_memory.memory_of", lambda device: whole // 2)
    with pytest.raises(SettingError, match="and the weights"):
        check_cache_fits(model, 1, 16, None)
    check_cache_fits(model, 1, 16, None, "int8")
    with pytest.raises(InputError, match="stored is int8; the grouped matmuls of experts are not quantised"):
        check_cache_fits(dataclasses.replace(MODEL, n_experts=4, experts_per_token=2), 1, 16, None, "int8")


@pytest.mark.slow
def test_a_tpu_reads_8_bits() -> None:
    """A step's matmuls take half of what the weights were, and no wider copy of them is made."""
    pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
    model = dataclasses.replace(
        MODEL, d_model=1024, d_ff=4096, head_dim=128, dtype="bfloat16", param_dtype="bfloat16", vocab_size=1024
    )
    mesh = make_mesh(devices=Slice.parse("v6e:2x2").devices()[:1])
    whole, narrow = (
        lower_decode(model, 16, 512, 8, mesh, stored=stored).compile().memory_analysis() for stored in ("none", "int8")
    )
    saved = whole.argument_size_in_bytes - narrow.argument_size_in_bytes
    assert saved == pytest.approx(decoding_bytes(model, 0, 0) - decoding_bytes(model, 0, 0, "int8"), rel=0.05)
    assert narrow.temp_size_in_bytes <= whole.temp_size_in_bytes + saved // 8
