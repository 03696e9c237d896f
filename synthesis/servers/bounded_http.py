"""An HTTP transport that reads no more of an answer than it may have: what a server sends is the server's choice."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Of one answer. A tool's result is cut to a few thousand characters later, a list of tools has some kilobytes each."""


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """Ends an answer of more than `MOST_BYTES`, and refuses one that is compressed, which would grow as it is read.

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
        return response


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
