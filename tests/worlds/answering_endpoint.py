"""Chat completions endpoints over HTTP that answer what a pipeline asks: with the rules' answers, in the form that a
kind of server gives them, and now and then not at all.

    endpoint = Answering(Strict())
    async with endpoint as url:
        teacher = Asking(OpenAITeacherConfig(url, "m"), endpoint)      # and run a pipeline with it
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from flaky_endpoint import Flaky, completion

from synthesis.core.chat_format import AssistantTurn
from synthesis.core.openai_messages import read_reply, replayed, to_openai
from synthesis.core.records import Language, Message, ToolCall, ToolSpec
from synthesis.core.stages import rng_for
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, render_prompt

# ---------------------------------------------------------------------------------------------------------------------
# Kinds of servers


class Refused(Exception):
    """Status 400."""


class Server:
    """Knows no form of answers, and says so: refuses every `response_format`."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises `Refused`."""
        if "response_format" in body:
            raise Refused("Unrecognized request argument supplied: response_format")

    def shaped(self, body: Mapping[str, Any], text: str) -> str:
        """What a model that would write this text writes, where its output is constrained."""
        return text


class Deaf(Server):
    """Knows no form of answers, and takes every `response_format` in silence."""

    def check(self, body: Mapping[str, Any]) -> None:
        pass


class JsonOnly(Server):
    """Knows `json_object` alone, for prompts that say JSON."""

    def check(self, body: Mapping[str, Any]) -> None:
        kind = body.get("response_format", {}).get("type", "text")
        if kind not in ("text", "json_object"):
            raise Refused(
                f"'response_format.type' : value is not one of the allowed values ['text','json_object']: {kind}"
            )
        if kind == "json_object" and "json" not in body["messages"][0]["content"].lower():
            raise Refused("'messages' must contain the word 'json' in some form, to use 'response_format' of this type")

    def shaped(self, body: Mapping[str, Any], text: str) -> str:
        return as_object(text) if "response_format" in body else text


class Strict(JsonOnly):
    """Strict structured output by the rules of the hosted services."""

    def check(self, body: Mapping[str, Any]) -> None:
        given = body.get("response_format", {})
        if given.get("type") != "json_schema":
            return super().check(body)
        named = given["json_schema"]
        problem = strict_problem(named["schema"])
        if problem and named.get("strict"):
            raise Refused(f"Invalid schema for response_format '{named['name']}': {problem}")

    def shaped(self, body: Mapping[str, Any], text: str) -> str:
        given = body.get("response_format", {})
        if given.get("type") != "json_schema":
            return super().shaped(body, text)
        schema = given["json_schema"]["schema"]
        return json.dumps(completed(json.loads(as_object(text)), schema, schema.get("$defs", {})))


class Guided(Strict):
    """vLLM's guided decoding: any schema, and the output always fits it."""

    def check(self, body: Mapping[str, Any]) -> None:
        pass


_ALLOWED = {
    "$ref", "$defs", "type", "description", "properties", "required", "additionalProperties", "items", "enum", "anyOf",
    "const",
}  # fmt: skip


def strict_problem(schema: Any, at: str = "()", *, root: bool = True) -> str:
    """What the rules of strict structured output have against a schema; "": nothing.

    Those of OpenAI's guide as far as they are common to the services that follow it: bounds and `default` are not.
    """
    if unknown := sorted(set(schema) - _ALLOWED):
        return f"In context={at}, '{unknown[0]}' is not permitted."
    if "$ref" in schema:
        return (
            "" if set(schema) == {"$ref"} else f"In context={at}, $ref cannot have keywords {set(schema) - {'$ref'}}."
        )
    if root and schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got {schema.get('type')!r}."
    if "anyOf" not in schema and "type" not in schema:
        return f"In context={at}, schema must have a 'type' key."
    parts = [(f"{at}.{key}", one) for key, one in schema.get("$defs", {}).items()]
    parts += [(f"{at}.anyOf", one) for one in schema.get("anyOf", [])]
    if schema.get("type") == "object":
        if schema.get("additionalProperties") is not False:
            return f"In context={at}, 'additionalProperties' is required to be supplied and to be false."
        properties = schema.get("properties", {})
        if schema.get("required") != list(properties):
            return f"In context={at}, 'required' is required to be supplied and to include every key in properties."
        parts += [(f"{at}.{key}", one) for key, one in properties.items()]
    if schema.get("type") == "array":
        if "items" not in schema:
            return f"In context={at}, array schema missing items."
        parts.append((f"{at}.items", schema["items"]))
    return next((problem for where, one in parts if (problem := strict_problem(one, where, root=False))), "")


def as_object(text: str) -> str:
    """JSON is all that comes out: the object in the text, or an empty one."""
    try:
        return json.dumps(json.loads(text[text.index("{") : text.rindex("}") + 1]))
    except ValueError:
        return "{}"


def completed(value: Any, schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The value as a constrained decoder of the schema writes it: every property there, null where it may be."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        nullable = any(one.get("type") == "null" for one in schema["anyOf"])
        if value is None:
            return None if nullable else completed(None, schema["anyOf"][0], definitions)
        types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
        fitting = [one for one in schema["anyOf"] if one.get("type") == types[type(value)]]
        return completed(value, (fitting or schema["anyOf"])[0], definitions)
    if schema.get("type") == "object":
        given = value if isinstance(value, dict) else {}
        return {name: completed(given.get(name), one, definitions) for name, one in schema["properties"].items()}
    if schema.get("type") == "array":
        return [completed(one, schema["items"], definitions) for one in value or []]
    if "enum" in schema:
        return value if value in schema["enum"] else schema["enum"][0]
    least = {"string": "", "integer": 0, "number": 0.0, "boolean": False}
    return value if value is not None else least.get(schema.get("type"))


# ---------------------------------------------------------------------------------------------------------------------
# The endpoint, and who asks it

NOISE = ("cut", "prose", "refusal", "missing_field", "wrong_type", "inner_json", "wrapped", "empty")
"""Kinds of bodies that are no answer as they stand. Which one a request gets depends on its text and its seed."""


_TRIES = 8
"""Seeds that a request may have beyond its first."""


class Answering(Flaky):
    """Answers with what `Asking` has told it, as its kind of server would.

    Args:
        noise: share of the answers that are unusable (`NOISE`).
    """

    def __init__(self, server: Server, *, noise: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.server, self.noise = server, noise
        self.known: dict[tuple[str, int], str] = {}
        self.turns: dict[tuple[str, int], dict[str, Any]] = {}
        self.spoilt: dict[str, int] = {}
        self.refused: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        try:
            self.server.check(body)
        except Refused as problem:
            self.refused.append(str(problem))
            return web.json_response({"error": {"message": str(problem)}}, status=400)
        if (turn := self.turn(body)) is not None:
            return self.as_turn(body, turn)
        text = self.server.shaped(body, self.told(body["messages"][0]["content"], body.get("seed", 0)))
        rng = rng_for(body.get("seed", 0), body["messages"][0]["content"])
        finish = "stop"
        if rng.random() < self.noise:
            kind = rng.choice(NOISE)
            text, finish = spoilt(kind, text, rng), "length" if kind == "cut" else "stop"
            self.spoilt[kind] = self.spoilt.get(kind, 0) + 1
        return web.Response(body=completion(text, finish), content_type="application/json")

    def turn(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The turn of an agent that is asked for; None: it is not."""
        said = json.dumps(body["messages"])
        seeds = (body.get("seed", 0) - number for number in range(_TRIES))
        return next((self.turns[said, seed] for seed in seeds if (said, seed) in self.turns), None)

    def as_turn(self, body: Mapping[str, Any], turn: dict[str, Any]) -> web.Response:
        """Spoilt are a turn's end, and the arguments of its first call: all else is a turn."""
        rng, finish = rng_for(body.get("seed", 0), json.dumps(body["messages"])), "stop"
        if rng.random() < self.noise:
            kind = rng.choice(("cut", "inner_json") if turn["tool_calls"] else ("cut",))
            self.spoilt[kind] = self.spoilt.get(kind, 0) + 1
            finish = "length" if kind == "cut" else "stop"
            if kind == "inner_json":
                first, *others = turn["tool_calls"]
                broken = {**first, "function": {**first["function"], "arguments": "{country: Japan}"}}
                turn = {**turn, "tool_calls": [broken, *others]}
        choice = {"index": 0, "message": turn, "finish_reason": finish}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 60, "completion_tokens": 40}})

    def told(self, content: str, seed: int) -> str:
        """The answer to a prompt, whatever the teacher has written behind it, and whichever try it is."""
        while content:
            for number in range(_TRIES):
                if known := self.known.get((content.rstrip(), seed - number)):
                    return known
            content = content.rpartition("\n\n")[0]
        return "Yes."


def spoilt(kind: str, text: str, rng: random.Random) -> str:
    """The text as a model spoils it."""
    if kind == "cut":
        return text[: rng.randrange(len(text) or 1)]
    if kind == "prose":
        return "I would look that up first, and then decide."
    if kind == "refusal":
        return "I'm sorry, but I can't help with that."
    if kind == "wrapped":
        return f"Certainly! Here is the answer {{as JSON}}:\n```json\n{text}\n```\nLet me know if you need more."
    if kind == "empty":
        return ""
    try:
        value = json.loads(text)
    except ValueError:
        return text[:3]
    name = rng.choice(sorted(value))
    if kind == "missing_field":
        del value[name]
    elif kind == "wrong_type":
        value[name] = {"of": value[name]}
    elif "result" in value:
        value["result"] = "{not JSON"
    elif value.get("tool_calls"):
        value["tool_calls"][0]["arguments"] = "{country: Japan}"
    else:
        del value[name]
    return json.dumps(value)


class Asking(OpenAITeacher):
    """A teacher behind an endpoint that is told, before it is asked, what the rules answer."""

    BY_RULES = True

    def __init__(self, config: OpenAITeacherConfig, endpoint: Answering) -> None:
        super().__init__(config)
        self._answers, self._offline = endpoint, OfflineTeacher()

    async def ask(self, answer: Any, variables: Mapping[str, Any], *, language: Language, seed: int) -> Any:
        given = await self._offline.ask(answer, variables, language=language, seed=seed)
        key = render_prompt(answer, variables, language).rstrip(), seed % 2**31
        self._answers.known[key] = msgspec.json.encode(given).decode()
        return await super().ask(answer, variables, language=language, seed=seed)

    async def act(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, language: Language, seed: int,
        sent: Sequence[dict[str, Any] | None] = (),
    ) -> AssistantTurn:  # fmt: skip
        given = await self._offline.act(messages, tools, language=language, seed=seed)
        calls = [call for call in given.calls if isinstance(call, ToolCall)]
        (turn,) = to_openai([Message("assistant", given.content, given.reasoning, calls)])
        said = json.dumps(replayed(messages, sent, read_reply))
        self._answers.turns[said, seed % 2**31] = {**turn, "tool_calls": turn.get("tool_calls", [])}
        return await super().act(messages, tools, language=language, seed=seed, sent=sent)
