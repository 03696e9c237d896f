"""A dataset's card as tables. A card is whatever JSON its writer gave it; what it lacks is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from astra_jax.evaluation.grids import decoding_text
from astra_jax.evaluation.saved import SuiteRun
from launch.viewer.lists import LINKS, Pages
from launch.viewer.service import PageService, ViewerConfig, page
from launch.viewer.stages import in_order
from synthesis.core.compat import convert_stored
from synthesis.environments import statistics as of_environments
from synthesis.trajectories import statistics as of_trajectories

_FIRST_FACTS = ("kind", "count", "model", "user", "judge", "split", "seed", "teacher", "embedder")
_LARGE = ("config", "statistics", "rejected")


class ViewerService(PageService):
    """The service of `astra inspect`: the pages of a dataset, and /card.

    Args:
        card: the dataset's.
        more: other pages of the same run, by the addresses of their lists.
    """

    def __init__(
        self, pages: Pages, card: Mapping[str, Any], config: ViewerConfig, more: Mapping[str, Pages] = {}
    ) -> None:
        self._pages, self._card = pages, card
        routes = [*pages.routes(), *(route for one in more.values() for route in one.routes())]
        routes.append(web.get("/card", self._show_card))
        super().__init__(config, routes, script="viewer.js", program="launch.inspect")
        lists = {"/": pages, **more} if more else {}
        links = [(address, one.noun.capitalize()) for address, one in lists.items()]
        self._runner.app[LINKS] = [*links, ("/card", "Dataset card")]

    async def _show_card(self, request: web.Request) -> web.Response:
        card = shown_card(self._card)
        return page("card.html.jinja", card=card, noun=self._pages.noun, decoding_text=decoding_text)


@dataclass(frozen=True)
class ShownCard:
    """Content of the card's page.

    Attributes:
        facts: single values of the card.
        table: the paper's table; empty where the card has no such statistics.
        suites: of an evaluation.
        rejections: stage, reason and count, in the pipeline's order, the most frequent reason first; None: the card
            does not say.
        more: the rest of the card, by name.
    """

    facts: Mapping[str, Any]
    table: Mapping[str, str]
    suites: Sequence[SuiteRun]
    rejections: Sequence[tuple[str, str, float]] | None
    more: Mapping[str, Any]


def shown_card(card: Mapping[str, Any]) -> ShownCard:
    """Prepare a card for its page."""
    statistics, environments = _at(card, "statistics"), card.get("kind") == "ToolEnvironment"
    try:
        suites = convert_stored(card.get("suites", []), list[SuiteRun])
    except msgspec.ValidationError:
        suites = []  # another version's; they are shown as they are
    facts = {name: value for name, value in card.items() if not isinstance(value, (Mapping, list))}
    if suites:
        facts = {**_at(card, "roles"), **facts}
    names = [name for name in _FIRST_FACTS if name in facts] + sorted(facts.keys() - set(_FIRST_FACTS))
    large = [name for name in _LARGE if name in card and name not in facts]
    more = [*large, *sorted(card.keys() - facts.keys() - set(large))]
    return ShownCard(
        facts={name: facts[name] for name in names},
        table=_table(card, statistics, environments),
        suites=suites,
        rejections=_rejections(card["rejected"]) if isinstance(card.get("rejected"), Mapping) else None,
        more={name: card[name] for name in more if card[name]},
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
        failed = _at(card, "rejected/judge").get("judge_failed", 0)
        share = failed / runs["runs"] if runs["runs"] and _is_number(failed) else 0.0
        injected = f"failures were injected into {runs['injected_failure_rate']:.1%} of their calls"
        table["runs before judging"] = f"{runs['runs']:,}; {injected}"
        table["runs without a valid judgement"] = f"{failed:,}; {share:.1%} (rejected: judges fail closed)"
    return table


def _rejections(rejected: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Return the counts of {stage: {reason: count}}, or of {reason: count} where there is one stage only."""
    by_stage = [(stage, given) for stage, given in rejected.items() if isinstance(given, Mapping)]
    by_stage.append(("", {reason: count for reason, count in rejected.items() if not isinstance(count, Mapping)}))
    counts = [
        (stage, reason, count) for stage, reasons in by_stage for reason, count in reasons.items() if _is_number(count)
    ]
    place = {stage: index for index, stage in enumerate(in_order({stage for stage, *_ in counts}))}
    return sorted(counts, key=lambda one: (place[one[0]], -one[2], one[1]))


def _at(value: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the mapping at a path; empty where there is none."""
    found: Any = value
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
