"""The service behind the pages of `launch.inspect` and `launch.watch`: who may ask, what it sends along, how it ends.

    GET  /page.css, /page.js, and a script of the program's own

Records come from anywhere, so their texts are escaped, and nothing but this service's own scripts runs.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from aiohttp import web

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
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="any user name, the key as password", charset="UTF-8"'}


@dataclass(frozen=True, kw_only=True)
class ViewerConfig(ReachConfig):
    """How the pages are reached; browsers send the key as HTTP Basic's password."""

    RISK = "read the data and run tools"

    port: Port = 8800
    drain_seconds: SecondsOrZero = 35.0


class PageService(HttpService):
    """Serves pages until it is stopped; what each of them links to is here.

    Args:
        routes: the pages.
        script: the file of this folder that these pages run beside `page.js`.
        program: that whoever looks at them has started.
    """

    config: ViewerConfig

    def __init__(self, config: ViewerConfig, routes: Iterable[web.RouteDef], *, script: str, program: str) -> None:
        self._program = program
        scripts = {script: (HERE / script).read_text(encoding="utf-8"), "page.js": html.SCRIPT}
        fixed = [web.get(f"/{name}", partial(_send, text, "text/javascript")) for name, text in scripts.items()]
        style = web.get("/page.css", partial(_send, html.STYLE, "text/css"))
        super().__init__(config, [*routes, *fixed, style], most_bytes=_MOST_BYTES)

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
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def admit(self, request: web.Request) -> None:
        """Whoever shows the token, a browser as HTTP Basic's password."""
        if self.draining:  # on a connection that was open before
            raise HttpRefusal(503, f"{self._program} is stopping; start it again")
        token = self.config.token
        if token is not None and not (shows_token(request.headers, token) or _shows_password(request.headers, token)):
            raise HttpRefusal(401, "give the key as the password, with any user name", _CHALLENGE)


async def _send(text: str, kind: str, request: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)


def _shows_password(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request has HTTP Basic (RFC 7617) with the token as its password, in constant time."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    try:
        password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(password, token.encode())
