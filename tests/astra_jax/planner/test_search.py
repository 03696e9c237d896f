"""The search: what arithmetic rules out, in which order the compiler is asked, and when it stops."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest

from astra_jax.mesh import AXES, BATCH
from astra_jax.planner import search as searching
from astra_jax.planner.hardware import PlanError, Slice
from astra_jax.planner.plan import Plan
from astra_jax.planner.programs import refused
from astra_jax.planner.search import Way, search
from benchmarks import rows
from configs.training import grpo_run, sft_run
from launch.flags.cli import load_config

RUN = sft_run("4b", learning_rate=1e-5)
SLICE = Slice.parse("v6e:2x4")
EVERY = searching.candidates


@functools.cache
def ways(slice_: Slice) -> list[Way]:
    return list(EVERY(RUN.model, RUN.sft, slice_, 20_480))


def planned(one: Any, where: Slice, *, peak: float, seconds: float, refusal: str = "") -> Plan:
    names, room = {field.name for field in dataclasses.fields(Plan)}, where.chip.hbm_bytes
    values: dict[str, Any] = dict.fromkeys(names) | {"step_seconds": seconds, "topology": where.name}
    values |= {"peak_bytes_per_chip": peak, "hbm_bytes_per_chip": room, "refusal": refusal}
    values["fits"] = not refusal and peak <= room
    return Plan(**values | {"mesh": dict(one.mesh), "remat": one.config.remat})


class Compiler:
    """In place of `make_plan`: remembers what was asked, and answers by a rule; the first may be refused for want of
    VMEM."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, room: float, slower: float = 1.2, refused_first: bool = False
    ) -> None:
        self.asked: list[Way] = []
        self._room, self._slower, self._refused_first = room, slower, refused_first
        monkeypatch.setattr(searching, "make_plan", self.plan)
        monkeypatch.setattr(searching, "candidates", lambda model, config, slice_, tokens: ways(slice_))

    def plan(self, model: Any, config: Any, where: Slice, *, mesh: dict[str, int], **options: Any) -> Plan:
        same = [one for one in ways(where) if (one.mesh, one.config) == (mesh, config)]
        self.asked.append(same[0])
        seconds = self._slower * same[0].takes
        if self._refused_first and len(self.asked) == 1:
            wanted, why = refused("Ran out of memory in memory space vmem. Used 72.00M of 16.00M vmem.")
            return planned(same[0], where, peak=wanted, seconds=seconds, refusal=why)
        peak = same[0].holds if same[0].holds <= self._room else where.chip.hbm_bytes + 1
        return planned(same[0], where, peak=peak, seconds=seconds)


def test_candidates_would_start_and_could_fit() -> None:
    found = ways(SLICE)
    assert {one.config.remat for one in found} >= {"full", "attention", "dots"}
    assert {tuple(one.mesh.values()) for one in found} >= {(1, 8, 1, 1, 1), (1, 2, 1, 4, 1), (1, 4, 1, 1, 2)}
    for one in found:
        places = math.prod(one.mesh[axis] for axis in BATCH)
        assert math.prod(one.mesh.values()) == 8 and one.config.micro_batch_size % places == 0
        assert one.config.batch_size % one.config.micro_batch_size == 0
        assert one.holds <= SLICE.chip.hbm_bytes and one.takes <= one.guess
    assert not ways(Slice.parse("v5e:1x2"))  # 16 bytes for each parameter


def test_longer_rows_are_tried_where_blocks_of_attention_are_larger_for_it() -> None:
    run = grpo_run("4b")
    found = list(EVERY(run.model, run.grpo, Slice.parse("v6e:4x4"), 74_752))
    lengths = {one.config.row_buckets[-1] for one in found if one.mesh["context"] == 16}
    assert lengths == {77_824, 81_920}
    by_length = {
        one.config.row_buckets[-1]: one.takes
        for one in found
        if one.mesh["context"] == 16 and one.config.remat == "full" and one.config.micro_batch_size == 1
    }
    assert by_length[81_920] < by_length[77_824]  # blocks of 512 and of 128 queries


def kept_plans() -> list[dict[str, Any]]:
    """The newest of each kind in `benchmarks/results`."""
    newest = rows.newest(rows.read("plans"), "job", "size", "tokens", "topology")
    return [row for row in newest if row["fits"] and row.get("micro_batch_size")]


@pytest.mark.parametrize("row", kept_plans(), ids=lambda row: f"{row['job']} {row['size']} {row['topology']}")
def test_what_was_compiled_holds_and_takes_more_than_arithmetic_says(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way that is left out by it could not have been the fastest, and would not have fitted."""
    run, mesh = load_config(f"{row['job']}:{row['size']}"), dict.fromkeys(AXES, 1) | row["mesh"]
    monkeypatch.setattr(searching, "_meshes", lambda model, slice_: [mesh])
    given = EVERY(run.model, getattr(run, row["job"]), Slice.parse(row["topology"]), row["tokens"])
    same = [one for one in given if how(one) == (row["remat"], row["micro_batch_size"])]
    assert same and min(one.holds for one in same) <= row["peak_bytes_per_chip"]
    assert min(one.takes for one in same) <= row["step_seconds"]


def how(one: Way) -> tuple[str, int | None]:
    return one.config.remat, one.config.micro_batch_size


def test_experts_products_are_held_by_none_only() -> None:
    """32 rows of 20,480 of 30B-A3B with `dots`, 16 at once, were compiled for v5p:2x2x4 with 69.9 GiB."""
    run = sft_run("30b-a3b", learning_rate=1e-5)
    same = [
        one.holds
        for one in EVERY(run.model, run.sft, Slice.parse("v5p:2x2x4"), 20_480)
        if one.mesh["fsdp"] == 16 and how(one) == ("dots", 16)
    ]
    assert same and min(same) < 69.9 * 2**30


def test_the_fastest_comes_first_and_the_search_ends_where_nothing_can_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler(monkeypatch, room=math.inf, slower=1.0)
    found = search(RUN.model, RUN.sft, SLICE, tokens=20_480, compiles=20)
    here = [one for one in compiler.asked if math.prod(one.mesh.values()) == 8]
    assert [one.guess for one in here] == sorted(one.guess for one in here)
    assert found.fastest is not None and found.fastest.step_seconds == min(one.takes for one in here)
    rest = [one for one in ways(SLICE) if one not in here]
    assert rest and all(one.takes >= found.fastest.step_seconds for one in rest)


def test_compiles_are_bounded_and_what_holds_more_than_a_refused_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = sorted(one.holds for one in ways(SLICE))
    compiler = Compiler(monkeypatch, room=every[0])
    late = [dataclasses.replace(one, guess=one.guess * (1e3 if one.holds == every[0] else 1)) for one in ways(SLICE)]
    monkeypatch.setattr(searching, "candidates", lambda *asked: late if SLICE in asked else [])
    found = search(RUN.model, RUN.sft, SLICE, tokens=20_480, compiles=4)
    here = [one for one in compiler.asked if math.prod(one.mesh.values()) == 8]
    assert len(here) <= 4 and found.considered == len(every)
    refused = [one for one in here if one.holds > every[0]]
    assert refused and all(b.holds < a.holds for a, b in zip(refused, refused[1:], strict=False))
    assert here[-1].holds == every[0] and found.fastest is not None  # the last try is the easiest to hold


def test_a_refusal_for_want_of_vmem_leaves_out_only_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' blocks that are too large say nothing of what others hold."""
    compiler = Compiler(monkeypatch, room=math.inf, refused_first=True)
    easiest = sorted(ways(SLICE), key=lambda one: one.holds)
    three = [dataclasses.replace(one, takes=0.0, guess=float(at)) for at, one in enumerate(easiest[:30:10])]
    monkeypatch.setattr(searching, "candidates", lambda *asked: three if SLICE in asked else [])
    found = search(RUN.model, RUN.sft, SLICE, tokens=20_480)
    assert [one.config for one in compiler.asked] == [one.config for one in three]
    assert found.tried[0].refusal == "wants 72.0 MiB of vmem, which has 16.0" and found.fastest in found.tried[1:]


def test_the_smallest_slice_is_found_beside_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler(monkeypatch, room=math.inf)
    told: list[Plan] = []
    found = search(RUN.model, RUN.sft, Slice.parse("v6e:4x4"), tokens=20_480, compiles=3, on_plan=told.append)
    assert found.fastest is not None and found.fastest.topology == "v6e:4x4"
    assert found.smallest is not None and found.smallest.topology == "v6e:2x2"
    assert tuple(told) == found.tried and len(told) <= 3 + 3


def test_nothing_that_fits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Compiler(monkeypatch, room=0)
    found = search(RUN.model, RUN.sft, SLICE, tokens=20_480, compiles=3)
    assert found.fastest is None and found.smallest is None and 1 <= len(found.tried) <= 3
    with pytest.raises(PlanError, match="no mesh of v5e:1x2 can hold and run this job; give a larger --topology"):
        search(RUN.model, RUN.sft, Slice.parse("v5e:1x2"), tokens=20_480)
