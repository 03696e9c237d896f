"""Messages as OpenAI's chat completions have them: what a model is asked with, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from synthesis.core.chat_format import AssistantTurn, Call, MalformedCall, parse_arguments
from synthesis.core.records import Message, ToolCall

_CALL_TAG = "<tool_call>"


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """OpenAI's messages; thinking is `reasoning_content`, as compatible servers call it."""
    every: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            one["reasoning_content"] = message.reasoning
        if message.tool_calls:
            one["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _json(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            one |= {"tool_call_id": message.tool_call_id, "name": message.name}
        every.append(one)
    return every


def read_reply(message: Mapping[str, Any]) -> AssistantTurn:
    """What a model wrote: its thinking, what it says, and its calls in order, readable or not.

    Thinking is the field `reasoning_content` (vLLM also: `reasoning`), or what stands before `</think>` where the
    server does not parse it. A call that stands in the text, as of a server that does not parse calls, cannot be read.
    """
    content, reasoning = (text_of(message.get(name)) for name in ("content", "reasoning_content"))
    reasoning = reasoning or text_of(message.get("reasoning"))
    before, thought, after = content.partition("</think>")
    if thought:
        reasoning = "\n\n".join(filter(None, (reasoning, before.strip().removeprefix("<think>").strip())))
        content = after
    written = message.get("tool_calls") or []
    calls = [_call(one, number) for number, one in enumerate(written if isinstance(written, list) else [written])]
    if _CALL_TAG in content and not calls:
        calls = [MalformedCall(content, f"{_CALL_TAG} stands in the text: serve the model with a parser of its calls")]
    return AssistantTurn(reasoning.strip(), content.strip(), calls)


def text_of(value: Any) -> str:
    """A text, which some servers send as a list of parts."""
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, Mapping) and _is_text(part.get("text")))
    return value if isinstance(value, str) else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _call(written: Any, number: int) -> Call:
    function = written.get("function") if isinstance(written, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
        return MalformedCall(_json(written), "it names no function")
    text = function.get("arguments")
    text = text or "{}" if isinstance(text, str) or text is None else _json(text)
    try:
        return ToolCall(str(written.get("id") or f"call_{number}"), name, parse_arguments(text))
    except ValueError as error:
        return MalformedCall(text, f"{name}: {error}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
