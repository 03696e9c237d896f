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

from launch.viewer.evaluated import FILTERS, NAME_FIELDS, RESULT_KEYS, SCORES, Evaluated, Name, ResultFilter, turns_of
from launch.viewer.listing import address, asked, beside, checked_sort, page_number, query
from launch.viewer.pages import page, short
from sandbox.http_service import HttpRefusal
from synthesis.core.datasets import DatasetError

_OF_THE_LIST = "list_"
"""Before the names of the list's filter, in the address of a result, which has a suite and a trial of its own."""


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
        wanted = _wanted(request)
        return page(
            "results.html.jinja",
            page=self._evaluated.page(wanted, page_number(request)),
            wanted=wanted,
            evaluated=self._evaluated,
            scores=SCORES,
            keys=RESULT_KEYS,
            link=partial(address, wanted),
            place=partial(_place, wanted),
        )

    async def _one(self, request: web.Request) -> web.Response:
        name = Name(**asked(request, NAME_FIELDS))
        wanted = _wanted(request, prefix=_OF_THE_LIST)
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
            home=f"/{query(wanted)}",
            beside=beside([one.name for one in self._evaluated.chosen(wanted)], name, partial(_place, wanted)),
            place=partial(_place, wanted),
        )


def _wanted(request: web.Request, prefix: str = "") -> ResultFilter:
    given = asked(request, [f"{prefix}{name}" for name in FILTERS])
    wanted = ResultFilter(**{name.removeprefix(prefix): value for name, value in given.items()})
    if wanted.score not in ("", *SCORES):
        raise HttpRefusal(400, f"score is {short(wanted.score)}; give one of {', '.join(SCORES)}")
    checked_sort(wanted.sort, RESULT_KEYS)
    return wanted


def _place(wanted: ResultFilter, name: Name) -> str:
    """Where a result's page is, which leads back to the list that it was chosen from."""
    listed = {f"{_OF_THE_LIST}{field}": value for field, value in asdict(wanted).items() if value}
    return f"/result?{urlencode(asdict(name) | listed)}"
