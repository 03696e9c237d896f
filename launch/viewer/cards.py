"""A dataset's card as tables and bars. A card is whatever JSON its writer gave it; what it lacks is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from astra_jax.evaluation.grids import decoding_text
from astra_jax.evaluation.saved import SuiteRun
from synthesis.core import charts
from synthesis.core.typed import convert_to
from synthesis.environments import statistics as of_environments
from synthesis.trajectories import statistics as of_trajectories
from synthesis.trajectories.judge import AXES

_STAGES = {
    "Trajectory": (
        *(
            "collect",
            "registries",
            "tools",
            "normalize",
            "propose",
            "graph",
            "verify",
            "tasks",
            "augment",
            "duplicates",
        ),
        *("score", "interact", "judge"),
    ),
    "ToolEnvironment": (
        *("decompose", "distinct", "validate", "quality", "augment", "implement", "merge", "distract", "verify"),
    ),
}
"""In the order of the pipelines, which a card does not keep."""
_LARGE = ("config", "statistics", "rejected")
_TENTHS, _TWENTIETHS = (0.0, 1.0, 0.1), (0.0, 1.0, 0.05)


@dataclass(frozen=True)
class Chart:
    """A title and either columns or rows; `note` is what one number says of it all, such as the mean."""

    title: str
    note: str
    columns: charts.Columns | None
    rows: list[charts.ChartRow]


@dataclass(frozen=True)
class Rejection:
    """How many inputs of a stage a reason has cost; `bar` is its length in pixels."""

    stage: str
    reason: str
    count: int
    bar: float


@dataclass(frozen=True)
class SuiteCard:
    """What an evaluation ran of a benchmark; of each category its title, how many items it has, and the decoding."""

    title: str
    harness: str
    licence: str
    categories: list[tuple[str, int | None, str]]


@dataclass(frozen=True)
class ShownCard:
    """What the card page shows.

    Attributes:
        kind: of the records.
        facts: what the card says in one value.
        table: the paper's table; empty where the card has no such statistics.
        groups: headings with their charts.
        suites: of an evaluation.
        rejections: by stage, in the pipeline's order, the most frequent reason first; None: the card does not say.
        more: the rest of the card, and the numbers behind the charts, by name.
    """

    kind: str
    facts: dict[str, Any]
    table: dict[str, str]
    groups: list[tuple[str, list[Chart]]]
    suites: list[SuiteCard]
    rejections: list[Rejection] | None
    more: dict[str, Any]


def shown_card(card: Mapping[str, Any]) -> ShownCard:
    """A card, ready for its page."""
    statistics = card.get("statistics")
    statistics = statistics if isinstance(statistics, Mapping) else {}
    environments = card.get("kind") == "ToolEnvironment"
    facts = {name: value for name, value in card.items() if not isinstance(value, (Mapping, list))}
    if suites := _suites(card):  # an evaluation: who played its roles stands beside the model
        facts = {**_at(card, "roles"), **facts}
    names = ("kind", "count", "model", "user", "judge", "split", "seed", "teacher", "embedder")
    ordered = [name for name in names if name in facts] + sorted(facts.keys() - set(names))
    # Statistics first: it is what people open; then what made them.
    large = [name for name in _LARGE if name in card and name not in facts]
    others = sorted(card.keys() - facts.keys() - set(large))
    groups = _of_environments(statistics) if environments else _of_trajectories(statistics)
    rejected, stages = card.get("rejected"), _STAGES["ToolEnvironment" if environments else "Trajectory"]
    return ShownCard(
        kind=str(card.get("kind", "")),
        facts={name: facts[name] for name in ordered},
        table=_table(card, statistics, environments),
        groups=[(title, [chart for chart in drawn if chart]) for title, drawn in groups if any(drawn)],
        suites=suites,
        rejections=_rejections(rejected, stages) if isinstance(rejected, Mapping) else None,
        more={name: card[name] for name in (*large, *others) if card[name]},
    )


def _table(card: Mapping[str, Any], statistics: Mapping[str, Any], environments: bool) -> dict[str, str]:
    if not statistics:
        return {}
    try:
        table = (of_environments if environments else of_trajectories).table_rows(statistics)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError):
        return {}  # another writer's statistics; they are shown as they are
    runs = _at(statistics, "all_runs")
    if runs and all(_is_number(runs.get(name)) for name in ("runs", "injected_failure_rate")):
        failed = _at(card, "rejected", "judge").get("judge_failed", 0)
        rate = failed / runs["runs"] if runs["runs"] and _is_number(failed) else 0.0
        table["runs before judging"] = (
            f"{runs['runs']:,}; failures were injected into {runs['injected_failure_rate']:.1%} of their calls"
        )
        table["runs without a valid judgement"] = f"{failed:,}; {rate:.1%} (rejected: judges fail closed)"
    return table


def _suites(card: Mapping[str, Any]) -> list[SuiteCard]:
    try:
        runs = convert_to(card.get("suites", []), list[SuiteRun])
    except msgspec.ValidationError:
        return []  # another version's; they are shown as they are
    return [
        SuiteCard(
            run.info.title,
            run.info.harness,
            run.info.licence,
            [
                (
                    one.title,
                    run.totals.get(one.name),
                    decoding_text(run.decodings[one.name]) if one.name in run.decodings else "",
                )
                for one in run.info.categories
            ],
        )
        for run in runs
    ]


def _of_trajectories(statistics: Mapping[str, Any]) -> list[tuple[str, list[Chart | None]]]:
    axes = _at(statistics, "axes")
    return [
        (
            "Conversations",
            [
                _chart("Messages", statistics, "messages_per_conversation"),
                _chart("Tool calls", statistics, "tool_calls_per_conversation"),
                _chart("Tool documents", statistics, "tools_per_conversation"),
                _chart("Thousands of tokens, estimated", statistics, "tokens_per_conversation"),
                _chart("Roles of the messages", statistics, "role_shares", shares=True),
            ],
        ),
        (
            "What they are about",
            [
                _chart("Domains", statistics, "domains"),
                _chart("Languages", statistics, "languages"),
                _chart("Where tools ran, by conversation", statistics, "execution_shares", shares=True),
                _chart("Where tools ran, by call", statistics, "execution_shares_of_calls", shares=True),
                _chart("Where tools ran, by server", statistics, "execution_shares_of_servers", shares=True),
            ],
        ),
        (
            "Failed calls",
            [
                _chart("Injected, by kind", statistics, "injected_failures_by_kind"),
                _chart("Real, by kind", statistics, "real_failures_by_kind"),
            ],
        ),
        (
            "Scores",
            [
                _chart("Reward, the mean of the axes", statistics, "reward", bins=_TWENTIETHS),
                *(
                    _chart(name.replace("_", " ").capitalize(), axes, name, bins=_TENTHS)
                    for name in (*AXES, *sorted(axes.keys() - set(AXES)))
                ),
            ],
        ),
    ]


def _of_environments(statistics: Mapping[str, Any]) -> list[tuple[str, list[Chart | None]]]:
    return [
        (
            "Questions",
            [
                _chart("Sub-questions", statistics, "sub_questions"),
                _chart("Hops", statistics, "hops"),
                _chart("Tool calls", statistics, "tool_calls"),
                _chart("Scenarios", statistics, "structures", shares=True),
            ],
        ),
        (
            "What they are about",
            [
                _chart("Domains", statistics, "domains", shares=True),
                _chart("Languages", statistics, "languages", shares=True),
                _chart("Where questions come from", statistics, "modes", shares=True),
                _chart("Rules by which outputs hold answers", statistics, "rules", shares=True),
                _chart("Worlds with state, by domain", _at(statistics, "worlds"), "domains"),
                _chart("States asked for in a task", _at(statistics, "worlds"), "states_asked_for"),
            ],
        ),
    ]


def _chart(
    title: str,
    statistics: Mapping[str, Any],
    name: str,
    *,
    shares: bool = False,
    bins: tuple[float, float, float] | None = None,
) -> Chart | None:
    """The chart of one statistic: numbers by name, or a mapping that has them as its `histogram`."""
    found = _at(statistics, name)
    values = found.get("histogram", found)
    if not charts.is_histogram(values):
        return None
    of_all = {} if values is found else found
    notes = [f"{word} {of_all[word]:g}" for word in ("mean", "median", "least") if _is_number(of_all.get(word))]
    if charts.has_order(values):
        return Chart(title, ", ".join(notes), charts.columns(values, bins=bins), [])
    return Chart(title, ", ".join(notes), None, charts.chart_rows(values, shares=shares))


def _rejections(rejected: Mapping[str, Any], stages: Sequence[str]) -> list[Rejection]:
    """Of {stage: {reason: count}}, or of {reason: count} where there is one stage only."""
    counts = [
        (stage, reason, count)
        for stage, reasons in rejected.items()
        for reason, count in (reasons if isinstance(reasons, Mapping) else {}).items()
    ]
    counts += [("", reason, count) for reason, count in rejected.items() if not isinstance(count, Mapping)]
    counts = [one for one in counts if _is_number(one[2])]
    largest = max((count for _, _, count in counts), default=0) or 1
    place = {stage: index for index, stage in enumerate(stages)}
    counts.sort(key=lambda one: (place.get(one[0], len(place)), one[0], -one[2], one[1]))
    return [Rejection(*one, bar=charts.ROW_WIDTH * max(0, one[2]) / largest) for one in counts]


def _at(value: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """What is at a path; empty where it is no mapping."""
    found: Any = value
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
