"""Clients of model endpoints: each API through its maker's own package, behind one interface.

Requests are written in the form of OpenAI's chat completions. An `Api` sends one in the form of its API and returns an
`EndpointReply`. A reply's `message` is the assistant message in the API's own form; a later request may hold it among
its `messages`, and it is sent back as it came. So opaque fields (signatures of thoughts, encrypted reasoning) and the
ids of calls reach the endpoint again.

Rates, budgets, retries and verdicts are `endpoint.Endpoint`'s: the packages' own retries are off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.parse
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from astra_jax.base.http_responses import MOST_BYTES, without_keys
from astra_jax.base.nesting import MOST_NESTING, nests_too_deeply
from astra_jax.base.proxies import may_be_proxied
from synthesis.core.chat_format import AssistantTurn
from synthesis.core.endpoint_limits import BYTES_PER_TOKEN
from synthesis.core.endpoint_replies import (
    BadStatus,
    EndpointReply,
    NoReply,
    UnreadableReply,
    end_problem,
    error_problem,
    shown,
    token_count,
)
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.openai_messages import read_reply, sendable, text_of
from synthesis.core.rate_limits import Usage

CONNECT_SECONDS = 8.0
"""For looking up the host's name, connecting and TLS; the answer has the request's own time."""

_KEPT_HEADERS = frozenset(
    {"host", "connection", "accept", "content-type", "content-length", "transfer-encoding", "user-agent"}
    | {"anthropic-version", "x-goog-api-client"}
)
"""Headers that a request keeps, beside the key; all others are deleted. An API's own ones belong here."""

_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
"""Encodings of a body that grow by a bounded factor while they are read."""


class Api(ABC):
    """One API of model endpoints. Makes its client when constructed, which needs a running event loop.

    Raises:
        ValueError: `base_url` is not an address.
    """

    def __init__(self, config: OpenAITeacherConfig) -> None:
        self.config = config
        address = urllib.parse.urlsplit(config.base_url)
        if not address.hostname or address.port == 0:
            raise ValueError("it names no host")
        address.hostname.encode("idna")
        self._keys = {"Authorization": f"Bearer {config.api_key}"}

    @abstractmethod
    def _request(self, body: bytes) -> Any:
        """Return the request as the client takes it. Raises `BadStatus`: the API cannot do what it asks for."""

    @abstractmethod
    async def _post(self, request: Any) -> Any:
        """Send one request; exceptions of the client pass through."""

    @abstractmethod
    def _read(self, given: Any, body: bytes) -> EndpointReply:
        """Return what the client gave. Raises `BadStatus` and `UnreadableReply`."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    @staticmethod
    def read_turn(message: Mapping[str, Any], tools: Collection[str] = ()) -> AssistantTurn:
        """Return what a reply's `message` says: reasoning, text and calls, under the endpoint's ids.

        Args:
            tools: names of the tools that the model was offered; see `openai_messages.read_reply`.
        """
        return read_reply(message, tools)

    async def send(self, body: bytes, seconds: float) -> EndpointReply:
        """Send a request once.

        Args:
            body: JSON in the form of OpenAI's chat completions.
            seconds: until the whole answer must be there.

        Raises:
            BadStatus: the endpoint answered with an error.
            NoReply: it did not answer.
            UnreadableReply: it answered with something that is no answer of the API.
        """
        request = self._request(body)
        try:
            async with asyncio.timeout(seconds):
                given = await self._post(request)
        except TimeoutError:
            raise NoReply(f"no answer in {seconds:g} s", connected=True) from None
        except Exception as error:
            raise self._translated(error) from None
        return self._read(given, body)

    def _translated(self, error: Exception) -> Exception:
        """Return an exception of the client as one of `send`'s."""
        import aiohttp

        response = getattr(error, "response", None)
        if (status := getattr(response, "status_code", 200)) != 200:
            assert response is not None
            location = self._without_key(str(response.headers.get("Location", "")))
            body = without_keys(response.content, self._keys)
            return BadStatus(status, body, response.headers.get("Retry-After"), location)
        chain = list(_causes(error))
        for cause in chain:
            if isinstance(cause, UnreadableReply):
                return cause
            if isinstance(cause, aiohttp.ClientHttpProxyError):
                return BadStatus(cause.status, f"the proxy answered {cause.message}".encode())
        problem = self._without_key(f"{type(chain[-1]).__name__}: {chain[-1]}")
        if any(isinstance(cause, aiohttp.ClientError | OSError) or _is_of_httpx(cause) for cause in chain):
            theirs = [cause for cause in chain if isinstance(cause, aiohttp.ClientError)]
            not_connected = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
            # The clients' packages call a dropped connection a timeout to connect: aiohttp's error tells the two apart.
            connected = not any(isinstance(cause, not_connected) for cause in theirs) and (
                bool(theirs) or not any(_is_of_httpx(cause, "Connect") for cause in chain)
            )
            return NoReply(problem, connected=connected)
        return UnreadableReply(f"the reply cannot be read ({problem:.300})")

    def _without_key(self, text: str) -> str:
        """Return a text of the endpoint without the key, which services repeat."""
        return without_keys(text.encode(errors="replace"), self._keys).decode(errors="replace")

    def _error(self, *levels: Any, answered: bool, usage: Usage | None) -> str:
        """Return the error that a reply with status 200 carries; "" where it carries none.

        Args:
            levels: the objects of the reply in which the API puts errors.
            answered: whether the reply holds an answer too, which the error then broke off.
            usage: that the reply names.

        Raises:
            BadStatus: it holds no answer, and the error names a status.
            UnreadableReply: it holds no answer.
        """
        if (error := error_problem(*levels)) is None:
            return ""
        problem, status = self._without_key(error[0]), error[1]
        if answered:
            return f"broken off by the endpoint ({problem})"
        if status is not None:
            raise BadStatus(status, problem.encode())
        raise UnreadableReply(f"status 200 with an error in it: {problem}", usage, foreign=False)


class OpenAIApi(Api):
    """OpenAI's chat completions, which vLLM, SGLang and most hosted services speak too."""

    def __init__(self, config: OpenAITeacherConfig) -> None:
        super().__init__(config)
        import openai  # takes half a second, and the offline teacher needs none of it
        from openai.types.chat import ChatCompletion

        limits = type(openai.DEFAULT_CONNECTION_LIMITS)
        http = http_client(
            openai.DefaultAioHttpClient, openai.Timeout, limits, config.base_url, config.concurrency, self._keys
        )
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url, api_key=config.api_key, max_retries=0, http_client=http
        )
        self._completion = ChatCompletion

    def _request(self, body: bytes) -> bytes:
        return body

    async def _post(self, request: bytes) -> Any:
        # `post` takes the JSON as it is; `chat.completions.create` would encode each request a second time.
        headers = {"Content-Type": "application/json"}
        options: Any = {"headers": headers}
        return await self._client.post("/chat/completions", cast_to=self._completion, content=request, options=options)

    def _read(self, given: Any, body: bytes) -> EndpointReply:
        # The client's models keep fields that they do not know, and fields of a wrong type.
        data = given.to_dict(mode="python", warnings=False) if isinstance(given, self._completion) else given
        choices = data.get("choices") if isinstance(data, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        counts = data.get("usage") if isinstance(data, dict) else None
        counts = counts if isinstance(counts, dict) else {}
        prompt, written = token_count(counts.get("prompt_tokens")), token_count(counts.get("completion_tokens"))
        usage = None if prompt is None or written is None else Usage(prompt, written)
        error = self._error(data, choice, message, answered=isinstance(message, dict), usage=usage)
        if not isinstance(message, dict):
            problem = f"the body is not a chat completion: {self._without_key(shown(json_of(data)))}"
            raise UnreadableReply(problem, usage, foreign=choices is None)
        text = text_of(message.get("content"))
        reason = choice.get("finish_reason")
        reason = "" if reason is None else str(reason)
        if usage is None:
            guessed = len(text.encode(errors="replace")) // BYTES_PER_TOKEN
            usage = Usage(
                len(body) // BYTES_PER_TOKEN if prompt is None else prompt, guessed if written is None else written
            )
        problem = error or end_problem(reason, self.config.max_tokens)
        if not problem and not text and (refusal := message.get("refusal")):
            problem = f"refused by the model: {refusal!s:.200}"
        return EndpointReply(text, reason, usage, sendable(message, body), problem)

    async def close(self) -> None:
        """See `Api.close`."""
        await self._client.close()


def http_client(
    kind: Any,
    timeout: Any,
    limits: Any,
    url: str,
    connections: int,
    keys: Mapping[str, str],
    seconds: float | None = None,
) -> Any:
    """Return an HTTP client that bounds what it reads and how long it connects, and sends a key to its address alone.

    It follows no redirect, and sends no further header: the makers' packages add headers of environment variables
    (`OPENAI_CUSTOM_HEADERS`, `OPENAI_ORG_ID`, `ANTHROPIC_CUSTOM_HEADERS`), which are for other addresses.

    Args:
        kind: class of an asynchronous client of httpx.
        timeout: httpx's class.
        limits: httpx's class.
        url: of the endpoint; no proxy is used for one on this machine.
        connections: open at most.
        keys: headers that hold the key.
        seconds: without a byte before a request fails; None: no limit here.
    """

    class Bounded(kind):  # type: ignore[misc]
        async def send(self, request: Any, **options: Any) -> Any:
            for name in [name for name in request.headers if name.lower() not in _KEPT_HEADERS]:
                del request.headers[name]
            request.headers.update({"Accept-Encoding": "gzip, deflate", **keys})
            request.extensions = {**request.extensions, "timeout": self.timeout.as_dict()}
            response = await super().send(request, **{**options, "stream": True, "follow_redirects": False})
            try:
                body = await _bounded_body(response)
            finally:
                await response.aclose()
            left_out = ("content-encoding", "content-length", "transfer-encoding")
            headers = [pair for pair in response.headers.multi_items() if pair[0].lower() not in left_out]
            extensions = {"http_version": b"HTTP/1.1", **response.extensions}
            return type(response)(
                response.status_code, headers=headers, content=body, request=request, extensions=extensions
            )

    client = Bounded(
        trust_env=may_be_proxied(url),
        verify=ssl.create_default_context(),  # the system's authorities, or those of SSL_CERT_FILE
        timeout=timeout(seconds, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
        limits=limits(max_connections=connections, max_keepalive_connections=connections),
    )
    transports = [getattr(client, "_transport", None), *getattr(client, "_mounts", {}).values()]
    weakref.finalize(client, _abandon, transports)
    return client


def _abandon(transports: list[Any]) -> None:
    """Close the sessions of a client that nobody closed, without a loop to wait in."""
    import aiohttp

    for transport in transports:
        session = getattr(transport, "client", None)
        if isinstance(session, aiohttp.ClientSession) and not session.closed:
            connector = session.connector
            session.detach()
            with warnings.catch_warnings():
                # The connector wants to be awaited, but has closed its connections by then.
                warnings.simplefilter("ignore", DeprecationWarning)
                if connector is not None and asyncio.iscoroutine(waiting := aiohttp.BaseConnector.close(connector)):
                    waiting.close()


async def _bounded_body(response: Any) -> bytes:
    if (encoding := response.headers.get("Content-Encoding", "").strip().lower()) not in _ENCODINGS:
        raise UnreadableReply(f"the reply is compressed as {encoding[:80]!r}, which was not asked for", foreign=False)
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MOST_BYTES:
            raise UnreadableReply(f"the reply is longer than {MOST_BYTES} bytes", foreign=False)
    if body.count(b"[") + body.count(b"{") > MOST_NESTING:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            nested = msgspec.json.decode(body)
            if nests_too_deeply(nested):
                raise UnreadableReply("the reply is nested too deeply", foreign=False)
    return bytes(body)


def _is_of_httpx(error: BaseException, begins: str = "") -> bool:
    """Return whether an error of transport is httpx's, of which the clients use two packages."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool({"TransportError", "InvalidURL"} & names) and type(error).__name__.startswith(begins)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def json_of(data: Any) -> bytes:
    """Return a value of a reply as text, for a message."""
    return (data if isinstance(data, str) else json.dumps(data, default=str)).encode(errors="replace")
