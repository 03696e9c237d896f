"""Servers of OpenAI's, Anthropic's and Gemini's APIs over HTTP, as strict as those services.

An unknown field of a request is refused with status 400, and so is a conversation that lacks what the service sent. The
forms are those of the makers' packages in October 2026.

They play a model that calls the first tool twice at once and then answers with the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

KEY = "secret-key-of-the-test"
ANSWER = "Both are there."
THOUGHT = "I look them up."


class BadRequest(Exception):
    """The message of the refusal."""


def only(value: Any, place: str, allowed: str, required: str = "") -> Mapping[str, Any]:
    """Return an object whose fields are all known."""
    if not isinstance(value, dict):
        raise BadRequest(f"{place}: not an object")
    for name in value:
        if name not in allowed.split():
            raise BadRequest(f"{place}.{name}: unknown")
    for name in required.split():
        if name not in value:
            raise BadRequest(f"{place}.{name}: missing")
    return value


class StrictApi:
    """Serves on loopback; `async with` gives the address for `base_url`.

    Attributes:
        requests: bodies that were accepted or refused, in order.
        headers: theirs.
        replies: in place of the model's own, as they are taken off the front; None: the model's own.
    """

    path = ""
    base = ""

    def __init__(self, *replies: Any) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.replies = list(replies)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post(self.path, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}{self.base}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if not self.authorized(request):
            return web.json_response(self.error("invalid x-api-key", 401), status=401)
        try:
            self.check(body)
        except BadRequest as problem:
            return web.json_response(self.error(str(problem), 400), status=400)
        given = self.replies.pop(0) if self.replies else None
        if isinstance(given, web.StreamResponse):
            return given
        return web.json_response(self.reply(body) if given is None else given)

    authorized: Callable[[web.Request], bool]
    error: Callable[[str, int], Any]
    check: Callable[[dict[str, Any]], None]
    reply: Callable[[dict[str, Any]], Any]


class StrictOpenAI(StrictApi):
    path, base = "/v1/chat/completions", "/v1"

    def authorized(self, request: web.Request) -> bool:  # type: ignore[override]
        return request.headers.get("Authorization") == f"Bearer {KEY}"

    def error(self, message: str, status: int) -> Any:  # type: ignore[override]
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}

    def check(self, body: dict[str, Any]) -> None:  # type: ignore[override]
        allowed = (
            "model messages response_format temperature max_tokens max_completion_tokens seed tools tool_choice top_p "
            "n stop stream parallel_tool_calls reasoning_effort"
        )
        only(body, "body", allowed, "model messages")
        asked: list[str] = []
        for one in body["messages"]:
            if one.get("role") == "assistant":
                only(one, "messages.assistant", "role content name refusal tool_calls", "role")
                for call in one.get("tool_calls", ()):
                    only(call, "tool_calls", "id type function", "id type function")
                    only(call["function"], "function", "name arguments", "name arguments")
                    json.loads(call["function"]["arguments"])
                asked = [call["id"] for call in one.get("tool_calls", ())]
            elif one.get("role") == "tool":
                only(one, "messages.tool", "role content tool_call_id", "content tool_call_id")
                if one["tool_call_id"] not in asked:
                    raise BadRequest(f"tool_call_id {one['tool_call_id']!r} answers no call")
            else:
                only(one, "messages", "role content name", "role content")
        for tool in body.get("tools", ()):
            only(only(tool, "tools", "type function", "type function")["function"], "function",
                 "name description parameters strict", "name")  # fmt: skip

    def reply(self, body: dict[str, Any]) -> Any:  # type: ignore[override]
        message: dict[str, Any] = {"role": "assistant", "content": ANSWER, "refusal": None, "annotations": []}
        if "tools" in body and body["messages"][-1]["role"] != "tool":
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"item": "a"}'}
            calls = [{"id": f"call_{n}xyz", "type": "function", "function": function} for n in range(2)]
            message |= {"content": None, "tool_calls": calls}
        elif "response_format" in body:
            message["content"] = value_of(body["response_format"]["json_schema"]["schema"])
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        usage = {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def value_of(schema: dict[str, Any]) -> str:
    """Return an answer of a schema: that of the probe, or of `ChainVote`."""
    if "remarks" in schema["properties"]:
        return json.dumps({"remarks": [], "value": 1, "rating": 1, "verdict": "yes", "aliases": []})
    return json.dumps({"reason": "So.", "user_query": "Look.", "valid": True})


class StrictAnthropic(StrictApi):
    path = "/v1/messages"
    thinking = {"type": "thinking", "thinking": THOUGHT, "signature": "c2lnbmF0dXJl", "new_field": [1]}

    def authorized(self, request: web.Request) -> bool:  # type: ignore[override]
        return request.headers.get("Authorization") == f"Bearer {KEY}" and "anthropic-version" in request.headers

    def error(self, message: str, status: int) -> Any:  # type: ignore[override]
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"}

    def check(self, body: dict[str, Any]) -> None:  # type: ignore[override]
        allowed = (
            "model messages max_tokens system tools tool_choice output_config thinking metadata stop_sequences stream "
            "service_tier"
        )
        only(body, "body", allowed, "model messages max_tokens")
        if form := body.get("output_config", {}).get("format"):
            only(form, "output_config.format", "type schema", "type schema")
        called: list[str] = []
        for one in body["messages"]:
            only(one, "messages", "role content", "role content")
            if one["role"] not in ("user", "assistant"):
                raise BadRequest(f"messages: role {one['role']!r}")
            blocks = [{"type": "text", "text": one["content"]}] if isinstance(one["content"], str) else one["content"]
            answered = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            if answered != called:
                raise BadRequest("tool_use ids were found without tool_result blocks immediately after")
            called = [block["id"] for block in blocks if block["type"] == "tool_use"]
            for block in blocks:
                fields = {"text": "type text citations", "tool_use": "type id name input caller",
                          "tool_result": "type tool_use_id content is_error"}  # fmt: skip
                if block["type"] == "thinking":
                    if block != self.thinking:
                        raise BadRequest("thinking blocks cannot be modified")
                    continue
                only(block, "content", fields[block["type"]])
                if block["type"] == "text" and not block["text"]:
                    raise BadRequest("text content blocks must be non-empty")
            if called and "thinking" in body and blocks[0]["type"] != "thinking":
                raise BadRequest("a final assistant message must start with a thinking block")
        for tool in body.get("tools", ()):
            only(tool, "tools", "name description input_schema", "name input_schema")
            only(tool["input_schema"], "input_schema", "type properties required", "type")

    def reply(self, body: dict[str, Any]) -> Any:  # type: ignore[override]
        content: list[dict[str, Any]] = [{"type": "text", "text": ANSWER, "citations": None}]
        last = body["messages"][-1]["content"]
        if "tools" in body and isinstance(last, str):
            name = body["tools"][0]["name"]
            uses = [{"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": {"item": "a"}} for n in range(2)]
            content = [self.thinking, *uses]
        elif "output_config" in body:
            content = [{"type": "text", "text": value_of(body["output_config"]["format"]["schema"])}]
        stop = "tool_use" if len(content) > 1 else "end_turn"
        usage = {"input_tokens": 10, "cache_read_input_tokens": 40, "output_tokens": 7}
        return {"id": "msg", "type": "message", "role": "assistant", "model": "m", "content": content,
                "stop_reason": stop, "stop_sequence": None, "usage": usage}  # fmt: skip


class StrictGemini(StrictApi):
    path = "/v1/models/{model}"

    def authorized(self, request: web.Request) -> bool:  # type: ignore[override]
        assert request.match_info["model"] == "m:generateContent"
        return request.headers.get("x-goog-api-key") == KEY

    def error(self, message: str, status: int) -> Any:  # type: ignore[override]
        return {"error": {"code": status, "message": message, "status": "INVALID_ARGUMENT"}}

    def check(self, body: dict[str, Any]) -> None:  # type: ignore[override]
        only(body, "body", "contents systemInstruction generationConfig tools toolConfig safetySettings", "contents")
        settings = "temperature maxOutputTokens seed topP topK responseMimeType responseJsonSchema thinkingConfig"
        only(body.get("generationConfig", {}), "generationConfig", settings)
        only(body.get("systemInstruction", {}), "systemInstruction", "parts role")
        called: list[Any] = []
        for one in body["contents"]:
            only(one, "contents", "role parts", "role parts")
            if one["role"] not in ("user", "model"):
                raise BadRequest(f"contents: role {one['role']!r}")
            results = [part["functionResponse"] for part in one["parts"] if "functionResponse" in part]
            if [(each.get("id"), each["name"]) for each in results] != called:
                raise BadRequest("function response parts should be equal to function call parts of the turn before")
            calls = [part for part in one["parts"] if "functionCall" in part]
            called = [(part["functionCall"].get("id"), part["functionCall"]["name"]) for part in calls]
            if calls and "thoughtSignature" not in calls[0]:
                raise BadRequest("Function call is missing a thought_signature in functionCall parts.")
            for part in one["parts"]:
                only(part, "parts", "text thought thoughtSignature functionCall functionResponse newField")
            for each in results:
                only(each, "functionResponse", "id name response", "name response")
                only(each["response"], "response", "result")
        for tool in body.get("tools", ()):
            for declared in only(tool, "tools", "functionDeclarations")["functionDeclarations"]:
                only(declared, "functionDeclarations", "name description parametersJsonSchema", "name")

    def reply(self, body: dict[str, Any]) -> Any:  # type: ignore[override]
        parts: list[dict[str, Any]] = [{"text": ANSWER}]
        if "tools" in body and "functionResponse" not in body["contents"][-1]["parts"][0]:
            name = body["tools"][0]["functionDeclarations"][0]["name"]
            made = [{"functionCall": {"name": name, "args": {"item": "a"}}} for _ in range(2)]
            first = {**made[0], "thoughtSignature": "c2lnbmF0dXJl+/=", "newField": {"x": 1}}
            parts = [{"text": THOUGHT, "thought": True}, first, made[1]]
        elif schema := body.get("generationConfig", {}).get("responseJsonSchema"):
            parts = [{"text": value_of(schema)}]
        usage = {"promptTokenCount": 50, "candidatesTokenCount": 3, "thoughtsTokenCount": 4, "totalTokenCount": 57}
        candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m", "responseId": "r"}


APIS: Mapping[str, type[StrictApi]] = {"openai": StrictOpenAI, "anthropic": StrictAnthropic, "gemini": StrictGemini}
