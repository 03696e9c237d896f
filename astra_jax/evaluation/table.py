"""Scores of an evaluation: intervals, deviation between trials, pass^k, tokens and steps, how runs ended.

The trials of an item are not independent. So an item counts once, with the mean of its trials, and an interval comes
from the deviation between items. Scores are in percent.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from astra_jax.evaluation.intervals import Estimate, combined, estimate, pass_hat
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.saved import Evaluation, SuiteRun
from astra_jax.evaluation.suite import Category, Decoding, EvaluationError, Role, SuiteInfo


class Metric(msgspec.Struct, frozen=True):
    """Mean of a further score over the items that have it, in its own unit."""

    mean: float
    items: int


class Use(msgspec.Struct, frozen=True):
    """Steps, calls and tokens of runs, as means over runs, and how they ended.

    Each run has its own three ratios, and the table their means, each run weighing the same. The paper (§4) does not
    say how it averages, but its numbers do not multiply (2.5 x 379.6 is not 1096.7), as those of pooled counts would.

    Attributes:
        runs: items times trials.
        steps: completions.
        steps_per_sub_task: completions for each part that the item asks for.
        tokens_per_step: completion tokens, of the runs that have a completion; None where none has.
        without_completion: runs that the endpoint never answered, such as a prompt that does not fit.
        finishes: share of runs by how they ended, the most frequent first.
    """

    runs: int
    prompt_tokens: float
    completion_tokens: float
    steps: float
    calls: float
    steps_per_sub_task: float
    tokens_per_step: float | None
    tokens_per_sub_task: float
    without_completion: int
    finishes: dict[str, float]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A column: a category, or a headline, which is the mean of categories that weigh the same.

    Attributes:
        score: mean over items of the mean over trials, percent.
        items: that were run; fewer than `total` are a partial run.
        total: items that it has.
    """

    title: str
    score: Estimate
    items: int
    total: int

    @property
    def partial(self) -> bool:
        """Return True if items were left out."""
        return self.items < self.total


class CategoryScore(Score, frozen=True, kw_only=True):
    """A category.

    Attributes:
        means: of whole trials, percent.
        deviation: between these means (the sample's, n - 1), in points; None where there is one trial.
        pass_hat: pass^k for k = 1 … trials, percent; None where a score is neither 0 nor 1.
        metrics: further scores by name.
        departures: differences of the decoding from the paper's.
    """

    name: str
    means: list[float]
    deviation: float | None
    pass_hat: list[float] | None
    metrics: dict[str, Metric]
    departures: list[str]
    use: Use


class ItemSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of an item: the mean score in percent, and what was wrong in any of them."""

    category: str
    item: str
    score: float
    problems: list[str]


class SuiteTable(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a suite, what it declares and the decodings that were used."""

    info: SuiteInfo
    decodings: dict[str, Decoding]
    categories: list[CategoryScore]
    headlines: list[Score]
    use: Use
    items: list[ItemSummary]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of an evaluation; `partial`: some category lacks items. `weights` as in `Evaluation`."""

    model: str
    partial: bool
    roles: dict[Role, str]
    config: dict[str, Any]
    weights: dict[str, Any] | None = None
    suites: list[SuiteTable]


def tabulate(evaluation: Evaluation) -> Table:
    """Return the scores of an evaluation.

    Raises:
        EvaluationError: the results are not what the suites say was run: a category without results, an item without
            one of its trials or with one twice, a score that is not in [0, 1]. A mean of the rest would hide it.
    """
    by_suite: dict[str, list[ItemResult]] = defaultdict(list)
    for result in evaluation.results:
        by_suite[result.suite].append(result)
    if stray := by_suite.keys() - evaluation.suites.keys():
        raise EvaluationError(f"there are results of {sorted(stray)}, which the evaluation does not declare")
    suites = [_suite(run, by_suite[name]) for name, run in evaluation.suites.items()]
    return Table(
        model=evaluation.model,
        partial=any(category.partial for suite in suites for category in suite.categories),
        roles=dict(evaluation.roles),
        config=dict(evaluation.config),
        weights=None if evaluation.weights is None else dict(evaluation.weights),
        suites=suites,
    )


def items_of(run: SuiteRun, category: str, results: Iterable[ItemResult]) -> dict[str, list[ItemResult]]:
    """Return a category's results by item, in their order; those of an item by trial. Raises as `tabulate`."""
    where, trials = f"{run.info.name}/{category}", run.decodings[category].trials
    items: dict[str, list[ItemResult]] = defaultdict(list)
    for result in results:
        if result.category == category:
            items[result.item].append(result)
    if not items:
        raise EvaluationError(f"there are no results of {where}; run the evaluation to its end")
    if len(items) > run.totals[category]:
        raise EvaluationError(f"there are results of {len(items)} items of {where}, which has {run.totals[category]}")
    for id, runs in items.items():
        runs.sort(key=lambda one: one.trial)
        if [one.trial for one in runs] != list(range(trials)):
            found = ", ".join(str(one.trial) for one in runs)
            raise EvaluationError(
                f"item {id} of {where} has results of trials {found}; expected 0 to {trials - 1}, each once"
            )
        for one in runs:
            if not 0 <= one.score <= 1 or one.sub_tasks < 1 or not all(map(math.isfinite, one.metrics.values())):
                raise EvaluationError(
                    f"item {id} of {where}, trial {one.trial}: score {one.score}, {one.sub_tasks} sub-tasks, metrics "
                    f"{one.metrics}; a score is 0 to 1, sub-tasks are at least one, metrics are finite"
                )
    return items


def item_means(items: Mapping[str, Sequence[ItemResult]]) -> list[float]:
    """Return the mean score of each item over its trials, in percent."""
    return [_percent(one.score for one in runs) for runs in items.values()]


def over_categories(
    info: SuiteInfo, estimates: Sequence[Estimate], values: Sequence[Sequence[float]], *, least: float
) -> Estimate:
    """Return the mean over categories, each weighing the same.

    Args:
        estimates: of each category.
        values: of each category's items, in [least, 100].

    Raises:
        EvaluationError: the suite says that its categories share questions, and they have not as many.
    """
    if not info.shared_questions:
        return combined(estimates)
    if len({len(one) for one in values}) != 1:
        raise EvaluationError(
            f"the categories of {info.name} share their questions, but have {[len(one) for one in values]} items; "
            "run as many of each"
        )
    questions = [math.fsum(question) / len(question) for question in zip(*values, strict=True)]
    return estimate(questions, least=least, most=100)


def departures(used: Decoding, paper: Decoding) -> list[str]:
    """Return the differences of a decoding from the paper's, in words."""
    found = []
    for field in fields(Decoding):
        ours, theirs = getattr(used, field.name), getattr(paper, field.name)
        if ours != theirs:
            found.append(f"{field.name.replace('_', ' ')} {_plain(ours)} instead of {_plain(theirs)}")
    return found


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return msgspec.json.encode(value).decode()
    return "unset" if value is None else str(value)


def _suite(run: SuiteRun, results: Sequence[ItemResult]) -> SuiteTable:
    info = run.info
    if stray := {one.category for one in results} - {one.name for one in info.categories}:
        raise EvaluationError(f"there are results of {sorted(stray)}, which are not categories of {info.name}")
    items = {one.name: items_of(run, one.name, results) for one in info.categories}
    means = {name: item_means(found) for name, found in items.items()}
    categories = {one.name: _category(one, run, items[one.name]) for one in info.categories}
    headlines = [
        Score(
            title=title,
            score=over_categories(info, [categories[n].score for n in names], [means[n] for n in names], least=0),
            items=sum(categories[name].items for name in names),
            total=sum(categories[name].total for name in names),
        )
        for title, names in info.headline.items()
    ]
    return SuiteTable(
        info=info,
        decodings=dict(run.decodings),
        categories=list(categories.values()),
        headlines=headlines,
        use=_use(results),
        items=[
            ItemSummary(
                category=name,
                item=id,
                score=_percent(one.score for one in runs),
                problems=list(dict.fromkeys(one.problem for one in runs if one.problem)),
            )
            for name, by_item in items.items()
            for id, runs in by_item.items()
        ],
    )


def _category(category: Category, run: SuiteRun, items: Mapping[str, Sequence[ItemResult]]) -> CategoryScore:
    decoding = run.decodings[category.name]
    every = [one for runs in items.values() for one in runs]
    metrics: dict[str, list[float]] = defaultdict(list)
    for runs in items.values():
        for metric in sorted({key for one in runs for key in one.metrics}):
            metrics[metric].append(_mean(one.metrics[metric] for one in runs if metric in one.metrics))
    means = [_percent(runs[trial].score for runs in items.values()) for trial in range(decoding.trials)]
    successes = [round(sum(one.score for one in runs)) for runs in items.values()]
    all_or_nothing = all(one.score in (0, 1) for one in every)
    return CategoryScore(
        name=category.name,
        title=category.title,
        score=estimate(item_means(items), least=0, most=100),
        items=len(items),
        total=run.totals[category.name],
        means=means,
        deviation=float(np.std(means, ddof=1)) if len(means) > 1 else None,
        pass_hat=[100 * one for one in pass_hat(successes, decoding.trials)] if all_or_nothing else None,
        metrics={key: Metric(_mean(values), len(values)) for key, values in metrics.items()},
        departures=departures(decoding, category.decoding),
        use=_use(every),
    )


def _use(runs: Sequence[ItemResult]) -> Use:
    spoke = [one for one in runs if one.steps]
    ranked = sorted(Counter(one.finish for one in runs).items(), key=lambda one: (-one[1], one[0]))
    return Use(
        runs=len(runs),
        prompt_tokens=_mean(one.prompt_tokens for one in runs),
        completion_tokens=_mean(one.completion_tokens for one in runs),
        steps=_mean(one.steps for one in runs),
        calls=_mean(one.calls for one in runs),
        steps_per_sub_task=_mean(one.steps / one.sub_tasks for one in runs),
        tokens_per_step=_mean(one.completion_tokens / one.steps for one in spoke) if spoke else None,
        tokens_per_sub_task=_mean(one.completion_tokens / one.sub_tasks for one in runs),
        without_completion=len(runs) - len(spoke),
        finishes={name: count / len(runs) for name, count in ranked},
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)


def _percent(scores: Iterable[float]) -> float:
    return 100 * _mean(scores)
