"""The pages of a GRPO run's batches.

GET  /                                   updates; ?sort their order, ?page a part
GET  /update/N                           the groups that one was trained on; ?sort, ?page
GET  /update/N/group/PLACE/episode/E     an episode: the conversation, and its tokens with their logprobs and versions;
                                         ?page a part of the tokens
"""

from __future__ import annotations

from functools import partial

from aiohttp import web

from astra_jax.grpo.dump import DumpedBatches
from launch.viewer.conversations import turns_of_messages
from launch.viewer.dumped import GROUP_KEYS, LIKELY, UPDATE_KEYS, ListOrder, stretches, versions_text
from launch.viewer.listing import address, arranged, asked, beside, checked_sort, page_number, part, query
from launch.viewer.pages import page
from sandbox.http_service import HttpRefusal
from synthesis.core.datasets import DatasetError

_TOKENS = 1_000
"""On a page."""


class BatchPages:
    """Shows the batches of a run."""

    noun = "updates"

    def __init__(self, batches: DumpedBatches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.updates)

    def routes(self) -> list[web.RouteDef]:
        """See the module."""
        one = r"/update/{update:\d{1,9}}"
        return [
            web.get("/", self._list),
            web.get(one, self._update),
            web.get(one + r"/group/{place:\d{1,9}}/episode/{episode:\d{1,9}}", self._episode),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        wanted = ListOrder(**asked(request, ("sort",)))
        checked_sort(wanted.sort, UPDATE_KEYS)
        updates = arranged(self._batches.updates.values(), wanted.sort, UPDATE_KEYS)
        return page(
            "batches.html.jinja",
            page=part(updates, page_number(request)),
            wanted=wanted,
            run=self._batches.run,
            keys=UPDATE_KEYS,
            link=partial(address, wanted),
            versions_text=versions_text,
        )

    async def _update(self, request: web.Request) -> web.Response:
        update = self._known_update(request)
        wanted = ListOrder(**asked(request, ("sort",)))
        checked_sort(wanted.sort, GROUP_KEYS)
        try:
            lines, filling = self._batches.shard(update)
        except DatasetError as error:
            raise _changed(error) from None

        def link(number: int, **more: str) -> str:
            return f"/update/{update}{query(wanted, **more, page=number)}"

        counts = filling.get("counts")
        return page(
            "batch.html.jinja",
            page=part(arranged(enumerate(lines), wanted.sort, GROUP_KEYS), page_number(request)),
            wanted=wanted,
            line=self._batches.updates[update],
            counts=counts if isinstance(counts, dict) else {},
            keys=GROUP_KEYS,
            link=link,
            place=lambda place, episode: _place(update, place, episode),
            versions_text=versions_text,
            beside=beside([*self._batches.updates], update, "/update/{}".format),
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
        episode = group.episodes[number]
        tokens = part(range(len(episode.token_ids)), page_number(request), _TOKENS)
        begin = (tokens.number - 1) * _TOKENS
        return page(
            "dumped_episode.html.jinja",
            update=update,
            number=number,
            group=group,
            episode=episode,
            turns=turns_of_messages(episode.messages),
            stretches=stretches(episode, pieces, begin, begin + _TOKENS),
            sampled=sum(episode.loss_mask),
            versions_text=versions_text,
            page=tokens,
            link=lambda wanted: f"{_place(update, place, number)}?page={wanted}#tokens",
            likely=LIKELY,
            home=f"/update/{update}",
            beside=beside(range(len(group.episodes)), number, partial(_place, update, place)),
        )

    def _known_update(self, request: web.Request) -> int:
        update = int(request.match_info["update"])
        if update not in self._batches.updates:
            raise HttpRefusal(404, f"there is no update {update}; choose one of the list")
        return update


def _place(update: int, place: int, episode: int) -> str:
    return f"/update/{update}/group/{place}/episode/{episode}"


def _changed(error: DatasetError) -> HttpRefusal:
    return HttpRefusal(503, f"the dataset has changed since this was started, or is damaged ({error}); start it again")
