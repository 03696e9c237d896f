"""Pages of evaluations: one run's, or several beside each other. Self-contained HTML: no network, inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astra_jax.evaluation import grids
from astra_jax.evaluation.comparison import Comparison
from astra_jax.evaluation.grids import Grid
from astra_jax.evaluation.suite import SuiteInfo
from astra_jax.evaluation.table import CategoryScore, Headline, SuiteTable, Table
from synthesis.core import charts
from synthesis.core.files import write_text
from synthesis.core.html import template

_PROBLEM_CHARACTERS = 300


@dataclass(frozen=True)
class _Failure:
    """An item that some run does not always solve; `scores` has a cell for each run."""

    category: str
    item: str
    scores: list[str]
    problems: list[str]


@dataclass(frozen=True)
class _Section:
    """A suite: its grids, bars and endings by run, what it declares, how it was sampled, and what was not solved."""

    info: SuiteInfo
    grids: list[Grid]
    bars: list[tuple[str, list[charts.Whisker]]]
    endings: list[tuple[str, list[charts.ChartRow]]]
    decodings: list[tuple[str, str]]
    runs: list[str]
    failures: list[_Failure]


def write_evaluation(path: Path, table: Table) -> None:
    """Write the page of one run, atomically."""
    sections = [_section({table.model: suite}, grids.of_suite(table.model, suite)) for suite in table.suites]
    overview = grids.overview_of_table(table)
    _write(path, f"Evaluation of {table.model}", {table.model: table}, overview, sections)


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write the page of several runs, atomically."""
    sections = []
    for compared in comparison.suites:
        runs = comparison.runs_of(compared.name)
        sections.append(_section(runs, grids.of_compared(runs, compared)))
    _write(
        path,
        " → ".join(comparison.tables),
        comparison.tables,
        grids.overview_of_comparison(comparison),
        sections,
        warnings=comparison.warnings,
        differences=comparison.differences,
    )


def _write(
    path: Path,
    title: str,
    tables: Mapping[str, Table],
    overview: Sequence[Grid],
    sections: Sequence[_Section],
    *,
    warnings: Sequence[str] = (),
    differences: Sequence[str] = (),
) -> None:
    page = template("evaluation.html.jinja", Path(__file__).parent)
    html = page.render(
        title=title,
        tables=tables,
        overview=overview,
        sections=sections,
        warnings=warnings,
        differences=differences,
        width=charts.ROW_WIDTH,
        numeric=_numeric,
    )
    write_text(path, html)


def _numeric(grid: Grid) -> list[bool]:
    """Of each column of a grid, whether its cells are numbers, where it says anything."""
    columns = [[row.cells[place] for row in grid.rows] for place in range(len(grid.columns))]
    return [all(cell[:1] in "+-–0123456789" for cell in column) for column in columns]


def _section(runs: Mapping[str, SuiteTable], shown: list[Grid]) -> _Section:
    info = next(iter(runs.values())).info
    return _Section(
        info=info,
        grids=shown,
        bars=[(name, _bars(suite)) for name, suite in runs.items()],
        endings=[(name, charts.chart_rows(suite.use.finishes, shares=True)) for name, suite in runs.items()],
        decodings=[
            (f"{name}, {column.title}", grids.decoding_text(suite.decodings[column.name]))
            for name, suite in runs.items()
            for column in info.categories
        ],
        runs=list(runs),
        failures=_failures(runs),
    )


def _bars(suite: SuiteTable) -> list[charts.Whisker]:
    shown: list[CategoryScore | Headline] = [*suite.categories, *suite.headlines]
    return [
        charts.whisker(
            f"{one.title} (partial)" if one.partial else one.title,
            grids.score_text(one),
            one.score.mean,
            one.score.low,
            one.score.high,
        )
        for one in shown
    ]


def _failures(runs: Mapping[str, SuiteTable]) -> list[_Failure]:
    first = next(iter(runs.values()))
    titles = {one.name: one.title for one in first.info.categories}
    by_run = {name: {(one.category, one.item): one for one in suite.items} for name, suite in runs.items()}
    failures = []
    for key in by_run[next(iter(runs))]:
        items = {name: items[key] for name, items in by_run.items()}
        if all(one.score == 100 for one in items.values()):
            continue
        problems = [
            f"{name}: {problem}" if len(runs) > 1 else problem
            for name, one in items.items()
            for problem in one.problems
        ]
        failures.append(
            _Failure(
                category=titles[key[0]],
                item=key[1],
                scores=[f"{one.score:.1f}" for one in items.values()],
                problems=[
                    one if len(one) <= _PROBLEM_CHARACTERS else f"{one[:_PROBLEM_CHARACTERS]}…" for one in problems
                ],
            )
        )
    return failures
