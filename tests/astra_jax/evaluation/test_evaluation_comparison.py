"""Stages beside each other: paired differences against hand-computed ones, what is watched, what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_world import BFCL, CATEGORIES, evaluation
from scipy import stats

from astra_jax.evaluation import grids
from astra_jax.evaluation.comparison import Change, compare
from astra_jax.evaluation.grids import markdown
from astra_jax.evaluation.saved import Evaluation
from astra_jax.evaluation.suite import EvaluationError

COUNT = 40


def missing(share: float, **more) -> Evaluation:
    """A run that solves this share of the items whose function is missing, and half of the others."""
    solved = [[float(n < share * COUNT)] for n in range(COUNT)]
    return evaluation({"base": [[1], [0]] * (COUNT // 2), "miss_func": solved}, **more)


def change(before: Evaluation, after: Evaluation, category: str = "miss_func") -> Change:
    (suite,) = compare({"before": before, "after": after}).suites
    return next(one for one in suite.changes if one.category == category)


def test_a_difference_is_paired_by_item() -> None:
    before = evaluation({"base": [[0, 0], [1, 0], [1, 1], [0, 1]]})
    after = evaluation({"base": [[1, 1], [1, 1], [1, 1], [0, 0]]})
    found = change(before, after, "base")
    # 100, 50, 0, -50: mean 25, deviation 64.55, standard error 32.27, t with 3 degrees of freedom 3.18245.
    assert (found.points.mean, found.points.high) == pytest.approx((25, 100)) and found.points.low == pytest.approx(
        25 - 102.71, abs=0.01
    )
    assert (found.better, found.worse, found.same, found.verdict) == (2, 1, 1, "")


def test_pairing_finds_what_two_intervals_hide() -> None:
    """The same hard items for both; the interval is SciPy's for paired values."""
    rng = random.Random(0)
    hard = [rng.random() < 0.5 for _ in range(COUNT)]
    before = [[float(easy)] for easy in hard]
    after = [[float(easy and n % 4 != 0)] for n, easy in enumerate(hard)]
    a, b = evaluation({"base": before}), evaluation({"base": after})
    found = change(a, b, "base")
    each = [100 * (y[0] - x[0]) for x, y in zip(before, after, strict=True)]
    reference = stats.ttest_1samp(each, 0).confidence_interval()
    assert (found.points.low, found.points.high) == pytest.approx((reference.low, reference.high))
    assert found.verdict == "fell"
    one, two = (table.suites[0].categories[0].score for table in compare({"a": a, "b": b}).tables.values())
    assert two.high > one.low


@settings(max_examples=50)
@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 1.0])] * 4), min_size=1, max_size=12))
def test_a_difference_is_the_same_from_the_other_side(scores: list[tuple[float, ...]]) -> None:
    before = evaluation({"base": [one[:2] for one in scores], "miss_func": [one[1:3] for one in scores]})
    after = evaluation({"base": [one[2:] for one in scores], "miss_func": [one[:2] for one in scores]})
    there, back = (
        [one for suite in compare({"a": x, "b": y}).suites for one in suite.changes]
        for x, y in ((before, after), (after, before))
    )
    for one, other in zip(there, back, strict=True):
        assert (one.points.mean, one.points.low, one.points.high) == pytest.approx(
            (-other.points.mean, -other.points.high, -other.points.low), abs=1e-6
        )
        assert (one.better, one.worse, one.same) == (other.worse, other.better, other.same)
    tables = compare({"a": before, "b": after}).tables
    scored: list[list[Any]] = [[*one.suites[0].categories, *one.suites[0].headlines] for one in tables.values()]
    means = [[row.score.mean for row in table] for table in scored]
    assert [one.points.mean for one in there] == pytest.approx([y - x for x, y in zip(*means, strict=True)], abs=1e-6)


def test_a_fall_of_the_watched_category_is_a_warning() -> None:
    runs = {"base": missing(0.7), "sft": missing(0.4), "rl": missing(0.7)}
    found = compare(runs)
    (warning,) = found.warnings
    assert warning.startswith("BFCL v3 multi-turn, Missing function: sft is 30.0 points below base (95 % interval ")
    assert "the paper's SFT loses 14.0 points (14B) and 12.5 points (32B) there" in warning
    pairs = [(one.before, one.after, one.verdict) for one in found.suites[0].changes if one.category == "miss_func"]
    assert pairs == [("base", "sft", "fell"), ("sft", "rl", "rose"), ("base", "rl", "")]
    text = markdown(found)
    assert f"**WARNING: {warning}**" in text.split("## ")[0]
    assert "FELL, watched" in text and "| Qwen3-14B, SFT (Table 2) | 67.5 | 25.5 | – |" in text
    as_json = json.loads(grids.as_json(found))
    assert as_json["warnings"] == [warning] and as_json["runs"] == ["base", "sft", "rl"]
    assert set(as_json["comparison"]["tables"]) == set(runs)


@pytest.mark.parametrize(("after", "falls"), [(0.7, False), (0.65, False), (0.55, True), (0.75, False)])
def test_only_a_fall_beyond_its_interval_warns(after: float, falls: bool) -> None:
    assert bool(compare({"base": missing(0.7), "sft": missing(after)}).warnings) is falls


def test_a_fall_of_every_item_alike_is_not_overlooked() -> None:
    """Differences that do not deviate have an interval all the same."""
    before, after = ({"miss_func": [[1, one, 1, 0]] * COUNT} for one in (1, 0))
    found = compare({"base": evaluation(before), "sft": evaluation(after)})
    (point,) = {(one.points.mean, one.points.high < 0) for one in found.suites[0].changes}
    assert point == (-25, True) and found.warnings
    few = compare({"base": missing(0.7), "sft": missing(0.7)})
    assert not few.warnings and {one.verdict for one in few.suites[0].changes} == {""}


def test_other_categories_fall_without_a_warning() -> None:
    before, after = ({"long_context": [[one]] * COUNT} for one in (1, 0))
    found = compare({"base": evaluation(before), "sft": evaluation(after)})
    assert {one.verdict for one in found.suites[0].changes} == {"fell"} and not found.warnings


def test_headlines_of_shared_questions_are_paired_too() -> None:
    info = replace(BFCL, shared_questions=True)
    before = {one.name: [[1]] * 10 + [[0]] * 10 for one in CATEGORIES}
    after = {one.name: [[1]] * 15 + [[0]] * 5 for one in CATEGORIES}
    (suite,) = compare({"a": evaluation(before, info=info), "b": evaluation(after, info=info)}).suites
    base, headline = suite.changes[0], suite.changes[-1]
    assert headline.category == "" and headline.points == base.points


def altered(run: Evaluation, roles=None, **changes) -> Evaluation:
    """A run of a suite that declares something else."""
    suite = run.suites[BFCL.name]
    suite = msgspec.structs.replace(suite, info=replace(suite.info, **changes))
    return replace(run, suites={BFCL.name: suite}, roles=roles or {})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (altered(missing(0.5), harness="bfcl-eval 2025.1.1"), "differ in harness .*2026.3.23 and .*2025.1.1.*again"),
        (altered(missing(0.5), data_sha256={"base.json": "ff"}), "differ in data"),
        (evaluation({"base": [[1]] * COUNT}), "differ in categories"),
        (
            evaluation({"base": [[1]] * COUNT, "miss_func": [[1]] * 20}),
            "before has 40 items, after has 20, .*same limit",
        ),
        (replace(missing(0.5), suites={}, results=()), "no suite in common"),
        (replace(missing(0.5), results=missing(0.5).results[1:]), "before has 40 items, after has 39"),
    ],
)
def test_another_instrument_is_refused(other: Evaluation, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        compare({"before": missing(0.5), "after": other})


def test_another_user_simulator_is_refused() -> None:
    needs = frozenset({"user"})
    one, two = (
        altered(missing(0.5), {"user": name, "judge": f"not asked, {name}"}, needs=needs) for name in ("a", "b")
    )
    compare({"before": one, "after": replace(one, roles={"user": "a"})})
    with pytest.raises(EvaluationError, match=r"differ in the model that is the user \(a and b\)"):
        compare({"before": one, "after": two})
    with pytest.raises(EvaluationError, match="does not name the model of the user of bfcl_v3_mt"):
        altered(missing(0.5), needs=needs)


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(EvaluationError, match="1 runs are given"):
        compare({"only": missing(0.5)})


def test_another_decoding_and_settings_are_shown() -> None:
    before, after = missing(0.5), replace(missing(0.5), config={"seed": 1})
    run = after.suites[BFCL.name]
    cold = {name: replace(one, temperature=0.0) for name, one in run.decodings.items()}
    after = replace(after, suites={BFCL.name: msgspec.structs.replace(run, decodings=cold)})
    found = compare({"before": before, "after": after})
    assert found.differences == [
        "bfcl_v3_mt/base: after was sampled otherwise than before: temperature 0.0 instead of 0.6",
        "bfcl_v3_mt/miss_func: after was sampled otherwise than before: temperature 0.0 instead of 0.6",
        "setting seed: after has 1, before has 0",
    ]
    head = markdown(found).split("## ")[0]
    assert all(one in head for one in found.differences)


def test_suites_that_only_some_runs_have_are_left_out_and_named() -> None:
    both = missing(0.5)
    run = both.suites[BFCL.name]
    info = replace(run.info, name="ours", title="Ours")
    both = replace(both, suites={**both.suites, "ours": msgspec.structs.replace(run, info=info)})
    both = replace(both, results=both.results + tuple(msgspec.structs.replace(r, suite="ours") for r in both.results))
    found = compare({"before": missing(0.5), "after": both})
    assert [one.name for one in found.suites] == [BFCL.name]
    assert found.differences == ["ours was not run for all, and is left out of the comparison (only in after)"]


def test_partial_runs_are_compared_on_the_same_items_and_marked() -> None:
    found = change(missing(0.7, total=200), missing(0.2, total=200))
    assert found.partial and found.verdict == "fell"
    compared = compare({"a": missing(0.7, total=200), "b": missing(0.2, total=200)})
    text = markdown(compared)
    assert "points below a on a part of the items (95 %" in compared.warnings[0]
    ours = [line for line in text.splitlines() if line.startswith(("| **a**", "| **b**", "| a", "| b"))]
    assert len(ours) == 2 + 3 + 2 and all("partial" in line for line in ours)
