"""Messages of OpenAI's chat completions: those of requests, those of replies, and replies in later requests."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from synthesis.core.chat_format import AssistantTurn, Call, MalformedCall
from synthesis.core.loose_json import read_arguments
from synthesis.core.markup import THINK_END, THINK_START, markup_in, split_thought
from synthesis.core.records import Message, ToolCall, ToolSpec

_THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "reasoning_text",
    "reasoning_details",
    "thinking_blocks",
    "tool_plan",
)
"""Fields of a message that hold its thinking: DeepSeek's and vLLM's, Groq's and OpenRouter's, Ollama's, LiteLLM's and
Cohere's."""
_OF_THOUGHTS = ("thinking", "reasoning", "text", "summary", "content")
_THINKING_PART = re.compile(r"(?:redacted_)?thinking|reasoning|thought")
_AROUND_NAME = re.compile(
    r"""[\s"'`]{0,9}(?:(?:functions?|tools?|default_api|api)(?:[.:/]|::))?([a-zA-Z0-9_.-]+?)(?::\d{1,4}|\(\)|<\|.{0,200})?[\s"'`]{0,9}"""
)
"""A tool's name within a namespace (OpenAI, Gemini), with a number (Kimi) or the model's own markup behind it
(`find<|channel|>commentary`), quoted, or as an empty call."""
_FUNCTIONS = ("function", "functionCall", "toolUse")
"""Keys that hold a call's name and arguments: OpenAI, Gemini, Bedrock."""
_PARSERS = "serve the model with the parsers of its calls and its thinking"


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return OpenAI's messages; thinking is `reasoning_content`, as compatible servers call it."""
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


def estimated_tokens(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """Return about how many tokens a model reads: one for a Chinese character, one for four others of the JSON."""
    text = msgspec.json.encode([messages, tools]).decode()
    chinese = len(re.findall(r"[\u3400-\u9fff]", text))
    return chinese + (len(text) - chinese) // 4


def sendable(message: Mapping[str, Any], request: bytes) -> dict[str, Any]:
    """Return an assistant message as the next request may hold it: without empty fields, every call with its own id.

    Some services send calls without ids, or with an empty one. Those get ids that all services accept: Mistral takes
    nine letters and digits only.

    Args:
        request: to which the message is the reply; it makes the ids of each turn of a conversation different.
    """
    kept = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    calls = kept.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls):
        given = Counter(call.get("id") for call in calls if isinstance(call.get("id"), str))
        kept["tool_calls"] = [
            {
                "type": "function",
                **{name: value for name, value in call.items() if value is not None},
                "id": id
                if isinstance(id := call.get("id"), str) and id and given[id] == 1
                else _new_id(request, number),
            }
            for number, call in enumerate(calls)
        ]
    if "content" not in kept:
        kept["content"] = message.get("content", "") if kept.get("tool_calls") else ""
    return {**kept, "role": "assistant"}


def _new_id(request: bytes, number: int) -> str:
    return hashlib.sha256(b"%d %s" % (number, request)).hexdigest()[:9]


def replayed(
    messages: Sequence[Message],
    sent: Sequence[Mapping[str, Any] | None],
    read_turn: Callable[[Mapping[str, Any]], AssistantTurn],
) -> list[dict[str, Any]]:
    """Return a conversation as its endpoint knows it: its messages as it sent them, results under its ids of calls.

    Args:
        sent: what the endpoint sent for each assistant message of `messages`; None or missing: another wrote it.
        read_turn: reads one of them.
    """
    own, ids = iter(sent), dict[str, str]()
    every: list[dict[str, Any]] = []
    for message, plain in zip(messages, to_openai(messages), strict=True):
        plain.pop("name", None)
        if message.role == "assistant" and (raw := next(own, None)) is not None:
            theirs = read_turn(raw).calls
            ids |= {a.id: b.id for a, b in zip(message.tool_calls, theirs, strict=False) if isinstance(b, ToolCall)}
            plain = dict(raw)
        elif message.role == "tool":
            plain["tool_call_id"] = ids.get(message.tool_call_id, message.tool_call_id)
        every.append(plain)
    return every


_PLAIN_FIELDS = frozenset({"role", "content", "tool_calls", "parts", "id", "type", "function"})
"""Fields that a message of a model, or a call in it, has on every endpoint."""


def own_fields(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the further fields of a model's messages and of their calls."""
    for message in messages:
        if message.get("role") == "assistant":
            calls = message.get("tool_calls")
            for one in (message, *(calls if isinstance(calls, list) else ())):
                yield from one.keys() - _PLAIN_FIELDS


def without_fields(message: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return a model's message without fields of these names, on itself and on its calls."""
    if not names or message.get("role") != "assistant":
        return message
    kept = {name: value for name, value in message.items() if name not in names}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [{name: value for name, value in call.items() if name not in names} for call in calls]
    return kept


def read_reply(message: Mapping[str, Any], tools: Collection[str] = ()) -> AssistantTurn:
    """Read what a model wrote: its thinking, what it says, and its calls in order, readable or not.

    Thinking is a field of the message (`_THOUGHTS`), a part of its content, or what stands before `</think>` where the
    server does not parse it. Calls are `tool_calls`, the older `function_call`, or parts of the content as Anthropic
    and Gemini write them. Markup that stands in the text, the thinking, or a call is the turn's `leak`: the server
    has not parsed its model's output.

    Args:
        tools: names of the tools that the model was offered. A prefix of a name is dropped where they have the rest.
    """
    content, inline = split_thought(text_of(message.get("content")))[::-1]
    thoughts = [_thinking(message.get("content")), inline]
    named = next((thought for name in _THOUGHTS if (thought := thought_of(message.get(name)))), "")
    reasoning = "\n\n".join(filter(None, dict.fromkeys(untagged(thought).strip() for thought in (named, *thoughts))))
    calls: list[Call] = []
    repairs: dict[int, list[str]] = {}
    for number, one in enumerate(_written_calls(message)):
        call, needed = _call(one, number, tools)
        calls.append(call)
        if needed:
            repairs[number] = needed
    content = content.strip()
    return AssistantTurn(reasoning, content, calls, _leak(reasoning, content, calls, tools), repairs)


def _leak(reasoning: str, content: str, calls: Sequence[Call], tools: Collection[str]) -> str:
    """Return which markup of a chat format a turn holds, and the fix; empty where it holds none."""
    if found := markup_in(content, tools, turn=True):
        return f"the text holds {found}; {_PARSERS}"
    if found := markup_in(reasoning):
        return f"the thinking holds {found}; {_PARSERS}"
    for call in (call for call in calls if isinstance(call, ToolCall)):
        for text in (call.name, *texts_of(call.arguments)):
            found = markup_in(text)
            if found and not found.startswith("the thinking"):  # which people look up
                return f"a call of {call.name[:80]!r} holds {found}; {_PARSERS}"
    return ""


def texts_of(value: Any, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the texts of a JSON value: neither names in objects, nor what these names of `without` stand for."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if name not in without:
                yield from texts_of(one, without)
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one, without)


def text_of(value: Any) -> str:
    """Return a message's text, which some servers send as a list of parts; parts of thinking are left out."""
    return "".join(
        one if isinstance(one, str) else one["text"]
        for one in _parts(value)
        if isinstance(one, str) or (not is_thought(one) and isinstance(one.get("text"), str))
    )


def thought_of(value: Any) -> str:
    """Return the thinking that a field holds: a text, a part, or a list of parts, which may hold such lists."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return next((thought for name in _OF_THOUGHTS if (thought := thought_of(value.get(name)))), "")
    return "".join(map(thought_of, value)) if isinstance(value, list) else ""


def _thinking(content: Any) -> str:
    return "".join(thought_of(one) for one in _parts(content) if is_thought(one))


def _parts(value: Any) -> list[str | Mapping[str, Any]]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str | Mapping)]


def is_thought(part: Any) -> bool:
    """Return whether a part of a message's content is thinking, by its `type` (`thinking…`, `reasoning…`) or Gemini's
    mark."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return part.get("thought") is True or (isinstance(kind, str) and bool(_THINKING_PART.match(kind)))


def untagged(thought: str) -> str:
    """Thinking without the tags that a gateway left around it; other thinking as it is."""
    bare = thought.strip().removeprefix(THINK_START).removesuffix(THINK_END)
    return thought if bare == thought.strip() else bare.strip()


def _written_calls(message: Mapping[str, Any]) -> list[Any]:
    for written in (message.get("tool_calls"), message.get("function_call")):
        if written:
            return written if isinstance(written, list) else [written]
    return [
        part
        for part in _parts(message.get("content"))
        if not isinstance(part, str)
        and (part.get("type") in ("tool_use", "function_call") or not part.keys().isdisjoint(_FUNCTIONS))
    ]


def _call(written: Any, number: int, tools: Collection[str]) -> tuple[Call, list[str]]:
    """Return the call, and the repairs that it needed."""
    given = written if isinstance(written, Mapping) else {}
    function = next((given[name] for name in _FUNCTIONS if name in given), given)
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name.strip():
        return MalformedCall(_json(written), "it names no function"), []
    name, repairs = _tool_name(name, tools)
    arguments = next((function[key] for key in ("arguments", "input", "args", "parameters") if key in function), None)
    try:
        read, needed = read_arguments(arguments)
    except ValueError as error:
        return MalformedCall(arguments if isinstance(arguments, str) else _json(arguments), f"{name}: {error}"), []
    return ToolCall(str(given.get("id") or function.get("id") or f"call_{number}"), name, read), [*repairs, *needed]


def _tool_name(name: str, tools: Collection[str]) -> tuple[str, list[str]]:
    """Return the name of an offered tool without what endpoints put around it; another name as it is."""
    if name in tools or not (found := _AROUND_NAME.fullmatch(name)) or found[1] not in tools:
        return name, []
    return found[1], ["tool_name"]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
