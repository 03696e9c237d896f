"""Pages of a GRPO run's batches.

GET  /                                   groups; ?text and ?update filter them, ?sort orders them
GET  /update/N/group/PLACE/episode/E     an episode: the conversation, and its tokens with logprobs and versions
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from aiohttp import web
from markupsafe import Markup

from astra_jax.base.http_service import HttpRefusal
from astra_jax.grpo.dump import DumpedBatches, GroupLine
from astra_jax.grpo.episode_pages import verdicts_of
from astra_jax.pages.html import answer_text
from astra_jax.rollout.episode import Episode
from launch.viewer.conversation import turns_of
from launch.viewer.lists import ListChoice, RecordList, Row, beside, part
from launch.viewer.service import page
from synthesis.core.datasets import DatasetError

LIKELY = (0.9, 0.5, 0.1)
"""Lowest probabilities of a token of class 0, 1 and 2; less likely ones are of class 3."""
_TOKENS = 1_000
"""On a page."""
_COLUMNS = {
    "question": "question",
    "environment": "code",
    "update": "number",
    "versions": "text",
    "tokens": "number",
    "deviation": "number",
    "reward": "number",
    "episodes": "text",
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
    """Shows the batches of a run. Raises `DatasetError`: one is missing or damaged."""

    noun = "groups"

    def __init__(self, batches: DumpedBatches) -> None:
        self._batches = batches
        lines = ((update, enumerate(batches.shard(update)[0])) for update in batches.updates)
        rows = [_row(update, place, one) for update, groups in lines for place, one in groups]
        self._list = RecordList(
            f"Batches of the GRPO run {batches.run}", self.noun, _COLUMNS, rows, "/{}/episode/0",
            text="text in question or environment", choices=(ListChoice("update", "all updates", text="update {}"),),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._list.rows)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        episode = r"/update/{update:\d{1,9}}/group/{place:\d{1,9}}/episode/{episode:\d{1,9}}"
        return [web.get("/", self._list.show), web.get(episode, self._episode)]

    async def _episode(self, request: web.Request) -> web.Response:
        update, place, number = (int(request.match_info[name]) for name in ("update", "place", "episode"))
        if update not in self._batches.updates:
            raise HttpRefusal(404, f"there is no update {update}; choose one of the list")
        if place >= self._batches.updates[update].groups:
            raise HttpRefusal(404, f"update {update} has no group {place}; choose one of its list")
        try:
            group, pieces = self._batches.group(update, place)
        except DatasetError as error:
            text = f"the dataset has changed since this started, or is damaged ({error}); start it again"
            raise HttpRefusal(503, text) from None
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
                **({} if one.expected is None else {"expected answer": answer_text(one.expected)}),
                **({"offered tools": one.offered} if one.offered else {}),
                "tokens": len(one.token_ids),
                "sampled tokens": sum(one.loss_mask),
                "sampled by versions": one.sampled_by,
            },
            turns=turns_of(one.messages, verdicts=verdicts_of(one)),
            stretches=stretches(one, pieces, tokens.shown),
            likely=LIKELY,
            part=tokens,
            at=lambda wanted: f"{_EPISODE.format(update, place, number)}?page={wanted}#tokens",
            home=f"/?update={update}",
            records={"title": f"groups of update {update}"},
            beside=beside(range(len(group.episodes)), number, lambda n: _EPISODE.format(update, place, n)),
        )


def _row(update: int, place: int, one: GroupLine) -> Row:
    link = Markup('<a href="{}">{:.2f}</a> ')
    rewards = (link.format(_EPISODE.format(update, place, n), reward) for n, reward in enumerate(one.rewards))
    oldest, newest = one.versions
    values = {
        "question": one.question or "(no question)",
        "environment": one.environment_id,
        "update": update,
        "versions": str(oldest) if oldest == newest else f"{oldest}–{newest}",
        "tokens": one.tokens,
        "deviation": one.deviation,
        "reward": fmean(one.rewards),
        "episodes": Markup("").join(rewards),
    }
    return Row(f"update/{update}/group/{place}", values, f"{one.question}\n{one.environment_id}".casefold())


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
