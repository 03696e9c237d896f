"""Pages of sampled episodes for people: self-contained HTML without network access; the same episodes for trackers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from astra_jax.base.files import write_text
from astra_jax.pages.html import answer_text, template
from astra_jax.run.trackers import MAX_SAMPLES, LoggedSample

if TYPE_CHECKING:  # pages of data want no jax
    from astra_jax.grpo.exhaustion import Exhaustion
    from astra_jax.rollout.episode import Episode
    from astra_jax.rollout.records import Group
    from synthesis.core.records import Message

_GROUPS = 4


@dataclass(frozen=True)
class ShownVerdict:
    """Verdict of a call, for people; `is_good` if it worked and, where that is known, found what was asked for."""

    text: str
    is_good: bool


def verdicts_of(episode: Episode) -> list[ShownVerdict]:
    """Return the verdicts of an episode's calls, in their order."""
    is_counted = episode.score is not None and bool(episode.score.needed)
    found = []
    for call in episode.calls:
        outcome = call.outcome.replace("_", " ")
        if not call.ok:
            found.append(ShownVerdict(outcome, False))
        elif call.solved:
            parts = ", ".join(map(str, call.solved))
            found.append(ShownVerdict(f"{outcome}: answers sub-question {parts}", True))
        else:
            found.append(ShownVerdict(f"{outcome}{': answers no sub-question' if is_counted else ''}", not is_counted))
    return found


def logged_samples(groups: Sequence[Group]) -> list[LoggedSample]:
    """Return the first episodes of a batch for trackers: the prompt, all that follows it, and the reward."""
    episodes = itertools.islice((one for group in groups for one in group.episodes), MAX_SAMPLES)
    samples = []
    for one in episodes:
        first = next((n for n, message in enumerate(one.messages) if message.role == "assistant"), len(one.messages))
        prompt, completion = ("\n\n".join(map(_written, part)) for part in (one.messages[:first], one.messages[first:]))
        expected = "" if one.expected is None else answer_text(one.expected)
        samples.append(LoggedSample(prompt, completion, one.reward, expected))
    return samples


def _written(message: Message) -> str:
    calls = [f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in message.tool_calls]
    thought = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    return "\n".join([f"[{message.role}]", *filter(None, [thought, message.content]), *calls])


def write_episodes(path: Path | epath.Path, update: int, groups: Sequence[Group], metrics: Mapping[str, Any]) -> str:
    """Write the best and the worst episode of the batch's first groups, and the update's metrics; return the page.

    Args:
        groups: valid ones, so their best and worst episodes differ.
    """
    lead = "Of each group the best and the worst episode that this update trained on."
    return _write(path, f"GRPO, update {update}", [lead], [("", group) for group in groups[:_GROUPS]], metrics)


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
) -> str:
    shown = []
    for name, group in groups:
        best, *others = sorted(group.episodes, key=lambda episode: -episode.reward)
        question = _question(best.messages)
        shown.append(
            {
                "group": group,
                "summary": f"{name}: {question}" if name else question,
                "episodes": [best, *others[-1:]],
                "expected": best.expected,
                "offered": best.offered,
            }
        )
    html = template("episodes.html.jinja", Path(__file__).parent).render(
        title=title, lead=lead, shown=shown, metrics=dict(sorted(metrics.items())), verdicts_of=verdicts_of
    )
    write_text(path, html)
    return html


def _question(messages: Sequence[Message]) -> str:
    return next((one.content for one in messages if one.role == "user"), "")
