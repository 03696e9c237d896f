"""An optimizer's running means in bfloat16 and in the host's memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_world import DENSE, LENGTH, ROWS, packed_batch
from sft_world import AfterUpdate, make_dataset, starting, trajectories
from tpu_world import QUICKER

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.step import grpo_optimizer, take_step
from astra_jax.mesh import make_mesh
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.planner import programs
from astra_jax.planner.hardware import Slice
from astra_jax.planner.hlo import read_hlo
from astra_jax.run import moments
from astra_jax.run.config import TrainingConfig
from astra_jax.run.identity import check_same_run
from astra_jax.run.optimizers import abstract_state, apply_gradients, initial_state, make_optimizer
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import sft_optimizer, train_step
from synthesis.core.workdir import WorkdirError

DECAY = {"adamw": 0.999, "muon": 0.99}


def settings(**changes) -> TrainingConfig:
    return TrainingConfig(steps=1, batch_size=1, learning_rate=1e-2, **changes)


def trained(steps: int, config: TrainingConfig, *, nearest: bool = False):
    """Weights after noisy gradients of a quadratic with curvatures of four orders of magnitude, and the state."""
    size = 512
    curvature = jnp.logspace(-2, 2, size)
    params = {"layers": {"w_df": jax.random.normal(jax.random.key(0), (1, size, 1))}}
    optimizer = make_optimizer(config, lambda count: config.learning_rate / (1 + count / 100))

    def step(i, given):
        params, state = given
        w = params["layers"]["w_df"]
        slope = curvature[None, :, None] * (w + 0.3 * jax.random.normal(jax.random.key(i), w.shape))
        params, state, _ = apply_gradients(
            params, state, {"layers": {"w_df": slope}}, jnp.float32(1), optimizer=optimizer, rounding="nearest"
        )
        return params, state

    params, state = jax.jit(lambda: jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params))))()
    return params["layers"]["w_df"], state


def test_1000_updates_with_bfloat16_means_end_where_float32s_do(monkeypatch) -> None:
    """Both means, of 0.9 and 0.999. Rounded to the nearest the second one stands still, and steps are too long."""
    config = settings(b2=0.999, max_grad_norm=1e30)
    exact, expected = trained(1_000, config)
    narrow, state = trained(1_000, dataclasses.replace(config, optimizer_state_dtype="bfloat16"))
    monkeypatch.setattr(moments, "rounded", lambda x, key: x.astype(jnp.bfloat16))
    _, still = trained(1_000, dataclasses.replace(config, optimizer_state_dtype="bfloat16"))

    def second(state):
        return np.asarray(
            next(x for path, x in jax.tree.leaves_with_path(state) if ".nu" in jax.tree_util.keystr(path))
        )

    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(jnp.bfloat16)}
    wrong = np.abs(second(state).astype(np.float32) / second(expected) - 1).mean()
    stuck = np.abs(second(still).astype(np.float32) / second(expected) - 1).mean()
    distance = float(jnp.linalg.norm(narrow - exact) / jnp.linalg.norm(exact))
    print("second moment", wrong, "nearest", stuck, "weights", distance)
    assert wrong < 0.05 < stuck
    assert distance < 0.05


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_running_means_are_bfloat16(name: str) -> None:
    """Muon's coefficients and all counters are what they were."""
    params = DENSE.init(jax.random.key(0))
    plain, narrow = (
        make_optimizer(settings(optimizer=name, optimizer_state_dtype=kind), 1e-3).init(params)
        for kind in ("float32", "bfloat16")
    )
    names = moments.names_of(params)
    for (path, x), y in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(narrow), strict=True):
        owned = moments.owner_of(path, x, names) is not None
        assert y.dtype == (jnp.bfloat16 if owned else x.dtype), jax.tree_util.keystr(path)


@functools.cache
def updated(**changes):
    """(weights and state after three updates, the state as it lies)."""
    config = GRPOConfig(learning_rate=1e-2, **changes)
    start = DENSE.init(jax.random.key(0))
    params, state = initial_state(start, grpo_optimizer(config), offload=config.optimizer_offload)
    for i in range(3):
        gradients = jax.tree.map(lambda x, i=i: jax.random.normal(jax.random.key(i), x.shape), params)
        params, state, _ = take_step(
            params, state, gradients, jnp.float32(2), jnp.float32(config.learning_rate), config=config
        )
    return jax.device_get((params, state)), state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_the_host_keeps_is_what_the_devices_would(name: str) -> None:
    here, _ = updated(optimizer=name)
    there, state = updated(optimizer=name, optimizer_offload=True)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), there, here)
    away = moments.may_be_away(here[0])
    for path, x in jax.tree.leaves_with_path(state):
        owner = moments.owner_of(path, x, moments.names_of(here[0]))
        assert x.sharding.memory_kind == (moments.HOST if owner in away else "device"), jax.tree_util.keystr(path)
    assert len(away) == 7  # q, k, v, o, gate, up, down


@pytest.mark.slow
def test_a_step_that_is_broken_leaves_what_the_host_has() -> None:
    config = GRPOConfig(optimizer_offload=True)
    params, state = initial_state(DENSE.init(jax.random.key(0)), grpo_optimizer(config), offload=True)
    gradients = jax.tree.map(jnp.ones_like, params)
    params, state, _ = take_step(
        params, state, gradients, jnp.float32(1), jnp.float32(config.learning_rate), config=config
    )
    before = jax.device_get((params, state))
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    params, state, said = take_step(
        params, state, broken, jnp.float32(1), jnp.float32(config.learning_rate), config=config
    )
    assert not np.isfinite(said["train/grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((params, state)), before)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"optimizer_state_dtype": "bfloat16"}, {"optimizer_offload": True}], ids=str)
def test_a_run_goes_on_to_the_bit(chat_tokenizer, tmp_path, changes) -> None:
    data = make_dataset(tmp_path / "data", trajectories(6, longest=2))
    model = Qwen3Config(
        vocab_size=chat_tokenizer.vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        d_ff=48,
        tie_embeddings=True,
        max_positions=1024,
    )
    config = SFTConfig(
        data=DataConfig(seq_len=512, packing_bins=4, too_long="cut"),
        batch_size=2,
        steps=3,
        learning_rate=1e-2,
        checkpoint_every=1,
        sample_every=0,
        **changes,
    )
    params = model.init(jax.random.key(0))

    def run(folder: str, until: int = 0, config: SFTConfig = config):
        def stop(step, row) -> None:
            if step == until:
                raise KeyboardInterrupt

        arguments = (config, model, starting(params), data, chat_tokenizer, tmp_path / folder)
        return sft.train(*arguments, progress=False, hooks=[AfterUpdate(stop)])

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", 2)
    jax.tree.map(np.testing.assert_array_equal, run("stopped").params, straight.params)
    if "optimizer_state_dtype" in changes:
        with pytest.raises(WorkdirError, match="sft.optimizer_state_dtype is 'bfloat16' there, 'float32' here"):
            run("stopped", config=dataclasses.replace(config, optimizer_state_dtype="float32"))
    else:  # and moves to the devices, and back
        with pytest.raises(KeyboardInterrupt):
            run("moved", 1)
        with pytest.raises(KeyboardInterrupt):
            run("moved", 2, dataclasses.replace(config, optimizer_offload=False))
        moved = run("moved").params
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), moved, straight.params)


def test_runs_of_before_had_float32_means_and_nothing_in_8_bits() -> None:
    before = {"sft.batch_size": 4, "grpo.batch_size": 4}
    now = before | {
        "sft.matmul_quantization": "none",
        "sft.optimizer_state_dtype": "float32",
        "grpo.weight_quantization": "none",
    }
    check_same_run(before, now, "DIR")
    changed = {
        "sft.matmul_quantization": "int8",
        "grpo.optimizer_state_dtype": "bfloat16",
        "grpo.weight_quantization": "int8",
    }
    for name, value in changed.items():
        with pytest.raises(WorkdirError, match=f"{name} is '.*' there, '{value}' here"):
            check_same_run(before, now | {name: value}, "DIR")


@pytest.mark.slow
def test_host_memory_on_a_mesh_equals_the_devices() -> None:
    mesh = make_mesh(fsdp=4, tensor=2)

    def step(**changes):
        config = SFTConfig(data=DataConfig(seq_len=LENGTH), batch_size=ROWS, learning_rate=1e-2, eps=1e-3, **changes)
        shardings, optimizer = DENSE.param_shardings(mesh), sft_optimizer(config, 10)
        offload = config.optimizer_offload
        params, state = initial_state(DENSE.init(jax.random.key(0)), optimizer, shardings, offload=offload)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], packed_batch())
        for _ in range(2):
            params, state, _ = train_step(params, state, batch, model=DENSE, config=config, steps=10, mesh=mesh)
        return jax.device_get(params)

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), step(optimizer_offload=True), step())


WIDE = Qwen3Config(
    vocab_size=512,
    d_model=256,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=128,
    d_ff=256,
    tie_embeddings=False,
    dtype="bfloat16",
    param_dtype="float32",
)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p:2x2x1", "v6e:2x2"])
def test_a_tpu_keeps_in_the_hosts_memory_what_it_is_told_to(chip: str) -> None:
    """Activations of `remat=offload` and the layers' running means: in S(5), to the byte, and not on the chip."""
    pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
    mesh, length = make_mesh(devices=Slice.parse(chip).devices()[:1]), 512
    how = {"remat": "offload", "optimizer_offload": True, "compiler_options": QUICKER}
    config = SFTConfig(data=DataConfig(seq_len=length), batch_size=1, **how)
    texts: list[str] = []
    (found,) = programs.sft_programs(WIDE, config, mesh, programs.Compiling({}, lambda name, text: texts.append(text)))
    assert not found.refusal, found.refusal
    assert "S(5)" in texts[0]
    params, state = abstract_state(WIDE.abstract_params(), sft_optimizer(config, 10))
    away = moments.may_be_away(params)
    matrices = sum(8 * x.size for path, x in jax.tree.leaves_with_path(params) if jax.tree_util.keystr(path) in away)
    # Of each layer: its input, what comes out of attention, and the kernel's sums of exponentials.
    kept = WIDE.n_layers * length * (2 * WIDE.d_model + 2 * WIDE.n_heads * WIDE.head_dim + 4 * WIDE.n_heads)
    assert found.host == matrices + kept
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert found.arguments == pytest.approx(whole - matrices, rel=0.01)
    assert not read_hlo(texts[0]).unknown_loops
