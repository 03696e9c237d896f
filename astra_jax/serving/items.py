"""OpenAI's Responses API (`/v1/responses`) for text and functions: items become a conversation, turns become items.

The server keeps nothing between requests. `previous_response_id` is refused by name, and clients send all items again,
as with `store: false` (https://platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from astra_jax.serving.messages import TurnDeltas, offers_tools, text_of
from astra_jax.serving.protocol import ChatRequest, InvalidRequest, parse, shown
from astra_jax.serving.responses import Choice, Response
from astra_jax.serving.sampled import Part
from astra_jax.tokenizer import ChatTokenizer

MOST_ITEMS = 10_000
"""Most items of an input."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "conversation": (),
    "image": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False, True),
    "truncation": ("disabled", "auto"),
}
"""Unsupported fields, and their values that have no effect.

An input that is too long is refused, although `truncation` could ask to drop a part of it.
"""
_KEPT = ("conversation", "previous_response_id", "prompt")
"""Fields that name data which an earlier request left on a server."""
_IGNORED = ("context_management", "max_tool_calls", "store", "stream_options")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    _LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include`.

Except logprobs, they ask for parts of items that this server never sends. Thoughts are sent as text, and not as
encrypted content.
"""
_PARTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "text": {},
    "reasoning": {
        "context": ("auto", "current_turn"),
        "generate_summary": ("auto", "concise", "detailed"),
        "mode": ("standard",),
        "summary": ("auto", "concise", "detailed"),
    },
}
"""Names in object fields besides the supported ones, with the values that have no effect.

Thoughts are sent whole, and not as a summary.
"""
_CARRIED_OUT = {"text": ("format", "verbosity"), "reasoning": ("effort",)}
_OWN = ("include", "input", "instructions", "max_output_tokens", "reasoning", "text", "top_logprobs")
_NOT_HERE = (
    *("messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "response_format", "return_token_ids"),
    *("add_generation_prompt", "continue_final_message", "reasoning_effort", "verbosity"),
)
"""Fields that only chats have."""
_SAID_SO = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    (".function", ""),
    ("messages", "input"),
)
"""Names of a chat's fields in this API."""


class ItemsRequest(ChatRequest, kw_only=True):
    """Request to `/v1/responses`, converted to a chat.

    Attributes:
        echoed: fields of the request that the answer repeats.
    """

    echoed: dict[str, Any] = {}

    @property
    def thinking_fields(self) -> tuple[str, ...]:
        return tuple(map(_in_items_name, super().thinking_fields))


def items_request_of(fields: dict[str, Any]) -> ItemsRequest:
    """Return the request for a body's fields, checked.

    Raises:
        InvalidRequest: see `protocol.parse`; or an item is invalid, or not text.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    ignored = [name for name in fields if name in _IGNORED]
    for name in sorted(set(fields) & set(_NEUTRAL)):
        value = fields.pop(name)
        if not any(value == one and type(value) is type(one) for one in _NEUTRAL[name]):
            remedy = "; nothing is kept here, send all items instead" if name in _KEPT else "; leave it out"
            raise InvalidRequest(f"{name} is {shown(value)}, which is not supported here{remedy}", param=name)
        if value == "auto":
            ignored.append(name)
    for name in set(fields) & set(_NOT_HERE):
        raise InvalidRequest(f"{name} is a field of chats; leave it out, or ask /v1/chat/completions", param=name)
    metadata = fields.pop("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):
        raise InvalidRequest(f"metadata is {shown(metadata)}; send an object of strings", param="metadata")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_list(fields.get("tools", []), "tools"))]
    reasoning, text = _part(fields, "reasoning"), _part(fields, "text")
    ignored += [f"reasoning.{name}" for name in reasoning if name not in _CARRIED_OUT["reasoning"]]
    echoed = {name: fields.get(name) for name in ("instructions", "max_output_tokens")}
    echoed |= {"tools": [_echoed_tool(tool) for tool in tools], "text": {"format": {"type": "text"}, **text}}
    echoed |= {"tool_choice": fields.get("tool_choice", "auto"), "metadata": metadata}
    chat = {name: value for name, value in fields.items() if name not in _IGNORED and name not in _OWN}
    chat["messages"] = _messages(fields.get("input"), fields.get("instructions"))
    if "tools" in fields:
        chat["tools"] = tools
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        chat["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if "text" in fields:
        chat["response_format"] = _format(text)
    include = _list(fields.get("include", []), "include")
    for name in include:
        if name not in _INCLUDES:
            raise InvalidRequest(f"include has {shown(name)}; use some of {', '.join(_INCLUDES)}", param="include")
    ignored += [f"include.{name}" for name in include if name != _LOGPROBS]
    if _LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", 0)}
    elif fields.get("top_logprobs", 0) != 0:
        raise InvalidRequest(f"top_logprobs is given without {_LOGPROBS} in include; add it", param="top_logprobs")
    chat |= {"reasoning_effort": reasoning.get("effort"), "verbosity": text.get("verbosity")}
    try:
        asked = parse(chat, ChatRequest)
    except InvalidRequest as refused:
        raise in_items_words(refused) from None
    asked.ignored = (*map(_in_items_name, asked.ignored), *ignored)
    return ItemsRequest(**{name: getattr(asked, name) for name in asked.__struct_fields__}, echoed=echoed)


def in_items_words(refused: InvalidRequest) -> InvalidRequest:
    """Return a refusal of the chat with the field names of the Responses API."""
    param = None if refused.param is None else _in_items_name(refused.param)
    text = refused.text if not refused.param or param is None else refused.text.replace(refused.param, param)
    return InvalidRequest(text, status=refused.status, param=param, code=refused.code, headers=refused.headers)


def _in_items_name(param: str) -> str:
    """Return the name of a chat's field in the Responses API."""
    for chat, here in _SAID_SO:
        param = param.replace(chat, here)
    return param


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_ITEMS:
        raise InvalidRequest(f"{where} is {shown(value)}; send a list of {MOST_ITEMS:,} at most", param=where)
    return value


def _part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object field without nulls.

    Raises:
        InvalidRequest: it is not an object, or asks for something that is not supported.
    """
    given = fields.get(name, {})
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} is {shown(given)}; send an object", param=name)
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key not in _CARRIED_OUT[name] and value not in _PARTS[name].get(key, ()):
            where = f"{name}.{key}"
            raise InvalidRequest(f"{where:.100} is {shown(value)}; it is not supported here, leave it out", param=where)
    return given


def _format(text: Mapping[str, Any]) -> Any:
    format = text.get("format", {"type": "text"})
    if not isinstance(format, dict):
        raise InvalidRequest(f"text.format is {shown(format)}; send an object with a type", param="text.format")
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {name: one for name, one in format.items() if name != "type"}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{where} is {shown(tool)}; only functions are offered here", param=where)
    named = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": named}


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the answer repeats it, with all fields of OpenAI's schema."""
    function = tool["function"]
    return {
        "type": "function",
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": bool(function.get("strict")),
    }


def _messages(given: Any, instructions: Any) -> list[dict[str, Any]]:
    """Return a chat's messages. Consecutive thoughts, texts and calls of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if given is None:
        raise InvalidRequest("input is missing; send a text, or a list of items", param="input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input")
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") != "assistant":
            content = item.get("content")
            messages.append({"role": item.get("role"), "content": content and text_of(content, f"{where}.content")})
        elif kind == "function_call_output":
            content = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
            if kind == "message":
                messages[-1]["content"] += text_of(item.get("content"), f"{where}.content")
            elif kind == "reasoning":
                messages[-1]["reasoning_content"] += _thought(item, where)
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages[-1]["tool_calls"].append({"id": item.get("call_id"), "function": function})
        else:
            raise InvalidRequest(
                f"{where} is {shown(item)}; send messages, function calls and their outputs, and reasoning", param=where
            )
    return messages


def _thought(item: Mapping[str, Any], where: str) -> str:
    text = text_of(item.get("content"), f"{where}.content") or text_of(item.get("summary"), f"{where}.summary")
    if not text and item.get("encrypted_content"):
        where = f"{where}.encrypted_content"
        raise InvalidRequest(f"{where} cannot be read here; leave the item out", param=where)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Output


class ItemsResponse(Response[ItemsRequest]):
    """Response of `/v1/responses`: streamed as named events, or whole, as the last event contains it."""

    prefix, kind, chunk_kind = "resp", "response", ""
    end = b""

    def __init__(
        self, request: ItemsRequest, model: str, tokenizer: ChatTokenizer, prompts: Sequence[list[int]]
    ) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._form = request.response_format != {"type": "text"}
        self._deltas = TurnDeltas(tokenizer.format, offers_tools(request), self._form)
        self._output: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self._count = 0
        self._error: dict[str, Any] | None = None
        self._logprobs_since = 0  # first part whose logprobs were not yet sent

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        for _ in self._grown(choice, choice.text, last=True):
            pass
        return self._body(self._status(choice))

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._body("in_progress"))
        yield self._event("response.in_progress", response=self._body("in_progress"))

    def chunks(self, choice: Choice, part: Part) -> Iterator[dict[str, Any]]:
        yield from self._grown(choice, part.text, last=part.finish is not None)

    def closing(self) -> Iterator[dict[str, Any]]:
        (choice,) = self.choices
        status = self._status(choice)
        yield self._event(f"response.{status}", response=self._body(status))

    def framed(self, chunk: dict[str, Any]) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (chunk["type"].encode(), msgspec.json.encode(chunk))

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        error = body["error"]
        code = "server_error" if error["type"] == "server_error" else "invalid_prompt"
        self._error = {"code": code, "message": error["message"]}
        return self._event("response.failed", response=self._body("failed"))

    def _status(self, choice: Choice) -> str:
        return "completed" if choice.parts[-1].finish == "stop" else "incomplete"

    def _body(self, status: str) -> dict[str, Any]:
        asked = self.request
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        effort = asked.reasoning_effort or (None if asked.thinking else "none")
        return {
            "id": self._head["id"],
            "object": self.kind,
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self._head["model"],
            "status": status,
            "error": self._error,
            "incomplete_details": cut,
            "output": list(self._output),
            "usage": self.usage() if status in ("completed", "incomplete") else None,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_logprobs": asked.top_logprobs,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "reasoning": {"effort": effort, "summary": None},
            "previous_response_id": None,
            "background": False,
            "truncation": "disabled",
            **asked.echoed,
        }

    def usage(self) -> dict[str, Any]:
        of_chat = super().usage()
        (choice,) = self.choices
        thought = choice.thought_tokens(self._tokenizer.format, form=self._form)
        return {
            "input_tokens": of_chat["prompt_tokens"],
            "input_tokens_details": {**of_chat["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": of_chat["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": of_chat["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    # ---------------------------------------------------------------------------------------------------------- items

    def _grown(self, choice: Choice, text: str, *, last: bool) -> Iterator[dict[str, Any]]:
        """Yield events of more text, and of the items that it makes."""
        deltas = list(self._deltas.push(text))
        if last:
            deltas += self._deltas.finish()
        for delta in deltas:
            if more := delta.get("reasoning_content"):
                yield from self._opened("reasoning")
                yield self._said("reasoning_text", more)
            if more := delta.get("content"):
                yield from self._opened("message")
                yield self._said("output_text", more, logprobs=self._logprobs(choice))
            for call in delta.get("tool_calls", ()):
                yield from self._called(call)
        if last and not self._output:  # an empty answer is a turn, too
            yield from self._opened("message")
        if last:
            yield from self._closed("completed" if choice.parts[-1].finish == "stop" else "incomplete")

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield events that open an item of this kind, which then grows."""
        if self._open and self._output[-1]["type"] == kind:
            return
        yield from self._closed("completed")
        if kind == "reasoning":
            item: dict[str, Any] = {
                "id": _new("rs"),
                "type": kind,
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _new("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(item))
        item["content"] = [part]
        yield self._event("response.content_part.added", **self._place(), part=_copy(part))

    def _said(self, kind: str, more: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
        part = self._output[-1]["content"][0]
        part["text"] += more
        if logprobs is None:
            return self._event(f"response.{kind}.delta", **self._place(), delta=more)
        part["logprobs"] += logprobs
        return self._event(
            f"response.{kind}.delta", **self._place(), delta=more, logprobs=[_without_bytes(one) for one in logprobs]
        )

    def _closed(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield events that close the last item."""
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = status
        part = item["content"][0]
        logprobs = {"logprobs": [_without_bytes(one) for one in part["logprobs"]]} if "logprobs" in part else {}
        yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **logprobs)
        yield self._event("response.content_part.done", **self._place(), part=_copy(part))
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copy(item))

    def _called(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._closed("completed")
        function = call["function"]
        item = {"id": _new("fc"), "type": "function_call", "call_id": call["id"], "name": function["name"]}
        whole = {**item, "arguments": function["arguments"], "status": "completed"}
        self._output.append(whole)
        at = {"output_index": len(self._output) - 1}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **at, item=begun)
        at |= {"item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", **at, delta=whole["arguments"])
        echoed = {"name": whole["name"], "arguments": whole["arguments"]}
        yield self._event("response.function_call_arguments.done", **at, **echoed)
        yield self._event("response.output_item.done", output_index=at["output_index"], item=whole)

    def _place(self) -> dict[str, Any]:
        at = {"output_index": len(self._output) - 1, "content_index": 0}
        return {"item_id": self._output[-1]["id"], **at}

    def _logprobs(self, choice: Choice) -> list[dict[str, Any]]:
        """Return logprobs of the tokens since the last ones sent; they need not match a delta's text."""
        if not self.request.logprobs:
            return []
        since, self._logprobs_since = self._logprobs_since, len(choice.parts)
        return self.logprobs_of(choice.parts[since:])


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _without_bytes(logprob: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token's logprob for events; only parts have bytes."""
    best = [{"token": one["token"], "logprob": one["logprob"]} for one in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": best}


def _copy(value: Any) -> Any:
    """Return a copy of the current state, since the original grows."""
    if isinstance(value, dict):
        return {name: _copy(one) for name, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value
