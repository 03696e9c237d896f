"""Pages of tool environments.

    GET  /                   environments; ?text, ?structure and ?language filter them, ?sort orders them
    GET  /environment/ID     one of them: its sub-questions by hop, and its tools
    POST /call               {"environment", "tool", "arguments"} → the outcome, and the sub-questions that it solves

Tools run in the sandbox only. Pages of other sites cannot make calls: a call is JSON of this service's own origin.
`arguments` is an object, or the text of one, as in OpenAI's tool calls. Errors of /call are `{"error": text}`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from astra_jax.base.http_service import HttpRefusal
from astra_jax.base.typed import decode_json
from launch.viewer.lists import ListChoice, RecordList, Row, StoredRecords
from launch.viewer.schemas import least_value, parameters_of
from launch.viewer.service import CALL, page, short
from sandbox import SandboxError
from sandbox.interface import Sandbox
from synthesis.core.matching import match
from synthesis.core.records import CodeTool, Provenance, ToolEnvironment, World
from synthesis.core.reward import solved_by, sub_tasks_by_tool
from synthesis.core.worlds import EpisodeCalls
from synthesis.environments.documents import place_text

_CALL = 'send {"environment": ID, "tool": NAME, "arguments": {...}}'
_COLUMNS = {
    "question": "question",
    "id": "code",
    "domain": "small",
    "structure": "small",
    "language": "small",
    "split": "small",
    "sub-questions": "number",
}


class CallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /call."""

    environment: str
    tool: str
    arguments: dict[str, Any] | str


def stored_environments(path: str | os.PathLike[str]) -> StoredRecords[ToolEnvironment]:
    """Open a dataset of environments. Raises as `StoredRecords`."""
    return StoredRecords(path, ToolEnvironment, "environments", _row)


class EnvironmentPages:
    """Shows environments and runs their tools.

    Args:
        sandbox: already open, and owned by the caller.
    """

    noun = "environments"

    def __init__(self, records: StoredRecords[ToolEnvironment], sandbox: Sandbox) -> None:
        self._records, self._sandbox = records, sandbox
        choices = (ListChoice("structure", "all structures"), ListChoice("language", "all languages"))
        self._list = RecordList(
            "Environments", self.noun, _COLUMNS, records.rows, "/environment/{}",
            text="text in question, id or domain", choices=choices,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._records.rows)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        return [web.get("/", self._list.show), web.get("/environment/{id:.+}", self._show), web.post(CALL, self._call)]

    async def _show(self, request: web.Request) -> web.Response:
        one = self._records.read(request.match_info["id"])
        steps = sorted(one.sub_questions, key=lambda sub: sub.hop)
        return page(
            "environment.html.jinja",
            environment=one,
            values=_facts(one),
            tool_of={call.sub_question: call.tool for call in one.reference_calls},
            hops=[(hop, list(group)) for hop, group in itertools.groupby(steps, key=lambda sub: sub.hop)],
            needed=_shown_tools(one, one.tools),
            irrelevant={band: _shown_tools(one, tools) for band, tools in one.distractors.items() if tools},
            **self._list.around(request, one.id),
        )

    async def _call(self, request: web.Request) -> web.Response:
        call = _call_request(await request.read())
        environment = self._records.read(call.environment)
        irrelevant = [tool for tools in environment.distractors.values() for tool in tools]
        tools = {tool.spec.name: tool for tool in (*environment.tools, *irrelevant)}
        if call.tool not in tools:
            known = ", ".join(tools)
            raise HttpRefusal(404, f"{environment.id} has no tool {short(call.tool)}; its tools are {known}")
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
                answer["solves"] = _solved(environment, call.tool, result.value, arguments)
            except ValueError as error:
                answer["note"] = str(error)
        return web.json_response(answer)


def _row(one: ToolEnvironment) -> Row:
    values = {
        **{name: getattr(one, name) for name in ("id", "domain", "structure", "language")},
        "question": one.question or "(no question)",
        "split": one.split.replace("_", " "),
        "sub-questions": len(one.sub_questions),
    }
    return Row(one.id, values, f"{one.question}\n{one.id}\n{one.domain}".casefold(), one.language)


def _facts(one: ToolEnvironment) -> dict[str, Any]:
    facts = {name: getattr(one, name) for name in ("id", "domain", "language", "structure", "split", "mode")}
    facts = {name: value if name == "id" else value.replace("_", " ") for name, value in facts.items()}
    quality, difficulty = one.quality, one.difficulty
    if quality is None:
        facts["quality"] = "not scored"
    else:
        facts |= {f"quality: {name}": value for name, value in msgspec.structs.asdict(quality).items()}
    if difficulty is None:
        facts["difficulty"] = "not measured"
    else:
        rate = difficulty.solve_rate
        facts |= {
            "difficulty: hops": difficulty.hops,
            "difficulty: parallel share": difficulty.parallel_share,
            "difficulty: closest irrelevant tool": difficulty.distractor_closeness,
            "difficulty: solve rate": "not measured" if rate is None else f"{rate:.2f} ({difficulty.policy})",
        }
    if isinstance(one.provenance, Provenance) and one.provenance.document:
        facts["document"] = place_text(one.provenance.document)
    return facts | {"signature": one.signature, "entities": one.entities}


def _shown_tools(environment: ToolEnvironment, tools: Sequence[CodeTool]) -> list[dict[str, Any]]:
    """Return tools with parameters, reference calls and arguments to begin with, as the template shows them.

    Each reference is its call, the sub-question that it answers (None: there is none) and the rule of matching.
    """
    subs = {sub.id: sub for sub in environment.sub_questions}
    shown = []
    for tool in tools:
        calls = [call for call in environment.reference_calls if call.tool == tool.spec.name]
        references = []
        for call in calls:
            sub = subs.get(call.sub_question)
            # Records of older versions have no rule.
            rule = call.rule or (sub and match(call.output, sub.answer, environment.language)) or "none"
            references.append((call, sub, rule))
        arguments = calls[0].arguments if calls else least_value(tool.spec.parameters)
        parameters = parameters_of(tool.spec.parameters)
        shown.append({"tool": tool, "parameters": parameters, "references": references, "arguments": arguments})
    return shown


def _solved(environment: ToolEnvironment, tool: str, output: Any, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sub-questions that a successful call solves, by the RL reward's rules, and the rule of matching.

    Raises:
        ValueError: the environment cannot be scored; the message says why.
    """
    answers, language = {sub.id: sub.answer for sub in environment.sub_questions}, environment.language
    ids = solved_by(sub_tasks_by_tool(environment), tool, output, language, arguments=arguments)
    return [{"sub_question": id, "rule": match(output, answers[id], language) or ""} for id in ids]


def _call_request(body: bytes) -> CallRequest:
    try:
        return decode_json(body, CallRequest)
    except (ValueError, RecursionError) as error:  # msgspec's errors and those of UTF-8 are ValueErrors
        raise HttpRefusal(400, f"the body is not a call ({error}); {_CALL}") from None


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(400, f"arguments is {short(text)}, which is not JSON ({error}); write an object") from None
    if not isinstance(value, dict):
        raise HttpRefusal(400, f'arguments is {short(text)}; write an object, like {{"name": "value"}}')
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
