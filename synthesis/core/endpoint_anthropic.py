"""Anthropic's messages API through its maker's package (extra `anthropic`)."""

from __future__ import annotations

from typing import Any

from astra_jax.base.typed import decode_json
from synthesis.core.endpoint_apis import BYTES_PER_TOKEN, Api, http_client, json_of
from synthesis.core.endpoint_replies import (
    BadStatus,
    EndpointReply,
    UnreadableReply,
    end_problem,
    shown,
    token_count,
)
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.openai_messages import text_of
from synthesis.core.rate_limits import Usage


class AnthropicApi(Api):
    """Anthropic's messages. It samples without seeds, and enforces a JSON schema but not JSON alone."""

    def __init__(self, config: OpenAITeacherConfig) -> None:
        super().__init__(config)
        import anthropic
        from anthropic.types import Message

        limits = type(anthropic.DEFAULT_CONNECTION_LIMITS)
        http = http_client(
            anthropic.DefaultAioHttpClient, anthropic.Timeout, limits, config.base_url, config.concurrency, self._keys
        )
        self._client = anthropic.AsyncAnthropic(
            base_url=config.base_url, api_key=config.api_key, max_retries=0, http_client=http
        )
        self._message = Message

    def _request(self, body: bytes) -> dict[str, Any]:
        asked = decode_json(body, dict[str, Any])
        given = {name: value for name, value in asked.items() if name not in ("messages", "seed", "tools")}
        if given.get("temperature") == 1:  # the API's own, and current models take no other
            del given["temperature"]
        if (form := given.pop("response_format", None)) is not None:
            if form["type"] != "json_schema":
                raise BadStatus(400, f"Anthropic's API has no {form['type']}".encode())
            schema = {"type": "json_schema", "schema": form["json_schema"]["schema"]}
            given["output_config"] = {**given.get("output_config", {}), "format": schema}
        system = [one["content"] for one in asked["messages"] if one["role"] == "system"]
        if system:
            given["system"] = "\n\n".join(system)
        given["messages"] = _messages([one for one in asked["messages"] if one["role"] != "system"])
        if tools := asked.get("tools"):
            functions = [tool["function"] for tool in tools]
            given["tools"] = [
                {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
                for one in functions
            ]
        return given

    async def _post(self, request: dict[str, Any]) -> Any:
        # `messages.create` would drop or refuse fields that the package does not know, and refuses long answers.
        return await self._client.post("/v1/messages", cast_to=self._message, body=request)

    def _read(self, given: Any, body: bytes) -> EndpointReply:
        data = given.to_dict(mode="python", warnings=False) if isinstance(given, self._message) else given
        counts = data.get("usage") if isinstance(data, dict) else None
        counts = counts if isinstance(counts, dict) else {}
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        prompts, written = [token_count(counts.get(name)) for name in names], token_count(counts.get("output_tokens"))
        usage = None if prompts[0] is None or written is None else Usage(sum(one or 0 for one in prompts), written)
        content = data.get("content") if isinstance(data, dict) else None
        error = self._error(data, answered=isinstance(content, list), usage=usage)
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            problem = f"the body is not a message of Anthropic's API: {self._without_key(shown(json_of(data)))}"
            raise UnreadableReply(problem, usage, foreign=not isinstance(content, list))
        text = text_of(content)
        reason = data.get("stop_reason")
        reason = "" if reason is None else str(reason)
        if usage is None:
            usage = Usage(len(body) // BYTES_PER_TOKEN, len(json_of(content)) // BYTES_PER_TOKEN)
        problem = error or end_problem(reason, self.config.max_tokens, field="stop_reason")
        return EndpointReply(text, reason, usage, {"role": "assistant", "content": content}, problem)

    async def close(self) -> None:
        """See `Api.close`."""
        await self._client.close()


def _messages(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's messages as Anthropic's; the API's own, whose content is a list of blocks, stay as they are."""
    every: list[dict[str, Any]] = []
    for one in asked:
        role, content = one["role"], one.get("content") or ""
        if role == "assistant" and not isinstance(content, list):
            blocks = [{"type": "text", "text": content}] if content.strip() else []
            for call in one.get("tool_calls", ()):
                made = call["function"]
                arguments = decode_json(made["arguments"], dict[str, Any])
                blocks.append({"type": "tool_use", "id": call["id"], "name": made["name"], "input": arguments})
            content = blocks
        elif role == "tool":
            result = {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": content}
            if every and every[-1]["role"] == "user" and isinstance(every[-1]["content"], list):
                every[-1]["content"].append(result)  # all results of a turn are one message
                continue
            role, content = "user", [result]
        every.append({"role": role, "content": content})
    return every
