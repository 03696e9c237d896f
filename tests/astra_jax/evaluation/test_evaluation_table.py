"""The figures of an evaluation against hand-computed ones, brute force and SciPy; what is refused; what is said."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_world import BFCL, CATEGORIES, evaluation, result
from scipy import stats

from astra_jax.evaluation import paper
from astra_jax.evaluation.grids import as_json, markdown
from astra_jax.evaluation.intervals import Estimate, combined, estimate, pass_hat
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.saved import SuiteRun, load_evaluation, save_evaluation
from astra_jax.evaluation.suite import Decoding, EvaluationError
from astra_jax.evaluation.table import CategoryScore, departures, tabulate
from synthesis.core.datasets import DatasetError, write_dataset

ROOT = Path(__file__).parents[3]


def category(scores: list[list[float]], **more) -> CategoryScore:
    """The figures of one category."""
    return tabulate(evaluation({"base": scores}, **more)).suites[0].categories[0]


def alike(found: Estimate, mean: float, low: float, high: float) -> bool:
    return (found.mean, found.low, found.high) == pytest.approx((mean, low, high), abs=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Intervals


def test_an_interval_is_students_between_items() -> None:
    # Deviation 10, standard error 5.7735, t with 2 degrees of freedom 4.30265.
    assert alike(estimate([40, 50, 60], least=0, most=100), 50, 50 - 24.841, 50 + 24.841)
    # Deviation 50, standard error 25, t with 3 degrees of freedom 3.18245: 79.6 each way, cut off at the ends.
    assert alike(estimate([0, 100, 100, 100], least=0, most=100), 75, 0, 100)


@given(st.lists(st.integers(0, 4).map(lambda n: 25.0 * n), min_size=2, max_size=40), st.randoms())
def test_an_interval_is_scipys_and_knows_no_order(values: list[float], rng: random.Random) -> None:
    found = estimate(values, least=0, most=100)
    assert 0 <= found.low <= found.mean <= found.high <= 100
    shuffled = list(values)
    rng.shuffle(shuffled)
    again = estimate(shuffled, least=0, most=100)
    assert alike(again, found.mean, found.low, found.high)
    if len(set(values)) > 1:
        mean, error = sum(values) / len(values), stats.sem(values)
        low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error)
        assert alike(found, mean, max(0, low), min(100, high))


@pytest.mark.parametrize("count", [1, 2, 20, 200])
def test_equal_values_are_not_certainty(count: int) -> None:
    """At the ends of the range the bound is Clopper and Pearson's; between them it is as wide."""
    low = float(100 * stats.beta.ppf(0.025, count, 1))
    assert alike(estimate([100.0] * count, least=0, most=100), 100, low, 100)
    assert alike(estimate([0.0] * count, least=0, most=100), 0, 0, 100 - low)
    middle = estimate([50.0] * count, least=0, most=100)
    assert alike(middle, 50, low / 2, 100 - low / 2)
    assert alike(estimate([0.0] * count, least=-100, most=100), 0, low - 100, 100 - low)


@pytest.mark.parametrize("values", [[], [101.0], [-1.0, 2.0], [math.nan, 1.0], [math.inf]])
def test_what_has_no_mean_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value|their range is"):
        estimate(values, least=0, most=100)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Items of different difficulty, four dependent trials each; single trials as clusters would be far too sure."""
    rng = random.Random(0)
    held, held_naively, held_together, runs = 0, 0, 0, 600
    for _ in range(runs):
        both, every = [], []
        for _ in range(2):
            items = [
                [float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(0.5, 0.5) for _ in range(40))
            ]
            both.append(estimate([25 * sum(one) for one in items], least=0, most=100))
            every.append(estimate([100 * one for one in itertools.chain(*items)], least=0, most=100))
        held += both[0].low <= 50 <= both[0].high
        held_naively += every[0].low <= 50 <= every[0].high
        together = combined(both)
        held_together += together.low <= 50 <= together.high
    assert 0.92 < held / runs < 0.98
    assert 0.92 < held_together / runs < 0.98
    assert held_naively / runs < 0.85


def test_a_headline_adds_the_distances_of_its_categories() -> None:
    # sqrt(10² + 20²) / 2 below, sqrt(10² + 5²) / 2 above.
    found = combined([Estimate(50, 40, 60), Estimate(70, 50, 75)])
    assert alike(found, 60, 60 - 11.180, 60 + 5.590)
    with pytest.raises(ValueError, match="at least one"):
        combined([])


# ---------------------------------------------------------------------------------------------------------------------
# pass^k


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1)))
def test_pass_hat_is_the_share_of_all_subsets_of_trials(items: list[list[bool]]) -> None:
    trials = len(items[0])
    found = pass_hat([sum(one) for one in items], trials)
    for k, value in enumerate(found, 1):
        subsets = [all(some) for one in items for some in itertools.combinations(one, k)]
        assert value == pytest.approx(sum(subsets) / len(subsets))
    assert found == sorted(found, reverse=True)


def test_pass_hat_is_of_scores_that_are_0_or_1_only() -> None:
    assert category([[1, 0, 1, 1], [1, 1, 1, 1]]).pass_hat == pytest.approx([87.5, 75, 62.5, 50])
    assert category([[1, 0.5], [1, 1]]).pass_hat is None


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_a_category_by_hand() -> None:
    found = category([[1, 0], [1, 1], [0, 0]])
    # Items 50, 100, 0: deviation 50, standard error 28.868, half an interval 124.2.
    assert alike(found.score, 50, 0, 100)
    assert (found.items, found.total, found.partial) == (3, 3, False)
    assert found.means == pytest.approx([200 / 3, 100 / 3])
    assert found.deviation == pytest.approx((100 / 3) / math.sqrt(2))
    text = markdown(tabulate(evaluation({"base": [[1, 0], [1, 1], [0, 0]]})))
    assert "| Base | 3 of 3 | 2 | 23.57 | 33.3 | 66.7 |" in text
    assert found.pass_hat == pytest.approx([50, 100 / 3])


def test_trials_that_agree_make_no_interval_narrower() -> None:
    once = category([[float(n % 3 == 0)] for n in range(30)])
    often = category([[float(n % 3 == 0)] * 8 for n in range(30)])
    assert once.score == often.score and once.deviation is None and often.deviation == 0


def test_use_and_further_scores_by_hand() -> None:
    whole = evaluation({"base": [[1], [0], [0]]})
    results = (
        result("base", "a", 0, 1, steps=4, sub_tasks=2, completion_tokens=100, calls=3, metrics={"process": 0.5}),
        result("base", "b", 0, 0, steps=1, sub_tasks=1, completion_tokens=30, calls=1, finish="turn limit"),
        result(
            "base", "c", 0, 0, steps=0, sub_tasks=1, completion_tokens=0, prompt_tokens=0, calls=0, finish="too long"
        ),
    )
    found = tabulate(replace(whole, results=results)).suites[0].categories[0]
    use = found.use
    assert (use.runs, use.without_completion) == (3, 1)
    assert use.steps == pytest.approx(5 / 3) and use.calls == pytest.approx(4 / 3)
    assert use.prompt_tokens == pytest.approx(200 / 3) and use.completion_tokens == pytest.approx(130 / 3)
    assert use.steps_per_sub_task == pytest.approx((2 + 1 + 0) / 3)
    assert use.tokens_per_step == pytest.approx((25 + 30) / 2)
    assert use.tokens_per_sub_task == pytest.approx((50 + 30 + 0) / 3)
    assert use.finishes == pytest.approx({"answered": 1 / 3, "too long": 1 / 3, "turn limit": 1 / 3})
    assert (found.metrics["process"].mean, found.metrics["process"].items) == (0.5, 1)
    text = markdown(tabulate(replace(whole, results=results)))
    assert "Base: process is of 1 of 3 items" in text and "1 of 3 runs have no completion" in text


def test_a_headline_weighs_categories_the_same() -> None:
    table = tabulate(evaluation({"base": [[1]] * 3 + [[0]], "miss_func": [[0]] * 12 + [[1]] * 4}))
    base, missing, (headline,) = *table.suites[0].categories, table.suites[0].headlines
    assert headline.score == combined([base.score, missing.score]) and headline.score.mean == 50
    assert (headline.items, headline.total) == (20, 20)


def test_categories_of_the_same_questions_are_not_independent() -> None:
    scores = [[float(n % 2)] for n in range(20)]
    info = replace(BFCL, shared_questions=True)
    dependent = tabulate(evaluation({one.name: scores for one in CATEGORIES}, info=info)).suites[0]
    independent = tabulate(evaluation({one.name: scores for one in CATEGORIES})).suites[0]
    assert dependent.headlines[0].score == dependent.categories[0].score
    width = [one.high - one.low for one in (dependent.headlines[0].score, independent.headlines[0].score)]
    assert width[0] == pytest.approx(2 * width[1])
    with pytest.raises(EvaluationError, match=r"share their questions, but have \[20, 3\] items"):
        tabulate(evaluation({"base": scores, "miss_func": scores[:3]}, info=info))


def test_one_item_and_one_trial_is_said_as_it_is() -> None:
    table = tabulate(evaluation({"base": [[1]]}))
    found = table.suites[0].categories[0]
    assert alike(found.score, 100, 2.5, 100) and found.deviation is None
    text = markdown(table)
    assert "| Base | 1 of 1 | 1 | – | – | – | 100.0 |" in text and "Fewer than 4 trials (Base)" in text
    assert "Fewer than" not in markdown(tabulate(evaluation({"base": [[1] * 4]})))


def test_json_has_every_figure_and_no_number_that_json_does_not_have() -> None:
    silent = replace(evaluation({"base": [[1]]}), results=(result("base", "a", 0, 1, steps=0, completion_tokens=0),))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(as_json(tabulate(silent)), parse_constant=refuse)
    category = found["table"]["suites"][0]["categories"][0]
    assert category["use"]["tokens_per_step"] is None and category["deviation"] is None
    assert category["score"] == {"mean": 100.0, "low": 2.5, "high": 100.0}
    sources = {one["source"] for one in found["paper"]["rows"]["bfcl_v3_mt"]}
    assert sources == {"Table 1", "Table 2", "README"}


def test_a_partial_run_is_marked_wherever_it_has_a_figure() -> None:
    scores = {"base": [[1], [0]] * 10, "miss_func": [[1], [0]] * 10}
    table = tabulate(evaluation(scores, total=200))
    text = markdown(table)
    assert table.partial and "PARTIAL" in text.splitlines()[2]
    row = next(line for line in text.splitlines() if line.startswith("| **tiny**"))
    assert row.count("(partial: 20 of 200)") == 2 and row.count("(partial: 40 of 400)") == 1
    ours = [
        line for line in text.splitlines() if line.startswith(("| Base", "| Missing function", "| all", "| **tiny**"))
    ]
    assert len(ours) == 6 and all("partial" in line or "20 of 200" in line for line in ours)
    whole = markdown(tabulate(evaluation(scores)))
    assert "partial" not in whole.lower() and "20 of 20 " in whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:-1], "has results of trials 0; expected 0 to 1"),
        (lambda r: (*r, r[0]), "has results of trials 0, 0, 1"),
        (lambda r: (), "there are no results of bfcl_v3_mt/base"),
        (lambda r: (*r, result("base", "x", 0, 1), result("base", "x", 1, 1)), "results of 3 items .*, which has 2"),
        (lambda r: (*r, result("other", "x", 0, 1)), r"\['other'\], which are not categories"),
        (lambda r: (*r, result("base", "x", 0, 1, suite="aime")), r"\['aime'\], which the evaluation does not declare"),
        (lambda r: (msgspec.structs.replace(r[0], score=1.5), *r[1:]), "score 1.5"),
        (lambda r: (msgspec.structs.replace(r[0], score=math.nan), *r[1:]), "score nan"),
        (lambda r: (msgspec.structs.replace(r[0], sub_tasks=0), *r[1:]), "0 sub-tasks"),
        (lambda r: (msgspec.structs.replace(r[0], metrics={"process": math.nan}), *r[1:]), "metrics are finite"),
    ],
)
def test_results_that_are_not_whole_have_no_mean(change, message: str) -> None:
    whole = evaluation({"base": [[1, 0], [1, 1]]})
    tabulate(whole)
    with pytest.raises(EvaluationError, match=message):
        tabulate(replace(whole, results=change(whole.results)))


def test_another_decoding_than_the_papers_is_said() -> None:
    papers = Decoding(temperature=0.6, trials=4)
    assert departures(papers, papers) == []
    used = replace(papers, temperature=0, max_tokens=100, extra={"chat_template_kwargs": {"enable_thinking": False}})
    assert departures(used, papers) == [
        "temperature 0 instead of 0.6",
        "max tokens 100 instead of unset",
        'extra {"chat_template_kwargs":{"enable_thinking":false}} instead of {}',
    ]
    text = markdown(tabulate(evaluation({"base": [[1, 0]], "miss_func": [[1]]})))
    assert (
        "tiny was not sampled as the suite declares (the paper's way, where it has one): trials 2 instead of 1 (Base)."
        in text
    )


def test_names_cannot_break_the_markdown() -> None:
    text = markdown(tabulate(evaluation({"base": [[1]]}, model="a|b\n# c")))
    assert "| **a\\|b # c** |" in text and "\n# c" not in text


# ---------------------------------------------------------------------------------------------------------------------
# The paper


COLUMNS = {
    "bfcl_v3_mt": ("base", "miss_func", "miss_param", "long_context"),
    "tau2": ("retail", "telecom"),
    "acebench": ("multi_turn", "multi_step"),
}
AIME = ("aime_2024_k20", "aime_2025_k20", "aime_2024_all", "aime_2025_all")


def test_the_papers_averages_follow_from_its_columns() -> None:
    """All of them do, to the last printed digit; so the rows were copied right. The README gives averages alone."""
    checked = 0
    for row in paper.REFERENCES:
        for scores in row.scores.values():
            for column, printed in scores.items():
                over = column.split("+")
                if row.source == "README":
                    assert len(over) == 4
                elif len(over) > 1:
                    assert sum(scores[name] for name in over) / len(over) == pytest.approx(printed, abs=0.00501), row
                    checked += 1
    assert checked == 19 * 3 + 4 * 2


def test_what_does_not_follow_in_the_paper_is_known() -> None:
    """Baselines that differ between its tables, and behaviour that is no product."""

    def table(number: int) -> dict[str, paper.PublishedRow]:
        return {row.model: row for row in paper.REFERENCES if row.source == f"Table {number}"}

    names = {
        "Qwen3-14B": "Qwen3-14B",
        "Qwen3-32B": "Qwen3-32B",
        "ASTRA-14B": "Qwen3-14B, RL",
        "ASTRA-32B": "Qwen3-32B, RL",
    }
    differ = {
        (one, column)
        for one, two in names.items()
        for suite in ("bfcl_v3_mt", "tau2", "acebench")
        for column in COLUMNS[suite]
        if abs(table(1)[one].score(suite, column) - table(2)[two].score(suite, column)) > 0.05  # other digits apart
    }
    assert differ == {
        ("Qwen3-14B", "telecom"),
        *(("Qwen3-32B", column) for column in COLUMNS["bfcl_v3_mt"]),
    }
    for one in paper.BEHAVIOUR:
        assert abs(one.steps_per_sub_task * one.tokens_per_step / one.tokens_per_sub_task - 1) > 0.1


def test_reference_rows_are_found_by_suite_and_column() -> None:
    astra = next(row for row in paper.rows("tau2_v0_2", "Table 1") if row.model == "ASTRA-14B")
    assert astra.score("tau2_v0_2", "telecom") == astra.score("tau2", "telecom") == 47.37
    assert astra.score("tau2_v0_2", "telecom", "retail") == 57.69
    assert astra.score("tau2_v0_2", "telecom", "airline") is None and astra.score("tau2", "airline") is None
    assert paper.rows("ours", "Table 1", "Table 2") == []
    (aime,) = (row for row in paper.rows("aime", "Table 3") if row.model == "ASTRA-14B")
    assert aime.score("aime", *AIME[2:]) == 72.60


def test_several_suites_have_their_headlines_beside_each_other() -> None:
    columns = tuple(replace(CATEGORIES[0], name=name, title=name) for name in AIME)
    aime = replace(
        BFCL,
        name="aime",
        title="AIME",
        categories=columns,
        headline={"top-k 20": AIME[:2], "all": AIME[2:]},
    )
    bfcl = evaluation({one.name: [[1], [0]] for one in CATEGORIES})
    run = SuiteRun(
        info=aime,
        decodings={one.name: one.decoding for one in columns},
        totals={one.name: 1 for one in columns},
    )
    both = replace(
        bfcl,
        suites={**bfcl.suites, "aime": run},
        results=bfcl.results + tuple(result(one.name, "1", 0, 1, suite="aime") for one in columns),
    )
    text = markdown(tabulate(both))
    assert "| model | BFCL v3 multi-turn | AIME, top-k 20 | AIME, all |" in text
    assert "| ASTRA-32B | 64.25 | 74.85 | 75.15 |" in text and "| GPT-4.1 | 38.88 | – | – |" in text
    assert "| ASTRA-14B (Table 3) | 80.1 | 66.7 | 78.8 | 66.4 | **73.4** | **72.6** |" in text


# ---------------------------------------------------------------------------------------------------------------------
# On disk


def test_an_evaluation_is_read_as_it_was_written(tmp_path) -> None:
    whole = evaluation({"base": [[1, 0], [1, 1]], "miss_func": [[0], [1]]}, roles={"user": "gpt-4.1"}, total=200)
    save_evaluation(tmp_path, whole)
    assert load_evaluation(tmp_path) == whole and as_json(tabulate(load_evaluation(tmp_path))) == as_json(
        tabulate(whole)
    )


def test_what_is_no_evaluation_is_refused(tmp_path) -> None:
    with pytest.raises(DatasetError, match="no dataset at"):
        load_evaluation(tmp_path)
    write_dataset(tmp_path / "results", ItemResult, [], card={"model": "tiny"})
    with pytest.raises(EvaluationError, match="is not an evaluation's .*evaluate again"):
        load_evaluation(tmp_path)


def test_tables_want_no_jax() -> None:
    code = "import sys, astra_jax.evaluation.grids, astra_jax.evaluation.saved; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
