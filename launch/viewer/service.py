"""The service behind the pages of `launch.inspect`: who may ask, what it sends along, how it ends.

    GET  /            the list, by the dataset's kind; what else there is by kind: `environment_pages.py`,
                      `trajectory_pages.py`, `result_pages.py`
    GET  /card        the dataset's card

Records come from anywhere, so their texts are escaped, and nothing but this service's own script runs.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from launch.viewer.cards import shown_card
from launch.viewer.pages import CALL, HERE, page
from sandbox.access import ReachConfig, shows_token
from sandbox.http_service import HttpRefusal, HttpService
from sandbox.settings import Port, SecondsOrZero
from synthesis.core import html

_MOST_BYTES = 1 << 20
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="dataset: any user name, the token as password", charset="UTF-8"'}


class Pages(Protocol):
    """The pages of one kind of records."""

    noun: str
    """What the records are called, in the plural."""

    def __len__(self) -> int: ...

    def routes(self) -> list[web.RouteDef]:
        """The list, `/`, and what it leads to. Handlers raise `HttpRefusal`."""


@dataclass(frozen=True, kw_only=True)
class ViewerConfig(ReachConfig):
    """How the pages are reached; browsers send the token as HTTP Basic's password."""

    RISK = "read the data and run tools"

    port: Port = 8800
    drain_seconds: SecondsOrZero = 35.0


class ViewerService(HttpService):
    """Serves a dataset until it is stopped.

    Args:
        card: the dataset's.
    """

    config: ViewerConfig

    def __init__(self, pages: Pages, card: Mapping[str, Any], config: ViewerConfig) -> None:
        self._pages = pages
        self._card = card
        self._script = (HERE / "viewer.js").read_text(encoding="utf-8")
        routes = [
            *pages.routes(),
            web.get("/card", self._show_card),
            web.get("/viewer.js", self._show_script),
            web.get("/page.css", self._show_style),
            web.get("/page.js", self._show_page_script),
        ]
        super().__init__(config, routes, most_bytes=_MOST_BYTES)

    # ------------------------------------------------------------------------------------------------------- handlers

    def refusal(self, request: web.Request, refused: HttpRefusal) -> web.Response:
        """As JSON to programs, as a page to people."""
        if request.path == CALL:
            response = web.json_response({"error": refused.text}, status=refused.status)
        else:
            response = page("served.html.jinja", refused.status, title="Not shown", text=refused.text)
        response.headers.update(refused.headers)
        return response

    def finish(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """With what the browser may do with it."""
        response.headers.update(_HEADERS)
        return response

    def admit(self, request: web.Request) -> None:
        """Whoever shows the token, a browser as HTTP Basic's password."""
        if self.draining:  # on a connection that was open before
            raise HttpRefusal(503, "launch.inspect is stopping; start it again")
        token = self.config.token
        if token is not None and not (shows_token(request.headers, token) or _shows_password(request.headers, token)):
            raise HttpRefusal(401, "give the token as the password, with any user name", _CHALLENGE)

    async def _show_card(self, request: web.Request) -> web.Response:
        return page("card.html.jinja", card=shown_card(self._card), noun=self._pages.noun)

    async def _show_script(self, request: web.Request) -> web.Response:
        return web.Response(text=self._script, content_type="text/javascript")

    async def _show_style(self, request: web.Request) -> web.Response:
        return web.Response(text=html.STYLE, content_type="text/css")

    async def _show_page_script(self, request: web.Request) -> web.Response:
        return web.Response(text=html.SCRIPT, content_type="text/javascript")


def _shows_password(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request has HTTP Basic (RFC 7617) with the token as its password, in constant time."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    try:
        password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(password, token.encode())
