"""The pages of `launch.inspect`.

    GET  /                   environments; ?text, ?structure and ?language choose some of them, ?page a part
    GET  /environment/ID     one of them, its graph and its tools
    POST /call               {"environment", "tool", "arguments"} → the outcome, and the sub-questions that it solves

Environments come from anywhere, so their texts are escaped, nothing but this service's own script runs, and tools run
in the sandbox only. Pages of other sites cannot make calls: a call is JSON of this service's own origin, and without a
token the host that the browser asked for has to be this machine (a site may give its own name this machine's address).
`arguments` is an object, or the text of one, as OpenAI's tool calls have it. Errors of /call are `{"error": text}`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
from aiohttp import web

from astra_jax.rollout.pages import template
from launch.catalogue import Catalogue, Filter, code_tools, shown_tools, solved
from launch.drawing import answer_text, draw
from sandbox import SandboxError
from sandbox.access import is_loopback, shows_token
from sandbox.interface import Sandbox

_HERE = Path(__file__).parent
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
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="environments: any user name, the token as password", charset="UTF-8"'}
_CALL = 'send {"environment": ID, "tool": NAME, "arguments": {...}}'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class InspectionConfig:
    """How the pages are reached.

    Attributes:
        host: address to listen on; beyond loopback only with a token.
        port: 0 takes a free one.
        token: what people must show, as HTTP Basic's password or as a bearer; None asks for none.
        drain_seconds: how long calls in flight may go on once the service is told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8800
    token: str | None = None
    drain_seconds: float = 35.0

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ValueError(
                f"InspectionConfig.host={self.host!r} can be reached from other machines, and no token is set: whoever "
                "reaches it could run tools; give a token (--token_file), or listen on 127.0.0.1"
            )
        if not self.drain_seconds >= 0:
            raise ValueError(f"InspectionConfig.drain_seconds={self.drain_seconds}: must be at least 0")


class CallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /call."""

    environment: str
    tool: str
    arguments: dict[str, Any] | str


class Service:
    """Serves a catalogue until it is stopped.

    Args:
        sandbox: already open, and owned by the caller.
    """

    def __init__(self, catalogue: Catalogue, sandbox: Sandbox, config: InspectionConfig) -> None:
        self.config = config
        self.port = 0
        self._catalogue = catalogue
        self._sandbox = sandbox
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._script = (_HERE / "inspection.js").read_text(encoding="utf-8")
        self._style = template("inspection.css.jinja", _HERE).render()
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._guard])
        app.router.add_get("/", self._environments)
        app.router.add_get("/environment/{id:.+}", self._environment)
        app.router.add_get("/inspection.js", self._show_script)
        app.router.add_get("/inspection.css", self._show_style)
        app.router.add_post("/call", self._call)
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
        """Take no more calls, let those in flight end, then close. Returns how many were cut off."""
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
        try:
            self._admit(request)
            response = await handler(request)
        except _Refused as refused:
            response = _refusal(request, refused)
        except web.HTTPRequestEntityTooLarge:
            response = _refusal(request, _Refused(413, f"the body is larger than {_MOST_BYTES} bytes; send less"))
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            text = f"{request.method} {request.path}: {error.reason}"
            response = _refusal(request, _Refused(error.status, text, allowed))
        response.headers.update(_HEADERS)
        return response

    def _admit(self, request: web.Request) -> None:
        token = self.config.token
        if token is None:
            with contextlib.suppress(ValueError):  # of a host like "["
                if is_loopback(urlsplit(f"//{request.host}").hostname or ""):
                    return
            raise _Refused(
                403,
                f"the host {request.host!r} is not this machine; open http://127.0.0.1:{self.port}/, or use a token",
            )
        if not shows_token(request.headers, token) and not _shows_password(request.headers, token):
            raise _Refused(401, "give the token as the password, with any user name", _CHALLENGE)

    async def _environments(self, request: web.Request) -> web.Response:
        wanted = Filter(**{name: request.query.get(name, "") for name in ("text", "structure", "language")})
        number = request.query.get("page", "1")
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise _Refused(400, f"page is {number[:40]!r}; give a whole number from 1")
        page = self._catalogue.page(wanted, int(number))
        chosen = {name: value for name, value in asdict(wanted).items() if value}
        return _page(
            "environments.html.jinja",
            page=page,
            wanted=wanted,
            catalogue=self._catalogue,
            link=lambda number: f"/?{urlencode({**chosen, 'page': number})}",
        )

    async def _environment(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        environment = self._catalogue.get(id)
        if environment is None:
            raise _Refused(404, f"there is no environment {_short(id)}; choose one of the list")
        tool_of = {call.sub_question: call.tool for call in environment.reference_calls}
        return _page(
            "environment.html.jinja",
            environment=environment,
            drawing=draw(environment.sub_questions, tool_of),
            needed=shown_tools(environment, environment.tools),
            irrelevant={
                band: shown_tools(environment, tools) for band, tools in environment.distractors.items() if tools
            },
            answer_text=answer_text,
        )

    async def _show_script(self, request: web.Request) -> web.Response:
        return web.Response(text=self._script, content_type="text/javascript")

    async def _show_style(self, request: web.Request) -> web.Response:
        return web.Response(text=self._style, content_type="text/css")

    async def _call(self, request: web.Request) -> web.Response:
        origin = request.headers.get("Origin")  # every browser sends it with a POST
        if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
            raise _Refused(403, f"Origin is {_short(origin)}; calls are taken from this service's own pages only")
        if request.content_type != "application/json":
            raise _Refused(415, f"Content-Type is {request.content_type!r}; send application/json")
        call = _call_request(await request.read())
        environment = self._catalogue.get(call.environment)
        if environment is None:
            raise _Refused(
                404, f"environment {_short(call.environment)} is not in this dataset; give an id of the list"
            )
        tools = code_tools(environment)
        if call.tool not in tools:
            known = ", ".join(tools)
            raise _Refused(404, f"tool {_short(call.tool)} is none of {environment.id}'s; its tools are {known}")
        arguments = _arguments(call.arguments) if isinstance(call.arguments, str) else call.arguments
        if self._draining:  # on a connection that was open before
            raise _Refused(503, "launch.inspect is stopping; start it again")
        self._running += 1
        self._idle.clear()
        try:
            result = await self._sandbox.call(tools[call.tool].code, call.tool, arguments)
        except SandboxError as error:
            raise _Refused(503, str(error)) from None
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        answer = {**vars(result), "infrastructure": result.is_infrastructure, "solves": [], "note": ""}
        if result.ok:
            # As text too: JavaScript would show 1.0 as 1 and round long integers.
            answer["shown"] = json.dumps(result.value, ensure_ascii=False, indent=2)
            try:
                answer["solves"] = [asdict(one) for one in solved(environment, call.tool, result.value)]
            except ValueError as error:
                answer["note"] = str(error)
        return web.json_response(answer)


# ---------------------------------------------------------------------------------------------------------------------
# What comes in, what goes out


class _Refused(Exception):
    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers or {}


def _shows_password(headers: Mapping[str, str], token: str) -> bool:
    """Whether a request has HTTP Basic (RFC 7617) with the token as its password, in constant time."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    try:
        password = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(password, token.encode())


def _call_request(body: bytes) -> CallRequest:
    try:
        return msgspec.json.decode(body, type=CallRequest)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, text that is not UTF-8 too
        raise _Refused(400, f"the body is no call ({error}); {_CALL}") from None


def _arguments(text: str) -> dict[str, Any]:
    """The object that a text holds."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"arguments is {_short(text)}, which is not JSON ({error}); write an object") from None
    if not isinstance(value, dict):
        raise _Refused(400, f'arguments is {_short(text)}; write an object, like {{"name": "value"}}')
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


def _page(name: str, status: int = 200, **values: Any) -> web.Response:
    return web.Response(text=template(name, _HERE).render(**values), status=status, content_type="text/html")


def _refusal(request: web.Request, refused: _Refused) -> web.Response:
    """As JSON to programs, as a page to people."""
    if request.path == "/call":
        response = web.json_response({"error": refused.text}, status=refused.status)
    else:
        response = _page("inspection.html.jinja", refused.status, title="Not shown", text=refused.text)
    response.headers.update(refused.headers)
    return response
