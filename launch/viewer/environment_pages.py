"""The pages of tool environments.

    GET  /                   environments; ?text, ?structure and ?language choose some of them, ?sort their order, ?page
                             a part
    GET  /environment/ID     one of them, its graph and its tools
    POST /call               {"environment", "tool", "arguments"} → the outcome, and the sub-questions that it solves

Tools run in the sandbox only. Pages of other sites cannot make calls: a call is JSON of this service's own origin.
`arguments` is an object, or the text of one, as OpenAI's tool calls have it. Errors of /call are `{"error": text}`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from launch.viewer.catalogue import (
    ENVIRONMENT_KEYS,
    Catalogue,
    EnvironmentFilter,
    code_tools,
    shown_tools,
    solved,
)
from launch.viewer.drawing import draw_graph, shown_answer
from launch.viewer.listing import address, asked, beside, checked_sort, page_number, query
from launch.viewer.pages import CALL, page, short
from sandbox import SandboxError
from sandbox.http_service import HttpRefusal
from sandbox.interface import Sandbox
from synthesis.core.records import World
from synthesis.core.typed import decode_json
from synthesis.core.worlds import EpisodeCalls

_CALL = 'send {"environment": ID, "tool": NAME, "arguments": {...}}'


class CallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /call."""

    environment: str
    tool: str
    arguments: dict[str, Any] | str


class EnvironmentPages:
    """Shows a catalogue and runs its tools.

    Args:
        sandbox: already open, and owned by the caller.
    """

    noun = "environments"

    def __init__(self, catalogue: Catalogue, sandbox: Sandbox) -> None:
        self._catalogue = catalogue
        self._sandbox = sandbox

    def __len__(self) -> int:
        return len(self._catalogue)

    def routes(self) -> list[web.RouteDef]:
        """See the module."""
        return [
            web.get("/", self._list),
            web.get("/environment/{id:.+}", self._one),
            web.post(CALL, self._call),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        wanted = _wanted(request)
        shown = self._catalogue.page(wanted, page_number(request))
        return page(
            "environments.html.jinja",
            page=shown,
            wanted=wanted,
            catalogue=self._catalogue,
            keys=ENVIRONMENT_KEYS,
            link=partial(address, wanted),
            place=partial(_place, wanted),
        )

    async def _one(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        environment = self._catalogue.get(id)
        if environment is None:
            raise HttpRefusal(404, f"there is no environment {short(id)}; choose one of the list")
        wanted = _wanted(request)
        place = partial(_place, wanted)
        tool_of = {call.sub_question: call.tool for call in environment.reference_calls}
        return page(
            "environment.html.jinja",
            environment=environment,
            home=f"/{query(wanted)}",
            beside=beside([one.id for one in self._catalogue.chosen(wanted)], id, place),
            tool_of=tool_of,
            drawing=draw_graph(environment.sub_questions, tool_of),
            needed=shown_tools(environment, environment.tools),
            irrelevant={
                band: shown_tools(environment, tools) for band, tools in environment.distractors.items() if tools
            },
            shown_answer=shown_answer,
        )

    async def _call(self, request: web.Request) -> web.Response:
        call = _call_request(await request.read())
        environment = self._catalogue.get(call.environment)
        if environment is None:
            raise HttpRefusal(
                404, f"environment {short(call.environment)} is not in this dataset; give an id of the list"
            )
        tools = code_tools(environment)
        if call.tool not in tools:
            known = ", ".join(tools)
            raise HttpRefusal(404, f"tool {short(call.tool)} is none of {environment.id}'s; its tools are {known}")
        arguments = _arguments(call.arguments) if isinstance(call.arguments, str) else call.arguments
        try:
            run = EpisodeCalls(self._sandbox, environment)
            result = await run.call(tools[call.tool], arguments)
            changes = await run.changes()
        except SandboxError as error:
            raise HttpRefusal(503, str(error)) from None
        answer = {**vars(result), "infrastructure": result.is_infrastructure, "solves": [], "note": ""}
        if isinstance(environment.world, World) and not tools[call.tool].code:
            changed = ", ".join(f"{one.table} {one.id}" for one in changes) or "nothing"
            answer["note"] = f"Each call here begins with the world's own rows; this one changed {changed}."
        if result.ok:
            # As text too: JavaScript would show 1.0 as 1 and round long integers.
            answer["shown"] = json.dumps(result.value, ensure_ascii=False, indent=2)
            try:
                answer["solves"] = [asdict(one) for one in solved(environment, call.tool, result.value, arguments)]
            except ValueError as error:
                answer["note"] = str(error)
        return web.json_response(answer)


def _wanted(request: web.Request) -> EnvironmentFilter:
    wanted = EnvironmentFilter(**asked(request, ("text", "structure", "language", "sort")))
    checked_sort(wanted.sort, ENVIRONMENT_KEYS)
    return wanted


def _place(wanted: EnvironmentFilter, id: str) -> str:
    """Where an environment's page is, which leads back to the list that it was chosen from."""
    return f"/environment/{quote(id)}{query(wanted)}"


def _call_request(body: bytes) -> CallRequest:
    try:
        return decode_json(body, CallRequest)
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, text that is not UTF-8 too
        raise HttpRefusal(400, f"the body is no call ({error}); {_CALL}") from None


def _arguments(text: str) -> dict[str, Any]:
    """The object that a text holds."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(400, f"arguments is {short(text)}, which is not JSON ({error}); write an object") from None
    if not isinstance(value, dict):
        raise HttpRefusal(400, f'arguments is {short(text)}; write an object, like {{"name": "value"}}')
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
