"""The service behind the pages of `launch.inspect`: who may ask, what it sends along, how it ends.

    GET  /            the list, by the dataset's kind; what else there is by kind: `environments.py`, `trajectories.py`
    GET  /card        the dataset's card

Records come from anywhere, so their texts are escaped, and nothing but this service's own script runs. Pages of other
sites get nothing: without a token the host that the browser asked for has to be this machine (a site may give its own
name this machine's address).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from astra_jax.rollout.pages import template
from launch.viewer.answers import HERE, Refused, page, refusal
from launch.viewer.cards import shown_card
from sandbox.access import is_loopback, shows_token

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
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages(Protocol):
    """The pages of one kind of records."""

    noun: str
    """What the records are called, in the plural."""

    def __len__(self) -> int: ...

    def routes(self) -> list[web.RouteDef]:
        """The list, `/`, and what it leads to. Handlers raise `Refused`."""


@dataclass(frozen=True)
class ServiceConfig:
    """How the pages are reached.

    Attributes:
        host: address to listen on; beyond loopback only with a token.
        port: 0 takes a free one.
        token: what people must show, as HTTP Basic's password or as a bearer; None asks for none.
        drain_seconds: how long requests in flight may go on once the service is told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8800
    token: str | None = None
    drain_seconds: float = 35.0

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ValueError(
                f"ServiceConfig.host={self.host!r} can be reached from other machines, and no token is set: whoever "
                "reaches it could read the data and run tools; give a token (--token_file), or listen on 127.0.0.1"
            )
        if not self.drain_seconds >= 0:
            raise ValueError(f"ServiceConfig.drain_seconds={self.drain_seconds}: must be at least 0")


class Service:
    """Serves a dataset until it is stopped.

    Args:
        card: the dataset's.
    """

    def __init__(self, pages: Pages, card: Mapping[str, Any], config: ServiceConfig) -> None:
        self.config = config
        self.port = 0
        self._pages = pages
        self._card = card
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._script = (HERE / "viewer.js").read_text(encoding="utf-8")
        self._style = template("viewer.css.jinja", HERE).render()
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._guard])
        app.router.add_routes(pages.routes())
        app.router.add_get("/card", self._show_card)
        app.router.add_get("/viewer.js", self._show_script)
        app.router.add_get("/viewer.css", self._show_style)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self._site: web.TCPSite | None = None

    async def start(self) -> None:
        """Listen. `port` is then the one that was taken.

        Raises:
            OSError: the address cannot be had.
        """
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self.config.host, self.config.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> int:
        """Take no more requests, let those in flight end, then close. Returns how many were cut off."""
        self._draining = True
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.drain_seconds)
        cut = self._running
        await self._runner.cleanup()
        return cut

    # ------------------------------------------------------------------------------------------------------- handlers

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._running += 1
        self._idle.clear()
        try:
            self._admit(request)
            response = await handler(request)
        except Refused as refused:
            response = refusal(request, refused)
        except web.HTTPRequestEntityTooLarge:
            response = refusal(request, Refused(413, f"the body is larger than {_MOST_BYTES} bytes; send less"))
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = refusal(
                request, Refused(error.status, f"{request.method} {request.path}: {error.reason}", allowed)
            )
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        response.headers.update(_HEADERS)
        return response

    def _admit(self, request: web.Request) -> None:
        if self._draining:  # on a connection that was open before
            raise Refused(503, "launch.inspect is stopping; start it again")
        token = self.config.token
        if token is None:
            with contextlib.suppress(ValueError):  # of a host like "["
                if is_loopback(urlsplit(f"//{request.host}").hostname or ""):
                    return
            raise Refused(
                403,
                f"the host {request.host!r} is not this machine; open http://127.0.0.1:{self.port}/, or use a token",
            )
        if not shows_token(request.headers, token) and not _shows_password(request.headers, token):
            raise Refused(401, "give the token as the password, with any user name", _CHALLENGE)

    async def _show_card(self, request: web.Request) -> web.Response:
        return page("card.html.jinja", card=shown_card(self._card), noun=self._pages.noun)

    async def _show_script(self, request: web.Request) -> web.Response:
        return web.Response(text=self._script, content_type="text/javascript")

    async def _show_style(self, request: web.Request) -> web.Response:
        return web.Response(text=self._style, content_type="text/css")


def _shows_password(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request has HTTP Basic (RFC 7617) with the token as its password, in constant time."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    try:
        password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(password, token.encode())
