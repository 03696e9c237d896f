"""What every HTTP service of the house does alike: it listens, lets in who may come, refuses by name, and drains.

    class Service(HttpService):
        def __init__(self, config: ReachConfig) -> None:
            super().__init__(config, [web.get("/health", self._health)], most_bytes=1 << 20)

        def refusal(self, request, refused):
            return web.json_response({"error": refused.text}, status=refused.status, headers=refused.headers)

Handlers raise `HttpRefusal`; what a refusal looks like is the service's own affair.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from aiohttp import web

from sandbox.access import CHALLENGE, is_loopback, shows_token
from sandbox.settings import Port, SecondsOrZero, SettingError, Settings

OPEN_PATH = "/health"
"""What nobody has to show a token for, and what is answered to the last."""
_LAST_SECONDS = 2.0  # for the last answers to get out; whatever still runs once the drain is over is then cut off
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpRefusal(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        text: names what is wrong and what to send instead.
        headers: to send along.
    """

    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers or {}


@dataclass(frozen=True, kw_only=True)
class ReachConfig(Settings):
    """How a service is reached.

    Attributes:
        host: address to listen on; beyond loopback only with a token.
        port: 0 takes a free one.
        token: what callers must show; None asks for none.
        drain_seconds: how long requests in flight may go on once the service is told to stop.
    """

    RISK: ClassVar[str]
    """What whoever reaches the service could do."""
    TOKEN_NAME: ClassVar[str] = "token"
    """What the service's users know the token as."""

    host: str = "127.0.0.1"
    port: Port = 0
    token: str | None = None
    drain_seconds: SecondsOrZero = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.token and not is_loopback(self.host):
            raise SettingError(
                f"{type(self).__name__}.host={self.host!r} can be reached from other machines, and no "
                f"{self.TOKEN_NAME} is set: whoever reaches it could {self.RISK}; set one, or listen on 127.0.0.1"
            )


class HttpService(abc.ABC):
    """Listens until it is stopped; then lets the requests in flight end.

    Args:
        config: how it is reached.
        routes: what it answers.
        most_bytes: of a request's body; a larger one is refused with 413.

    Attributes:
        config: as given.
        port: the one that was taken, once it has started.
        draining: whether it has been told to stop.
    """

    def __init__(self, config: ReachConfig, routes: Iterable[web.RouteDef], *, most_bytes: int) -> None:
        self.config = config
        self.port = 0
        self.draining = False
        self._most_bytes = most_bytes
        self._open = 0  # requests
        self._idle = asyncio.Event()
        self._idle.set()
        app = web.Application(client_max_size=most_bytes, middlewares=[self._guard])
        app.router.add_routes(routes)
        # Whoever hangs up frees what he holds: the handler is cancelled.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_SECONDS)
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
        self.draining = True
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.drain_seconds)
        cut = self._open
        await self._runner.cleanup()
        return cut

    @abc.abstractmethod
    def refusal(self, request: web.Request, refused: HttpRefusal) -> web.StreamResponse:
        """The answer to a request that was refused."""

    def admit(self, request: web.Request) -> None:
        """Raises `HttpRefusal` for a request that is not to be handled."""
        if request.path != OPEN_PATH and not shows_token(request.headers, self.config.token):
            raise HttpRefusal(401, "send the header Authorization: Bearer TOKEN", CHALLENGE)

    def finish(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """The answer as it is to be sent; one that is streamed has been already."""
        return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        self._open += 1
        self._idle.clear()
        try:
            self.admit(request)
            response = await handler(request)
        except HttpRefusal as refused:
            response = self.refusal(request, refused)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._most_bytes} bytes; send less"
            response = self.refusal(request, HttpRefusal(413, text))
        except web.HTTPException as error:  # no such route, or not by this method
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            text = f"{request.method} {request.path}: {error.reason}"
            response = self.refusal(request, HttpRefusal(error.status, text, allowed))
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        return self.finish(request, response)
