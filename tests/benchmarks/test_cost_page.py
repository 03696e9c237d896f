"""docs/cost.md is what its script writes, and its arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
from benchmark_world import program

from benchmarks import rows
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
    plans = [row for row in rows.read("plans") if row.get("expected")]
    for (_, kind), one in works.items():
        assert one.is_bound == kind.startswith("h")
        named = [row for row in plans if one.source.endswith(row["topology"]) and row["mfu"] == one.mfu]
        assert bool(named) != one.is_bound
        assert one.is_bound or any(one.update_mfu == row["mfu"] for row in plans)


def test_training_is_as_fast_as_the_plan_nearest_in_size_then_in_length(monkeypatch) -> None:
    def plan(size: str, tokens: int, date: str, mfu: float) -> dict:
        return {"job": "sft", "topology": "v6e:4x4", "expected": True} | locals()

    known = [plan("14b", 20_480, "1", 0.3), plan("14b", 74_752, "1", 0.4), plan("0.6b", 20_480, "2", 0.1)]
    known += [plan("30b-a3b", 20_480, "3", 0.2), plan("14b", 20_480, "0", 0.5)]
    monkeypatch.setattr(cost.rows, "read", lambda name: known)
    assert cost.training_mfu("32b", "v6e", 18_000) == (0.3, "compiled cycles: sft:14b, 20,480 tokens, v6e:4x4")
    assert cost.training_mfu("14b", "v6e", 60_000)[0] == 0.4
    assert cost.training_mfu("1.7b", "v6e", 18_000)[0] == 0.1
    known.append(plan("14b", 74_752, "0", 0.35) | {"job": "grpo"})
    assert [cost.training_mfu("14b", "v6e", 60_000, job)[0] for job in ("sft", "grpo")] == [0.4, 0.35]
    assert cost.training_mfu("14b", "v6e", 18_000, "grpo")[0] == 0.3


def test_training_is_its_arithmetic_over_its_rate(works) -> None:
    """By hand: 14B has 13.99 billion parameters in its matmuls and 40 layers of 40 heads of 128."""
    one = works["14b", "v5p"]
    each = 6 * 13.99e9 + 6 * 40 * 40 * 128 * ASSUMED.conversation
    by_hand = 54_885 * 2 * ASSUMED.conversation * each / (459e12 * one.mfu) / 3600
    assert one.sft == pytest.approx(by_hand, rel=0.02)


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
