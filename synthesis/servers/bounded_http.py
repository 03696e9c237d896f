"""An HTTP transport that bounds the size of an answer, which is the server's choice.

Answers that are not the server's own (a gateway's error, a login page) reach the client as the error `HTTP_FAILED`: the
SDK's own errors for those are indistinguishable from a tool's text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
from mcp.types import JSONRPCError, JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

from astra_jax.base.typed import decode_json

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Maximum size of an answer. A tool's result is cut to a few thousand characters later, a tool list has some kB a
tool."""
HTTP_FAILED = -31_900
"""The code of the JSON-RPC error that stands for an HTTP answer that is none to the request. The protocol has none."""
_GATE = (401, 403, 407, 429, 502, 503, 504)
"""Statuses of what stands before the tools (access, rate limits, proxies), whatever their bodies say."""
_OLD_TRANSPORT = (
    "if the server speaks HTTP+SSE alone (the transport that streamable HTTP replaced in 2025), it cannot be used; "
    "give the address of its streamable HTTP endpoint, often one that ends in /mcp"
)
_REDIRECTS = 5
"""Maximum number of redirects that are followed, all to the same server (a slash at the end of an address)."""


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """Ends an answer of more than `MOST_BYTES`, and refuses one that is compressed, which would grow as it is read.

    A request of JSON-RPC has an answer of JSON-RPC; anything else becomes the error `HTTP_FAILED`, whose message says
    what came. A session that is over (404) is left to the SDK's client, which knows it.

    Raises:
        httpx2.TransportError: as for other answers that cannot be read; the message says which of the two it was.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Called by the client."""
        request.headers["Accept-Encoding"] = "identity"
        response = await super().handle_async_request(request)
        if (encoding := response.headers.get("Content-Encoding", "identity").strip().lower()) != "identity":
            await response.aclose()
            raise httpx2.TransportError(f"the answer is packed as {encoding[:80]!r}, though it was asked for as it is")
        stream: Any = response.stream
        response.stream = _Bounded(stream, request.url)
        asked = await _asked(request)
        if asked is None or (problem := await _problem(request, response)) is None:
            return response
        await response.aclose()
        error = {"code": HTTP_FAILED, "message": problem}
        return httpx2.Response(502, json={"jsonrpc": "2.0", "id": asked, "error": error})


class _Sent(msgspec.Struct):
    id: str | int | None = None
    method: str | None = None


async def _asked(request: httpx2.Request) -> str | int | None:
    """Return the id of a request of JSON-RPC; None of what wants no answer."""
    if request.method != "POST":
        return None
    sent = decode_json(await request.aread(), _Sent)
    return sent.id if sent.method is not None else None


async def _problem(request: httpx2.Request, response: httpx2.Response) -> str | None:
    """Return why an answer to a JSON-RPC request is unusable; None if the client understands it."""
    status = response.status_code
    kind = response.headers.get("Content-Type", "").lower()
    if 300 <= status < 400:
        return _unfollowed(request, response)
    if status >= 400:
        if status == 404 and "mcp-session-id" in request.headers:
            return None
        is_json = kind.startswith("application/json")
        if status not in _GATE and is_json and isinstance(_message(await response.aread()), JSONRPCError):
            return None  # the server's own error, which the protocol lets have such a status
        hint = f"; {_OLD_TRANSPORT}" if status in (404, 405) else ""
        return f"HTTP {status} {response.reason_phrase}{hint}"
    if status == 202:
        return "HTTP 202, which says that no answer will come"
    if not kind.startswith(("application/json", "text/event-stream")):
        return f"an answer of the type {kind[:80]!r}, which is not the protocol's"
    if kind.startswith("application/json") and _message(body := await response.aread()) is None:
        return f"an answer that is not one message of JSON-RPC: {body[:80].decode(errors='replace')!r}"
    return None


def _message(body: bytes) -> JSONRPCMessage | None:
    """Return the message of JSON-RPC that a body is; None where it is none, such as a list of them."""
    try:
        return jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError:
        return None


def _unfollowed(request: httpx2.Request, response: httpx2.Response) -> str | None:
    """Return the problem of a redirect that the client does not follow: to another server, or one that drops the
    request."""
    location = response.headers.get("Location", "")
    followed = request.extensions.get("followed", 0)
    request.extensions["followed"] = followed + 1  # the next request has what this one has
    if response.status_code in (307, 308) and location and followed < _REDIRECTS:
        with contextlib.suppress(httpx2.InvalidURL):
            if _same_server(request.url, request.url.join(location)):
                return None
    return f"HTTP {response.status_code} to {location[:200]!r}; give that address if it is the server's"


def _same_server(here: httpx2.URL, there: httpx2.URL) -> bool:
    """The SDK's rule: the same origin, or its https at the usual ports; no name and password that it was not given."""
    if there.userinfo and there.userinfo != here.userinfo:
        return False
    secured = (here.scheme, there.scheme) == ("http", "https") and here.port is there.port is None
    return here.host == there.host and (secured or (here.scheme, here.port) == (there.scheme, there.port))


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, url: httpx2.URL) -> None:
        self._stream, self._url = stream, url

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for part in self._stream:
            count += len(part)
            if count > MOST_BYTES:
                message = f"the answer has more than {MOST_BYTES >> 20} MiB"
                _log.warning("MCP server %s: %s", self._url, message)  # the SDK keeps why a stream of events ended
                raise httpx2.TransportError(message)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
