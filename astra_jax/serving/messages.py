"""Conversion of OpenAI's messages and tools to the project's records, and of sampled turns to OpenAI's messages.

The chat format renders and parses. A call that cannot be executed stays in the content as it is written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from astra_jax.base.nesting import nests_too_deeply
from astra_jax.serving.protocol import ChatRequest, InvalidRequest, shown
from synthesis.core.chat_format import AssistantTurn, ChatFormat, Whole, beginning, parse_arguments
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.tool_schemas import UncheckableSchema, check_size

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's, and `ToolSpec`'s
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
"""Types of text parts in a content, and the field with the text: of chats, and of the Responses API."""
_UNSUPPORTED = {
    "audio": "only text is offered here",
    "function_call": "it is no longer used, send tool_calls",
    "partial": "send continue_final_message, outside of the message, instead",
    "prefix": "send continue_final_message, outside of the message, instead",
}
"""Fields that would change a message's meaning, unless they are null or false, and what to send instead."""
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

# ---------------------------------------------------------------------------------------------------------------------
# Input


def conversation_of(request: ChatRequest, chat_format: ChatFormat) -> tuple[list[Message], list[ToolSpec]]:
    """Return the messages, and the tools that the model is shown.

    Args:
        chat_format: the model's format; calls in the history that cannot be executed become its text.

    Raises:
        InvalidRequest: a message or a tool is not in OpenAI's form, or has something other than text.
    """
    messages = [_message(message, f"messages[{i}]", chat_format) for i, message in enumerate(request.messages)]
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    return messages, tools if offers_tools(request) else []


def offers_tools(request: ChatRequest) -> bool:
    """Return whether the model is shown tools; only then are its texts parsed for calls."""
    return bool(request.tools) and request.tool_choice != "none"


def _message(message: Mapping[str, Any], where: str, chat_format: ChatFormat) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role is {shown(role)}; use one of {', '.join(_ROLES)}", param=f"{where}.role")
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise InvalidRequest(
            f"{where}.tool_calls must be a list, in a message of the assistant", param=f"{where}.tool_calls"
        )
    for name, remedy in _UNSUPPORTED.items():
        if message.get(name):
            param = f"{where}.{name}"
            raise InvalidRequest(f"{param} is {shown(message[name])}; {remedy}", param=param)
    if message.get("content") is None and role not in ("assistant", "tool"):
        raise InvalidRequest(f"{where}.content is missing; send a string", param=f"{where}.content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    content = text_of(message.get("content"), f"{where}.content") or text_of(message.get("refusal"), f"{where}.refusal")
    read = [_call(call, f"{where}.tool_calls[{i}]", chat_format) for i, call in enumerate(calls)]
    return Message(
        role=_ROLES[role],  # type: ignore[arg-type]
        content="\n".join(part for part in (content, *(one for one in read if isinstance(one, str))) if part),
        reasoning=text_of(reasoning, f"{where}.reasoning_content"),
        tool_calls=[one for one in read if isinstance(one, ToolCall)],
        tool_call_id=text_of(message.get("tool_call_id"), f"{where}.tool_call_id"),
        name=text_of(message.get("name"), f"{where}.name"),
    )


def text_of(content: Any, where: str) -> str:
    """Return a string, or the joined texts of a list of parts, of a chat or of the Responses API; null is empty.

    Raises:
        InvalidRequest: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else part
        if not isinstance(text, str):
            raise InvalidRequest(f"{where} has {shown(part)}; send a string, or parts of type text", param=where)
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str, chat_format: ChatFormat) -> ToolCall | str:
    """Return a call of the history; if its arguments are not a JSON object, the text that the model wrote."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} has no function with a name; send calls as they were answered", param=where)
    arguments, name = function.get("arguments"), function["name"]
    if arguments is None or isinstance(arguments, str):
        written = (arguments or "").strip()
        if written in ("", "null"):  # how clients send no arguments
            written = "{}"
        try:
            arguments = parse_arguments(written)
        except ValueError:
            return chat_format.call_frame.text(name, written)
    if not isinstance(arguments, dict) or nests_too_deeply(arguments):
        where = f"{where}.function.arguments"
        raise InvalidRequest(f"{where} is {shown(arguments)}; send a JSON object as a string", param=where)
    return ToolCall(id=text_of(call.get("id"), f"{where}.id"), name=name, arguments=arguments)


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} is not a function with a name; only functions are offered here", param=where)
    if function.get("strict") not in (None, True, False):
        raise InvalidRequest(
            f"{where}.function.strict is {shown(function['strict'])}; send true or false",
            param=f"{where}.function.strict",
        )
    if not _NAME.fullmatch(function["name"]):
        raise InvalidRequest(
            f"{where}.function.name is {shown(function['name'])}; use 1 to 64 letters, digits, _ and -",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema", param=f"{where}.function.parameters")
    try:
        check_size(parameters)
    except UncheckableSchema as error:
        where = f"{where}.function.parameters"
        raise InvalidRequest(f"{where}: {error}", param=where) from None
    description = text_of(function.get("description"), f"{where}.function.description")
    return ToolSpec(function["name"], description, parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Output


def message_of(text: str, chat_format: ChatFormat, *, tools: bool, form: bool = False) -> dict[str, Any]:
    """Return a whole turn as the message of an answer.

    Args:
        chat_format: format of the model that wrote it.
        tools: whether tools were offered; without them nothing is a call.
        form: whether the turn is JSON, or calls. Tags in a string of JSON are then text.
    """
    turn = _parse(text, chat_format, tools=tools, form=form)
    content = turn.content or (None if turn.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_openai_call(call) for call in _calls(turn)]
    return message


def _parse(text: str, chat_format: ChatFormat, *, tools: bool, form: bool) -> AssistantTurn:
    if _is_json(text, chat_format, form=form):
        return AssistantTurn("", text)
    if not tools:
        return AssistantTurn(*chat_format.split_reasoning(text))

    return chat_format.parse_assistant(text, keep_malformed=True, check=_problem)


def thought_length(text: str, chat_format: ChatFormat, *, form: bool = False) -> int:
    """Return the characters of a turn's thought, its tags included; for `form` see `message_of`."""
    return 0 if _is_json(text, chat_format, form=form) else len(text) - len(chat_format.split_reasoning(text)[1])


def _is_json(text: str, chat_format: ChatFormat, *, form: bool) -> bool:
    """Return whether a turn with a form is the requested JSON, and not calls."""
    return form and bool(chat_format.call_frame.opens) and text.startswith("{")


def _problem(call: ToolCall) -> str:
    return "the arguments nest too deeply" if nests_too_deeply(call.arguments) else ""


def _calls(turn: AssistantTurn, since: int = 0) -> list[ToolCall]:
    return [call for call in turn.calls[since:] if isinstance(call, ToolCall)]


def _openai_call(call: ToolCall) -> dict[str, Any]:
    # The parser numbers calls within a turn; clients need ids that are unique in a conversation.
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass
class _WholeCalls:
    """Calls of a growing text, each parsed once: when it is complete, or can no longer become one."""

    chat_format: ChatFormat
    _end: int = 0  # end of the last one
    _tried: int = 0

    def of(self, text: str, after: int) -> tuple[list[Whole], int]:
        """Return the new calls, and the start of an open one, or the text's length if none is open.

        Args:
            text: the whole text so far.
            after: end of its reasoning.
        """
        whole, opened = self.chat_format.whole_calls(text, max(self._end, after), self._tried, _problem)
        self._tried = len(text)
        if whole:
            self._end = whole[-1].end
        return whole, opened


class FirstCall:
    """Detector of the end of a turn's first call in its growing text."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format, self._calls = chat_format, _WholeCalls(chat_format)
        self._text = ""

    def push(self, text: str) -> bool:
        """Return whether the first call is complete after more text. A call that cannot be executed is text."""
        self._text += text
        if not text or self._format.is_thinking(self._text) is not False:
            return False
        after = len(self._text) - len(self._format.split_reasoning(self._text)[1])
        return any(one.call is not None for one in self._calls.of(self._text, after)[0])


class TurnDeltas:
    """Converter of a turn's growing text into deltas, which add up to `message_of` the whole.

    A delta has only text that no further text can change. So it excludes an open call, a possible start of a tag, and
    newlines that a tag would remove. One exception is a `</think>` that was never opened: content sent before it stays
    content.
    """

    def __init__(self, chat_format: ChatFormat, tools: bool, form: bool = False) -> None:
        """
        Args:
            tools, form: see `message_of`.
        """
        self._format, self._tools, self._form = chat_format, tools, form
        self._whole = _WholeCalls(chat_format)
        self._text = ""
        self._before = ""  # content before the last whole call
        self._behind = 0  # end of that call
        self._calls: list[ToolCall] = []
        self._reasoning = self._content = ""  # sent so far
        self._sent = 0  # calls

    @property
    def called(self) -> bool:
        """True if there was a call."""
        return self._sent > 0

    def push(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield deltas after more text."""
        self._text += text
        thinking = self._format.is_thinking(self._text)
        if not text or thinking is None:
            return
        if _is_json(self._text, self._format, form=self._form):
            turn = AssistantTurn("", self._text)
        else:
            reasoning, content = self._format.split_reasoning(self._text)
            if thinking:
                held = beginning(reasoning, self._format.thought_end)
                reasoning = reasoning[: len(reasoning) - held].rstrip("\n")
            elif self._tools:
                content = self._settled(len(self._text) - len(content))
            turn = AssistantTurn(reasoning, content, [*self._calls])
        yield from self._growth(AssistantTurn(turn.reasoning, turn.content.rstrip("\n"), turn.calls))

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yield deltas of the text that was held back."""
        yield from self._growth(_parse(self._text, self._format, tools=self._tools, form=self._form))

    def _settled(self, after: int) -> str:
        """Return the content so far, as `parse_assistant` makes it from the text before, between and after calls.

        Args:
            after: end of the reasoning.
        """
        self._behind = max(self._behind, after)
        whole, opened = self._whole.of(self._text, after)
        for one in whole:
            if one.call is not None:
                self._before = self._joined(self._text[self._behind : one.begin].removesuffix("\n"))
                self._calls.append(one.call)
                self._behind = one.end
        # A possible start of a tag is at the end of the text; if a call is open, its tag is there.
        held = self._format.opening(self._text) if opened == len(self._text) else 0
        return self._joined(self._text[self._behind : max(self._behind, opened - held)])

    def _joined(self, more: str) -> str:
        if not self._calls:
            return more
        return "\n".join(part for part in (self._before, more.strip("\n")) if part)

    def _growth(self, turn: AssistantTurn) -> Iterator[dict[str, Any]]:
        if more := _more(self._reasoning, turn.reasoning):
            self._reasoning = turn.reasoning
            yield {"reasoning_content": more}
        if more := _more(self._content, turn.content):
            self._content = turn.content
            yield {"content": more}
        for index, call in enumerate(_calls(turn, self._sent), self._sent):
            yield {"tool_calls": [{"index": index, **_openai_call(call)}]}
        self._sent = len(turn.calls)


def _more(before: str, now: str) -> str:
    return now[len(before) :] if now.startswith(before) else now
