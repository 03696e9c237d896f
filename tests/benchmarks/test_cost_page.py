"""docs/cost.md is what its script writes, and its arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
from benchmark_world import program

from launch.flags.cli import UsageError

cost = program("benchmarks.cost")
KINDS, PAGE, PRICES, SIZES = cost.KINDS, cost.PAGE, cost.PRICES, cost.SIZES
ASSUMED = cost.Assumed(6_000, 4_000, 6_000, 2_000, 0.5, 8)


@pytest.fixture(scope="module")
def works():
    return {(size, kind): cost.work_of(size, kind, ASSUMED) for size in SIZES for kind in KINDS}


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == cost.page(ASSUMED, PRICES), "run python -m benchmarks.cost"


def test_each_figure_says_what_it_is(works) -> None:
    """TPUs' go by a row of compiled cycles, GPUs' by arithmetic, and are bounds."""
    plans = [row for kind in KINDS for row in cost.fitting_plans(kind) if row.get("expected")]
    for (_, kind), one in works.items():
        assert one.is_bound == kind.startswith("h")
        named = [row for row in plans if one.source.endswith(row["topology"]) and row["mfu"] == one.mfu]
        assert bool(named) != one.is_bound
        assert one.is_bound or any(one.update_mfu == row["mfu"] for row in plans)


def test_training_is_as_fast_as_the_plan_nearest_in_size_then_in_length(monkeypatch) -> None:
    def plan(size: str, tokens: int, date: str, mfu: float) -> dict:
        return {"job": "sft", "topology": "v6e:4x4", "expected": True, "fits": True} | locals()

    known = [plan("14b", 20_480, "1", 0.3), plan("14b", 74_752, "1", 0.4), plan("0.6b", 20_480, "2", 0.1)]
    known += [plan("30b-a3b", 20_480, "3", 0.2), plan("14b", 20_480, "0", 0.5)]
    monkeypatch.setattr(cost.rows, "read", lambda name: known)
    assert cost.training_mfu("32b", "v6e", 18_000) == (0.3, "compiled cycles: sft:14b, 20,480 tokens, v6e:4x4")
    assert cost.training_mfu("14b", "v6e", 60_000)[0] == 0.4
    assert cost.training_mfu("1.7b", "v6e", 18_000)[0] == 0.1
    known.append(plan("14b", 74_752, "0", 0.35) | {"job": "grpo"})
    assert [cost.training_mfu("14b", "v6e", 60_000, job)[0] for job in ("sft", "grpo")] == [0.4, 0.35]
    assert cost.training_mfu("14b", "v6e", 18_000, "grpo")[0] == 0.3


def test_only_the_newest_row_of_each_plan_counts_and_only_if_it_fits(monkeypatch) -> None:
    def plan(date: str, topology: str, mfu: float, fits: bool) -> dict:
        return {"job": "grpo", "size": "14b", "tokens": 74_752, "chips": mfu * 100, "expected": True} | locals()

    known = [plan("1", "v6e:2x2", 0.04, True), plan("2", "v6e:4x4", 0.16, True), plan("1", "v6e:4x4", 0.3, True)]
    known += [plan("3", "v6e:2x2", 0.04, False)]  # as the step is now
    monkeypatch.setattr(cost.rows, "read", lambda name: known)
    assert cost.planned_slice("14b", "v6e")[0] == "v6e:4x4"
    assert cost.training_mfu("14b", "v6e", 74_752, "grpo")[0] == 0.16


def test_decoding_reaches_the_median_of_its_programs(monkeypatch) -> None:
    """The first and the last row are of one program."""
    decoded = {"model": "4b", "topology": "v6e:2x2", "mesh": {}, "length": 4096, "steps": 32, "date": "1"}
    known = [decoded | {"slots": slots, "share": share} for slots, share in ((1, 0.5), (16, 0.7), (4, 0.8))]
    known.append(known[0] | {"stored": "none", "date": "2", "share": 0.6})
    monkeypatch.setattr(cost.rows, "read", lambda name: known)
    assert cost.decode_share.__wrapped__() == 0.7
    monkeypatch.setattr(cost.rows, "read", lambda name: known[1:])
    assert cost.decode_share.__wrapped__() == 0.7
    monkeypatch.setattr(cost.rows, "read", lambda name: [known[0], known[3], known[2]])
    assert cost.decode_share.__wrapped__() == pytest.approx(0.7)  # of two their mean


def test_training_is_its_arithmetic_over_its_rate(works) -> None:
    """By hand: 14B has 13.99 billion parameters in its matmuls and 40 layers of 40 heads of 128. On TPUs attention
    visits whole blocks of 1,024 at both ends of a document."""
    for kind, peak, more in (("v5p", 459e12, 2_048), ("v6e", 918e12, 2_048), ("h200", 989e12, 0)):
        one = works["14b", kind]
        for hours, mfu, tokens, length in (
            (one.sft, one.mfu, 54_885 * 2 * ASSUMED.conversation, ASSUMED.conversation),
            (one.update, one.update_mfu, 140 * 256 * 8 * ASSUMED.episode, ASSUMED.episode),
        ):
            each = 6 * 13.99e9 + 6 * 40 * 40 * 128 * (length + more)
            assert hours == pytest.approx(tokens * each / (peak * mfu) / 3600, rel=0.02)


def test_rollouts_and_updates_grow_with_what_makes_them(works) -> None:
    one = works["14b", "h200"]
    rarer = cost.work_of("14b", "h200", dataclasses.replace(ASSUMED, valid_share=0.25))
    assert rarer.rollout == pytest.approx(2 * one.rollout) and rarer.update == one.update
    longer = cost.work_of("14b", "h200", dataclasses.replace(ASSUMED, sampled=12_000))
    assert longer.rollout > 2 * one.rollout and longer.update > 1.5 * one.update


def test_the_bill_of_turns_is_the_least_of_all_fleets() -> None:
    update, rollout = 400.0, 900.0
    bills = [(train + serve) * (rollout / serve + update / train) for train in range(1, 60) for serve in range(1, 60)]
    assert cost.exact(update, rollout) == pytest.approx(min(bills)) == 2_500


def test_prices_that_are_none_are_refused() -> None:
    assert cost.prices(["v6e=1.5"])["v6e"] == 1.5
    for text in ("v7=1", "v6e=", "v6e=-1", "v6e=nan"):
        with pytest.raises(UsageError, match="write KIND=DOLLARS"):
            cost.prices([text])
