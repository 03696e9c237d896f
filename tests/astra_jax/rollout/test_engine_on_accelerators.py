"""The engine's other form, with scanned layers and a cache that is read in place, as TPUs and meshes have it.

On CPUs, on one device and on a mesh, it draws what the written-out one draws. And where its cache lives, and when there
is no room for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from rollout_world import decisive

from astra_jax.base.settings import SettingError
from astra_jax.mesh import make_mesh
from astra_jax.models import decoder
from astra_jax.models.qwen3.presets import PRESETS, Qwen3Config
from astra_jax.planner.decoding import lower_copy, lower_decode, lower_prefill
from astra_jax.planner.hardware import INSTALL_GPU, Slice
from astra_jax.rollout.engine import worker
from astra_jax.rollout.engine.cache_memory import check_cache_fits, unroll_decode_layers
from astra_jax.rollout.engine.engine import Engine, EngineConfig
from astra_jax.rollout.sampler import Completion, Sampling

MODEL = Qwen3Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    head_dim=16,
    d_ff=48,
    tie_embeddings=True,
    max_positions=512,
)
SHAPES = EngineConfig(slots=5, max_length=288, prefill_chunk=128, decode_chunk=4, min_window=64)


@pytest.fixture(scope="module")
def params():
    return decisive(MODEL, 0)


def drawn(params, platform: str | None = None) -> tuple[list[Completion], int]:
    """What two rounds say: prompts of one token up to two chunks, three that begin alike, then a turn of each session;
    and how many tokens were copied."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, MODEL.vocab_size, n).tolist() for n in (1, 40, 150, 230)]
    texts += [texts[2][:140] + rng.integers(0, MODEL.vocab_size, 5).tolist() for _ in range(3)]

    async def turn(engine: Engine, i: int) -> list[Completion]:
        sampling = Sampling(max_tokens=10, stop_ids=(), seed=i, temperature=0.0 if i % 2 else 0.8)
        first = await engine.generate(texts[i], sampling, session=str(i))
        second = await engine.generate([*texts[i], *first.token_ids, 3, 4, 5], sampling, session=str(i))
        return [first, second]

    async def main() -> tuple[list[Completion], int]:
        async with Engine(params, MODEL, SHAPES) as engine:
            if platform is not None:
                engine._worker._compiled_for["platform"] = platform
            rounds = await asyncio.gather(*(turn(engine, i) for i in range(len(texts))))
            return [one for both in rounds for one in both], engine.stats.copied_tokens

    return asyncio.run(main())


@pytest.fixture(scope="module")
def expected(params) -> list[Completion]:
    return drawn(params)[0]


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}])
def test_it_draws_what_the_written_out_one_draws(params, expected, monkeypatch, sizes: dict[str, int]) -> None:
    monkeypatch.setattr(worker, "unroll_decode_layers", lambda *model, device: False)
    if sizes:
        count = int(np.prod(list(sizes.values())))
        mesh = make_mesh(**sizes, devices=jax.devices()[:count])
        params = jax.device_put(params, MODEL.param_shardings(mesh))
    check_drawn(*drawn(params), expected)


def test_a_gpus_form_draws_the_same(params, expected, monkeypatch) -> None:
    """Layers written out, few rows padded for its matmuls, prompts by its attention's kernel, interpreted."""
    asked = []
    monkeypatch.setattr(decoder, "best_backend", lambda *of: asked.append(of) or "triton_interpret")
    check_drawn(*drawn(params, "gpu"), expected)
    assert set(asked) == {(MODEL.head_dim, "gpu")}


def check_drawn(got: list[Completion], copied: int, expected: list[Completion]) -> None:
    assert copied > 0
    for one, wanted in zip(got, expected, strict=True):
        assert one.token_ids == wanted.token_ids
        np.testing.assert_allclose(one.logprobs, wanted.logprobs, atol=1e-4)


def test_each_device_holds_its_heads_of_the_cache(params) -> None:
    """A key head is on one device of those that the heads are spread over, and on all that are left."""
    for sizes, heads in (
        ({"tensor": 2}, 2),
        ({"fsdp": 2, "tensor": 2}, 1),
        ({"fsdp": 8}, 4),
        ({"tensor": 2, "fsdp": 4}, 2),
    ):
        mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
        placed = jax.device_put(params, MODEL.param_shardings(mesh))
        cache = Engine(placed, MODEL, SHAPES)._worker.cache
        assert {shard.data.shape[2] for shard in cache.v_bksh.addressable_shards} == {heads}, sizes


def test_a_cache_for_which_there_is_no_room_is_refused_before_it_is_made() -> None:
    """The paper's longest episodes, a batch of groups at once, on a slice that could hold some of them."""
    model = dataclasses.replace(PRESETS["14b"], dtype="bfloat16")
    mesh = make_mesh(fsdp=8, devices=Slice.parse("v5p:2x2x2").devices())
    message = r"512 x 74752 need 730.0 GiB for keys and .*the weights need 3.4; a TPU v5 has 95.7. Lower --slots or"
    with pytest.raises(SettingError, match=message):
        check_cache_fits(model, 512, 74_752, mesh)
    with pytest.raises(SettingError, match="Lower --config.grpo.concurrent_groups, or use a larger --mesh"):
        check_cache_fits(model, 512, 74_752, mesh, settings="--config.grpo.concurrent_groups")
    check_cache_fits(model, 48, 74_752, mesh)
    with pytest.raises(SettingError, match="GiB for keys and values on each device"):
        Engine(MODEL.init(jax.random.key(0)), MODEL, EngineConfig(slots=65_536, max_length=2**24))


@pytest.mark.parametrize(
    ("size", "slots", "platform", "kind", "apart"),
    [
        ("4b", 16, "gpu", "NVIDIA H200", True),
        ("4b", 64, "gpu", "NVIDIA H200", True),  # in float32, as CPUs keep them, there were no room for its keys
        ("32b", 16, "gpu", "NVIDIA H200", False),  # there is none for its layers beside the whole
        ("4b", 16, "tpu", "TPU v6 lite", False),
        ("32b", 16, "cpu", "cpu", True),
    ],
)
def test_layers_are_apart_where_they_would_be_copied(
    size: str, slots: int, platform: str, kind: str, apart: bool
) -> None:
    model, device = dataclasses.replace(PRESETS[size], dtype="bfloat16"), Described(platform, kind)
    assert unroll_decode_layers(model, slots, 4096, None, "none", device=device) is apart  # type: ignore[arg-type]
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    assert not unroll_decode_layers(model, slots, 4096, mesh, "none", device=device)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Described:
    """A device that is not there."""

    platform: str
    device_kind: str


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason=f"needs {INSTALL_GPU}")
@pytest.mark.parametrize("rows", [1, 16])
def test_programs_for_gpus_copy_no_weights(rows: int) -> None:
    """All that a token of each row needs beside them is less than one of their matrices."""
    model = dataclasses.replace(
        MODEL, d_model=1024, d_ff=4096, head_dim=128, dtype="bfloat16", param_dtype="bfloat16", vocab_size=1024
    )
    mesh = make_mesh(devices=Slice.parse("h200:1").devices())
    memory = lower_decode(model, rows, 256, 4, mesh).compile().memory_analysis()
    keys = 2 * model.n_layers * rows * model.n_kv_heads * 256 * model.head_dim * 2
    assert memory.temp_size_in_bytes - keys < 2 * model.d_model * model.d_ff


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason=f"needs {INSTALL_GPU}")
def test_prefill_on_a_gpu_attends_by_the_kernel() -> None:
    model = dataclasses.replace(MODEL, head_dim=64, dtype="bfloat16", param_dtype="bfloat16")
    mesh = make_mesh(devices=Slice.parse("h200:1").devices())
    program = lower_prefill(model, 4, 1024, 4, 512, mesh).compile().as_text()
    # Of the last layer only keys and values are wanted.
    assert program.count('custom_call_target="__gpu$xla.gpu.triton"') == model.n_layers - 1


@pytest.mark.slow
def test_programs_for_tpus_hold_no_second_cache() -> None:
    """Neither drawing for all slots or for some, nor prefilling, nor copying a row takes as much as the keys have."""
    pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
    model = dataclasses.replace(MODEL, head_dim=128, n_layers=4, dtype="bfloat16", param_dtype="bfloat16")
    mesh = make_mesh(devices=Slice.parse("v6e:2x2").devices()[:1])
    slots, length = 16, 2048
    keys = 2 * model.n_layers * slots * model.n_kv_heads * length * model.head_dim
    for lowered in (
        lower_decode(model, slots, length, 16, mesh),
        lower_decode(model, slots, length, 16, mesh, rows=4),
        lower_prefill(model, slots, length, 1, 512, mesh),
        lower_copy(model, slots, length, 4, mesh),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * keys
        assert memory.temp_size_in_bytes < keys / 2
