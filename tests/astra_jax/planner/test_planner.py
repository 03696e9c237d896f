"""The planner: what it counts, what it compiles for TPUs that are not here, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs_world import as_users

from astra_jax.mesh import make_mesh
from astra_jax.models.qwen3.presets import PRESETS as MODELS
from astra_jax.models.remat import REMATS
from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.hardware import CHIPS, INSTALL_GPU, PlanError, Slice, mesh_sizes
from astra_jax.planner.jobs import executed_flops_per_token
from configs.training import PRESETS
from launch.flags.cli import load_config

ROOT = Path(__file__).parents[3]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu: pip install '.[tpu]'"
)

needs_cuda_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason=f"compiling for GPUs needs {INSTALL_GPU}"
)


def compiled_text(f, mesh, spec, *shapes) -> str:
    sharded = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    return jax.jit(sharded).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_collectives_count_by_axis_and_as_often_as_their_loop_runs() -> None:
    mesh = make_mesh(fsdp=2, tensor=4)

    def f(x):
        def body(carry, _):
            return carry + jax.lax.psum(jnp.sin(carry), "tensor"), None

        x, _ = jax.lax.scan(body, x, length=5)
        gathered = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
        return jax.lax.psum(gathered, ("fsdp", "tensor"))

    counted = bytes_by_axis(compiled_text(f, mesh, P("fsdp"), (64, 32)), dict(mesh.shape))
    local, whole = 32 * 32 * 4, 64 * 32 * 4
    expected = {"tensor": 5 * local * 2 * 3 / 4, "fsdp": whole / 2, "fsdp+tensor": whole * 2 * 7 / 8}
    assert counted == pytest.approx(expected)


def test_scatters_and_permutations_count() -> None:
    mesh = make_mesh(context=8)

    def f(x):
        scattered = jax.lax.psum_scatter(x, "context", scatter_dimension=0, tiled=True)
        moved = jax.lax.ppermute(scattered, "context", [(i, (i + 1) % 8) for i in range(8)])
        return jax.lax.pmax(moved, "context")

    counted = bytes_by_axis(compiled_text(f, mesh, P(), (64, 32)), dict(mesh.shape))
    part = 8 * 32 * 4
    assert counted == pytest.approx({"context": part * 7 + part + part * 2 * 7 / 8})


def test_collectives_of_gpus_count_what_was_made_one_of_many() -> None:
    """Their starts name operands and results; the compiler writes a loop's trips beside it."""
    hlo = """
%body (p: (f32[8])) -> (f32[8]) {
  %all-gather-start = ((bf16[2,4]{1,0}, bf16[2,16]{1,0}), (bf16[8,4]{1,0}, bf16[8,16]{1,0})) all-gather-start(%a, %b), \
replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
  %reduce-scatter-start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%c), replica_groups={{0,1,2,3}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %all-reduce-start = (f32[16]{0}, f32[16]{0}) all-reduce-start(%d, %e), replica_groups={{0,1,2,3}}, to_apply=%add
  %while = (f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
""".replace("\\\n", "")
    gathered, scattered, reduced = 2 * (8 * 4 + 8 * 16) * 3 / 4, 4 * 2 * 4 * 3, 4 * 32 * 2 * 3 / 4
    expected = {"fsdp": 5 * (gathered + scattered) + reduced}
    assert bytes_by_axis(hlo, {"fsdp": 4, "tensor": 1}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "tokens", "gigaflops"),
    [
        ("0.6b", 16_384, 9.2),
        ("4b", 16_384, 38.6),
        ("8b", 74_752, 111.5),
        ("14b", 74_752, 175.8),
        ("32b", 74_752, 427.1),
    ],
)
def test_flops_are_those_of_the_formula(size: str, tokens: int, gigaflops: float) -> None:
    """6 for each weight that a token is multiplied with, 6 L T N H for causal attention."""
    useful, executed = MODELS[size].flops_per_token(tokens)
    assert useful / 1e9 == pytest.approx(gigaflops, rel=0.005)
    assert 1.3 < executed / useful < 1.5


def test_what_is_executed_goes_by_remat_and_by_the_kernels() -> None:
    model, tokens = MODELS["14b"], 74_752
    layers, head = model.matmul_parameters()
    useful = model.flops_per_token(tokens)[0]
    one = (useful - 6 * (layers + head)) / 6  # of attention's matmuls
    executed = {remat: executed_flops_per_token(model, tokens, remat) for remat in REMATS}
    assert executed["none"] == executed["dots"] == pytest.approx(useful + 3 * one)  # 2 and 7, not 2 and 4
    assert executed["attention"] == pytest.approx(executed["none"] + 2 * layers)
    assert executed["full"] == pytest.approx(executed["attention"] + 2 * one)


def test_experts_count_only_where_tokens_go() -> None:
    layers, head = MODELS["30b-a3b"].matmul_parameters()
    assert (layers + head) / 1e9 == pytest.approx(3.03, abs=0.05)  # "A3B", without the embedding


def test_a_mesh_is_chosen_by_the_length_of_rows() -> None:
    assert mesh_sizes(8, 74_752) == {"fsdp": 1, "context": 8} and mesh_sizes(64, 20_480) == {"fsdp": 16, "context": 4}


def test_slices_are_checked() -> None:
    assert Slice.parse("v5p:2x2x4").chips == 16
    with pytest.raises(PlanError, match="there is no chip 'v9'; use one of v5e, v5p, v6e"):
        Slice.parse("v9:2x2")
    with pytest.raises(PlanError, match="no slices of more than 131,072 chips"):
        Slice.parse("v5p:4x4x999999999")
    with pytest.raises(PlanError, match="'4by4' is no shape; write for example v6e:2x4"):
        Slice.parse("v6e:4by4")
    gpus = Slice.parse("h200:2x8")
    assert gpus.chips == 16 and gpus.link_bandwidth == 50e9 and Slice.parse("h200:8").link_bandwidth == 450e9
    with pytest.raises(PlanError, match="'1x2x8' is no shape; write for example h200:2"):
        Slice.parse("h200:1x2x8")
    for name, chip in CHIPS.items():
        sizes = [Slice(chip, shape).chips for shape in chip.slices]
        assert sizes == sorted(set(sizes)) and chip.name == name


def test_every_size_has_both_presets() -> None:
    sizes = {name for name in MODELS if name != "tiny"}
    assert set(PRESETS) == {f"{job}:{size}" for job in ("sft", "grpo") for size in sizes}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_papers(name: str) -> None:
    run = load_config(name)
    assert run.model == dataclasses.replace(
        MODELS[name.partition(":")[2]].in_training_precision(),
        max_positions=run.model.max_positions,
        yarn=run.model.yarn,
    )
    assert run.model.param_dtype == "float32" and run.model.dtype == "bfloat16"
    if name.startswith("grpo"):
        assert run.grpo.learning_rate == 2e-6 and run.grpo.batch_size == 256
        assert run.model.max_positions >= max(run.grpo.row_buckets) > 25_600 + 49_152
        assert run.model.yarn.factor == 3
    else:
        assert run.sft.data.seq_len == 20_480 and run.sft.batch_size == 32 and run.model.yarn is None
        assert run.sft.learning_rate == {"sft:14b": 5e-6, "sft:32b": 2e-6}.get(name, run.sft.learning_rate)


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.plan", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=as_users())


@needs_libtpu
@pytest.mark.slow
def test_the_command_compiles_the_real_step() -> None:
    own = ["--config.sft.remat=dots", "--config.sft.micro_batch_size=8", "--config.sft.batch_size=16"]
    run = ["--config=sft:0.6b", "--config.model.n_layers=2", *own, "--mesh=fsdp=4"]
    asked = ["--topology=v5e:2x2", "--tokens=1024", "--steps=100", "--price_per_chip_hour=1.2", "--json"]
    result = plan(*run, *asked)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["fits"] and found["chips"] == 4 and found["hbm_bytes_per_chip"] == CHIPS["v5e"].hbm_bytes
    model = dataclasses.replace(MODELS["0.6b"], n_layers=2)
    assert found["flops_per_token"] == model.flops_per_token(1024)[0]
    weights = 4 * 3 * 186.6e6 / 4  # AdamW's state is on the chip, a quarter of it
    assert weights < found["peak_bytes_per_chip"] < found["hbm_bytes_per_chip"]
    # At least one gather of the layers' weights in bfloat16, forward and backward, by each micro-batch.
    assert (
        found["collective_bytes_by_axis"]["fsdp"]
        > 2 * 2 * 31e6 * 0.75 * found["batch_size"] / found["micro_batch_size"]
    )
    # The run's own settings, and what the compiled step takes.
    assert (found["remat"], found["micro_batch_size"], found["batch_size"]) == ("dots", 8, 16)
    assert "--mesh=fsdp=4 --config.sft.micro_batch_size=8 --config.sft.remat=dots" in result.stdout
    assert found["expected"] and found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["seconds"]["attention"] > 0 and found["cycles"]["matmul"] > 0 and not found["uncounted"]
    ideal = found["flops_per_token"] * 16 * 1024 / 4 / CHIPS["v5e"].flops
    assert found["step_seconds"] > ideal and found["mfu"] == pytest.approx(ideal / found["step_seconds"])
    assert found["hours"] == pytest.approx(100 * found["step_seconds"] / 3600)
    assert found["dollars"] == pytest.approx(found["hours"] * 4 * 1.2)
    assert "fits: " in result.stdout and "expected " in result.stdout and "100 steps" in result.stdout


@needs_cuda_compiler
@pytest.mark.slow
def test_the_command_compiles_for_gpus() -> None:
    flags = ["--topology=h200:4", "--tokens=8192", "--config.model.n_layers=2", "--mesh=fsdp=2,context=2", "--json"]
    result = plan("--config=grpo:0.6b", *flags)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["fits"] and found["chips"] == 4 and found["hbm_bytes_per_chip"] == CHIPS["h200"].hbm_bytes
    assert 4 * 4 * 186.6e6 / 4 < found["peak_bytes_per_chip"] < 8 * 2**30
    assert found["collective_bytes_by_axis"].keys() >= {"fsdp", "context"}
    assert not found["expected"] and found["seconds"].keys() == {"compute", "memory", "network"}
    assert "at least " in result.stdout and "bound by" in result.stdout


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_said_not_raised() -> None:
    flags = ["--topology=v5e:2x2", "--tokens=4096", "--config.model.n_layers=3", "--config.model.d_ff=400000"]
    result = plan("--config=sft:8b", *flags, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert not found["fits"] and found["peak_bytes_per_chip"] > found["hbm_bytes_per_chip"]
    assert "DOES NOT FIT" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config=sft:14"], "--config=sft:14 is neither a preset nor a file; the nearest preset is sft:14b"),
        (["--config=configs/sft_qwen3_30b_a3b.py"], "presets have names now; use --config=sft:30b-a3b"),
        (["--config=configs/training.py"], "defines no CONFIG"),
        (
            ["--config=sft:14b", "--mesh=width=2"],
            "--mesh=width=2: write AXIS=SIZE; the axes are data, fsdp, expert, context, tensor",
        ),
        (["--config=sft:14b", "--topology=tpu:8"], "there is no chip 'tpu'"),
        ([], "--config is missing"),
    ],
)
def test_bad_flags_end_in_one_line(flags: list[str], message: str) -> None:
    result = plan("--topology=v5p:2x2x2", *flags)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
