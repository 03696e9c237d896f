"""The pages of trajectories.

GET  /                   trajectories; ?text, ?domain, ?language, ?reward and ?failures choose some of them, ?sort
                         their order, ?page a part
GET  /trajectory/ID      one of them: the conversation, the scores, the tool documents
"""

from __future__ import annotations

import math
from functools import partial
from urllib.parse import quote

from aiohttp import web

from launch.viewer.catalogue import parameters_of
from launch.viewer.conversations import TRAJECTORY_KEYS, Conversations, TrajectoryFilter, scores, turns
from launch.viewer.listing import address, asked, beside, checked_sort, page_number, query
from launch.viewer.pages import page, short
from sandbox.http_service import HttpRefusal
from synthesis.core.datasets import DatasetError


class TrajectoryPages:
    """Shows the trajectories of a dataset."""

    noun = "trajectories"

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def __len__(self) -> int:
        return len(self._conversations)

    def routes(self) -> list[web.RouteDef]:
        """See the module."""
        return [web.get("/", self._list), web.get("/trajectory/{id:.+}", self._one)]

    async def _list(self, request: web.Request) -> web.Response:
        wanted = _wanted(request)
        return page(
            "trajectories.html.jinja",
            page=self._conversations.page(wanted, page_number(request)),
            wanted=wanted,
            conversations=self._conversations,
            keys=TRAJECTORY_KEYS,
            link=partial(address, wanted),
            place=partial(_place, wanted),
        )

    async def _one(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        wanted = _wanted(request)
        try:
            trajectory = self._conversations.get(id)
            if trajectory is not None and trajectory.id != id:
                raise DatasetError("its records are others now")
        except DatasetError as error:
            raise HttpRefusal(
                503, f"the dataset has changed since this was started ({error}); start it again"
            ) from None
        if trajectory is None:
            raise HttpRefusal(404, f"there is no trajectory {short(id)}; choose one of the list")
        return page(
            "trajectory.html.jinja",
            trajectory=trajectory,
            question=next((one.content for one in trajectory.messages if one.role == "user"), ""),
            home=f"/{query(wanted)}",
            beside=beside([one.id for one in self._conversations.chosen(wanted)], id, partial(_place, wanted)),
            turns=turns(trajectory),
            scores=scores(trajectory),
            parameters_of=parameters_of,
        )


def _wanted(request: web.Request) -> TrajectoryFilter:
    wanted = TrajectoryFilter(
        **asked(request, ("text", "domain", "language", "failures", "sort")), reward=_least_reward(request)
    )
    checked_sort(wanted.sort, TRAJECTORY_KEYS)
    return wanted


def _place(wanted: TrajectoryFilter, id: str) -> str:
    """Where a trajectory's page is, which leads back to the list that it was chosen from."""
    return f"/trajectory/{quote(id)}{query(wanted)}"


def _least_reward(request: web.Request) -> float | None:
    text = request.query.get("reward", "").strip()
    if not text:
        return None
    try:
        least = float(text)
    except ValueError:
        least = math.nan
    if not math.isfinite(least):
        raise HttpRefusal(400, f"reward is {text[:40]!r}; give the least one, a number from 0 to 1")
    return least
