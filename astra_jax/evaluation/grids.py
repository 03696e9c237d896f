"""What an evaluation and a comparison say: grids of text, which markdown and the HTML page share, and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from astra_jax.evaluation import paper
from astra_jax.evaluation.comparison import Comparison, SuiteComparison
from astra_jax.evaluation.intervals import Estimate
from astra_jax.evaluation.suite import Decoding
from astra_jax.evaluation.table import CategoryScore, Headline, SuiteTable, Table, Use

_NO_FIGURE = "–"
_ENOUGH_TRIALS = 4
"""As many as the paper has on tau2-bench and ACEBench; with fewer, a benchmark's own noise is not seen."""


@dataclass(frozen=True)
class GridRow:
    """A line of a grid; `ours` is no reference."""

    cells: list[str]
    ours: bool = True


@dataclass(frozen=True)
class Grid:
    """A table of text: its first column names the rows, `strong` are columns of headlines."""

    title: str
    columns: list[str]
    rows: list[GridRow]
    notes: list[str] = field(default_factory=list)
    strong: frozenset[int] = frozenset()


_EVALUATION, _STAGES = ("Table 1", "Table 3"), ("Table 2", "Table 3")
"""Which published rows are beside ours: one run is compared with models, several with the paper's stages."""


def overview_of_table(table: Table) -> list[Grid]:
    """The headlines of an evaluation."""
    return _overview({table.model: table}, [one.info.name for one in table.suites], sources=_EVALUATION)


def overview_of_comparison(comparison: Comparison) -> list[Grid]:
    """The headlines of a comparison."""
    return _overview(comparison.tables, [one.name for one in comparison.suites], sources=_STAGES)


def of_suite(model: str, suite: SuiteTable) -> list[Grid]:
    """All grids of a suite that one model ran; the first is the paper's table."""
    return [
        scores({model: suite}, sources=_EVALUATION),
        trials(suite),
        behaviour({model: suite}),
        use(suite),
    ]


def of_compared(runs: Mapping[str, SuiteTable], compared: SuiteComparison) -> list[Grid]:
    """All grids of a suite that several runs have; the first is the paper's table."""
    return [scores(runs, sources=_STAGES), changes(compared), behaviour(runs)]


def _overview(tables: Mapping[str, Table], suites: Sequence[str], *, sources: Sequence[str]) -> list[Grid]:
    """The headlines of several suites in one grid; none where there is one suite.

    Args:
        tables: our figures, by name.
        suites: names of those to show; every table has them.
    """
    if len(suites) < 2:
        return []
    rows, strong = [], []
    for name, table in tables.items():
        by_name = {suite.info.name: suite for suite in table.suites}
        strong = [by_name[suite] for suite in suites]
        rows.append(GridRow([name, *(score_text(one) for suite in strong for one in suite.headlines)]))
    columns = [(suite.info, title) for suite in strong for title in suite.info.headline]
    # A model of Table 1 has its AIME figures in Table 3.
    models = dict.fromkeys(one.model for suite in suites for one in paper.rows(suite, *sources))
    published = [
        (
            model,
            [paper.average(model, sources, info.name, info.headline[title]) for info, title in columns],
        )
        for model in models
    ]
    titles = [f"{info.title}, {title}" if len(info.headline) > 1 else info.title for info, title in columns]
    notes = [f"Headlines; published rows ({', '.join(sources)}): {paper.PAPER}."]
    return [Grid("Overview", ["model", *titles], [*rows, *_published(published)], notes)]


def scores(runs: Mapping[str, SuiteTable], *, sources: Sequence[str]) -> Grid:
    """The paper's table of a suite: our rows, then the published ones of these sources.

    Args:
        runs: our figures, by name.
    """
    info = next(iter(runs.values())).info
    columns = ["model", *(one.title for one in info.categories), *info.headline]
    rows = [
        GridRow([name, *(score_text(one) for one in suite.categories), *(score_text(one) for one in suite.headlines)])
        for name, suite in runs.items()
    ]
    published = [
        (
            f"{one.model} ({one.source})",
            [
                *(one.score(info.name, column.name) for column in info.categories),
                *(one.average(info.name, names) for names in info.headline.values()),
            ],
        )
        for one in paper.rows(info.name, *sources)
    ]
    rows += _published([one for one in published if any(figure is not None for figure in one[1])])
    notes = [f"Scores in percent with 95 % intervals, by {info.harness}."]
    for name, suite in runs.items():
        if short := [one for one in suite.categories if one.partial]:
            left = ", ".join(f"{one.title} {one.items} of {one.total} items" for one in short)
            notes.append(f"PARTIAL: {name} ran {left}. It is not to be compared with whole runs.")
        notes += [
            f"{name} was not sampled as the suite declares (the paper's way, where it has one): {one}."
            for one in _departures(suite)
        ]
    if len(rows) > len(runs):
        notes += [f"Published rows: {paper.PAPER}.", *paper.NOTES.get(info.name, ())]
    first = 1 + len(info.categories)
    return Grid(info.title, columns, rows, notes, frozenset(range(first, first + len(info.headline))))


def score_text(one: CategoryScore | Headline) -> str:
    """A mean with its interval, and its mark where items were left out: no figure is shown without."""
    text = f"{one.score.mean:.1f} [{one.score.low:.1f}, {one.score.high:.1f}]"
    return f"{text} (partial: {one.items} of {one.total})" if one.partial else text


def trials(suite: SuiteTable) -> Grid:
    """How trials differ, pass^k, and the benchmark's further scores."""
    most = max(one.trials for one in suite.categories)
    ks = [k for k in range(1, most + 1) if k & (k - 1) == 0 or k == most]
    ks = ks if any(one.pass_hat for one in suite.categories) else []
    metrics = sorted({name for one in suite.categories for name in one.metrics})
    rows = []
    for one in suite.categories:
        spread, hat = one.spread, one.pass_hat or []
        rows.append(
            GridRow(
                [
                    one.title,
                    f"{one.items} of {one.total}",
                    str(one.trials),
                    *(
                        [f"{spread.deviation:.2f}", f"{spread.least:.1f}", f"{spread.most:.1f}"]
                        if spread
                        else [_NO_FIGURE] * 3
                    ),
                    *(f"{hat[k - 1]:.1f}" if k <= len(hat) else _NO_FIGURE for k in ks),
                    *(f"{one.metrics[name].mean:.3f}" if name in one.metrics else _NO_FIGURE for name in metrics),
                ]
            )
        )
    columns = ["category", "items", "trials", "deviation", "least", "most", *(f"pass^{k}" for k in ks), *metrics]
    notes = ["Deviation, least and most are of the means of whole trials, in points."]
    if few := [one.title for one in suite.categories if one.trials < _ENOUGH_TRIALS]:
        notes.append(f"Fewer than {_ENOUGH_TRIALS} trials ({', '.join(few)}): how much runs differ is hardly known.")
    notes += [
        f"{one.title}: {name} is of {metric.items} of {one.items} items."
        for one in suite.categories
        for name, metric in one.metrics.items()
        if metric.items < one.items
    ]
    return Grid(f"{suite.info.title}: trials", columns, rows, notes)


def behaviour(runs: Mapping[str, SuiteTable]) -> Grid:
    """The paper's analysis: steps per sub-task, tokens per step and per sub-task."""
    info = next(iter(runs.values())).info
    rows = []
    for name, suite in runs.items():
        ours = _uses(suite)
        if len(runs) > 1:
            ours = [(f"{name}, {ours[-1][0]}", suite.use)]
        rows += [GridRow([title, *_ratios(one)]) for title, one in ours]
    if info.name == "bfcl_v3_mt":
        rows += [
            GridRow(
                [
                    f"{one.model} (paper, §4)",
                    f"{one.steps_per_sub_task:.1f}",
                    f"{one.tokens_per_step:.1f}",
                    f"{one.tokens_per_sub_task:.1f}",
                ],
                ours=False,
            )
            for one in paper.BEHAVIOUR
        ]
    notes = [
        "Means over runs of each run's own ratio; tokens are those that the model wrote. A sub-task is a part of the "
        "item as the benchmark counts it (of a multi-turn item: a turn of the user)."
    ]
    for name, suite in runs.items():
        if silent := suite.use.without_completion:
            notes.append(f"{name}: {silent} of {suite.use.runs} runs have no completion, and no tokens per step.")
    columns = ["category", "steps per sub-task", "tokens per step", "tokens per sub-task"]
    return Grid(f"{info.title}: steps and tokens", columns, rows, notes)


def use(suite: SuiteTable) -> Grid:
    """What a task takes, and how runs ended."""
    ends = list(suite.use.finishes)
    columns = ["category", "steps", "calls", "prompt tokens", "completion tokens", *(f"ended: {end}" for end in ends)]
    rows = [
        GridRow(
            [
                title,
                f"{one.steps:.1f}",
                f"{one.calls:.1f}",
                f"{one.prompt_tokens:,.0f}",
                f"{one.completion_tokens:,.0f}",
                *(f"{one.finishes.get(end, 0):.1%}" for end in ends),
            ]
        )
        for title, one in _uses(suite)
    ]
    return Grid(
        f"{suite.info.title}: use per task", columns, rows, ["Means over runs; shares of runs by how they ended."]
    )


def _uses(suite: SuiteTable) -> list[tuple[str, Use]]:
    """Of each category, then of all; the names of partial ones say so."""
    every = [(one.title, one.partial, one.use) for one in suite.categories]
    every.append(("all categories", any(one.partial for one in suite.categories), suite.use))
    return [(f"{title} (partial)" if partial else title, one) for title, partial, one in every]


def changes(suite: SuiteComparison) -> Grid:
    """What became of each category from run to run."""
    rows = [
        GridRow(
            [
                f"{one.before} → {one.after}",
                one.title,
                f"{_points(one.points)}{' (partial)' if one.partial else ''}",
                *([str(one.better), str(one.worse), str(one.same)] if one.category else [_NO_FIGURE] * 3),
                f"{one.verdict.upper()}, watched" if one.warning else one.verdict,
            ]
        )
        for one in suite.changes
    ]
    columns = ["runs", "category", "points", "items better", "items worse", "items equal", "beyond its interval"]
    notes = [
        "Differences are paired by item, with 95 % intervals: where nothing changed, one in twenty is beyond its own."
    ]
    return Grid(f"{suite.title}: from run to run", columns, rows, notes)


def markdown(table: Table) -> str:
    """An evaluation for the terminal and for documents."""
    partial = "**PARTIAL: not all items were run; see the notes below each table.**\n\n" if table.partial else ""
    roles = "".join(f"The {role} is {_inline(model)}.\n\n" for role, model in sorted(table.roles.items()))
    return f"# Evaluation of {_inline(table.model)}\n\n{partial}{roles}" + _markdown(
        [*overview_of_table(table), *(grid for one in table.suites for grid in of_suite(table.model, one))]
    )


def comparison_markdown(comparison: Comparison) -> str:
    """A comparison for the terminal and for documents; watched falls and differences come first."""
    head = f"# {_inline(' → '.join(comparison.tables))}\n\n"
    head += "".join(f"- {_inline(name)}: {_inline(table.model)}\n" for name, table in comparison.tables.items()) + "\n"
    head += "".join(f"**WARNING: {_inline(one)}**\n\n" for one in comparison.warnings)
    if comparison.differences:
        head += "**The runs differ in more than the model:**\n\n"
        head += "".join(f"- {_inline(one)}\n" for one in comparison.differences) + "\n"
    return head + _markdown(
        [
            *overview_of_comparison(comparison),
            *(grid for one in comparison.suites for grid in of_compared(comparison.runs_of(one.name), one)),
        ]
    )


def as_json(table: Table) -> str:
    """Everything that the table knows, and the published rows of its suites. Standard JSON: no NaN, no infinity."""
    every = sorted({one.source for one in paper.REFERENCES})
    references = {suite.info.name: paper.rows(suite.info.name, *every) for suite in table.suites}
    whole = {"table": table, "paper": {"source": paper.PAPER, "rows": references, "behaviour": paper.BEHAVIOUR}}
    return _json(whole)


def comparison_json(comparison: Comparison) -> str:
    """Everything that a comparison knows."""
    return _json({"runs": list(comparison.tables), "comparison": comparison, "warnings": comparison.warnings})


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode() + "\n"


def _points(points: Estimate) -> str:
    return f"{points.mean:+.1f} [{points.low:+.1f}, {points.high:+.1f}]"


def _published(rows: Sequence[tuple[str, list[float | None]]]) -> list[GridRow]:
    """Rows of the paper, each column with the digits that it prints."""
    digits = [
        2 if any(one is not None and round(one, 1) != one for one in column) else 1
        for column in zip(*(figures for _, figures in rows), strict=True)
    ]
    return [
        GridRow(
            [
                name,
                *(
                    _NO_FIGURE if one is None else f"{one:.{places}f}"
                    for one, places in zip(figures, digits, strict=True)
                ),
            ],
            ours=False,
        )
        for name, figures in rows
    ]


def decoding_text(decoding: Decoding) -> str:
    """A decoding on one line, without what it leaves to the endpoint."""
    known = [(field.name.replace("_", " "), getattr(decoding, field.name)) for field in fields(Decoding)]
    return ", ".join(f"{name} {value}" for name, value in known if value not in (None, {}))


def _departures(suite: SuiteTable) -> list[str]:
    """How a suite's decodings differ from the paper's; categories that differ alike are told together."""
    titles: dict[str, list[str]] = defaultdict(list)
    for one in suite.categories:
        if one.departures:
            titles[", ".join(one.departures)].append(one.title)
    return [
        text if len(found) == len(suite.categories) else f"{text} ({', '.join(found)})"
        for text, found in titles.items()
    ]


def _ratios(one: Use) -> list[str]:
    per_step = _NO_FIGURE if one.tokens_per_step is None else f"{one.tokens_per_step:.1f}"
    return [f"{one.steps_per_sub_task:.1f}", per_step, f"{one.tokens_per_sub_task:.1f}"]


def _markdown(grids: Sequence[Grid]) -> str:
    return "\n".join(_grid(grid) for grid in grids)


def _grid(grid: Grid) -> str:
    lines = [f"## {_inline(grid.title)}", "", _line([_inline(one) for one in grid.columns])]
    lines.append(_line(["---", *("---:" for _ in grid.columns[1:])]))
    for row in grid.rows:
        cells = [_inline(cell) for cell in row.cells]
        strong = grid.strong | {0} if row.ours and grid.strong else grid.strong
        lines.append(
            _line([f"**{one}**" if place in strong and one != _NO_FIGURE else one for place, one in enumerate(cells)])
        )
    return "\n".join([*lines, "", *(f"- {_inline(note)}" for note in grid.notes), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _inline(text: str) -> str:
    """Text that neither ends a cell nor a line."""
    return " ".join(text.replace("|", "\\|").split())
