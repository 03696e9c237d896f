"""HTTP service of `astra inspect` and `astra watch`: who may ask, what is sent along, how it stops.

GET  /page.css, /page.js, and the script of the program

Records come from anywhere, so their texts are escaped, and only this service's own scripts run.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from astra_jax.base.access import ReachConfig, shows_token
from astra_jax.base.http_service import HttpRefusal, HttpService
from astra_jax.base.settings import Port, SecondsOrZero
from astra_jax.pages import html

CALL = "/call"
"""The only address for programs: answers and refusals are JSON."""
_HERE = Path(__file__).parent
_MAX_BYTES = 1 << 20
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
    """Address and key of the pages; browsers send the key as HTTP Basic's password."""

    RISK = "read the data and run tools"

    port: Port = 8800
    drain_seconds: SecondsOrZero = 35.0


class PageService(HttpService):
    """Serves pages, and the style and scripts that they load.

    Args:
        routes: of the pages.
        script: file of this folder that the pages run beside `page.js`.
        program: name of the program, for messages.
    """

    config: ViewerConfig

    def __init__(self, config: ViewerConfig, routes: Iterable[web.RouteDef], *, script: str, program: str) -> None:
        self._program = program
        scripts = {script: (_HERE / script).read_text(encoding="utf-8"), "page.js": html.SCRIPT}
        fixed = [web.get(f"/{name}", partial(_send, text, "text/javascript")) for name, text in scripts.items()]
        style = web.get("/page.css", partial(_send, html.STYLE, "text/css"))
        super().__init__(config, [*routes, *fixed, style], most_bytes=_MAX_BYTES)

    def refusal(self, request: web.Request, refused: HttpRefusal) -> web.Response:
        """Answer programs with JSON, people with a page."""
        if request.path == CALL:
            response = web.json_response({"error": refused.text}, status=refused.status)
        else:
            response = page("served.html.jinja", refused.status, title="Not shown", text=refused.text)
        response.headers.update(refused.headers)
        return response

    def finish(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Add the headers that say what a browser may do with an answer."""
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def admit(self, request: web.Request) -> None:
        """Refuse a request without the token; a browser sends it as HTTP Basic's password."""
        if self.draining:  # on a connection that was open before
            raise HttpRefusal(503, f"{self._program} is stopping; start it again")
        token = self.config.token
        if token is not None and not (shows_token(request.headers, token) or _shows_password(request.headers, token)):
            raise HttpRefusal(401, "give the key as the password, with any user name", _CHALLENGE)


def rendered(name: str, **values: Any) -> str:
    """Fill in a template of this folder; all values are escaped."""
    return html.template(name, _HERE).render(**values)


def page(name: str, status: int = 200, **values: Any) -> web.Response:
    """Answer with a page."""
    body = rendered(name, served=True, **values).encode("utf-8", "replace")  # a model can write a lone surrogate
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8")


def short(text: str) -> str:
    """Quote a text of a request in a refusal."""
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


async def _send(text: str, kind: str, request: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)


def _shows_password(headers: Mapping[str, str], token: str) -> bool:
    """Check a request's HTTP Basic password (RFC 7617) in constant time."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    try:
        password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(password, token.encode())
