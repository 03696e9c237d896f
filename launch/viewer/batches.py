"""Pages of a GRPO run's batches.

GET  /                                   updates; ?sort orders them
GET  /update/N                           the groups that an update trained on; ?sort orders them
GET  /update/N/group/PLACE/episode/E     an episode: the conversation, and its tokens with logprobs and versions
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from aiohttp import web
from markupsafe import Markup

from astra_jax.base.http_service import HttpRefusal
from astra_jax.grpo.dump import DumpedBatches, DumpedUpdate, GroupLine
from astra_jax.rollout.episode import Episode
from launch.viewer.conversation import turns_of
from launch.viewer.lists import RecordList, Row, beside, part
from launch.viewer.service import page
from synthesis.core.datasets import DatasetError

LIKELY = (0.9, 0.5, 0.1)
"""Lowest probabilities of a token of class 0, 1 and 2; less likely ones are of class 3."""
_TOKENS = 1_000
"""On a page."""
_UPDATES = {
    "update": "title",
    "reward": "number",
    "groups": "number",
    "episodes": "number",
    "tokens": "number",
    "versions": "text",
}
_GROUPS = {
    "question": "question",
    "environment": "code",
    "versions": "text",
    "tokens": "number",
    "deviation": "number",
    "reward": "number",
    "episodes": "text",
}
_LABELS = {
    "tokens": "sampled tokens",
    "versions": "sampled by versions",
    "before": "weights before",
    "after": "weights after",
}
_EPISODE = "/update/{}/group/{}/episode/{}"


@dataclass(frozen=True)
class ShownToken:
    """A sampled token; `likely` is its class, see `LIKELY`. The text of a part of a character is U+FFFD."""

    position: int
    id: int
    text: str
    logprob: float
    likely: int


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens that one version sampled; or that nobody sampled (None), then without `tokens`."""

    text: str
    version: int | None
    tokens: Sequence[ShownToken]


class BatchPages:
    """Shows the batches of a run."""

    noun = "updates"

    def __init__(self, batches: DumpedBatches) -> None:
        self._batches = batches
        rows = [Row(str(one.update), _values(one, _UPDATES)) for one in batches.updates.values()]
        self._list = RecordList(f"Batches of the GRPO run {batches.run}", self.noun, _UPDATES, rows, "/update/{}")

    def __len__(self) -> int:
        return len(self._batches.updates)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        update = r"/update/{update:\d{1,9}}"
        episode = update + r"/group/{place:\d{1,9}}/episode/{episode:\d{1,9}}"
        return [web.get("/", self._list.show), web.get(update, self._update), web.get(episode, self._episode)]

    async def _update(self, request: web.Request) -> web.Response:
        update = self._known_update(request)
        try:
            lines, filling = self._batches.shard(update)
        except DatasetError as error:
            raise _changed(error) from None
        one, counts = self._batches.updates[update], filling.get("counts")
        values = _values(one, ("reward", "groups", "episodes", "tokens", "versions", "before", "after"))
        groups = RecordList(
            f"Update {update}", "groups", _GROUPS, [_group_row(update, *line) for line in enumerate(lines)],
            _EPISODE.format(update, "{}", 0), address=f"/update/{update}",
        )  # fmt: skip
        return page(
            "batch.html.jinja",
            values={_LABELS.get(name, name): value for name, value in values.items()},
            counts=counts if isinstance(counts, dict) else {},
            beside=self._list.around(request, str(update))["beside"],
            **groups.view(request),
        )

    async def _episode(self, request: web.Request) -> web.Response:
        update = self._known_update(request)
        place, number = int(request.match_info["place"]), int(request.match_info["episode"])
        if place >= self._batches.updates[update].groups:
            raise HttpRefusal(404, f"update {update} has no group {place}; choose one of its list")
        try:
            group, pieces = self._batches.group(update, place)
        except DatasetError as error:
            raise _changed(error) from None
        if number >= len(group.episodes):
            raise HttpRefusal(404, f"group {place} of update {update} has no episode {number}; choose one of the list")
        one = group.episodes[number]
        tokens = part(range(len(one.token_ids)), request, _TOKENS)
        score, numbers = one.score, {"reward": one.reward, "deviation of the group": group.deviation}
        assert score is not None, "episodes of a batch are scored"
        if score.needed:
            numbers |= {"recall": score.recall, "precision": score.precision}
        return page(
            "episode.html.jinja",
            title=f"Update {update}, group {group.index}, episode {number}",
            heading=f"Group {group.index}, episode {number}",
            language="",
            values={
                "environment": group.environment_id,
                **numbers,
                **score.parts,
                "calls": score.calls,
                "turns": one.turns,
                "finish": one.finish.replace("_", " "),
                "tokens": len(one.token_ids),
                "sampled tokens": sum(one.loss_mask),
                "sampled by versions": one.sampled_by,
            },
            turns=turns_of(one.messages),
            stretches=stretches(one, pieces, tokens.shown),
            likely=LIKELY,
            part=tokens,
            at=lambda wanted: f"{_EPISODE.format(update, place, number)}?page={wanted}#tokens",
            home=f"/update/{update}",
            records={"title": f"groups of update {update}"},
            beside=beside(range(len(group.episodes)), number, lambda n: _EPISODE.format(update, place, n)),
        )

    def _known_update(self, request: web.Request) -> int:
        update = int(request.match_info["update"])
        if update not in self._batches.updates:
            raise HttpRefusal(404, f"there is no update {update}; choose one of the list")
        return update


def _group_row(update: int, place: int, one: GroupLine) -> Row:
    link = Markup('<a href="{}">{:.2f}</a> ')
    rewards = (link.format(_EPISODE.format(update, place, n), reward) for n, reward in enumerate(one.rewards))
    values = {
        **_values(one, ("tokens", "deviation", "versions")),
        "question": one.question or "(no question)",
        "environment": one.environment_id,
        "reward": fmean(one.rewards),
        "episodes": Markup("").join(rewards),
    }
    return Row(str(place), values)


def _values(one: DumpedUpdate | GroupLine, names: Iterable[str]) -> dict[str, Any]:
    """Return fields of a record; of versions the oldest and the newest."""
    values = {name: getattr(one, name) for name in names}
    oldest, newest = one.versions
    return {**values, "versions": str(oldest) if oldest == newest else f"{oldest}–{newest}"}


def stretches(episode: Episode, pieces: Mapping[int, str], positions: Sequence[int]) -> list[Stretch]:
    """Return the tokens at some positions of an episode.

    Args:
        pieces: the text of each token id.
    """

    def text(position: int) -> str:
        return pieces.get(episode.token_ids[position], "\ufffd")

    def token(at: int) -> ShownToken:
        likely = math.exp(min(0.0, episode.logprobs[at]))
        number = next((kind for kind, least in enumerate(LIKELY) if likely >= least), len(LIKELY))
        return ShownToken(at, episode.token_ids[at], text(at), episode.logprobs[at], number)

    found = []
    by_version = itertools.groupby(positions, key=lambda at: episode.versions[at] if episode.loss_mask[at] else None)
    for version, group in by_version:
        inside = [*group]
        tokens = [] if version is None else [token(at) for at in inside]
        found.append(Stretch("".join(map(text, inside)), version, tokens))
    return found


def _changed(error: DatasetError) -> HttpRefusal:
    return HttpRefusal(503, f"the dataset has changed since this started, or is damaged ({error}); start it again")
