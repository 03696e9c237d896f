"""Operations of an OpenAPI document as an MCP server over stdio: `python -m synthesis.servers.api_server FILE NAME`.

    {"apis": {"pets": {
      "document": "pets.yaml",
      "url": "https://pets.example/v1",
      "headers": {"Authorization": "Bearer ${PETS_TOKEN}"},
      "operations": ["createPet"],
      "requests_per_minute": 60
    }}}

Tools are the operations that only read (GET, HEAD, OPTIONS), and the operations that `operations` names. `document` is
a file beside this one, or a URL. `url` is the base URL; without it, it is that of the document's `servers`. Values of
`headers` and `query` take `${NAME}` from the environment and `${file:PATH}` from a file. They are in no record, and are
sent to the origin of `url` alone, which must be given then.

An answer with a status of 400 or more is a tool's error, which the agent sees. The statuses 401, 407, 429, 502, 503 and
504, a lost connection and no answer in time are the infrastructure's failure, as with MCP servers over HTTP.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx2
import msgspec
from mcp.shared.exceptions import MCPError
from mcp.types import Tool, ToolAnnotations

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line, read_unpacked
from astra_jax.base.http_responses import HIDDEN
from astra_jax.base.proxies import may_be_proxied
from astra_jax.base.settings import Bound, SettingError, check
from astra_jax.base.typed import decode_json
from synthesis.core.mirror import fetched
from synthesis.core.schemas import Unmappable
from synthesis.servers.bounded_http import HTTP_FAILED
from synthesis.servers.collect import RejectedTool
from synthesis.servers.function_server import FunctionTool, OwnTools, ToolFailed, serve
from synthesis.servers.openapi import openapi_tools
from synthesis.servers.openapi_calls import (
    FILES_BODY,
    FORM_BODY,
    ApiOperation,
    BadArgument,
    check_url,
    form_pairs,
    operation_of,
    request_of,
)
from synthesis.servers.registry import records_in

_MOST_BYTES: Final = 8 << 20
"""Maximum size of an answer, decompressed; agents see a few thousand characters of it."""
_MOST_SHOWN: Final = 4_000
"""Characters of the body of an error."""
_UNAVAILABLE: Final = (401, 407, 429, 502, 503, 504)
_LATER: Final = (429, 503)
"""Statuses that are asked again, after `Retry-After`."""
_TRIES: Final = 3
_LONGEST_PAUSE: Final = 30.0
_REDIRECTS: Final = 5
_SHORTEST_SECRET: Final = 8
"""Shorter texts are words, which answers may have."""
_SECRET: Final = re.compile(r"\$\{(file:)?([^}]{1,500})\}")


class _Api(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: str
    url: str = ""
    headers: dict[str, str] = {}
    query: dict[str, str] = {}
    operations: list[str] = []
    requests_per_minute: Annotated[float, Bound(above=0, most=1e6)] = 60.0
    timeout_seconds: Annotated[float, Bound(above=0, most=600)] = 20.0


class _Apis(msgspec.Struct, frozen=True):
    apis: dict[str, _Api]


@dataclass
class _Pace:
    """Requests of a minute, one after the other at equal distances."""

    requests_per_minute: float
    next: float = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        mine = max(now, self.next)
        self.next = mine + 60.0 / self.requests_per_minute
        await asyncio.sleep(mine - now)


@dataclass
class CalledApi:
    """An API whose operations are called.

    Attributes:
        headers: with their secrets.
        query: pairs that each request has, with their secrets.
        secrets: texts that nobody is shown.
    """

    settings: _Api
    headers: dict[str, str]
    query: dict[str, str]
    secrets: list[str]
    pace: _Pace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = _Pace(self.settings.requests_per_minute)

    async def call(self, operation: ApiOperation, url: str, arguments: dict[str, Any]) -> str:
        """Return what an operation answers, as text.

        Raises:
            ToolFailed: the API says that the call failed, or an argument cannot be sent.
            MCPError: `HTTP_FAILED`: it gave no answer of its own.
        """
        try:
            request = self._request(operation, url, arguments)
        except (BadArgument, httpx2.InvalidURL) as error:
            raise ToolFailed(str(error)) from None
        for number in range(_TRIES):
            await self.pace.wait()
            try:
                async with asyncio.timeout(self.settings.timeout_seconds):
                    answer, body = await self._answer(request)
            except (TimeoutError, httpx2.HTTPError, OSError) as error:
                said = first_line(error) if not isinstance(error, TimeoutError) else "no answer in time"
                raise self._failed(f"{operation.method} {operation.path}: {said}") from None
            if answer.status_code not in _LATER or number + 1 == _TRIES:
                break
            await asyncio.sleep(_pause(answer))
        status = f"HTTP {answer.status_code} {answer.reason_phrase}".rstrip()
        if answer.status_code in _UNAVAILABLE:
            raise self._failed(f"{operation.method} {operation.path}: {status}")
        if body is None:
            raise ToolFailed(f"the answer has more than {_MOST_BYTES >> 20} MiB; ask for less")
        if answer.is_redirect:
            raise ToolFailed(f"{status} leads to another host, and is not followed")
        text = self._shown(answer, body)
        if answer.status_code >= 400:
            raise ToolFailed(f"{status}: {text[:_MOST_SHOWN]}".rstrip(": "))
        return text

    def _request(self, operation: ApiOperation, url: str, arguments: Mapping[str, Any]) -> httpx2.Request:
        made = request_of(operation, arguments)
        own = "&".join(f"{httpx2.QueryParams({name: value})}" for name, value in self.query.items())
        query = "&".join(filter(None, (made.query, own)))
        headers = {"Accept": "application/json, text/*;q=0.9, */*;q=0.5", **operation.headers, **self.headers}
        content: dict[str, Any] = {}
        if made.body is not msgspec.UNSET:
            if operation.media == FORM_BODY:
                content["content"] = str(httpx2.QueryParams(form_pairs(made.body)))
            elif operation.media == FILES_BODY:
                content["files"] = [(name, (None, str(text))) for name, text in form_pairs(made.body)]
            else:
                content["content"] = msgspec.json.encode(made.body)
            if operation.media != FILES_BODY:
                headers["Content-Type"] = operation.media
        address = f"{url}{made.path}{f'?{query}' if query else ''}"
        return httpx2.Request(operation.method, address, headers=headers, **content)

    async def _answer(self, request: httpx2.Request) -> tuple[httpx2.Response, bytes | None]:
        """Return the answer and its body; None if it is too large. Redirects are followed to the same origin alone."""
        async with httpx2.AsyncClient(
            timeout=self.settings.timeout_seconds, follow_redirects=False, trust_env=may_be_proxied(str(request.url))
        ) as client:
            for _ in range(_REDIRECTS + 1):
                answer = await client.send(request, stream=True)
                try:
                    following = answer.next_request
                    if following is None or _origin(following.url) != _origin(request.url):
                        return answer, await _bounded(answer)
                finally:
                    await answer.aclose()
                request = following
        return answer, b""

    def _shown(self, answer: httpx2.Response, body: bytes) -> str:
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if body and kind and not re.search(r"^text/|json|xml|javascript|x-www-form-urlencoded|yaml|csv", kind):
            return f"[not shown: {kind:.80}, {len(body)} bytes]"
        try:
            return self.hidden(body.decode(answer.charset_encoding or "utf-8", "replace"))
        except LookupError:  # a charset that nobody knows
            return self.hidden(body.decode("utf-8", "replace"))

    def hidden(self, text: str) -> str:
        """Return a text without the secrets that were sent."""
        for secret in sorted(self.secrets, key=len, reverse=True):  # one may begin with another
            text = text.replace(secret, HIDDEN)
        return text

    def _failed(self, message: str) -> MCPError:
        return MCPError(code=HTTP_FAILED, message=self.hidden(message))


async def _bounded(answer: httpx2.Response) -> bytes | None:
    data = bytearray()
    async for part in answer.aiter_bytes():
        data += part
        if len(data) > _MOST_BYTES:
            return None
    return bytes(data)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _pause(answer: httpx2.Response) -> float:
    """Seconds that the API asks to wait, as far as anybody waits."""
    given = answer.headers.get("Retry-After", "")
    return min(float(given) if re.fullmatch(r"\d{1,6}(\.\d{1,3})?", given) else 1.0, _LONGEST_PAUSE)


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


def api_tools(file: str, name: str) -> OwnTools:
    """Return the operations of an API of a file.

    Raises:
        InputError: the file or the API's document cannot be used; says which, and why.
    """
    path = fetched(file)
    where = f"{file}: {name}"
    try:
        settings = decode_json(read_unpacked(path), _Apis).apis[name]
        check(_Api, settings, name)
    except SettingError as error:
        raise InputError(f"{file}: {error}") from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f'{file} is not a file of {{"apis": {{"NAME": {{"document": …}}}}}} ({error})') from None
    secrets: list[str] = []
    headers = {key: _filled(text, f"{where}: headers.{key}", secrets) for key, text in settings.headers.items()}
    query = {key: _filled(text, f"{where}: query.{key}", secrets) for key, text in settings.query.items()}
    document, address = _document(settings.document, path.parent, where)
    api = CalledApi(settings, headers, query, secrets)
    try:
        tools, rejected = openapi_tools(document)
    except Unmappable as problem:
        raise InputError(f"{where}: {problem.detail}") from None
    names = [tool["function"]["name"] for tool in tools] + [one.name for one in rejected]
    if unknown := [one for one in settings.operations if one not in names]:
        raise InputError(f"{where}: operations: there is no {unknown[0]!r:.80}; there are {', '.join(names):.1000}")
    served: list[FunctionTool] = []
    for tool in tools:
        try:
            served.append(_operation(tool, document, address, api, where))
        except Unmappable as problem:
            rejected.append(RejectedTool(tool["function"]["name"], problem.reason, problem.detail))
    if not served:
        why = f": {rejected[0].name}: {rejected[0].detail}" if rejected else ""
        raise InputError(f"{where}: no operation can be called{why}")
    info = document.get("info")
    about = info.get("description") or info.get("title") if isinstance(info, Mapping) else ""
    # Not the secrets: they may change without the tools doing so.
    made_of = msgspec.json.encode([document, settings], order="deterministic")
    return OwnTools(served, " ".join(str(about or "").split()), made_of, rejected)


def _operation(
    tool: dict[str, Any], document: Mapping[str, Any], address: str, api: CalledApi, where: str
) -> FunctionTool:
    """One operation as a tool. Raises `Unmappable`: it is not to be called, or cannot be."""
    function, settings = tool["function"], api.settings
    operation = operation_of(tool, document, address=address)
    if not operation.reads and function["name"] not in settings.operations:
        raise Unmappable(
            "changes_state", f"{operation.method} {operation.path:.100} may write; name it in `operations` to call it"
        )
    given = {header.lower() for header in api.headers}
    if missing := [header for header, value in operation.headers.items() if not value and header.lower() not in given]:
        raise Unmappable("header_missing", f"the operation needs the header {missing[0]!r:.80}; add it to `headers`")
    if not settings.url and (settings.headers or settings.query):
        raise InputError(
            f"{where}: headers and query are sent only to an address that you name; add "
            f'"url": "{operation.url or "https://HOST"}" if that is the API'
        )
    url = check_url(settings.url or operation.url, where)

    async def call(arguments: dict[str, Any]) -> str:
        return await api.call(operation, url, arguments)

    described = Tool(
        name=function["name"], description=function["description"], input_schema=function["parameters"],
        annotations=ToolAnnotations(read_only_hint=operation.reads),
    )  # fmt: skip
    return FunctionTool(described, call, None)


def _document(named: str, folder: Path, where: str) -> tuple[Mapping[str, Any], str]:
    """Return the document, and its address where it has one."""
    address = named if "://" in named else ""
    path = fetched(named) if address else folder / named
    found = [record for _, _, record in records_in(path)]
    if found and isinstance(found[0], Unmappable):
        raise InputError(f"{where}: document: {found[0].detail}")
    if len(found) != 1 or not isinstance(found[0], Mapping) or not found[0].keys() & {"openapi", "swagger"}:
        raise InputError(f"{where}: document: {named} is not an OpenAPI document")
    return found[0], address


def _filled(text: str, where: str, secrets: list[str]) -> str:
    """Return the text with `${NAME}` and `${file:PATH}` replaced; the values are added to `secrets`."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            try:
                secret = Path(found[2]).read_text(encoding="utf-8").partition("\n")[0].strip()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{where}: {found[2]} cannot be read ({type(error).__name__})") from None
        else:
            secret = os.environ.get(found[2], "").strip()
        if not secret:
            raise InputError(f"{where}: {found[0]} is not set or empty; set it, or write ${{file:PATH}}")
        if len(secret) >= _SHORTEST_SECRET:
            secrets.append(secret)
        return secret

    return _SECRET.sub(value, text)


if __name__ == "__main__":
    sys.exit(serve(lambda: api_tools(sys.argv[1], sys.argv[2])))
