"""Base of every HTTP service of the project: listening, access, refusals and draining.

Pages of other sites are refused, with or without a token: by their `Origin`, and by any content type other than
`application/json`, which browsers send without a preflight. Without a token the `Host` must be this machine, since a
site's own name may resolve to this machine's address. `connections.py` limits connections; this module limits bodies.

    class Service(HttpService):
        def __init__(self, config: ReachConfig) -> None:
            super().__init__(config, [web.get("/health", self._health)], most_bytes=1 << 20)

        def refusal(self, request, refused):
            return web.json_response({"error": refused.text}, status=refused.status, headers=refused.headers)

Handlers raise `HttpRefusal`; each service chooses the format of a refusal.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import hdrs, web

from astra_jax.base.access import CHALLENGE, ReachConfig, is_own_origin, names_this_machine, shows_token
from astra_jax.base.connections import Connection, Connections

OPEN_PATH = "/health"
"""Path that needs no token and that is answered until the service exits."""
_SHOWN = 80  # characters of a header in a refusal
_LAST_SECONDS = 2.0  # for the last answers after the drain; requests that still run are then cut off
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpRefusal(Exception):
    """Exception that answers a request with an error.

    Attributes:
        status: HTTP status.
        text: the problem and its fix.
        headers: headers of the answer.
    """

    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers or {}


class HttpService(abc.ABC):
    """HTTP server that drains on `stop`: requests in flight finish first.

    Args:
        config: address, token, TLS and limits.
        routes: routes of the service.
        most_bytes: largest body of a request; a larger one is refused with 413.

    Attributes:
        config: as given.
        port: port of the started service.
        draining: True once `stop` was called.
    """

    def __init__(self, config: ReachConfig, routes: Iterable[web.RouteDef], *, most_bytes: int) -> None:
        self.config = config
        self.port = 0
        self.draining = False
        self._most_bytes = most_bytes
        self._open = 0  # open requests
        self._idle = asyncio.Event()
        self._idle.set()
        app = web.Application(client_max_size=most_bytes, middlewares=[self._guard])
        app.router.add_routes(routes)
        self._held_bytes = 0  # bytes of bodies
        # A caller that disconnects frees its share: the handler is cancelled.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_LAST_SECONDS,
            keepalive_timeout=config.idle_seconds,
            lingering_time=config.header_seconds,  # for the rest of a refused request
            max_line_size=config.max_header_bytes,
            max_field_size=config.max_header_bytes,
            max_headers=config.max_headers,
            auto_decompress=False,  # a small compressed body could become a large one
        )
        self._connections: Connections | None = None

    async def start(self) -> None:
        """Listen, and set `port`.

        Raises:
            OSError: the address is not available.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self.config, self._runner.server)
        self.port = await self._connections.listen()

    async def stop(self) -> int:
        """Accept no more requests, let those in flight finish, then close. Return how many were cut off."""
        self.draining = True
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.deafen()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.drain_seconds)
        cut = self._open
        await self._runner.cleanup()
        if connections is not None:
            await connections.close()
        return cut

    @abc.abstractmethod
    def refusal(self, request: web.Request, refused: HttpRefusal) -> web.StreamResponse:
        """Return the answer to a refused request."""

    def admit(self, request: web.Request) -> None:
        """Check the token. Raises `HttpRefusal` for a request that the service does not handle."""
        if request.path != OPEN_PATH and not shows_token(request.headers, self.config.token):
            raise HttpRefusal(401, "send the header Authorization: Bearer TOKEN", CHALLENGE)

    def finish(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Return the answer to send. A streamed answer has already been sent."""
        return response

    def _admit(self, request: web.Request) -> None:
        """Check the host and origin, as every service does, then call `admit`."""
        host, origin = request.headers.get(hdrs.HOST), request.headers.get(hdrs.ORIGIN)
        if self.config.token is None and not names_this_machine(host):
            here = f"{self.config.scheme}://127.0.0.1:{self.port}/"
            text = f"the host {(host or '')[:_SHOWN]!r} is not this machine; ask for {here}, or use a token"
            raise HttpRefusal(403, text)
        if not is_own_origin(origin, host):
            text = f"Origin is {(origin or '')[:_SHOWN]!r}; requests are taken from this service's own pages only"
            raise HttpRefusal(403, text)
        self.admit(request)

    def _claim(self, request: web.Request) -> int:
        """Return the bytes that a request's body may take; 0 if no body is read.

        Raises:
            HttpRefusal: the content type is not JSON, the body is too large, or too many bytes are in flight.
        """
        if request.method in _WITHOUT_BODY or request.match_info.http_exception is not None:
            return 0
        if request.content_type != "application/json":
            raise HttpRefusal(415, f"Content-Type is {request.content_type[:_SHOWN]!r}; send application/json")
        if (encoding := request.headers.get(hdrs.CONTENT_ENCODING, "identity")) != "identity":
            raise HttpRefusal(415, f"Content-Encoding is {encoding[:_SHOWN]!r}; send the body as it is")
        size = self._most_bytes if request.content_length is None else request.content_length
        if size > self._most_bytes:
            raise self._too_large()
        if self._held_bytes and self._held_bytes + size > self.config.max_pending_bytes:
            text = f"{self._held_bytes} bytes of requests are under way, {size} more are too many; try again later"
            raise HttpRefusal(429, text, {"Retry-After": "1"})
        return size

    async def _receive(self, request: web.Request) -> None:
        """Read the body, for a later `request.read()`.

        Raises:
            HttpRefusal: the body is too large, too slow or broken.
        """
        try:
            async with asyncio.timeout(self.config.body_seconds):
                await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError as error:
            raise HttpRefusal(400, f"the body is broken: {error}") from None
        except TimeoutError:
            text = f"the body was not there after {self.config.body_seconds:g} s; send it at once"
            raise HttpRefusal(408, text) from None

    def _too_large(self) -> HttpRefusal:
        return HttpRefusal(413, f"the body is larger than {self._most_bytes} bytes; send less")

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = request.transport.get_protocol() if request.transport is not None else None
        assert connection is None or isinstance(connection, Connection)
        self._open += 1
        self._idle.clear()
        if connection is not None:
            connection.begin()
        size = 0
        try:
            self._admit(request)
            if size := self._claim(request):
                self._held_bytes += size
                await self._receive(request)
            response = await handler(request)
        except HttpRefusal as refused:
            response = self.refusal(request, refused)
        except web.HTTPException as error:  # no such route, or another method
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            text = f"{request.method} {request.path}: {error.reason}"
            response = self.refusal(request, HttpRefusal(error.status, text, allowed))
        finally:
            if connection is not None:
                connection.end()
            self._held_bytes -= size
            self._open -= 1
            if not self._open:
                self._idle.set()
        return self.finish(request, response)
