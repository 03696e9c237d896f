"""The pages of an evaluation's results.

GET  /           results; ?text, ?suite, ?category, ?score, ?finish and ?trial choose some of them, ?page a part
GET  /result     one of them, by ?suite, ?category, ?item and ?trial: its figures, its item's other trials, the
                 conversation
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from urllib.parse import urlencode

from aiohttp import web

from launch.viewer.evaluated import FILTERS, NAME_FIELDS, SCORES, Evaluated, Name, ResultFilter, turns_of
from launch.viewer.listing import address, asked, page_number
from launch.viewer.pages import page, short
from sandbox.http_service import HttpRefusal
from synthesis.core.datasets import DatasetError


class ResultPages:
    """Shows the results of an evaluation."""

    noun = "results"

    def __init__(self, evaluated: Evaluated) -> None:
        self._evaluated = evaluated

    def __len__(self) -> int:
        return len(self._evaluated)

    def routes(self) -> list[web.RouteDef]:
        """See the module."""
        return [web.get("/", self._list), web.get("/result", self._one)]

    async def _list(self, request: web.Request) -> web.Response:
        wanted = ResultFilter(**asked(request, FILTERS))
        if wanted.score not in ("", *SCORES):
            raise HttpRefusal(400, f"score is {short(wanted.score)}; give one of {', '.join(SCORES)}")
        return page(
            "results.html.jinja",
            page=self._evaluated.page(wanted, page_number(request)),
            wanted=wanted,
            evaluated=self._evaluated,
            scores=SCORES,
            link=partial(address, wanted),
            place=_place,
        )

    async def _one(self, request: web.Request) -> web.Response:
        name = Name(**asked(request, NAME_FIELDS))
        try:
            result = self._evaluated.get(name)
        except DatasetError as error:
            raise HttpRefusal(
                503, f"the dataset has changed since this was started ({error}); start it again"
            ) from None
        if result is None:
            raise HttpRefusal(
                404,
                f"there is no trial {short(name.trial)} of the item {short(name.item)} in {short(name.suite)}, "
                f"{short(name.category)}; choose one of the list",
            )
        return page(
            "result.html.jinja",
            result=result,
            own=name,
            model=self._evaluated.model,
            trials=self._evaluated.trials_of(name),
            turns=turns_of(result.messages),
            place=_place,
        )


def _place(name: Name) -> str:
    """Where a result's page is."""
    return f"/result?{urlencode(asdict(name))}"
