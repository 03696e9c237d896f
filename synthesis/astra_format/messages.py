"""Conversations as other programs write them: Qwen-Agent's messages and OpenAI's, both ways.

Qwen-Agent has one assistant message for the text of a turn and one more for each of its calls, then the results:

    {"role": "assistant", "content": "…", "reasoning_content": "…"}
    {"role": "assistant", "content": "", "function_call": {"name": "…", "arguments": "{…}"}, "extra": {…}}
    {"role": "function", "name": "…", "content": "…", "extra": {"function_id": "1"}}

OpenAI has one assistant message with `tool_calls`, and a `tool` message with `tool_call_id` for each result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from astra_jax.base.typed import convert_to, decode_json
from synthesis.astra_format import keys
from synthesis.astra_format.content_blocks import without_blocks
from synthesis.astra_format.records import Defect
from synthesis.astra_format.text_calls import RESULTS, read_turn, results_of
from synthesis.core.loose_json import read_arguments
from synthesis.core.markup import Quotes, markup_in
from synthesis.core.openai_messages import is_thought, thought_of, untagged
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.stages import Rejected
from synthesis.core.tool_documents import opened_text

ERROR = "[ERROR:"
"""Start of the last message of a run that failed and that the original recorded all the same."""


# ---------------------------------------------------------------------------------------------------------------------
# Out


def to_qwen(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Qwen-Agent's messages. Ids go into `extra.function_id`, where Qwen-Agent has them too."""
    every: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            extra = {"function_id": message.tool_call_id}
            every.append({"role": "function", "name": message.name, "content": message.content, "extra": extra})
            continue
        marks = {"weight": message.weight} if message.weight != 1 else {}
        if message.content or message.reasoning or not message.tool_calls:
            one: dict[str, Any] = {"role": message.role, "content": message.content, **marks}
            if message.reasoning:
                one["reasoning_content"] = message.reasoning
            every.append(one)
        for call in message.tool_calls:
            function = {"name": call.name, "arguments": _json(call.arguments)}
            extra = {"function_id": call.id}
            every.append({"role": "assistant", "content": "", "function_call": function, "extra": extra, **marks})
    return every


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------------
# In


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Given(msgspec.Struct):
    """A message of either form."""

    role: Literal["system", "developer", "user", "assistant", "function", "tool", "ipython"]
    content: str | list[Any] | None = None
    reasoning_content: str | list[Any] | None = None
    reasoning: str | list[Any] | dict[str, Any] | None = None
    reasoning_details: str | list[Any] | dict[str, Any] | None = None
    thinking: str | None = None
    function_call: _Function | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    extra: dict[str, Any] | None = None
    weight: float = 1.0

    def function_id(self) -> str:
        given = (self.extra or {}).get("function_id")
        return given if isinstance(given, str) else ""


_ROLES = get_args(get_type_hints(_Given)["role"])


@dataclass
class _Open:
    """A call that waits for its result; `given` is the id that the source has for it, if any."""

    call: ToolCall
    given: str


@dataclass
class _Reader:
    tools: Sequence[ToolSpec] = ()
    messages: list[Message] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)
    open: list[_Open] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def add(self, given: _Given) -> None:
        if given.role == "assistant":
            self._assistant(given)
        elif given.role in ("function", "tool", "ipython"):  # the last is Llama 3's
            results, rest = results_of(_text(given.content), RESULTS[:1])
            for one in results if results and not rest.strip() else [{}]:
                self._result(msgspec.structs.replace(given, **one))
        elif given.role == "user" and self.open and (read := results_of(_text(given.content)))[0]:
            detail = f"message {len(self.messages)}, of the user, is read as results"
            self.defects.append(Defect("results_in_text", detail))
            for one in read[0]:
                self._result(_Given("tool", **one))
            if read[1].strip():
                self.add(msgspec.structs.replace(given, content=read[1]))
        else:
            self.close()
            self.messages.append(Message("user" if given.role == "user" else "system", _text(given.content)))

    def _assistant(self, given: _Given) -> None:
        thoughts = [one for one in _items(given.content) if is_thought(one)]
        turn = read_turn(_text([one for one in _items(given.content) if not is_thought(one)]), self.tools)
        fields = (
            given.reasoning_content,
            given.reasoning,
            given.thinking,
            opened_text(given.reasoning_details),
            thoughts,
        )
        named = untagged(next(filter(None, map(thought_of, fields)), ""))
        reasoning = "\n\n".join(dict.fromkeys(filter(None, (named, turn.reasoning))))
        last = self.messages[-1] if self.messages else None
        # OpenAI's form has a turn in one message; Qwen-Agent's has one for its text, then one for each call.
        goes_on = given.tool_calls is None and given.function_call is not None
        if last is None or last.role != "assistant" or not goes_on:
            self.close()
            last = Message("assistant", "").weighed(given.weight)
            self.messages.append(last)
        if last.weight != given.weight:
            raise Rejected(
                "bad_mark", "it is of the same turn as the message before, and has another weight; give both the same"
            )
        calls = [(one.function, one.id or "") for one in given.tool_calls or []]
        if given.function_call is not None:
            calls.append((given.function_call, given.function_id()))
        if given.reasoning_details and not reasoning:
            self._note("encrypted_reasoning", "reasoning_details hold no text, and the turn is read without thinking")
        if turn.problem:
            self._note("leaked_markup", f"{turn.problem}; correct it, or give the call in tool_calls")
        if turn.calls and calls:
            there = [(one.name, self._arguments(one)) for one, _ in calls]
            if there != [(one.name, one.arguments) for one in turn.calls]:
                self._note("leaked_markup", "its text has other calls than its tool_calls; take them out of the text")
        elif turn.calls:
            self._note("calls_in_text", f"{', '.join(one.name for one in turn.calls)} in its text is read as a call")
            calls = [(_Function(one.name, one.arguments), "") for one in turn.calls]
        self.messages[-1] = msgspec.structs.replace(
            last,
            content="\n".join(filter(None, (last.content, turn.content))),
            reasoning="\n".join(filter(None, (last.reasoning, reasoning))),
            tool_calls=[*last.tool_calls, *(self._call(function, id) for function, id in calls)],
        )

    def _note(self, name: str, detail: str) -> None:
        self.defects.append(Defect(name, f"message {len(self.messages) - 1}: {detail}"))

    def _call(self, function: _Function, given: str) -> ToolCall:
        id = given
        if given in self.ids:
            self.defects.append(Defect("repeated_call_id", f"{given} is the id of two calls; the later has a new one"))
        if not given or given in self.ids:
            number = len(self.ids) + 1
            while (id := f"call_{number}") in self.ids:
                number += 1
        self.ids.add(id)
        call = ToolCall(id, function.name, self._arguments(function))
        self.open.append(_Open(call, given))
        return call

    def _arguments(self, function: _Function) -> dict[str, Any]:
        given = function.arguments
        if isinstance(given, dict):
            return given
        try:
            return decode_json(given, dict[str, Any]) if given and given.strip() else {}
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            pass
        try:
            read, repairs = read_arguments(given)
        except ValueError:
            self.defects.append(Defect("bad_arguments", f"{function.name}: no JSON object: {given!r:.80}"))
            return {}
        if repairs:
            self.defects.append(Defect("repaired_arguments", f"{function.name}: {', '.join(repairs)}: {given!r:.80}"))
        return read

    def _result(self, given: _Given) -> None:
        id, name = given.tool_call_id or given.function_id(), given.name or ""
        fitting = [
            one
            for one in self.open
            if (not id or not one.given or one.given == id) and (not name or one.call.name == name)
        ]
        if not fitting:
            self.defects.append(Defect("result_without_call", f"of {name or 'no tool'}, id {id or 'missing'}"))
            return
        found = fitting[0]
        self.open.remove(found)
        content = _text(given.content)
        self.messages.append(Message("tool", content, tool_call_id=found.call.id, name=found.call.name))

    def close(self) -> None:
        """End the turn: calls that are still open stay without a result."""
        self.defects += [Defect("call_without_result", f"{one.call.name}, id {one.call.id}") for one in self.open]
        self.open.clear()


def read_messages(given: Sequence[Any], tools: Sequence[ToolSpec] = ()) -> tuple[list[Message], list[Defect]]:
    """Convert messages of either form to ours, and return them with their defects.

    Calls: `call_without_result`, `result_without_call` (left out), `bad_arguments` (no JSON object; replaced by `{}`),
    `repaired_arguments` (repaired by `core/loose_json.py`), `repeated_call_id` (repaired).
    Turns: `no_question`, `no_final_answer`, `ends_in_error` (`[ERROR: …]` is the last message).
    Text: `leaked_markup` (markup of a chat format in the text or the thinking of an assistant's turn).

    `calls_in_text` and `results_in_text` (read as calls and results, see `text_calls`), `call_in_code_block` (text
    about calls, which stays text), `encrypted_reasoning` (thinking that nobody can read).

    A result belongs to the first open call of its turn with its id, or with its name where there are no ids.

    Args:
        tools: tools that the record lists.

    Raises:
        Rejected: `bad_record`: an invalid message; `unknown_key`, `bad_mark`: see `keys`.
    """
    reader = _Reader(tools)
    for index, one in enumerate(given):
        try:
            for message in without_blocks(one):
                reader.add(convert_to(_checked(message), _Given))
        except msgspec.ValidationError as error:
            raise Rejected("bad_record", f"message {index}: {error}") from None
        except Rejected as rejection:
            raise Rejected(rejection.reason, f"message {index}: {rejection.detail}") from None
    reader.close()
    messages, defects = reader.messages, reader.defects
    names = [tool.name for tool in tools]
    found = {defect.detail.partition(":")[0] for defect in defects if defect.name == "leaked_markup"}
    for number, message in enumerate(messages):
        if message.role != "assistant" or f"message {number}" in found:
            continue
        leak = markup_in(Quotes(message.content).outside(), names, turn=True) or markup_in(message.reasoning)
        if leak:
            detail = f"message {number} holds {leak}, which would be trained on: {message.content!r:.200}"
            defects.append(Defect("leaked_markup", detail))
        elif quoted := markup_in(message.content, names, turn=True):
            defects.append(Defect("call_in_code_block", f"message {number} holds {quoted} in code, and stays text"))
    if not any(message.role == "user" and message.content.strip() for message in messages):
        defects.append(Defect("no_question", "no message of the user says anything"))
    last = messages[-1] if messages else Message("user", "")
    if last.content.lstrip().startswith(ERROR):
        defects.append(Defect("ends_in_error", last.content.strip()[:100]))
    elif last.role != "assistant" or last.tool_calls or not last.content.strip():
        defects.append(Defect("no_final_answer", f"the last message is of the role {last.role} and is not an answer"))
    return messages, defects


def _checked(given: Any) -> Any:
    """Return a message with its marks of training as `weight`, which only the assistant's have. Raises `Rejected`."""
    if not isinstance(given, dict):
        return given
    keys.check(given, (*_Given.__struct_fields__, *keys.MARKS), keys.MESSAGE, "")
    for call in given.get("tool_calls") or () if isinstance(given.get("tool_calls"), list) else ():
        if isinstance(call, dict):
            keys.check(call, _Call.__struct_fields__, keys.CALL, "a call")
            if isinstance(function := call.get("function"), dict):
                keys.check(function, _Function.__struct_fields__, keys.CALL, "a call's function")
    if isinstance(function := given.get("function_call"), dict):
        keys.check(function, _Function.__struct_fields__, keys.CALL, "a call")
    plain, role = keys.without_marks(given), given.get("role")
    if role not in _ROLES:
        raise Rejected("bad_record", f"the role {role!r:.40} is not known; use one of {', '.join(_ROLES)}")
    if role == "assistant":
        return {**plain, "weight": keys.weight_of(given, "")}
    keys.check_asks_nothing(given, str(role), "")
    return plain


def _items(content: str | list[Any] | None) -> list[Any]:
    return [content or ""] if content is None or isinstance(content, str) else content


def _text(content: str | list[Any] | None) -> str:
    """Return the text of content, which may be a list of text items.

    Raises:
        Rejected: `bad_record`: an item that is no text, such as an image.
    """
    texts: list[str] = []
    for one in _items(content):
        if isinstance(one, dict) and isinstance(one.get("text"), str):
            keys.check(one, (), keys.PART, "a text of the content")
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            kind = str(one.get("type", "")) if isinstance(one, dict) else ""
            named = f", of type {kind!r:.40}" if kind else ""
            raise Rejected(
                "bad_record", f"the content has an item that is not text{named}, such as an image: {one!r:.100}"
            )
        texts.append(text)
    return "".join(texts)
