"""Gemini's `generateContent` through its maker's package (extra `gemini`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from astra_jax.base.typed import decode_any_json, decode_json
from synthesis.core.chat_format import AssistantTurn
from synthesis.core.endpoint_apis import BYTES_PER_TOKEN, Api, http_client
from synthesis.core.endpoint_replies import (
    EndpointReply,
    UnreadableReply,
    end_problem,
    shown,
    token_count,
)
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.openai_messages import read_reply, text_of
from synthesis.core.rate_limits import Usage

_SETTINGS = {"temperature": "temperature", "max_tokens": "maxOutputTokens", "seed": "seed", "top_p": "topP"}
"""OpenAI's names of settings, and those in `generationConfig`."""
_OURS = frozenset({"model", "messages", "tools", "response_format", *_SETTINGS})


class GeminiApi(Api):
    """Gemini's `generateContent`. Fields of `extra_body` are those of its requests, such as `generationConfig`."""

    def __init__(self, config: OpenAITeacherConfig) -> None:
        super().__init__(config)
        import httpx2
        from google import genai
        from google.genai import types

        self._keys = {"x-goog-api-key": config.api_key}
        http = http_client(
            httpx2.AsyncClient, httpx2.Timeout, httpx2.Limits, config.base_url, config.concurrency, self._keys
        )
        self._http, self._types = http, types
        options = types.HttpOptions(base_url=config.base_url, httpx_async_client=http)
        self._client = genai.Client(api_key=config.api_key, vertexai=False, http_options=options)

    def _request(self, body: bytes) -> dict[str, Any]:
        asked = decode_json(body, dict[str, Any])
        settings = {theirs: asked[ours] for ours, theirs in _SETTINGS.items() if ours in asked}
        if (form := asked.get("response_format")) is not None:
            settings["responseMimeType"] = "application/json"
            if form["type"] == "json_schema":
                settings["responseJsonSchema"] = form["json_schema"]["schema"]
        given: dict[str, Any] = {name: value for name, value in asked.items() if name not in _OURS}
        given["generationConfig"] = {**settings, **given.get("generationConfig", {})}
        given["contents"] = _contents([one for one in asked["messages"] if one["role"] != "system"])
        if system := [one["content"] for one in asked["messages"] if one["role"] == "system"]:
            given["systemInstruction"] = {"parts": [{"text": text} for text in system]}
        if tools := asked.get("tools"):
            functions = [tool["function"] for tool in tools]
            declared = [
                {"name": one["name"], "description": one["description"], "parametersJsonSchema": one["parameters"]}
                for one in functions
            ]
            given["tools"] = [{"functionDeclarations": declared}]
        return {"model": asked["model"], "body": given}

    async def _post(self, request: dict[str, Any]) -> Any:
        # The package's own types would refuse fields of messages that they do not know, and drop those of replies.
        options = self._types.HttpOptions(extra_body=request["body"])
        config = self._types.GenerateContentConfig(http_options=options, should_return_http_response=True)
        return await self._client.aio.models.generate_content(model=request["model"], contents="-", config=config)

    def _read(self, given: Any, body: bytes) -> EndpointReply:
        raw = (given.sdk_http_response.body if given.sdk_http_response else None) or ""
        try:
            data = decode_any_json(raw)
        except (msgspec.DecodeError, UnicodeError):
            data = None
        data = data if isinstance(data, dict) else {}
        counts = data.get("usageMetadata")
        counts = counts if isinstance(counts, dict) else {}
        prompt, *written = (
            token_count(counts.get(name)) for name in ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
        )
        usage = None if prompt is None else Usage(prompt, sum(one or 0 for one in written))
        candidates, feedback = data.get("candidates"), data.get("promptFeedback")
        candidate = candidates[0] if isinstance(candidates, list) and candidates else None
        candidate = candidate if isinstance(candidate, dict) else {}
        error = self._error(data, candidate, answered=bool(candidate), usage=usage)
        estimated = usage or Usage(len(body) // BYTES_PER_TOKEN, len(raw.encode(errors="replace")) // BYTES_PER_TOKEN)
        empty: dict[str, Any] = {"role": "model", "parts": []}
        if isinstance(feedback, dict) and (blocked := feedback.get("blockReason")):
            problem = f"blocked by the endpoint (promptFeedback.blockReason={blocked!r:.80})"
            return EndpointReply("", str(blocked), estimated, empty, problem)
        if not candidate:
            problem = f"the body is not an answer of Gemini's API: {self._without_key(shown(raw.encode()))}"
            raise UnreadableReply(problem, usage, foreign=candidates is None and not counts)
        content = candidate.get("content")
        message = {**empty, **content} if isinstance(content, dict) else empty
        parts = message["parts"]
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise UnreadableReply(
                f"the parts of the answer are not objects: {shown(raw.encode())}", usage, foreign=False
            )
        reason = candidate.get("finishReason")
        reason = "" if reason is None else str(reason)
        problem = error or end_problem(reason, self.config.max_tokens, field="finishReason")
        return EndpointReply(text_of(parts), reason, estimated, message, problem)

    async def close(self) -> None:
        """See `Api.close`."""
        await self._http.aclose()

    @staticmethod
    def read_turn(message: Mapping[str, Any], tools: Collection[str] = ()) -> AssistantTurn:
        """See `Api.read_turn`."""
        return read_reply({"content": message["parts"]}, tools)


def _id_of(call: Mapping[str, Any], number: int) -> str:
    """Return the id of a call, which the API leaves out on some models."""
    return call["id"] if isinstance(call.get("id"), str) and call["id"] else f"call_{number}"


def _contents(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's messages as Gemini's contents; the API's own, which have parts, stay as they are."""
    every: list[dict[str, Any]] = []
    calls: dict[str, Mapping[str, Any]] = {}  # of the last turn of the model
    results: list[dict[str, Any]] = []
    for one in asked:
        if one["role"] == "tool":
            if not results:
                every.append({"role": "user", "parts": results})
            call = calls.get(one["tool_call_id"], {})
            named = {name: call[name] for name in ("id", "name") if call.get(name)}
            results.append({"functionResponse": {**named, "response": {"result": one.get("content") or ""}}})
            continue
        results = []
        if "parts" in one:
            made = [part["functionCall"] for part in one["parts"] if "functionCall" in part]
            calls = {_id_of(call, number): call for number, call in enumerate(made)}
            every.append(one)
        elif one["role"] == "assistant":
            parts: list[dict[str, Any]] = [{"text": one["content"]}] if one.get("content") else []
            calls = {}
            for written in one.get("tool_calls", ()):
                function = written["function"]
                call = {"name": function["name"], "args": decode_json(function["arguments"], dict[str, Any])}
                calls[written["id"]] = call
                parts.append({"functionCall": call})
            every.append({"role": "model", "parts": parts})
        else:
            every.append({"role": "user", "parts": [{"text": one.get("content") or ""}]})
    return every
