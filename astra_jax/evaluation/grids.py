"""Format an evaluation or a comparison as text tables, for Markdown and the HTML page, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from astra_jax.evaluation import paper
from astra_jax.evaluation.comparison import Comparison, SuiteComparison
from astra_jax.evaluation.suite import Decoding
from astra_jax.evaluation.table import Score, SuiteTable, Table, Use

_UNKNOWN = "–"
_ENOUGH_TRIALS = 4
"""Number of trials of the paper on tau2-bench and ACEBench; fewer do not show a benchmark's own noise."""
_MODELS, _STAGES = ("Table 1", "Table 3"), ("Table 2", "Table 3")
"""Sources of published rows: one run is compared with models, several with the paper's stages."""


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        columns: the first one names the rows.
        rows: ours.
        published: the paper's, below ours.
        strong: columns of headlines.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    published: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation, or a comparison of several.

    Attributes:
        tables: scores by the name of the run.
        comparison: of several runs.
    """

    tables: Mapping[str, Table]
    comparison: Comparison | None = None

    @classmethod
    def of(cls, one: Table | Comparison) -> EvaluationReport:
        """Return the report of an evaluation or a comparison."""
        return cls(one.tables, one) if isinstance(one, Comparison) else cls({one.model: one})

    @property
    def title(self) -> str:
        """Return the heading."""
        return " → ".join(self.tables) if self.comparison else f"Evaluation of {next(iter(self.tables))}"

    @property
    def warnings(self) -> list[str]:
        """Return the falls of monitored categories, and the runs that left items out."""
        partial = [
            f"{name} did not run all items: its scores are marked PARTIAL, and not to be compared with whole runs"
            for name, table in self.tables.items()
            if table.partial
        ]
        return partial + (self.comparison.warnings if self.comparison else [])

    @property
    def models(self) -> list[str]:
        """Return the model of each run, and those of the roles that its suites asked."""
        lines = []
        for name, table in self.tables.items():
            roles = "".join(f", {role}: {model}" for role, model in sorted(table.roles.items()))
            lines.append(f"{name if self.comparison else 'model'}: {table.model}{roles}")
        return lines

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of the paper's tables that are shown next to it."""
        return _STAGES if self.comparison else _MODELS

    @property
    def suites(self) -> dict[str, dict[str, SuiteTable]]:
        """Return the suites that all runs have: scores by run."""
        by_name = {run: {one.info.name: one for one in table.suites} for run, table in self.tables.items()}
        first = next(iter(by_name.values()))
        common = [suite for suite in first if all(suite in suites for suites in by_name.values())]
        return {suite: {run: suites[suite] for run, suites in by_name.items()} for suite in common}

    def grids(self, suite: str) -> list[Grid]:
        """Return the grids of a suite; the first is the paper's table."""
        runs = self.suites[suite]
        if self.comparison:
            compared = next(one for one in self.comparison.suites if one.name == suite)
            return [scores(runs, self.sources), changes(compared), use(runs)]
        return [scores(runs, self.sources), trials(runs), use(runs)]

    def overview(self) -> list[Grid]:
        """Return the headlines of all suites in one grid; none where there is one suite."""
        if len(self.suites) < 2:
            return []
        rows = [
            [run, *(score_text(one) for runs in self.suites.values() for one in runs[run].headlines)]
            for run in self.tables
        ]
        infos = [next(iter(runs.values())).info for runs in self.suites.values()]
        columns = [(info, title) for info in infos for title in info.headline]
        published = []
        for model in dict.fromkeys(one.model for info in infos for one in paper.rows(info.name, *self.sources)):
            # A model of Table 1 has its AIME scores in Table 3.
            own = [one for one in paper.REFERENCES if one.model == model and one.source in self.sources]
            cells = []
            for info, title in columns:
                known = (one.score(info.name, *info.headline[title]) for one in own)
                cells.append(_number(next((number for number in known if number is not None), None)))
            published.append([model, *cells])
        titles = [f"{info.title}, {title}" if len(info.headline) > 1 else info.title for info, title in columns]
        notes = [f"Headlines; published rows ({', '.join(self.sources)}): {paper.PAPER}."]
        return [Grid("Overview", ["model", *titles], rows, published, notes)]


def scores(runs: Mapping[str, SuiteTable], sources: Sequence[str]) -> Grid:
    """Return the paper's table of a suite: our rows by run, then the published ones of some sources."""
    info = next(iter(runs.values())).info
    columns = ["model", *(one.title for one in info.categories), *info.headline]
    rows = [[name, *map(score_text, [*suite.categories, *suite.headlines])] for name, suite in runs.items()]
    shown = [*((one.name,) for one in info.categories), *info.headline.values()]
    published = [
        [f"{one.model} ({one.source})", *(_number(one.score(info.name, *names)) for names in shown)]
        for one in paper.rows(info.name, *sources)
    ]
    published = [row for row in published if set(row[1:]) != {_UNKNOWN}]
    notes = [f"Scores in percent with 95 % intervals, by {info.harness}."]
    for name, suite in runs.items():
        if short := [one for one in suite.categories if one.partial]:
            left = ", ".join(f"{one.title} {one.items} of {one.total} items" for one in short)
            notes.append(f"PARTIAL: {name} ran {left}. It is not to be compared with whole runs.")
        notes += [
            f"{name} was not sampled as the suite declares (the paper's way, where it has one): {one}."
            for one in _departures(suite)
        ]
    if published:
        notes += [f"Published rows: {paper.PAPER}.", *paper.NOTES.get(info.name, ())]
    first = 1 + len(info.categories)
    return Grid(info.title, columns, rows, published, notes, frozenset(range(first, first + len(info.headline))))


def score_text(one: Score) -> str:
    """Write a mean with its interval, and a mark where items were left out."""
    text = f"{one.score.mean:.1f} [{one.score.low:.1f}, {one.score.high:.1f}]"
    return f"{text} (partial: {one.items} of {one.total})" if one.partial else text


def trials(runs: Mapping[str, SuiteTable]) -> Grid:
    """Return the deviation between trials, pass^k, and the benchmark's further scores."""
    (suite,) = runs.values()
    most = max(len(one.means) for one in suite.categories)
    ks = [k for k in range(1, most + 1) if k & (k - 1) == 0 or k == most]
    ks = ks if any(one.pass_hat for one in suite.categories) else []
    metrics = sorted({name for one in suite.categories for name in one.metrics})
    rows = []
    for one in suite.categories:
        hat, spread = one.pass_hat or [], [_UNKNOWN] * 3
        if one.deviation is not None:
            spread = [f"{one.deviation:.2f}", f"{min(one.means):.1f}", f"{max(one.means):.1f}"]
        row = [one.title, f"{one.items} of {one.total}", str(len(one.means)), *spread]
        row += [f"{hat[k - 1]:.1f}" if k <= len(hat) else _UNKNOWN for k in ks]
        rows.append(row + [f"{one.metrics[n].mean:.3f}" if n in one.metrics else _UNKNOWN for n in metrics])
    columns = ["category", "items", "trials", "deviation", "least", "most", *(f"pass^{k}" for k in ks), *metrics]
    notes = ["Deviation, least and most are of the means of whole trials, in points."]
    if few := [one.title for one in suite.categories if len(one.means) < _ENOUGH_TRIALS]:
        notes.append(f"Fewer than {_ENOUGH_TRIALS} trials ({', '.join(few)}): how much runs differ is hardly known.")
    notes += [
        f"{one.title}: {name} is of {metric.items} of {one.items} items."
        for one in suite.categories
        for name, metric in one.metrics.items()
        if metric.items < one.items
    ]
    return Grid(f"{suite.info.title}: trials", columns, rows, notes=notes)


def use(runs: Mapping[str, SuiteTable]) -> Grid:
    """Return the steps and tokens of a task, the paper's analysis of them, and how runs ended."""
    info = next(iter(runs.values())).info
    ends = list(dict.fromkeys(end for suite in runs.values() for end in suite.use.finishes))
    rows, notes = [], []
    for name, suite in runs.items():
        whole = ("all categories", any(one.partial for one in suite.categories), suite.use)
        every = [*((one.title, one.partial, one.use) for one in suite.categories), whole]
        if len(runs) > 1:
            every = [(f"{name}, {whole[0]}", *whole[1:])]
        rows += [[f"{title} (partial)" if partial else title, *_use(one, ends)] for title, partial, one in every]
        if silent := suite.use.without_completion:
            notes.append(f"{name}: {silent} of {suite.use.runs} runs have no completion, and no tokens per step.")
    columns = ["category", "steps per sub-task", "tokens per step", "tokens per sub-task", "steps", "calls"]
    columns += ["prompt tokens", "completion tokens", *(f"ended: {end}" for end in ends)]
    published = []
    for row in paper.BEHAVIOUR if info.name == "bfcl_v3_mt" else ():
        known = [row.steps_per_sub_task, row.tokens_per_step, row.tokens_per_sub_task]
        cells = [f"{row.model} (paper, §4)", *(f"{number:.1f}" for number in known)]
        published.append(cells + [_UNKNOWN] * (len(columns) - len(cells)))
    ratios = (
        "Means over runs; ratios are each run's own, and shares are of runs by how they ended. Tokens of ratios are "
        "those that the model wrote. A sub-task is a part of the item as the benchmark counts it (of a multi-turn "
        "item: a turn of the user)."
    )
    return Grid(f"{info.title}: steps, tokens and use per task", columns, rows, published, [ratios, *notes])


def _use(one: Use, ends: Sequence[str]) -> list[str]:
    return [
        f"{one.steps_per_sub_task:.1f}",
        _UNKNOWN if one.tokens_per_step is None else f"{one.tokens_per_step:.1f}",
        f"{one.tokens_per_sub_task:.1f}",
        f"{one.steps:.1f}",
        f"{one.calls:.1f}",
        f"{one.prompt_tokens:,.0f}",
        f"{one.completion_tokens:,.0f}",
        *(f"{one.finishes.get(end, 0):.1%}" for end in ends),
    ]


def changes(suite: SuiteComparison) -> Grid:
    """Return the differences of each category from run to run."""
    rows = []
    for one in suite.changes:
        points = f"{one.points.mean:+.1f} [{one.points.low:+.1f}, {one.points.high:+.1f}]"
        counts = [str(one.better), str(one.worse), str(one.same)] if one.category else [_UNKNOWN] * 3
        verdict = f"{one.verdict.upper()}, watched" if one.warning else one.verdict
        partial = " (partial)" if one.partial else ""
        rows.append([f"{one.before} → {one.after}", one.title, f"{points}{partial}", *counts, verdict])
    columns = ["runs", "category", "points", "items better", "items worse", "items equal", "beyond its interval"]
    note = (
        "Differences are paired by item, with 95 % intervals: where nothing changed, one in twenty is beyond its own."
    )
    return Grid(f"{suite.title}: from run to run", columns, rows, notes=[note])


def markdown(one: Table | Comparison) -> str:
    """Write an evaluation or a comparison for the terminal and for documents; warnings come first."""
    report = EvaluationReport.of(one)
    lines = [f"# {_inline(report.title)}", ""]
    for warning in report.warnings:
        lines += [f"**WARNING: {_inline(warning)}**", ""]
    lines += [*(f"- {_inline(line)}" for line in report.models), ""]
    if report.comparison and report.comparison.differences:
        differences = [f"- {_inline(line)}" for line in report.comparison.differences]
        lines += ["**The runs differ in more than the model:**", "", *differences, ""]
    for grid in [*report.overview(), *(grid for suite in report.suites for grid in report.grids(suite))]:
        lines += [
            f"## {_inline(grid.title)}",
            "",
            _line(grid.columns),
            _line(["---", *["---:"] * len(grid.columns[1:])]),
        ]
        lines += [_line(row, grid.strong | {0} if grid.strong else grid.strong) for row in grid.rows]
        lines += [_line(row, grid.strong) for row in grid.published]
        lines += ["", *(f"- {_inline(note)}" for note in grid.notes), ""]
    return "\n".join(lines)


def as_json(one: Table | Comparison) -> str:
    """Write all that is known, with the published rows beside an evaluation. Standard JSON: no NaN, no infinity."""
    if isinstance(one, Comparison):
        whole: object = {"runs": list(one.tables), "comparison": one, "warnings": one.warnings}
    else:
        sources = sorted({row.source for row in paper.REFERENCES})
        rows = {suite.info.name: paper.rows(suite.info.name, *sources) for suite in one.suites}
        whole = {"table": one, "paper": {"source": paper.PAPER, "rows": rows, "behaviour": paper.BEHAVIOUR}}
    return msgspec.json.format(msgspec.json.encode(whole, order="deterministic"), indent=2).decode() + "\n"


def decoding_text(decoding: Decoding) -> str:
    """Write a decoding on one line, without the settings that it leaves to the endpoint."""
    known = [(field.name.replace("_", " "), getattr(decoding, field.name)) for field in fields(Decoding)]
    return ", ".join(f"{name} {value}" for name, value in known if value not in (None, {}))


def _departures(suite: SuiteTable) -> list[str]:
    """Return the decodings' differences from the paper's; categories that differ alike share a line."""
    titles: dict[str, list[str]] = {}
    for one in suite.categories:
        if one.departures:
            titles.setdefault(", ".join(one.departures), []).append(one.title)
    every = len(suite.categories)
    return [text if len(found) == every else f"{text} ({', '.join(found)})" for text, found in titles.items()]


def _number(number: float | None) -> str:
    """Write a published number with one decimal, or the two that the paper prints."""
    return _UNKNOWN if number is None else f"{number:.2f}".removesuffix("0")


def _line(cells: Sequence[str], strong: frozenset[int] = frozenset()) -> str:
    shown = [_inline(cell) for cell in cells]
    marked = [f"**{one}**" if n in strong and one != _UNKNOWN else one for n, one in enumerate(shown)]
    return f"| {' | '.join(marked)} |"


def _inline(text: str) -> str:
    """Return text that ends neither a cell nor a line."""
    return " ".join(text.replace("|", "\\|").split())
