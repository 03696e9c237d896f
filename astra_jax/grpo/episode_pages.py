"""Pages of sampled episodes for people: self-contained HTML without network access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from astra_jax.base.files import write_text
from astra_jax.pages.html import template

if TYPE_CHECKING:  # pages of data want no jax
    from astra_jax.grpo.exhaustion import Exhaustion
    from astra_jax.rollout.filling import Group
    from synthesis.core.records import Message

_GROUPS = 4


def write_episodes(path: Path | epath.Path, update: int, groups: Sequence[Group], metrics: Mapping[str, Any]) -> None:
    """Write the best and the worst episode of the batch's first groups, and the update's metrics.

    Args:
        groups: valid ones, so their best and worst episodes differ.
    """
    lead = "Of each group the best and the worst episode that this update trained on."
    _write(path, f"GRPO, update {update}", [lead], [("", group) for group in groups[:_GROUPS]], metrics)


def write_exhausted(path: Path | epath.Path, exhausted: Exhaustion, metrics: Mapping[str, Any]) -> None:
    """Write a page for an exhausted run: rewards by environment, and episodes of the best, the worst and a typical
    group."""
    title = f"GRPO, no batch for update {exhausted.update}"
    lead = [*exhausted.lines()[:1], exhausted.advice, *map(str, exhausted.environments)]
    _write(path, title, lead, exhausted.shown_groups(), metrics)


def _write(
    path: Path | epath.Path,
    title: str,
    lead: Sequence[str],
    groups: Sequence[tuple[str, Group]],
    metrics: Mapping[str, Any],
) -> None:
    shown = []
    for name, group in groups:
        best, *others = sorted(group.episodes, key=lambda episode: -episode.reward)
        question = _question(best.messages)
        shown.append(
            {"group": group, "summary": f"{name}: {question}" if name else question, "episodes": [best, *others[-1:]]}
        )
    html = template("episodes.html.jinja", Path(__file__).parent).render(
        title=title, lead=lead, shown=shown, metrics=dict(sorted(metrics.items()))
    )
    write_text(path, html)


def _question(messages: Sequence[Message]) -> str:
    return next((one.content for one in messages if one.role == "user"), "")
