"""Page of an evaluation, or of several runs compared: one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astra_jax.base.files import write_text
from astra_jax.evaluation.comparison import Comparison
from astra_jax.evaluation.grids import EvaluationReport, Grid, decoding_text, score_text
from astra_jax.evaluation.table import SuiteTable, Table
from launch.viewer import charts
from launch.viewer.service import rendered

_MAX_CHARACTERS = 300


@dataclass(frozen=True)
class _Failure:
    """An item that some run does not always solve; `scores` has one for each run."""

    category: str
    item: str
    scores: list[str]
    problems: list[str]


def write_evaluation(path: Path, one: Table | Comparison) -> None:
    """Write the page of an evaluation or a comparison, atomically."""
    report = EvaluationReport.of(one)
    html = rendered(
        "evaluation.html.jinja",
        report=report,
        sections=[_section(runs, report.grids(suite)) for suite, runs in report.suites.items()],
        numeric=_numeric,
        score_text=score_text,
    )
    write_text(path, html)


def _numeric(grid: Grid) -> list[bool]:
    """Tell of each column whether its cells are numbers."""
    every = zip(*grid.rows, *grid.published, strict=True)
    return [all(cell[:1] in "+-–0123456789" for cell in column) for column in every]


def _section(runs: Mapping[str, SuiteTable], grids: list[Grid]) -> dict[str, Any]:
    """Return what the template shows of a suite."""
    info = next(iter(runs.values())).info
    return {
        "info": info,
        "grids": grids,
        "scores": {name: [*suite.categories, *suite.headlines] for name, suite in runs.items()},
        "endings": {name: charts.bars(suite.use.finishes, shares=True) for name, suite in runs.items()},
        "decodings": {
            f"{name}, {column.title}": decoding_text(suite.decodings[column.name])
            for name, suite in runs.items()
            for column in info.categories
        },
        "failures": _failures(runs),
    }


def _failures(runs: Mapping[str, SuiteTable]) -> list[_Failure]:
    titles = {one.name: one.title for one in next(iter(runs.values())).info.categories}
    by_item = {name: {(one.category, one.item): one for one in suite.items} for name, suite in runs.items()}
    failures = []
    for category, item in next(iter(by_item.values())):
        items = {name: of_run[category, item] for name, of_run in by_item.items()}
        if all(one.score == 100 for one in items.values()):
            continue
        problems = [
            f"{name}: {problem}" if len(runs) > 1 else problem
            for name, one in items.items()
            for problem in one.problems
        ]
        cut = [one if len(one) <= _MAX_CHARACTERS else f"{one[:_MAX_CHARACTERS]}…" for one in problems]
        failures.append(_Failure(titles[category], item, [f"{one.score:.1f}" for one in items.values()], cut))
    return failures
