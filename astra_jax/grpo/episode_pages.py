"""Sampled episodes as a page for people: self-contained HTML, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from synthesis.core.files import write_text
from synthesis.core.html import template

if TYPE_CHECKING:  # pages of data want no jax
    from astra_jax.rollout.filling import Group
    from synthesis.core.records import Message

_GROUPS = 4


def write_episodes(path: Path | epath.Path, update: int, groups: Sequence[Group], metrics: Mapping[str, Any]) -> None:
    """The best and the worst episode of the batch's first groups, and the update's metrics.

    Args:
        groups: valid ones, so that the two differ.
    """
    shown = []
    for group in groups[:_GROUPS]:
        best, *_, worst = sorted(group.episodes, key=lambda episode: -episode.reward)
        shown.append({"group": group, "question": _question(best.messages), "episodes": [best, worst]})
    html = template("episodes.html.jinja", Path(__file__).parent).render(
        update=update, shown=shown, metrics=dict(sorted(metrics.items()))
    )
    write_text(path, html)


def _question(messages: Sequence[Message]) -> str:
    return next((one.content for one in messages if one.role == "user"), "")
