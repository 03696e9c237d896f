"""Several slices: one mesh over them, what goes between them and how long it takes, how often gradients do."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_world import QUICKER, needs_libtpu

from astra_jax.axes import is_small
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import make_mesh
from astra_jax.models.model import parameters
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.planner.collectives import bytes_by_axis, collective_of, collectives
from astra_jax.planner.hardware import PlanError, Slice, mesh_sizes
from astra_jax.planner.hlo import read_hlo
from astra_jax.planner.network import Torus
from astra_jax.planner.programs import Compiling, grpo_programs, sft_programs
from astra_jax.planner.schedule import schedule_of
from astra_jax.planner.search import between_slices_seconds, candidates
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs.training import PRESETS

TINY = Qwen3Config(
    vocab_size=1024,
    d_model=256,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_dim=128,
    d_ff=256,
    tie_embeddings=False,
    dtype="bfloat16",
    param_dtype="float32",
)


def tpus(*slices: int) -> list[SimpleNamespace]:
    """Devices of slices of so many chips, as far as a mesh is refused by them."""
    return [SimpleNamespace(platform="tpu", slice_index=index) for index, n in enumerate(slices) for _ in range(n)]


@pytest.mark.parametrize(
    ("sizes", "slices", "message"),
    [
        ({"fsdp": 16}, (8, 8), "2 slices, and no axis but 'data' may cross from one to another; 'data' is 1"),
        ({"data": 2, "fsdp": 8}, (4, 4, 4, 4), "'data' is 2, make it a multiple of 4"),
        ({"data": 3, "fsdp": 4}, (6, 6), "'data' is 3, make it a multiple of 2"),
        (
            {"data": 2, "fsdp": 6},
            (8, 4),
            "must have the same number of devices, but slice 0 has 8, slice 1 has 4 devices",
        ),
        ({"data": 2, "fsdp": 4}, (8, 8), "needs 8 devices, there are 16"),
    ],
)
def test_meshes_whose_axes_would_cross_slices_are_refused(sizes, slices, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=tpus(*slices))


def test_slices_are_named_with_their_number() -> None:
    two = Slice.parse("2xv5p:2x2x2")
    assert (two.name, two.count, two.chips) == ("2xv5p:2x2x2", 2, 16) and two.hosts == 1
    assert Slice.parse("v5p:2x2x2") == Slice(two.chip, "2x2x2") and Slice.parse("12xv6e:4x4").chips == 192
    assert mesh_sizes(two, 74_752) == {"data": 2, "fsdp": 1, "context": 8}
    for name in ("1xv5p:2x2x2", "0xv6e:4x4", "2xh200:8"):
        with pytest.raises(PlanError, match="write for example 2xv5p:2x2x2 for two slices"):
            Slice.parse(name)
    with pytest.raises(PlanError, match="no slices of more than 131,072 chips"):
        Slice.parse("999999999xv6e:4x4")
    with pytest.raises(PlanError, match="there is no chip '3v6e'"):
        Slice.parse("3v6e:4x4")


SENT = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %recv = (f32[1000,1000]{1,0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send = (f32[1000,1000]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"175000"}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[1000,1000]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
}
""".replace("\\\n", "")


def test_what_goes_between_slices_takes_the_network_and_hides_behind_work() -> None:
    """Of 320 microseconds the fusion hides 100."""
    chip = Slice.parse("v6e:2x2").chip
    places = [SimpleNamespace(coords=(x, y, 0)) for _ in range(2) for y in range(2) for x in range(2)]
    network = Torus.of(places, "2x2", chip.link_bandwidth, chip.network_bandwidth)
    mesh = {"data": 2, "fsdp": 4}
    found = schedule_of(read_hlo(SENT), chip, network, mesh)
    assert bytes_by_axis(SENT, mesh) == {"data between slices": 4e6}
    assert found.exposed == {"all-reduce over data between slices": pytest.approx(4e6 / 12.5e9 - 100e-6)}
    assert found.hidden == {"all-reduce over data between slices": pytest.approx(100e-6)} and not found.unknown


def test_a_transfer_that_is_not_known_is_no_plan() -> None:
    module = read_hlo(SENT.replace("{1,2}x{0:3}", "all of them"))
    with pytest.raises(ValueError, match="recv goes between slices in a way that is not known"):
        collective_of(module.computations["main"].instructions[0], "main")


def test_a_search_puts_data_between_slices_and_counts_what_goes_there() -> None:
    model, config = PRESETS["sft:4b"]().model, PRESETS["sft:4b"]().sft
    one, two = (list(candidates(model, config, Slice.parse(name), None)) for name in ("v6e:2x4", "2xv6e:2x4"))
    assert {way.mesh["data"] for way in one} == {1} and {way.mesh["data"] for way in two} == {2}
    late = between_slices_seconds(parameters(model), Slice.parse("2xv6e:2x4"))
    assert late == pytest.approx(4 * parameters(model) / 8 / 12.5e9) and min(way.takes for way in two) > late


KINDS = {
    "all-reduce": (lambda x: jax.lax.psum(x, "data"), 2 * 3 / 4),
    "all-gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), 3),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), 3 / 4),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "data", 0, 1, tiled=True), 3 / 4),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), 1),
}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_between_slices_are_those_by_hand(kind: str) -> None:
    function, share = KINDS[kind]
    mesh = make_mesh(data=4, fsdp=4, devices=Slice.parse("4xv6e:2x2").devices())
    part = jax.shard_map(function, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P("data", "fsdp"), check_vma=False)
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    module = read_hlo(jax.jit(part).lower(x).compile().as_text())
    ((one, runs),) = [(one, runs) for one, runs in collectives(module) if one.between_slices]
    assert one.received * runs == pytest.approx(share * 4 * 512 * 1024 / 4) and one.way(mesh.shape).startswith("data")


@functools.cache
def two_slices():
    return make_mesh(data=2, fsdp=2, context=2, devices=Slice.parse("2xv6e:2x2").devices())


def sent_between_slices(compiled) -> list[tuple[str, float, float]]:
    return [
        ("+".join(one.dtypes), one.received, runs) for one, runs in collectives(compiled.module) if one.between_slices
    ]


def gradients_bytes() -> float:
    """That a chip receives: float32, a quarter of all matrices; in sums over two slices each number once."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(TINY.abstract_params())
    return 4 * sum(math.prod(leaf.shape) for path, leaf in leaves if not is_small(path[-1].key)) / 4


@needs_libtpu
@pytest.mark.slow
def test_gradients_go_between_slices_once_a_step() -> None:
    """Not once for each of four micro-batches, in float32, and nothing else but numbers."""
    config = SFTConfig(
        data=DataConfig(seq_len=512), batch_size=16, micro_batch_size=4, remat="full", compiler_options=QUICKER
    )
    assert config.micro_batches == 4
    (compiled,) = sft_programs(TINY, config, two_slices(), Compiling())
    sent = sent_between_slices(compiled)
    assert {dtype for dtype, _, _ in sent} == {"f32"} and {runs for _, _, runs in sent} == {1.0}
    assert gradients_bytes() <= sum(size for _, size, _ in sent) <= 1.05 * gradients_bytes() + 50_000


@needs_libtpu
@pytest.mark.slow
def test_grpos_micro_batches_send_nothing_between_slices() -> None:
    config = GRPOConfig(remat="full", micro_batch_size=4, row_buckets=(512, 81_920), compiler_options=QUICKER)
    micro_batch, step = grpo_programs(TINY, config, two_slices(), Compiling(), 512, 4)
    assert not sent_between_slices(micro_batch)
    sent = sent_between_slices(step)
    assert {dtype for dtype, _, _ in sent} == {"f32"} and {runs for _, _, runs in sent} == {1.0}
    assert gradients_bytes() <= sum(size for _, size, _ in sent) <= 1.05 * gradients_bytes() + 50_000
