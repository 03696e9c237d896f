"""Sampled episodes as a page for people: self-contained HTML, no scripts, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from etils import epath

from astra_jax.files import write_text

if TYPE_CHECKING:  # pages of data want no jax
    from astra_jax.rollout.filling import Group

_GROUPS = 4


def template(name: str, *folders: Path) -> jinja2.Template:
    """A template of this folder, or of `folders`; all may import `conversation.jinja`."""
    loader = jinja2.FileSystemLoader([Path(__file__).parent, *folders])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["json"] = lambda value: msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return environment.get_template(name)


def write_episodes(path: Path | epath.Path, update: int, groups: Sequence[Group], metrics: Mapping[str, Any]) -> None:
    """The best and the worst episode of the batch's first groups, and the update's metrics.

    Args:
        groups: valid ones, so that the two differ.
    """
    shown = []
    for group in groups[:_GROUPS]:
        best, *_, worst = sorted(group.episodes, key=lambda episode: -episode.reward)
        shown.append({"group": group, "question": best.messages[0].content, "episodes": [best, worst]})
    html = template("episodes.html.jinja").render(update=update, shown=shown, metrics=dict(sorted(metrics.items())))
    write_text(path, html)
