"""The planner: what it counts, what it compiles for TPUs that are not here, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from programs_world import Ended, programs
from tpu_world import needs_libtpu

from astra_jax.attention.splash import BLOCK
from astra_jax.mesh import AXES, make_mesh
from astra_jax.models.adapters import abstract_trained
from astra_jax.models.decoder import Decoder
from astra_jax.models.lora import LoRA
from astra_jax.models.model import parameters
from astra_jax.models.qwen3.presets import PRESETS as MODELS
from astra_jax.models.remat import REMATS
from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.hardware import CHIPS, INSTALL_GPU, PlanError, Slice, mesh_sizes
from astra_jax.planner.jobs import executed_flops_per_token, for_tokens, job_on, least_traffic, longest
from astra_jax.planner.plan import flags_of, row_length
from astra_jax.planner.programs import refused
from astra_jax.planner.rollouts import rollout_seconds
from astra_jax.run.chips import chip_of
from configs.training import MODELS as ALL_MODELS
from configs.training import PRESETS, unstretched
from launch.flags.cli import load_config, overridden

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


def test_rows_that_may_be_cut_count_by_the_longest() -> None:
    """As `row_buckets` do: the program has a branch for each length, a batch takes one."""
    mesh = make_mesh(fsdp=8)

    def counted(lengths: tuple[int, ...]) -> dict[str, float]:
        def cut(length: int):
            return lambda w, x: jnp.sin(x[:, :length] @ jax.lax.all_gather(w, "fsdp", tiled=True)[:length]).sum()

        def f(w, x):
            which = jnp.int32(x[0, 0]) % len(lengths)
            return jax.lax.psum(jax.lax.switch(which, [cut(length) for length in lengths], w, x), "fsdp")

        return bytes_by_axis(compiled_text(f, mesh, (P("fsdp"), P()), (256, 16), (4, 256)), dict(mesh.shape))

    assert counted((64, 128, 256)) == counted((256,)) == {"fsdp": pytest.approx(4 * 256 * 16 * 7 / 8, rel=0.01)}


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


@pytest.mark.parametrize("name", [name for name, model in ALL_MODELS.items() if not model.n_experts])
def test_every_weight_that_tokens_are_multiplied_with_counts(name: str) -> None:
    """All but the norms and an embedding that is no head; biases too."""
    model = ALL_MODELS[name]
    params = model.abstract_params()
    norms = [leaf for path, leaf in jax.tree.leaves_with_path(params) if "norm" in path[-1].key]
    rest = sum(leaf.size for leaf in norms) + (0 if model.tie_embeddings else params["embed_vd"].size)
    assert sum(model.matmul_parameters()) == parameters(model) - rest
    assert len(norms) == (5 if model.family == "qwen3" else 3)
    useful = model.flops_per_token(4_096)[0]
    attention = 6 * model.n_layers * model.n_heads * model.head_dim * 4_096
    assert useful == 6 * (parameters(model) - rest) + attention


DOWN = 40 * 5_120 * 17_408
"""Of 14B's layers: what comes out of it no gradient wants, so nothing computes it again."""


def test_what_is_executed_goes_by_remat_and_by_the_kernels() -> None:
    model, tokens = MODELS["14b"], 74_752
    layers, head = model.matmul_parameters()
    useful = model.flops_per_token(tokens)[0]
    one = (useful - 6 * (layers + head)) / 6  # of attention's matmuls
    for chip, more in (("v5p", 1), ("h200", 3)):  # 2 and 5 on TPUs, on GPUs 2 and 7, not 2 and 4
        executed = {remat: executed_flops_per_token(model, tokens, remat, CHIPS[chip]) for remat in REMATS}
        assert executed["none"] == executed["dots"] == pytest.approx(useful + more * one)
        assert executed["attention"] == pytest.approx(executed["none"] + 2 * (layers - DOWN))
        assert executed["full"] == pytest.approx(executed["attention"] + 2 * one)


def test_under_adapters_no_gradient_of_the_weights_is_computed() -> None:
    model = MODELS["14b"]
    layers, head = model.matmul_parameters()
    for remat, again in (("none", 0), ("full", 2)):
        whole, thin = (
            executed_flops_per_token(model, 4096, remat, CHIPS["v5p"], lora) for lora in (LoRA(), LoRA(rank=16))
        )
        adapters, last = 64_225_280, 40 * 16 * 5_120  # of rank 16, on all seven matrices of 40 layers; down's second
        assert whole - thin == 2 * (layers + head) - 6 * adapters - again * (adapters - last)


def test_what_is_read_and_written_goes_by_the_types_that_it_is_kept_in() -> None:
    """By hand; a bound may count nothing that a run could do without."""
    model, weights = MODELS["14b"].in_training_precision(), parameters(MODELS["14b"])
    layers, head = model.matmul_parameters()
    run = load_config("grpo:14b").grpo
    alone, mesh = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1) | {"fsdp": 4, "tensor": 2}

    def of(model: Decoder = model, sizes: dict[str, int] = alone, micro_batches: int = 3, **changes: Any) -> float:
        return least_traffic(model, dataclasses.replace(run, **changes), sizes, micro_batches)

    assert of(remat="full") == 28 * weights + 3 * 2 * (4 * layers - DOWN + 3 * head)
    assert of(remat="none") == 28 * weights + 3 * 2 * 3 * (layers + head)
    assert of(sizes=mesh) == 28 * weights / 8 + 3 * 2 * (5 * layers - DOWN + 4 * head) / 2  # gathers are written
    narrow = dataclasses.replace(model, param_dtype="bfloat16")
    assert of(narrow, remat="none", optimizer_state_dtype="bfloat16") == 14 * weights + 3 * 2 * 3 * (layers + head)
    assert of(optimizer_offload=True, remat="none") == 12 * weights + 3 * 2 * 3 * (layers + head)
    thin = sum(leaf.size for leaf in jax.tree.leaves(abstract_trained(model, LoRA(rank=16))))
    assert of(lora=LoRA(rank=16), remat="none") == 28 * thin + 3 * 2 * 2 * (layers + head)
    assert of(lora=LoRA(rank=16, weight_quantization="int8"), remat="none") == 28 * thin + 3 * 2 * (layers + 2 * head)


@pytest.mark.parametrize(
    ("name", "topology", "tokens", "changes"),
    [
        ("sft:14b", "v6e:4x4", 74_752, {}),
        ("sft:14b", "v6e:4x4", None, {}),
        ("sft:14b", "h200:4", 16_384, {"row_buckets": "[16384]", "batch_size": "16"}),  # none of them is shorter
        ("sft:qwen2.5-0.5b", "v5e:2x2", 120_000, {"lora.rank": "16", "lora.alpha": "8", "lora.targets": '["q_proj"]'}),
        ("grpo:14b", "v6e:4x4", 32_768, {}),
        ("grpo:14b", "v6e:4x4", 12_288, {"batch_size": "16"}),
        ("grpo:14b", "v6e:4x4", 120_000, {"optimizer_state_dtype": "bfloat16"}),
        ("grpo:smollm2-135m", "h200:2x8", 4_096, {}),
    ],
)
def test_the_flags_of_a_plan_make_the_run_that_was_planned(
    name: str, topology: str, tokens: int | None, changes: dict[str, str]
) -> None:
    """Split as a shell does, and taken as the training program takes them."""
    kind, slice_ = name.partition(":")[0], Slice.parse(topology)
    run = overridden(load_config(name), [(f"{kind}.{setting}", value) for setting, value in changes.items()])
    given = getattr(run, kind)
    sizes = mesh_sizes(slice_, tokens or longest(given))
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
    model, config = run.model, given
    if tokens is not None:
        length = row_length(config, tokens, mesh.shape["context"])
        model, config = for_tokens(unstretched(name, model), config, tokens, length)
    job = job_on(model, config, mesh, blocks=BLOCK)
    assert job.model.stretch == (1 if (tokens or longest(given)) <= MODELS["14b"].max_positions else job.model.stretch)

    flags = shlex.split(" ".join(flags_of(job, mesh.shape, run.model, given)))
    overrides = [flag.removeprefix("--config.").partition("=") for flag in flags if not flag.startswith("--mesh=")]
    started = overridden(run, [(setting, value) for setting, _, value in overrides])
    assert job_on(started.model, getattr(started, kind), mesh, blocks=BLOCK) == job
    assert any(flag.startswith("--mesh=") for flag in flags) == (mesh.size > 1)
    if tokens is None:
        assert not any("model" in flag for flag in flags)


@needs_libtpu
@pytest.mark.nightly
def test_a_run_of_adapters_is_planned_with_their_state_alone(plan, planned) -> None:
    """Also as it may be written: without the part that the settings are of."""
    model = dataclasses.replace(ALL_MODELS["qwen2.5-0.5b"], **SMALL)
    lora = ["--config.lora.rank=16", "--config.lora.alpha=8", '--config.lora.targets=["q_proj","down_proj"]']
    result = plan(*RUN, *lora)
    found = []
    for one in (planned, result):
        assert one.code == 0, one.errors
        found.append(json.loads(one.out.splitlines()[-1])["bytes_by_kind"]["arguments"])
    adapters = model.n_layers * 16 * (model.d_model + model.n_heads * model.head_dim + model.d_ff + model.d_model)
    weights = parameters(model)
    saved = (3 * 4 * weights - (4 * weights + 3 * 4 * adapters)) / 4
    assert found[0] - found[1] == pytest.approx(saved, rel=0.1)
    assert (
        """--config.sft.lora.rank=16 --config.sft.lora.alpha=8.0 --config.sft.lora.targets='["q_proj","down_proj"]'"""
        in (result.out)
    )
    narrow = plan(*RUN, *lora, "--config.lora.weight_quantization=int8")
    assert narrow.code == 0 and "--config.sft.lora.weight_quantization=int8" in narrow.out, narrow.errors
    bytes_ = json.loads(narrow.out.splitlines()[-1])["bytes_by_kind"]["arguments"]
    assert found[1] - bytes_ == pytest.approx(3 * model.matmul_parameters()[0] / 4, rel=0.1)
    refused = plan(*RUN, "--config.lora.rank=16", '--config.lora.targets=["experts"]')
    assert refused.code == 2 and "q_proj, k_proj, v_proj, o_proj, gate_proj" in refused.errors


def test_experts_count_only_where_tokens_go() -> None:
    layers, head = MODELS["30b-a3b"].matmul_parameters()
    assert (layers + head) / 1e9 == pytest.approx(3.03, abs=0.05)  # "A3B", without the embedding


def test_a_mesh_is_chosen_by_the_length_of_rows() -> None:
    assert mesh_sizes(Slice.parse("v6e:2x4"), 74_752) == {"data": 1, "fsdp": 1, "context": 8}
    assert mesh_sizes(Slice.parse("v6e:8x8"), 20_480) == {"data": 1, "fsdp": 16, "context": 4}


ACCELERATOR_TYPES = [
    ("v4-8", "v4:2x2x1", 4),
    ("v4-32", "v4:2x2x4", 16),
    ("v5p-8", "v5p:2x2x1", 4),
    ("tpu-v5p-16", "v5p:2x2x2", 8),
    ("v5litepod-16", "v5e:4x4", 16),
    ("v6e-16", "v6e:4x4", 16),
    ("2xv6e-256", "2xv6e:16x16", 512),
]
"""Google Cloud's name, ours, and the number of chips."""


def test_slices_are_checked() -> None:
    assert Slice.parse("v5p:2x2x4").chips == 16
    with pytest.raises(PlanError, match="there is no chip 'v9'; use one of v4, v5e, v5p, v6e"):
        Slice.parse("v9:2x2")
    with pytest.raises(PlanError, match="no slices of more than 131,072 chips"):
        Slice.parse("v5p:4x4x999999999")
    with pytest.raises(PlanError, match="'4by4' is not a shape; write for example v6e:2x4"):
        Slice.parse("v6e:4by4")
    gpus = Slice.parse("h200:2x8")
    assert gpus.chips == 16 and gpus.hosts == 2 and Slice.parse("h200:8").hosts == Slice.parse("v6e:4x4").hosts == 1
    with pytest.raises(PlanError, match="'1x2x8' is not a shape; write for example h200:2"):
        Slice.parse("h200:1x2x8")
    for typed, name, chips in ACCELERATOR_TYPES:
        assert (Slice.parse(typed).name, Slice.parse(typed).chips) == (name, chips)
    with pytest.raises(PlanError, match="'v5p-6': there is no such slice. The number counts TensorCores, two for each"):
        Slice.parse("v5p-6")
    with pytest.raises(PlanError, match="'v6e-3': .* counts chips; use one of v6e-4, v6e-8, .* for example v6e:2x4"):
        Slice.parse("v6e-3")
    for name, chip in CHIPS.items():
        sizes = [Slice(chip, shape).chips for shape in chip.slices]
        assert sizes == sorted(set(sizes)) and chip.name == name
    assert Slice.parse("4090").chips == Slice.parse("H100:1").chips == 1
    with pytest.raises(PlanError, match="hosts of 4090 have no network of a known speed; plan one host.*4090:4"):
        Slice.parse("4090:2x4")
    with pytest.raises(PlanError, match=r"no chip 'a100' \(did you mean a100-40gb or a100-80gb\?\)"):
        Slice.parse("a100:8")


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", None),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("cpu", None),
    ],
)
def test_a_device_is_recognised_by_its_whole_name(kind: str, chip: str | None) -> None:
    found = chip_of(kind)
    assert (found and found.name) == chip


def test_rollouts_take_at_least_the_reading_of_weights_and_cache() -> None:
    """By hand: one server of one chip, whose memory holds all sequences."""
    model, chip = MODELS["0.6b"].in_training_precision(), CHIPS["h100"]
    run = load_config("grpo:0.6b").grpo
    episode = dataclasses.replace(run.episode, max_prompt_tokens=1_000, max_response_tokens=2_000)
    config = dataclasses.replace(run, batch_size=4, group_size=8, episode=episode)
    cached = 2 * 2 * 28 * 8 * 128 * 32 * (1_000 + 2_000 / 2)
    a_token = (2 * sum(model.matmul_parameters()) + cached) / (chip.hbm_bandwidth * 0.48)
    prompts = 4 * 1_000 * model.flops_per_token(1_000)[0] / 3 / (chip.flops * 0.5)
    assert rollout_seconds(model, config, chip, 1, 0.5) == pytest.approx(2_000 * a_token + prompts)
    eight = rollout_seconds(model, config, chip, 8, 0.5)
    assert eight is not None and eight < 2_000 * a_token
    large = ALL_MODELS["32b"].in_training_precision()
    assert rollout_seconds(large, config, CHIPS["4090"], 1, 0.5) is None


def test_every_size_has_both_presets_but_where_episodes_have_no_room() -> None:
    sizes = {name for name in ALL_MODELS if name != "tiny"}
    short = {name for name in sizes if ALL_MODELS[name].max_positions < 8_192}
    assert short == {"llama2-7b", "llama2-13b", "llama2-70b"}
    assert set(PRESETS) == {f"sft:{size}" for size in sizes} | {f"grpo:{size}" for size in sizes - short}


def test_a_plan_is_of_the_longest_rows_that_a_batch_may_take() -> None:
    """Which is more than its longest episode where prompts lie in a row once."""
    run = load_config("grpo:0.6b")
    longer = max(run.grpo.row_buckets) + 4_096
    config = dataclasses.replace(run.grpo, row_buckets=(*run.grpo.row_buckets, longer))
    mesh = AbstractMesh((1, 4, 1, 1, 1), AXES)
    assert job_on(run.model, config, mesh, blocks=BLOCK).row_tokens == longer > longest(config)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_papers(name: str) -> None:
    """But for what a model's own context leaves no room for."""
    run = load_config(name)
    model = ALL_MODELS[name.partition(":")[2]]
    assert run.model == dataclasses.replace(
        model.in_training_precision(), max_positions=run.model.max_positions, yarn=run.model.yarn
    )
    assert run.model.param_dtype == "float32" and run.model.dtype == "bfloat16"
    if name.startswith("grpo"):
        assert run.grpo.learning_rate == 2e-6 and run.grpo.batch_size == 256
        assert run.model.max_positions >= max(run.grpo.row_buckets) >= longest(run.grpo)
        if model.family.startswith("qwen"):
            assert run.model.yarn.factor == 3 and longest(run.grpo) == 25_600 + 49_152
        else:
            assert run.model == model.in_training_precision()
            assert longest(run.grpo) == (25_600 + 49_152 if model.llama3 else model.max_positions)
    else:
        assert run.sft.data.seq_len == min(20_480, model.max_positions)
        assert run.sft.batch_size == 32 and run.model.yarn is None
        assert run.sft.learning_rate == {"sft:14b": 5e-6, "sft:32b": 2e-6}.get(name, run.sft.learning_rate)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Iterator[Callable[..., Ended]]:
    """The command, as users have programs compiled (`tests/conftest.py`)."""
    with programs("launch.plan", tmp_path_factory.mktemp("said"), XLA_FLAGS="") as made:
        yield made


SMALL = {"n_layers": 2, "vocab_size": 1024, "d_model": 256, "d_ff": 512, "n_heads": 4, "n_kv_heads": 2}
"""What the compiler takes is a fifth of what it takes for the smallest preset's own sizes."""
SMALLER = [f"--config.model.{name}={value}" for name, value in SMALL.items()]


OWN = ["--config.sft.remat=dots", "--config.sft.micro_batch_size=4", "--config.sft.batch_size=8"]
PLACE = ["--mesh=fsdp=2,tensor=2", "--topology=v5e:2x2", "--tokens=512"]
RUN = ["--config=sft:qwen2.5-0.5b", *SMALLER, *OWN, *PLACE, "--steps=100", "--price_per_chip_hour=1.2", "--json"]


@pytest.fixture(scope="module")
def planned(plan) -> Ended:
    return plan(*RUN)


@needs_libtpu
@pytest.mark.nightly
def test_the_command_compiles_the_real_step(planned) -> None:
    """Of a model with biases, which are spread as heads are, and heads of 64, which the kernel takes: SmolLM2 and Llama
    3.2 1B have such heads too."""
    ended = planned
    assert ended.code == 0, ended.errors
    found = json.loads(ended.out.splitlines()[-1])
    assert found["fits"] and found["chips"] == 4 and found["hbm_bytes_per_chip"] == CHIPS["v5e"].hbm_bytes
    assert ended.errors == "", "libtpu's warnings are hidden"
    assert found["command"].startswith("astra sft --config=sft:qwen2.5-0.5b --weights=weights --data=train.jsonl ")
    assert found["command"].count("--config.sft.remat=") == 1 and "--config.model.n_layers=2" in found["command"]
    model = dataclasses.replace(ALL_MODELS["qwen2.5-0.5b"], **SMALL)
    assert (model.head_dim, model.attention_bias) == (64, True)
    assert found["flops_per_token"] == model.flops_per_token(512)[0]
    state = 4 * 3 * parameters(model) / 4  # AdamW's is on the chip, a quarter of it
    assert state < found["peak_bytes_per_chip"] < found["hbm_bytes_per_chip"]
    # By each micro-batch a gather of the layers' weights in bfloat16, forward and backward, and at least one sum of
    # their gradients in float32: of a chip's half of the heads and of the width, the half that it does not keep.
    moved = (2 * 2 + 4) * model.matmul_parameters()[0] / 2 / 2
    assert 2 * moved < found["collective_bytes_by_axis"]["fsdp"]
    assert found["collective_bytes_by_axis"]["tensor"] > 0
    # The run's own settings, and what the compiled step takes.
    assert (found["remat"], found["micro_batch_size"], found["batch_size"]) == ("dots", 4, 8)
    assert "--mesh=fsdp=2,tensor=2 --config.sft.micro_batch_size=4 --config.sft.remat=dots" in ended.out
    assert found["expected"] and found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["seconds"]["attention"] > 0 and found["cycles"]["matmul"] > 0 and not found["uncounted"]
    ideal = found["flops_per_token"] * 8 * 512 / 4 / CHIPS["v5e"].flops
    assert found["step_seconds"] > ideal and found["mfu"] == pytest.approx(ideal / found["step_seconds"])
    assert found["hours"] == pytest.approx(100 * found["step_seconds"] / 3600)
    assert found["dollars"] == pytest.approx(found["hours"] * 4 * 1.2)
    assert "fits: " in ended.out and "expected " in ended.out and "100 steps" in ended.out


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_starts_on_a_slice(name: str) -> None:
    """With the mesh that the planner takes by itself; what fits there is another question."""
    run = load_config(name)
    config = getattr(run, "sft", None) or run.grpo
    slice_ = Slice.parse("v5p:2x4x4")
    sizes = {axis: mesh_sizes(slice_, longest(config)).get(axis, 1) for axis in AXES}
    job = job_on(run.model, config, AbstractMesh(tuple(sizes.values()), tuple(sizes)), blocks=BLOCK)
    assert job.kind == name.partition(":")[0] and job.row_tokens >= longest(config)


@needs_cuda_compiler
@pytest.mark.nightly
def test_the_command_compiles_for_gpus(plan) -> None:
    ended = plan(
        "--config=grpo:0.6b", *SMALLER, "--topology=h200:4", "--tokens=8192", "--mesh=fsdp=2,context=2", "--json"
    )
    assert ended.code == 0, ended.errors
    found = json.loads(ended.out.splitlines()[-1])
    assert found["fits"] and found["chips"] == 4 and found["hbm_bytes_per_chip"] == CHIPS["h200"].hbm_bytes
    # Weights, AdamW's state and gradients, a quarter of each.
    assert 4 * 4 * parameters(dataclasses.replace(MODELS["0.6b"], **SMALL)) / 4 < found["peak_bytes_per_chip"] < 2**30
    assert found["collective_bytes_by_axis"].keys() >= {"fsdp+context", "context"}
    assert not found["expected"] and found["seconds"].keys() == {"compute", "memory", "network"}
    assert "at least " in ended.out and "bound by" in ended.out


@needs_libtpu
@pytest.mark.nightly
def test_what_does_not_fit_is_said_not_raised(plan) -> None:
    flags = ["--topology=v5e:2x2", "--tokens=4096", "--config.model.n_layers=3", "--config.model.d_ff=400000"]
    ended = plan("--config=sft:8b", *flags, "--json")
    assert ended.code == 0, ended.errors
    found = json.loads(ended.out.splitlines()[-1])
    assert not found["fits"] and found["peak_bytes_per_chip"] > found["hbm_bytes_per_chip"]
    assert "DOES NOT FIT" in ended.out and "the compiler refuses train_step wants " in ended.out


@pytest.mark.parametrize(
    ("said", "wanted", "why"),
    [
        (
            "Ran out of memory in memory space hbm. Used 72.00G of 31.25G hbm. Exceeded hbm capacity by 40.75G.",
            72 * 2**30,
            "wants 73,728.0 MiB of hbm, which has 32,000.0",
        ),
        (
            "Ran out of memory in memory space vmem. Used 82.50M of 64.00M vmem. Exceeded vmem capacity by 18.50M.",
            0.0,
            "wants 82.5 MiB of vmem, which has 64.0",
        ),
        (
            "Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation2 "
            "[shape = 'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped]",
            0.0,
            "wants 256.0 MiB of vmem, which has 128.0",
        ),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (112.24G) exceeds available "
            "HBM (15.75G).",
            112.24 * 2**30,
            "wants 114,933.8 MiB of hbm, which has 16,128.0",
        ),
        ("something else\nof many lines", 0.0, "something else"),
    ],
)
def test_of_which_memory_there_is_too_little(said: str, wanted: float, why: str) -> None:
    assert refused(said) == (pytest.approx(wanted), why)


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
        ([], "--config is missing; see --help"),
    ],
)
def test_bad_flags_end_in_one_line(plan, flags: list[str], message: str) -> None:
    assert message in plan("--topology=v5p:2x2x2", *flags).line
