"""What people see of a run's batches: its updates, their groups, and an episode's tokens as they were sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from astra_jax.grpo.dump import DumpedUpdate, GroupLine
from astra_jax.rollout.episode import Episode

UPDATE_KEYS: Mapping[str, Callable[[DumpedUpdate], Any]] = {
    "update": lambda one: one.update,
    "reward": lambda one: one.reward,
    "episodes": lambda one: one.episodes,
    "tokens": lambda one: one.tokens,
}
"""What the list of updates can be sorted by."""
GROUP_KEYS: Mapping[str, Callable[[tuple[int, GroupLine]], Any]] = {
    "question": lambda one: one[1].question.casefold(),
    "environment": lambda one: one[1].environment_id,
    "deviation": lambda one: one[1].deviation,
    "reward": lambda one: fmean(one[1].rewards),
    "tokens": lambda one: one[1].tokens,
}
"""What the groups of an update can be sorted by."""
LIKELY = (0.9, 0.5, 0.1)
"""Probabilities from which on a token is of class 0, 1, 2; those below are of class 3."""


@dataclass(frozen=True)
class ListOrder:
    """The order of a list; "": the dataset's."""

    sort: str = ""


@dataclass(frozen=True)
class ShownToken:
    """A token that was sampled.

    Attributes:
        place: in the sequence, from 0.
        text: of a part of a character it is U+FFFD.
        likely: see `LIKELY`.
    """

    place: int
    number: int
    text: str
    logprob: float
    version: int
    likely: int


@dataclass(frozen=True)
class Stretch:
    """Tokens that follow each other, all sampled by one version; or all of them not sampled: then only their text."""

    text: str
    version: int | None
    tokens: Sequence[ShownToken]


def versions_text(versions: tuple[int, int]) -> str:
    """Of the oldest and the newest version."""
    oldest, newest = versions
    return str(oldest) if oldest == newest else f"{oldest}–{newest}"


def stretches(episode: Episode, pieces: Mapping[int, str], begin: int, end: int) -> list[Stretch]:
    """The tokens of an episode at the places from `begin` to before `end`.

    Args:
        pieces: the text of each token.
    """
    places = range(begin, min(end, len(episode.token_ids)))
    found = []
    for (sampled, version), group in itertools.groupby(
        places, key=lambda place: (episode.loss_mask[place], episode.versions[place])
    ):
        inside = [*group]
        texts = [pieces.get(episode.token_ids[place], "\ufffd") for place in inside]
        if not sampled:
            found.append(Stretch("".join(texts), None, ()))
            continue
        tokens = [
            ShownToken(
                place=place,
                number=episode.token_ids[place],
                text=text,
                logprob=episode.logprobs[place],
                version=version,
                likely=_likely(episode.logprobs[place]),
            )
            for place, text in zip(inside, texts, strict=True)
        ]
        found.append(Stretch("".join(texts), version, tokens))
    return found


def _likely(logprob: float) -> int:
    probability = math.exp(min(0.0, logprob))
    return next((kind for kind, least in enumerate(LIKELY) if probability >= least), len(LIKELY))
