"""The reader of compiled programs: computations, loops, cycles, kernels, and the clock that walks over a schedule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import pytest

from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.cycles import count_cycles
from astra_jax.planner.hlo import Module, read_hlo
from astra_jax.planner.kernels import work_of
from astra_jax.planner.network import Torus
from astra_jax.planner.schedule import schedule_of
from astra_jax.run.chips import CHIPS

WINDOWED = """HloModule jit_step, is_scheduled=true, num_partitions=8

%windowed_dot_general_body_ag (param: (u32[], bf16[64,8])) -> (u32[], bf16[64,8]) {
  %param = (u32[]{:T(128)}, bf16[64,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %two = u32[]{:T(128)} constant(2)
  %at = u32[]{:T(128)} get-tuple-element(%param), index=0
  %shard = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%param), index=1
  %one.start = (bf16[64,8]{1,0:T(8,128)(2,1)S(1)}, bf16[64,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%shard), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
  %matmul = bf16[64,8]{1,0} fusion(%shard), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  %one.done = bf16[64,8]{1,0:T(8,128)(2,1)} collective-permute-done(%one.start)
  %other.start = (bf16[64,8]{1,0}, bf16[64,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%one.done), channel_id=2, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}
  %other.done = bf16[64,8]{1,0} collective-permute-done(%other.start)
  %next = u32[]{:T(128)} add(%at, %two)
  ROOT %tuple = (u32[]{:T(128)}, bf16[64,8]{1,0}) tuple(%next, %other.done)
}

%fused (p: bf16[64,8]) -> bf16[64,8] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %convolution = bf16[64,8]{1,0} convolution(%p, %p), backend_config={"estimated_cycles":"77"}
}

%windowed_dot_general_cond_ag (param.1: (u32[], bf16[64,8])) -> pred[] {
  %param.1 = (u32[]{:T(128)}, bf16[64,8]{1,0}) parameter(0)
  %bound = u32[]{:T(128)} constant(8), metadata={op_name="x"}
  %at.1 = u32[]{:T(128)} get-tuple-element(%param.1), index=0
  ROOT %compare = pred[]{:T(512)} compare(%at.1, %bound), direction=LT
}

ENTRY %main (x: bf16[64,8]) -> bf16[64,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %begin = u32[]{:T(128)} copy(%zero)
  %splash_mha_fwd_segmented_residuals.2 = (f32[1024,128]{1,0}, bf16[4,2048,128]{2,1,0}) custom-call(%x), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,2]{2,1,0}, s8[1,2,2]{2,1,0}, \
bf16[4,2048,128]{2,1,0}, bf16[2,2048,128]{2,1,0}, bf16[2,2048,128]{2,1,0}, s32[2048,128]{1,0}, s32[8,2048]{1,0}, \
s32[2048,128]{1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 1024, \\"block_q_dkv\\": 256, \\"block_kv_dkv\\": 1024, \
\\"block_q_dq\\": 512, \\"block_kv_dq\\": 1024}"
}}, metadata={op_name="jit(step)/splash_mha_fwd"}
  %seen = bf16[4,2048,128]{2,1,0} get-tuple-element(%splash_mha_fwd_segmented_residuals.2), index=1, \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 1024}"
}}
  %start = (u32[]{:T(128)}, bf16[64,8]{1,0}) tuple(%begin, %x)
  %while = (u32[]{:T(128)}, bf16[64,8]{1,0}) while(%start), condition=%windowed_dot_general_cond_ag, \
body=%windowed_dot_general_body_ag
  %y = bf16[64,8]{1,0} get-tuple-element(%while), index=1
  ROOT %tanh = bf16[64,8]{1,0} fusion(%y), kind=kLoop, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"300"}}
}
""".replace("\\\n", "")
SHARD = 64 * 8 * 2
MESH = {"data": 1, "fsdp": 8}


def often(module: Module) -> Mapping[str, float]:
    return module.runs(lambda computation: len(computation.instructions))


def test_what_follows_a_kernels_metadata_is_read() -> None:
    """Its JSON has lines of its own, and the line that ends it begins with braces."""
    module = read_hlo(WINDOWED)
    assert module.entry == "main" and list(module.computations["main"].by_name)[-1] == "tanh"
    assert [one.opcode for one in module.computations["main"].instructions].count("while") == 1
    assert module.computations["main"].root is not None and module.apart == {"fused"}


def test_unsigned_loops_that_count_by_twos_run_half_as_often() -> None:
    module = read_hlo(WINDOWED)
    assert often(module)["windowed_dot_general_body_ag"] == 4 and not module.unknown_loops
    assert bytes_by_axis(WINDOWED, MESH) == {"fsdp": 4 * 2 * SHARD}


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({"constant(8)": "constant(7)"}, 4),  # 0, 2, 4, 6
        ({"direction=LT": "direction=LE"}, 5),
        ({"direction=LT": "direction=NE"}, 4),
        ({"constant(0)": "constant(4)"}, 2),
        ({"compare(%at.1, %bound), direction=LT": "compare(%bound, %at.1), direction=GT"}, 4),
        ({"copy(%zero)": "copy(%x)"}, None),  # where it begins is data
        ({"body=%windowed_dot_general_body_ag": 'body=%windowed_dot_general_body_ag, backend_config='
          '{"known_trip_count":{"n":"6"}}'}, 6),
    ],
)  # fmt: skip
def test_trips_are_counted_or_said_to_be_unknown(changes: dict[str, str], trips: int | None) -> None:
    text = WINDOWED
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    module = read_hlo(text)
    main = module.computations["main"]
    assert module.trips(main, main.by_name["while"]) == trips
    assert module.unknown_loops == ([] if trips else ["while"])
    assert often(module)["windowed_dot_general_body_ag"] == (trips or 1)


def test_cycles_are_those_of_what_runs_times_the_trips() -> None:
    counted = count_cycles(read_hlo(WINDOWED))
    assert counted.by_category == {"matmul": 4 * 1000, "elementwise": 300}  # not the 77 inside the fusion
    assert counted.kernels == {"splash_mha_fwd_segmented_residuals": 1} and not counted.unestimated


BRANCHES = """HloModule jit_step, num_partitions=4

%short (a: f32[16]) -> f32[64] {
  %a = f32[16]{0} parameter(0)
  %work = f32[16]{0} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"700"}
  ROOT %wide = f32[64]{0} all-gather(%work), replica_groups={{0,1,2,3}}, dimensions={0}
}

%long (b: f32[16]) -> f32[64] {
  %b = f32[16]{0} parameter(0)
  %thin = bf16[16]{0} fusion(%b), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %gathered = bf16[64]{0} all-gather(%thin), replica_groups={{0,1,2,3}}, dimensions={0}
  %t = (s32[], bf16[64]{0}) tuple(%zero, %gathered)
  %loop = (s32[], bf16[64]{0}) while(%t), condition=%until, body=%again, backend_config=\
{"known_trip_count":{"n":"5"}}
  ROOT %last = f32[64]{0} fusion(%loop), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
}

%again (c: (s32[], bf16[64])) -> (s32[], bf16[64]) {
  ROOT %c = (s32[], bf16[64]{0}) parameter(0)
  %turn = bf16[64]{0} fusion(%c), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"200"}
}

ENTRY %main (i: s32[], x: f32[16]) -> f32[64] {
  %i = s32[] parameter(0)
  %x = f32[16]{0} parameter(1)
  ROOT %either = f32[64]{0} conditional(%i, %x, %x), BOTH
}
""".replace("\\\n", "")


@pytest.mark.parametrize(
    "both",
    ["branch_computations={%short, %long, %short}", "true_computation=%short, false_computation=%long"],
    ids=["switch", "choice"],
)
def test_of_a_conditionals_branches_the_one_counts_that_has_most_of_what_is_counted(both: str) -> None:
    """The one sends float32, the other works longer, by its loop."""
    text = BRANCHES.replace("BOTH", both)
    assert bytes_by_axis(text, {"fsdp": 4}) == {"fsdp": 3 * 16 * 4}
    assert count_cycles(read_hlo(text)).by_category == {"elementwise": 100 + 5 * 200 + 100}


def test_a_kernels_work_is_that_of_the_blocks_it_visits() -> None:
    one = read_hlo(WINDOWED).computations["main"].by_name["splash_mha_fwd_segmented_residuals.2"]
    work = work_of(one)
    assert work is not None
    visited = 1 + 1 + 2 + 2  # of four blocks of 512 queries, those of 1,024 keys that begin before their ends
    assert work.flops == 4 * visited * 2 * (2 * 512 * 1024 * 128)
    streamed = 4 * visited * 1024 * (2 * 2 * 128)
    assert streamed < work.traffic < streamed + 4 * 2048 * (4 * 128 + 3 * 512 + 512)


def test_the_backward_kernel_computes_scores_once_and_writes_each_gradient_once() -> None:
    of_rows = (
        "bf16[1,4,2048,128]{3,2,1,0}, bf16[1,4,2048,128]{3,2,1,0}, f32[1,4,1,2048]{3,2,1,0}, f32[1,4,1,2048]{3,2,1,0}"
    )
    of_keys = "bf16[1,2,2048,128]{3,2,1,0}, bf16[1,2,2048,128]{3,2,1,0}, s32[2048,1]{1,0}"
    forward = read_hlo(WINDOWED).computations["main"].by_name["splash_mha_fwd_segmented_residuals.2"]
    operands = f"{{s32[2]{{0}}, {of_rows}, s32[1,2048]{{1,0}}, s32[1,2048]{{1,0}}, {of_keys}}}"
    attributes = re.sub(
        r"(?<=operand_layout_constraints=)\{.*?\}\}(?=,)", operands, forward.attributes, flags=re.DOTALL
    )
    assert operands in attributes
    work = work_of(dataclasses.replace(forward, name="vmap_attention_backward_.1", attributes=attributes))
    assert work is not None
    assert work.flops == 4 * (1 + 1 + 2 + 2) * 5 * (2 * 512 * 1024 * 128)
    written = 2 * 128 * (4 * 2048 + 2 * 2 * 2048)
    read = 2 * 128 * (2 * 4 * 6 * 512 + 2 * 2 * 2048)
    assert written + read < work.traffic < 1.2 * (written + read)


@pytest.mark.parametrize(
    ("kernel", "matmuls", "visited", "block_q", "streamed"),
    [("dkv", 4, 1 + 1 + 1 + 1 + 2 + 2 + 2 + 2, 256, 256), ("dq", 3, 1 + 1 + 2 + 2, 512, 1024)],
)
def test_the_two_kernels_of_splashs_own_backward_pass_are_known(
    kernel: str, matmuls: int, visited: int, block_q: int, streamed: int
) -> None:
    """As other libraries' steps have them; each has its own blocks, and reads one side for each block of the other."""
    forward = read_hlo(WINDOWED).computations["main"].by_name["splash_mha_fwd_segmented_residuals.2"]
    work = work_of(dataclasses.replace(forward, name=f"splash_mha_{kernel}_no_residuals.1"))
    assert work is not None
    assert work.flops == 4 * visited * matmuls * (2 * block_q * 1024 * 128)
    least = 4 * visited * streamed * (2 * 2 * 128)
    assert least < work.traffic < 4 * least


def test_splashs_one_kernel_of_all_gradients_is_told_from_that_of_the_keys() -> None:
    """Both have one name."""
    forward = read_hlo(WINDOWED).computations["main"].by_name["splash_mha_fwd_segmented_residuals.2"]
    result = "(bf16[2,4,2048,128]{3,2,1,0}, bf16[2,2048,128]{2,1,0}, bf16[2,2048,128]{2,1,0})"
    one = dataclasses.replace(forward, name="splash_mha_dkv_no_residuals.1", result=result)
    assert work_of(one) is None
    assert work_of(dataclasses.replace(one, result=result.replace("bf16[2,4,2048,128]{3,2,1,0}, ", ""))) is not None


def test_the_clock_waits_only_for_what_the_work_does_not_hide() -> None:
    chip = CHIPS["v5e"]
    assert chip.clock is not None
    places = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0))  # around the slice
    network = Torus(places, (2, 4), (False, False), link=1e9, network=1e9)
    found = schedule_of(read_hlo(WINDOWED), chip, network, MESH)
    matmul, sent = 1000 / chip.clock, SHARD / 1e9
    assert sent > matmul
    assert found.work["matmul"] == pytest.approx(4 * matmul)
    assert found.exposed == {"collective-permute over fsdp": pytest.approx(4 * (sent - matmul + sent))}
    assert found.hidden == {"collective-permute over fsdp": pytest.approx(4 * matmul)}
    assert found.seconds == pytest.approx(
        4 * 2 * sent + found.work["elementwise"] + found.work["attention"]
    )  # fmt: skip
    assert not found.unknown


BESIDE = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add.clone (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:S(7)} parameter(0)
  %b = f32[]{:S(7)} parameter(1)
  ROOT %sum = f32[]{:S(7)} add(%a, %b), backend_config={"window_config":{"estimated_cycles":"1165"}}
}, execution_thread="sparsecore"

%called_computation (whole: f32[64,32], ready: token[]) -> f32[8,32] {
  %whole = f32[64,32]{1,0} parameter(0)
  %ready = token[] parameter(1)
  ROOT %reduce-scatter.8 = f32[8,32]{1,0} reduce-scatter(%whole), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add.clone
}, execution_thread="sparsecore"

%product (x: bf16[64,64]) -> f32[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  ROOT %dot = f32[64,64]{1,0} convolution(%x, %x), dim_labels=bf_io->bf
}

ENTRY %main (gradient: f32[64,32], x: bf16[64,64]) -> f32[8,32] {
  %gradient = f32[64,32]{1,0} parameter(0)
  %x = bf16[64,64]{1,0} parameter(1)
  %prepare = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %prepared = token[] custom-call(%prepare), custom_call_target="PrepareAsyncCallDone"
  %start = ((f32[64,32]{1,0}, token[]), f32[8,32]{1,0}) call-start(%gradient, %prepared), \
async_execution_thread="sparsecore", to_apply=%called_computation
  %matmul = f32[64,64]{1,0} fusion(%x), kind=kOutput, calls=%product, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  ROOT %done = f32[8,32]{1,0} call-done(%start)
}
""".replace("\\\n", "")


def test_what_a_sparse_core_exchanges_is_counted_and_waited_for() -> None:
    chip, module = CHIPS["v6e"], read_hlo(BESIDE)
    received = 7 * 8 * 32 * 4
    assert bytes_by_axis(module, MESH) == {"fsdp": received}
    assert count_cycles(module).by_category == {"matmul": 1000}
    assert count_cycles(module).unestimated == {}
    places = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0))
    assert chip.clock is not None
    for link in (1e9, 1e12):
        network = Torus(places, (2, 4), (False, False), link=link, network=1e9)
        found = schedule_of(module, chip, network, MESH)
        alone = schedule_of(read_hlo(re.sub(r"\n  %matmul.*", "", BESIDE)), chip, network, MESH)
        (sent,) = alone.exposed.values()
        assert sent >= received / 7 / link
        matmul = 1000 / chip.clock
        assert found.work == {"matmul": pytest.approx(matmul)} and not found.unknown
        assert found.exposed == {"reduce-scatter over fsdp": pytest.approx(max(0.0, sent - matmul))}
        assert found.hidden == {"reduce-scatter over fsdp": pytest.approx(min(sent, matmul))}


def test_what_else_a_sparse_core_does_is_said_not_to_be_counted() -> None:
    text = re.sub(
        r"ROOT %reduce-scatter.8 = (\S+) reduce-scatter\(%whole\).*", r"ROOT %part = \1 slice(%whole)", BESIDE
    )
    network = Torus(((0, 0), (0, 1)), (1, 2), (False, False), link=1e9, network=1e9)
    assert schedule_of(read_hlo(text), CHIPS["v6e"], network, MESH).unknown == ("start, which runs beside",)
