"""The figures of an evaluation: scores with intervals, spread between trials, pass^k, tokens and steps, how runs ended.

Items are the clusters: the trials of an item are not independent, so an item counts once, with the mean of its trials,
and an interval comes from the deviation between items. Scores are in percent.
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
from astra_jax.evaluation.suite import Decoding, EvaluationError, Role, SuiteInfo


class Spread(msgspec.Struct, frozen=True):
    """How the means of whole trials differ, in points: `deviation` is the sample's (n - 1)."""

    deviation: float
    least: float
    most: float
    means: list[float]


class Metric(msgspec.Struct, frozen=True):
    """A further score's mean over the items that have it, in its own unit."""

    mean: float
    items: int


class Use(msgspec.Struct, frozen=True):
    """What runs took, and how they ended.

    The paper's analysis (§4) has steps and tokens per sub-task and tokens per step. Here each run has its own three
    ratios, and the table their means, each run weighing the same: the paper does not say how it averages, but its
    figures do not multiply (2.5 x 379.6 is not 1096.7), which those of pooled counts would.

    Attributes:
        runs: items times trials.
        prompt_tokens: per run.
        completion_tokens: per run.
        steps: completions per run.
        calls: per run.
        steps_per_sub_task: completions for each part that the item asks for.
        tokens_per_step: completion tokens; of the runs that have a completion, None where none has.
        tokens_per_sub_task: completion tokens.
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


class CategoryScore(msgspec.Struct, frozen=True, kw_only=True):
    """A column.

    Attributes:
        score: mean over items of the mean over trials, percent.
        items: that were run.
        total: that the category has; a run of fewer is partial.
        spread: None where there is one trial.
        pass_hat: pass^k for k = 1 … trials, percent; None where a score is neither 0 nor 1.
        metrics: further scores by name.
        departures: how the decoding differs from the paper's.
    """

    name: str
    title: str
    score: Estimate
    items: int
    total: int
    partial: bool
    trials: int
    spread: Spread | None
    pass_hat: list[float] | None
    metrics: dict[str, Metric]
    departures: list[str]
    use: Use


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over categories, each weighing the same; `items` and `total` are theirs together."""

    title: str
    categories: tuple[str, ...]
    score: Estimate
    items: int
    total: int
    partial: bool


class ItemSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of an item: `score` in percent, what was wrong in any of them, and how often runs ended how."""

    category: str
    item: str
    score: float
    trials: int
    finishes: dict[str, int]
    problems: list[str]


class SuiteTable(msgspec.Struct, frozen=True, kw_only=True):
    """A suite's figures, next to what it declares and the decodings that were used."""

    info: SuiteInfo
    decodings: dict[str, Decoding]
    categories: list[CategoryScore]
    headlines: list[Headline]
    use: Use
    items: list[ItemSummary]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of an evaluation; `partial` says that some category lacks items."""

    model: str
    partial: bool
    roles: dict[Role, str]
    config: dict[str, Any]
    suites: list[SuiteTable]


def tabulate(evaluation: Evaluation) -> Table:
    """The figures of an evaluation.

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
        suites=suites,
    )


def items_of(run: SuiteRun, category: str, results: Iterable[ItemResult]) -> dict[str, list[ItemResult]]:
    """A category's runs by item, in the order of the results; those of an item by trial.

    Raises:
        EvaluationError: as `tabulate`.
    """
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
    """The mean score of each item over its trials, in percent."""
    return [_percent(one.score for one in runs) for runs in items.values()]


def over_categories(
    info: SuiteInfo, estimates: Sequence[Estimate], values: Sequence[Sequence[float]], *, least: float
) -> Estimate:
    """A figure over categories, each weighing the same.

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
    """How a decoding differs from the paper's, in words."""
    found = []
    for field in fields(Decoding):
        ours, theirs = getattr(used, field.name), getattr(paper, field.name)
        if ours != theirs:
            found.append(f"{field.name.replace('_', ' ')} {_plain(ours)} instead of {_plain(theirs)}")
    return found


def _plain(value: object) -> str:
    return (
        msgspec.json.encode(value).decode() if isinstance(value, Mapping) else "unset" if value is None else f"{value}"
    )


def _suite(run: SuiteRun, results: Sequence[ItemResult]) -> SuiteTable:
    declared = [one.name for one in run.info.categories]
    if stray := {one.category for one in results} - set(declared):
        raise EvaluationError(f"there are results of {sorted(stray)}, which are no categories of {run.info.name}")
    items = {name: items_of(run, name, results) for name in declared}
    categories = {
        one.name: _category(
            one.name, one.title, run, items[one.name], departures(run.decodings[one.name], one.decoding)
        )
        for one in run.info.categories
    }
    means = {name: item_means(items[name]) for name in declared}
    headlines = [
        _headline(title, run.info, [categories[name] for name in names], [means[name] for name in names])
        for title, names in run.info.headline.items()
    ]
    return SuiteTable(
        info=run.info,
        decodings=dict(run.decodings),
        categories=list(categories.values()),
        headlines=headlines,
        use=_use(results),
        items=[_item(name, id, runs) for name, by_item in items.items() for id, runs in by_item.items()],
    )


def _headline(
    title: str, info: SuiteInfo, categories: Sequence[CategoryScore], means: Sequence[Sequence[float]]
) -> Headline:
    return Headline(
        title=title,
        categories=tuple(one.name for one in categories),
        score=over_categories(info, [one.score for one in categories], means, least=0),
        items=sum(one.items for one in categories),
        total=sum(one.total for one in categories),
        partial=any(one.partial for one in categories),
    )


def _category(
    name: str, title: str, run: SuiteRun, items: Mapping[str, Sequence[ItemResult]], departed: list[str]
) -> CategoryScore:
    trials = run.decodings[name].trials
    every = [one for runs in items.values() for one in runs]
    metrics: dict[str, list[float]] = defaultdict(list)
    for runs in items.values():
        for metric in sorted({key for one in runs for key in one.metrics}):
            known = [one.metrics[metric] for one in runs if metric in one.metrics]
            metrics[metric].append(math.fsum(known) / len(known))
    all_or_nothing = all(one.score in (0, 1) for one in every)
    return CategoryScore(
        name=name,
        title=title,
        score=estimate(item_means(items), least=0, most=100),
        items=len(items),
        total=run.totals[name],
        partial=len(items) < run.totals[name],
        trials=trials,
        spread=_spread([_percent(runs[trial].score for runs in items.values()) for trial in range(trials)]),
        pass_hat=(
            [100 * one for one in pass_hat([round(sum(r.score for r in runs)) for runs in items.values()], trials)]
            if all_or_nothing
            else None
        ),
        metrics={key: Metric(math.fsum(values) / len(values), len(values)) for key, values in metrics.items()},
        departures=departed,
        use=_use(every),
    )


def _spread(means: list[float]) -> Spread | None:
    if len(means) < 2:
        return None
    return Spread(float(np.std(means, ddof=1)), min(means), max(means), means)


def _use(runs: Sequence[ItemResult]) -> Use:
    spoke = [one for one in runs if one.steps]
    finishes = Counter(one.finish for one in runs)
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
        finishes={
            name: count / len(runs) for name, count in sorted(finishes.items(), key=lambda one: (-one[1], one[0]))
        },
    )


def _item(category: str, id: str, runs: Sequence[ItemResult]) -> ItemSummary:
    return ItemSummary(
        category=category,
        item=id,
        score=_percent(one.score for one in runs),
        trials=len(runs),
        finishes=dict(Counter(one.finish for one in runs)),
        problems=list(dict.fromkeys(one.problem for one in runs if one.problem)),
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)


def _percent(scores: Iterable[float]) -> float:
    return 100 * _mean(scores)
