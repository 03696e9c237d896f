"""Format an evaluation or a comparison as text tables, for Markdown and the HTML page, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
_MAX_CHARACTERS = 300
"""Most characters of a problem in the list of failures."""

Runs = Mapping[str, SuiteTable]
"""A suite's scores by the name of the run."""


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        columns: the first one names the rows.
        rows: ours.
        published: the paper's, below ours.
        strong: columns of headlines.
        folded: only the page has it, folded.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    published: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    strong: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation, or a comparison of several.

    Attributes:
        warnings: watched falls, and runs that left items out.
        models: the model of each run, and the models that its suites asked.
        differences: of the runs besides the model.
    """

    title: str
    warnings: list[str]
    models: list[str]
    differences: list[str]
    grids: list[Grid]


def report_of(one: Table | Comparison) -> EvaluationReport:
    """Return the report of an evaluation or a comparison."""
    compared = one if isinstance(one, Comparison) else None
    tables = {one.model: one} if isinstance(one, Table) else one.tables
    sources = _STAGES if compared else _MODELS
    suites: list[Runs] = [
        {run: suite for run, table in tables.items() for suite in table.suites if suite.info.name == first.info.name}
        for first in next(iter(tables.values())).suites
    ]
    suites = [runs for runs in suites if len(runs) == len(tables)]
    changed = {suite.name: [_changes(suite)] for suite in compared.suites} if compared else {}
    grids = [_overview(suites, sources)] if len(suites) > 1 else []
    for runs in suites:
        name = next(iter(runs.values())).info.name
        more = changed[name] if compared else [_trials(next(iter(runs.values())))]
        grids += [_scores(runs, sources), *more, _use(runs), _about(runs), _failures(runs)]
    partial = [
        f"{name} did not run all items: its scores are marked PARTIAL, and not to be compared with whole runs"
        for name, table in tables.items()
        if table.partial
    ]
    models = [
        f"{name if compared else 'model'}: {table.model}"
        + _weights(table)
        + "".join(f", {role}: {model}" for role, model in sorted(table.roles.items()))
        for name, table in tables.items()
    ]
    return EvaluationReport(
        title=" → ".join(tables) if compared else f"Evaluation of {next(iter(tables))}",
        warnings=partial + (compared.warnings if compared else []),
        models=models,
        differences=compared.differences if compared else [],
        grids=grids,
    )


def _weights(table: Table) -> str:
    if (weights := table.weights) is None:
        return ""
    step = "" if weights["step"] is None else f", step {weights['step']}"
    return f" ({weights['folder']}{step}, sha256 {str(weights['sha256'])[:16]})"


def _overview(suites: Sequence[Runs], sources: Sequence[str]) -> Grid:
    """Return the headlines of all suites."""
    rows = [[run, *(score_text(one) for runs in suites for one in runs[run].headlines)] for run in suites[0]]
    infos = [next(iter(runs.values())).info for runs in suites]
    columns = [(info, title) for info in infos for title in info.headline]
    published = []
    for model in dict.fromkeys(one.model for info in infos for one in paper.rows(info.name, *sources)):
        # A model of Table 1 has its AIME scores in Table 3.
        own = [one for one in paper.REFERENCES if one.model == model and one.source in sources]
        known = [[one.score(info.name, *info.headline[title]) for one in own] for info, title in columns]
        published.append([model, *(_number(next((one for one in of if one is not None), None)) for of in known)])
    titles = [f"{info.title}, {title}" if len(info.headline) > 1 else info.title for info, title in columns]
    notes = [f"Headlines; published rows ({', '.join(sources)}): {paper.PAPER}."]
    return Grid("Overview", ["model", *titles], rows, published, notes)


def _scores(runs: Runs, sources: Sequence[str]) -> Grid:
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


def _trials(suite: SuiteTable) -> Grid:
    """Return how trials of a single run differ, pass^k, and the benchmark's further scores."""
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


_USE: Mapping[str, Callable[[Use], str]] = {
    "steps per sub-task": lambda one: f"{one.steps_per_sub_task:.1f}",
    "tokens per step": lambda one: _UNKNOWN if one.tokens_per_step is None else f"{one.tokens_per_step:.1f}",
    "tokens per sub-task": lambda one: f"{one.tokens_per_sub_task:.1f}",
    "steps": lambda one: f"{one.steps:.1f}",
    "calls": lambda one: f"{one.calls:.1f}",
    "prompt tokens": lambda one: f"{one.prompt_tokens:,.0f}",
    "completion tokens": lambda one: f"{one.completion_tokens:,.0f}",
}


def _use(runs: Runs) -> Grid:
    """Return what a task takes, the paper's analysis of steps and tokens, and how runs ended."""
    info = next(iter(runs.values())).info
    ends = list(dict.fromkeys(end for suite in runs.values() for end in suite.use.finishes))
    rows, notes = [], []
    for name, suite in runs.items():
        whole = ("all categories", any(one.partial for one in suite.categories), suite.use)
        every = [*((one.title, one.partial, one.use) for one in suite.categories), whole]
        if len(runs) > 1:
            every = [(f"{name}, {whole[0]}", *whole[1:])]
        for title, partial, use in every:
            shares = [f"{use.finishes.get(end, 0):.1%}" for end in ends]
            cells = [text(use) for text in _USE.values()]
            rows.append([f"{title} (partial)" if partial else title, *cells, *shares])
        if silent := suite.use.without_completion:
            notes.append(f"{name}: {silent} of {suite.use.runs} runs have no completion, and no tokens per step.")
    columns = ["category", *_USE, *(f"ended: {end}" for end in ends)]
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


def _about(runs: Runs) -> Grid:
    """Return the harness, its data, pitfalls and the decodings."""
    info = next(iter(runs.values())).info
    rows = [["harness", f"{info.harness}, {info.license}"]]
    if info.needs:
        rows.append(["models that it also asks", " and ".join(sorted(info.needs))])
    rows += [[f"SHA-256 of {name}", digest] for name, digest in sorted(info.data_sha256.items())]
    rows += [
        [f"decoding of {name}, {column.title}", decoding_text(suite.decodings[column.name])]
        for name, suite in runs.items()
        for column in info.categories
    ]
    title = f"{info.title}: harness, data and decoding"
    return Grid(title, ["what", "value"], rows, notes=list(info.notes), folded=True)


def _failures(runs: Runs) -> Grid:
    """Return the items that some run does not always solve."""
    info = next(iter(runs.values())).info
    titles = {one.name: one.title for one in info.categories}
    by_item = {name: {(one.category, one.item): one for one in suite.items} for name, suite in runs.items()}
    rows = []
    for category, item in next(iter(by_item.values())):
        items = {name: of_run[category, item] for name, of_run in by_item.items()}
        if any(round(one.score, 6) < 100 for one in items.values()):  # means of trials are rounded
            problems = [
                f"{name}: {problem}" if len(runs) > 1 else problem
                for name, one in items.items()
                for problem in one.problems
            ]
            cut = [one if len(one) <= _MAX_CHARACTERS else f"{one[:_MAX_CHARACTERS]}…" for one in problems]
            rows.append([item, titles[category], *(f"{one.score:.1f}" for one in items.values()), "; ".join(cut)])
    columns = ["item", "category", *(list(runs) if len(runs) > 1 else ["score"]), "what was wrong"]
    notes = ["astra inspect WORKDIR/results shows the conversations."]
    return Grid(f"{info.title}: {len(rows)} items not always solved", columns, rows, notes=notes, folded=True)


def _changes(suite: SuiteComparison) -> Grid:
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
    report = report_of(one)
    lines = [f"# {_inline(report.title)}", ""]
    for warning in report.warnings:
        lines += [f"**WARNING: {_inline(warning)}**", ""]
    lines += [*(f"- {_inline(line)}" for line in report.models), ""]
    if report.differences:
        differences = [f"- {_inline(line)}" for line in report.differences]
        lines += ["**The runs differ in more than the model:**", "", *differences, ""]
    for grid in (one for one in report.grids if not one.folded):
        rule = _line(["---", *["---:"] * len(grid.columns[1:])])
        lines += [f"## {_inline(grid.title)}", "", _line(grid.columns), rule]
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
