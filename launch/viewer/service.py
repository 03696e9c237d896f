"""The service of `launch.inspect`: the pages of a dataset, and its card.

GET  /            the list, by the dataset's kind; what else there is by kind: `environment_pages.py`,
                  `trajectory_pages.py`, `result_pages.py`, `batch_pages.py`
GET  /card        the dataset's card
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web

from launch.viewer.cards import shown_card
from launch.viewer.page_service import PageService, ViewerConfig
from launch.viewer.pages import page


class Pages(Protocol):
    """The pages of one kind of records."""

    noun: str
    """What the records are called, in the plural."""

    def __len__(self) -> int: ...

    def routes(self) -> list[web.RouteDef]:
        """The list, `/`, and what it leads to. Handlers raise `HttpRefusal`."""


class ViewerService(PageService):
    """Serves a dataset.

    Args:
        card: the dataset's.
    """

    def __init__(self, pages: Pages, card: Mapping[str, Any], config: ViewerConfig) -> None:
        self._pages = pages
        self._card = card
        routes = [*pages.routes(), web.get("/card", self._show_card)]
        super().__init__(config, routes, script="viewer.js", program="launch.inspect")

    async def _show_card(self, request: web.Request) -> web.Response:
        return page("card.html.jinja", card=shown_card(self._card), noun=self._pages.noun)
