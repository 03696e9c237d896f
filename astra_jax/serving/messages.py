"""OpenAI's messages and tools as the project's records, and a sampled turn as OpenAI's message, whole or in deltas.

Rendering and parsing are the chat format's. What cannot be executed as a call stays in the content as it was written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from astra_jax.serving.protocol import ChatRequest, InvalidRequest, shown
from sandbox.protocol import nests_too_deeply
from synthesis.core.chat_format import AssistantTurn, ChatFormat, Whole, beginning, parse_arguments
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.tool_schemas import UncheckableSchema, check_size

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's, and `ToolSpec`'s
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
"""Parts of a content that are text, and the field that holds it: of chats, and of the Responses API."""
_UNSUPPORTED = {
    "audio": "only text is offered here",
    "function_call": "it is no longer used, send tool_calls",
    "partial": "send continue_final_message, outside of the message, instead",
    "prefix": "send continue_final_message, outside of the message, instead",
}
"""Fields of a message that would change its meaning, unless they are null or false, and what to do instead."""
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

# ---------------------------------------------------------------------------------------------------------------------
# In


def conversation_of(request: ChatRequest, chat_format: ChatFormat) -> tuple[list[Message], list[ToolSpec]]:
    """The messages, and the tools that the model is shown.

    Args:
        chat_format: of the model; calls in the history that cannot be executed become text of it.

    Raises:
        InvalidRequest: a message or a tool that is not in OpenAI's form, or has something else than text.
    """
    messages = [_message(message, f"messages[{i}]", chat_format) for i, message in enumerate(request.messages)]
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    return messages, tools if offers_tools(request) else []


def offers_tools(request: ChatRequest) -> bool:
    """Whether the model is shown tools; only then is a call looked for in what it says."""
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
    """A string, or the texts of a list of parts, of a chat or of the Responses API; null is an empty one.

    Raises:
        InvalidRequest: a part is no text.
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
    """A call of the history; one whose arguments are no JSON object is the text that the model wrote, as in answers."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} has no function with a name; send calls as they were answered", param=where)
    arguments, name = function.get("arguments"), function["name"]
    if arguments is None or isinstance(arguments, str):
        written = (arguments or "").strip()
        if written in ("", "null"):  # clients' ways of having none
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
        raise InvalidRequest(f"{where} is no function with a name; only functions are offered here", param=where)
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
# Out


def message_of(text: str, chat_format: ChatFormat, *, tools: bool, form: bool = False) -> dict[str, Any]:
    """A whole turn as the message of an answer.

    Args:
        chat_format: of the model that said it.
        tools: whether tools were offered; without, nothing is a call.
        form: whether it is JSON, or calls; what looks like a tag in a string of JSON is none then.
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
    """Characters of a turn's thought, its tags included; `form`: see `message_of`."""
    return 0 if _is_json(text, chat_format, form=form) else len(text) - len(chat_format.split_reasoning(text)[1])


def _is_json(text: str, chat_format: ChatFormat, *, form: bool) -> bool:
    """Whether a turn of a form is the JSON that was asked for, and not calls."""
    return form and bool(chat_format.call_frame.opens) and text.startswith("{")


def _problem(call: ToolCall) -> str:
    return "the arguments nest too deeply" if nests_too_deeply(call.arguments) else ""


def _calls(turn: AssistantTurn, since: int = 0) -> list[ToolCall]:
    return [call for call in turn.calls[since:] if isinstance(call, ToolCall)]


def _openai_call(call: ToolCall) -> dict[str, Any]:
    # The parser counts calls within a turn; clients tell all calls of a conversation apart by their id.
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass
class _WholeCalls:
    """The calls of a growing text, each read once: when it is whole, or when no more text can make it one."""

    chat_format: ChatFormat
    _end: int = 0  # of the last
    _tried: int = 0

    def of(self, text: str, after: int) -> tuple[list[Whole], int]:
        """Those that are new, and where an open one begins; the text's length where none is open.

        Args:
            text: all so far.
            after: where its reasoning ends.
        """
        whole, opened = self.chat_format.whole_calls(text, max(self._end, after), self._tried, _problem)
        self._tried = len(text)
        if whole:
            self._end = whole[-1].end
        return whole, opened


class FirstCall:
    """Watches the growing text of a turn for the end of its first call."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format, self._calls = chat_format, _WholeCalls(chat_format)
        self._text = ""

    def push(self, text: str) -> bool:
        """Whether that call is whole, after more text. What cannot be executed as a call is none, as in the answer."""
        self._text += text
        if not text or self._format.is_thinking(self._text) is not False:
            return False
        after = len(self._text) - len(self._format.split_reasoning(self._text)[1])
        return any(one.call is not None for one in self._calls.of(self._text, after)[0])


class TurnDeltas:
    """Turns the growing text of a turn into deltas, which add up to `message_of` the whole.

    A delta is made of what no further text can change: the text so far without an open call, without what may be the
    beginning of a tag, and without newlines that a tag would take with it. Only a `</think>` that was never opened
    comes too late: what was sent as content before it stays content.
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
        self._behind = 0  # where that ends
        self._calls: list[ToolCall] = []
        self._reasoning = self._content = ""  # that were sent
        self._sent = 0  # calls

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._sent > 0

    def push(self, text: str) -> Iterator[dict[str, Any]]:
        """Deltas after more text."""
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
        """Deltas of what waited."""
        yield from self._growth(_parse(self._text, self._format, tools=self._tools, form=self._form))

    def _settled(self, after: int) -> str:
        """The content so far, as `parse_assistant` makes it of what stands before, between and behind calls.

        Args:
            after: where the reasoning ends.
        """
        self._behind = max(self._behind, after)
        whole, opened = self._whole.of(self._text, after)
        for one in whole:
            if one.call is not None:
                self._before = self._joined(self._text[self._behind : one.begin].removesuffix("\n"))
                self._calls.append(one.call)
                self._behind = one.end
        # What may begin a tag is at the end of all that has come; where a call is open, the tag is there.
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
