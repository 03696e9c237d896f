"""Compare stages of training on the same items, in pairs, so that the difficulty of items cancels.

The difference of two runs is the mean over items of the difference between their means over trials. Its interval comes
from the deviation between items. Unlike McNemar's test it supports several trials and partial scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from astra_jax.evaluation.intervals import Estimate, estimate
from astra_jax.evaluation.paper import WATCHED
from astra_jax.evaluation.saved import Evaluation
from astra_jax.evaluation.suite import EvaluationError, SuiteInfo
from astra_jax.evaluation.table import Table, departures, item_means, items_of, over_categories, tabulate


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of a category or a headline from one run to another.

    Attributes:
        category: its name; "" of a headline, whose items are not counted.
        points: after minus before, in points.
        better: items that score higher after.
        worse: items that score lower.
        same: items that score the same.
        verdict: `rose` or `fell` where the interval is on one side of 0, else "".
        warning: why this fall is watched; "" where it is not watched, or did not happen.
        partial: items were left out.
    """

    category: str
    title: str
    before: str
    after: str
    points: Estimate
    better: int = 0
    worse: int = 0
    same: int = 0
    verdict: str
    warning: str = ""
    partial: bool


class SuiteComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of a suite, categories first, from each run to the next and from the first to the last."""

    name: str
    title: str
    changes: list[Change]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of several runs.

    Attributes:
        tables: tables by name of the run, in the order of training.
        suites: comparisons of the suites that all runs have.
        differences: differences between the runs other than the model, in words.
    """

    tables: dict[str, Table]
    suites: list[SuiteComparison]
    differences: list[str]

    @property
    def warnings(self) -> list[str]:
        """Return the falls of monitored categories, one in a line."""
        return [
            f"{suite.title}, {change.title}: {change.after} is {-change.points.mean:.1f} points below {change.before} "
            f"{'on a part of the items ' if change.partial else ''}"
            f"(95 % interval {-change.points.high:.1f} to {-change.points.low:.1f}); {change.warning}"
            for suite in self.suites
            for change in suite.changes
            if change.warning
        ]


def compare(runs: Mapping[str, Evaluation]) -> Comparison:
    """Compare runs, in the order of training.

    Runs with another harness, other data, other items, or other models for user or judge are refused: their difference
    would not be the model's alone. Another decoding, seed or setting is shown, since it belongs to the evaluated model.

    Raises:
        EvaluationError: there are fewer than two runs, they have no common suite, they cannot be compared, or their
            results are incomplete.
    """
    if len(runs) < 2:
        raise EvaluationError(f"{len(runs)} runs are given; a comparison needs two or more")
    names = list(runs)
    first = names[0]
    has = {
        suite: [name for name, run in runs.items() if suite in run.suites]
        for suite in dict.fromkeys(suite for run in runs.values() for suite in run.suites)
    }
    common = [suite for suite in runs[first].suites if len(has[suite]) == len(runs)]
    if not common:
        have = "; ".join(f"{name}: {', '.join(run.suites)}" for name, run in runs.items())
        raise EvaluationError(f"the runs have no suite in common ({have})")
    differences = [
        f"{suite} was not run for all, and is left out of the comparison (only in {', '.join(has[suite])})"
        for suite in has
        if suite not in common
    ]
    for other in names[1:]:
        for suite in common:
            _check(suite, first, runs[first], other, runs[other])
            differences += _decodings(suite, first, runs[first], other, runs[other])
        differences += _settings(first, runs[first].config, other, runs[other].config)
    pairs = list(pairwise(names)) + ([(first, names[-1])] if len(names) > 2 else [])
    suites = [
        SuiteComparison(
            name=suite,
            title=runs[first].suites[suite].info.title,
            changes=[change for one in pairs for change in _changes(suite, one, runs[one[0]], runs[one[1]])],
        )
        for suite in common
    ]
    return Comparison(
        tables={name: _table(name, run) for name, run in runs.items()}, suites=suites, differences=differences
    )


def _table(name: str, run: Evaluation) -> Table:
    try:
        return tabulate(run)
    except EvaluationError as error:
        raise EvaluationError(f"{name}: {error}") from None


def _check(suite: str, first: str, a: Evaluation, other: str, b: Evaluation) -> None:
    """Raise `EvaluationError` if two runs were measured in different ways."""
    one, two = a.suites[suite], b.suites[suite]
    for what, ours, theirs in _instruments(one.info, a, two.info, b):
        if ours != theirs:
            raise EvaluationError(
                f"{suite}: {first} and {other} differ in {what} ({ours} and {theirs}), so that their scores are not of "
                "the same measure; evaluate one of them again"
            )
    for category in (column.name for column in one.info.categories):
        mine, yours = (
            {result.item for result in run.results if (result.suite, result.category) == (suite, category)}
            for run in (a, b)
        )
        if mine != yours:
            raise EvaluationError(
                f"{suite}/{category}: {first} has {len(mine)} items, {other} has {len(yours)}, and {len(mine & yours)} "
                "are the same; items are compared in pairs: evaluate both with the same limit"
            )


def _instruments(one: SuiteInfo, a: Evaluation, two: SuiteInfo, b: Evaluation) -> Iterator[tuple[str, Any, Any]]:
    yield "harness", one.harness, two.harness
    yield "data", dict(one.data_sha256), dict(two.data_sha256)
    yield "categories", [column.name for column in one.categories], [column.name for column in two.categories]
    yield "headlines", dict(one.headline), dict(two.headline)
    for role in sorted(one.needs | two.needs):
        yield f"the model that is the {role}", a.roles.get(role), b.roles.get(role)


def _decodings(suite: str, first: str, a: Evaluation, other: str, b: Evaluation) -> list[str]:
    found = []
    for category, theirs in a.suites[suite].decodings.items():
        if differs := departures(b.suites[suite].decodings[category], theirs):
            found.append(f"{suite}/{category}: {other} was sampled otherwise than {first}: {', '.join(differs)}")
    return found


def _settings(first: str, a: Mapping[str, Any], other: str, b: Mapping[str, Any]) -> list[str]:
    return [
        f"setting {name}: {other} has {_plain(b.get(name))}, {first} has {_plain(a.get(name))}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _plain(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _changes(suite: str, pair: tuple[str, str], a: Evaluation, b: Evaluation) -> list[Change]:
    """Return the changes of each category, then of each headline."""
    info, totals = a.suites[suite].info, a.suites[suite].totals
    each: dict[str, list[float]] = {}
    points: dict[str, Estimate] = {}
    changes = []
    for column in info.categories:
        before, after = (_by_item(run, suite, column.name) for run in (a, b))
        differences = each[column.name] = [after[item] - before[item] for item in before]
        points[column.name] = estimate(differences, least=-100, most=100)
        verdict = _verdict(points[column.name])
        changes.append(
            Change(
                category=column.name,
                title=column.title,
                before=pair[0],
                after=pair[1],
                points=points[column.name],
                better=sum(one > _EQUAL for one in differences),
                worse=sum(one < -_EQUAL for one in differences),
                same=sum(abs(one) <= _EQUAL for one in differences),
                verdict=verdict,
                warning=WATCHED.get((suite, column.name), "") if verdict == "fell" else "",
                partial=len(differences) < totals[column.name],
            )
        )
    for title, names in info.headline.items():
        mean = over_categories(info, [points[name] for name in names], [each[name] for name in names], least=-100)
        changes.append(
            Change(
                category="",
                title=title,
                before=pair[0],
                after=pair[1],
                points=mean,
                verdict=_verdict(mean),
                partial=any(len(each[name]) < totals[name] for name in names),
            )
        )
    return changes


_EQUAL = 1e-9
"""Points; means of the same trials in another order differ in the last bit."""


def _by_item(run: Evaluation, suite: str, category: str) -> dict[str, float]:
    items = items_of(run.suites[suite], category, [one for one in run.results if one.suite == suite])
    return dict(zip(items, item_means(items), strict=True))


def _verdict(points: Estimate) -> str:
    return "rose" if points.low > 0 else "fell" if points.high < 0 else ""
