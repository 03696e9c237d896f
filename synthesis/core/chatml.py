"""ChatML with calls in tags, as Hermes has them: the formats of Qwen3 and Qwen2.5, and of models that know no tools.

A conversation in Qwen3's:

    <|im_start|>system … <tools> one JSON schema a line </tools> …<|im_end|>
    <|im_start|>user … <|im_end|>
    <|im_start|>assistant <think> … </think> text <tool_call> {"name": …, "arguments": …} </tool_call><|im_end|>
    <|im_start|>user <tool_response> … </tool_response> <tool_response> … </tool_response><|im_end|>
    <|im_start|>assistant … <|im_end|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from synthesis.core.chat_format import (
    AssistantTurn,
    Call,
    CallFrame,
    ChatFormat,
    MalformedCall,
    Segment,
    Whole,
    beginning,
    checked_call,
    decoded,
    escaped_of,
    may_be_cut,
    written,
)
from synthesis.core.records import Message, ToolCall, ToolSpec

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"

_CALL = CallFrame(
    before=f'{CALL_START}\n{{"name": "',
    middle='", "arguments": ',
    after=f"}}\n{CALL_END}",
    between="\n",
    opens=CALL_START,
)
_NO_SPACE = re.compile(r"\S")
_ASSISTANT_PROMPT = f"{TURN_START}assistant\n"
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


@dataclass(frozen=True)
class ChatML(ChatFormat):
    """A format of this kind; `QWEN3`, `QWEN3_INSTRUCT` and `QWEN2_5` are those of released models.

    Attributes:
        default_system: text of the system's turn if no message has one; None: no turn.
        think_tags: tags separate reasoning from content, even if it was left inside the content.
        thoughts: reasoning is written, and a last turn has a thought, if only an empty one. False leaves it out.
    """

    default_system: str | None = None
    think_tags: bool = False
    thoughts: bool = False

    @property
    def identity(self) -> Any:
        if self.think_tags and self.default_system is None:
            return self.thoughts  # as while there were no other formats
        return {"chatml": [self.default_system, self.think_tags, self.thoughts]}

    @property
    def turn_end(self) -> str:
        return TURN_END

    @property
    def pad(self) -> str:
        return PAD

    @property
    def frame(self) -> tuple[str, ...]:
        return (PAD, TURN_START, TURN_END)

    @property
    def text_tokens(self) -> tuple[str, ...]:
        thought = (THINK_START, THINK_END) if self.think_tags else ()
        return (*thought, CALL_START, CALL_END, RESPONSE_START, RESPONSE_END)

    @property
    def needed(self) -> tuple[str, ...]:
        # Qwen2.5 reads its tools' responses between tags that are no tokens.
        return (*self.frame, *self.text_tokens) if self.think_tags else self.frame

    @property
    def call_frame(self) -> CallFrame:
        return _CALL

    @property
    def thought_start(self) -> str:
        return f"{THINK_START}\n" if self.thoughts else ""

    @property
    def _names(self) -> tuple[str, ...]:
        return ("think", "tool_call", "tool_response") if self.think_tags else ("tool_call", "tool_response")

    # ------------------------------------------------------------------------------------------------------- rendering

    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        add_generation_prompt: bool,
        keep_reasoning: bool,
        thinking: bool,
    ) -> list[Segment]:
        pieces = [Segment(self._header(messages[0], tools), trainable=False)]
        last_query = -1 if keep_reasoning else _last_query(messages)
        for i, message in enumerate(messages):
            last = i + 1 == len(messages)
            if message.role == "assistant":
                text = self._assistant_text(message, thought=self.thoughts and i > last_query, last=last)
                pieces += [Segment(_ASSISTANT_PROMPT, False), Segment(text + TURN_END, True), Segment("\n", False)]
            elif message.role == "tool":
                # Consecutive tool results share one user turn.
                opening = f"{TURN_START}user" if i == 0 or messages[i - 1].role != "tool" else ""
                closing = f"{TURN_END}\n" if last or messages[i + 1].role != "tool" else ""
                pieces.append(Segment(opening + self._response(message.content) + closing, False))
            elif message.role == "user" or i > 0:
                pieces.append(Segment(f"{TURN_START}{message.role}\n{self.escape(message.content)}{TURN_END}\n", False))
        if add_generation_prompt:
            thought = "" if thinking or not self.thoughts else f"{THINK_START}\n\n{THINK_END}\n\n"
            pieces.append(Segment(_ASSISTANT_PROMPT + thought, False))
        return pieces

    def results_text(self, outputs: Sequence[str]) -> str:
        responses = "".join(self._response(output) for output in outputs)
        return f"\n{TURN_START}user{responses}{TURN_END}\n{_ASSISTANT_PROMPT}"

    def escape(self, text: str) -> str:
        return escaped_of(text, self._names, self.control)

    def _header(self, first: Message, tools: Sequence[ToolSpec]) -> str:
        system = self.escape(first.content) if first.role == "system" else self.default_system
        if tools:
            lines = "".join("\n" + self.escape(written(tool.to_openai())) for tool in tools)
            prefix = "" if system is None else system + "\n\n"
            return f"{TURN_START}system\n{prefix}{TOOLS_HEADER}{lines}{TOOLS_FOOTER}{TURN_END}\n"
        return "" if system is None else f"{TURN_START}system\n{system}{TURN_END}\n"

    def _assistant_text(self, message: Message, *, thought: bool, last: bool) -> str:
        reasoning, content = message.reasoning, message.content
        if self.think_tags and not reasoning and THINK_END in content:  # reasoning that was left inside the content
            reasoning = content.split(THINK_END)[0].rstrip("\n").split(THINK_START)[-1].lstrip("\n")
            content = content.split(THINK_END)[-1].lstrip("\n")
        text = content = self.escape(content)
        if thought and (last or reasoning):
            text = f"{THINK_START}\n{self.escape(reasoning.strip(chr(10)))}\n{THINK_END}\n\n" + content.lstrip("\n")
        for i, call in enumerate(message.tool_calls):
            newline = "\n" if content or i else ""
            text += newline + _CALL.text(self.escape(call.name), self.escape(written(call.arguments)))
        return text

    def _response(self, output: str) -> str:
        return f"\n{RESPONSE_START}\n{self.escape(output)}\n{RESPONSE_END}"

    # --------------------------------------------------------------------------------------------------------- parsing

    def parse_assistant(
        self, text: str, *, keep_malformed: bool = False, check: Callable[[ToolCall], str] | None = None
    ) -> AssistantTurn:
        text = text.removesuffix(TURN_END)
        reasoning, text = self.split_reasoning(text)
        content: list[str] = []
        calls: list[Call] = []
        position = end = 0
        while (start := self._next_call(text, end)) >= 0:
            call, end, _ = parse_tagged_call(text, start + len(CALL_START), f"call_{len(calls)}", check)
            if keep_malformed and isinstance(call, MalformedCall):
                continue
            # The template puts exactly one newline between text and a call; that one is not content.
            content.append(text[position:start].removesuffix("\n"))
            calls.append(call)
            position = end
        content.append(text[position:])
        if calls:
            content = [part for part in (content[0], *(part.strip("\n") for part in content[1:])) if part]
        return AssistantTurn(reasoning, "\n".join(content), calls)

    def split_reasoning(self, text: str) -> tuple[str, str]:
        if not self.think_tags:
            return "", text
        opened = text.lstrip("\n").startswith(THINK_START)
        end, first_call = text.find(THINK_END), text.find(CALL_START)
        if opened and end < 0:
            return text.lstrip("\n").removeprefix(THINK_START).strip("\n"), ""
        # A closing tag inside a tool call's arguments is data, unless the turn began with an opening one.
        if end < 0 or not (opened or first_call < 0 or end < first_call):
            return "", text
        reasoning = text[:end].lstrip("\n").removeprefix(THINK_START)
        return reasoning.strip("\n"), text[end + len(THINK_END) :].lstrip("\n")

    def is_thinking(self, text: str) -> bool | None:
        begun = text.lstrip("\n")
        if not self.think_tags:
            return False
        if THINK_START.startswith(begun):
            return None
        return begun.startswith(THINK_START) and THINK_END not in text

    @property
    def thought_end(self) -> str:
        return THINK_END if self.think_tags else ""

    def whole_calls(
        self, text: str, start: int, tried: int, check: Callable[[ToolCall], str] | None = None
    ) -> tuple[list[Whole], int]:
        whole: list[Whole] = []
        while (begin := self._next_call(text, start)) >= 0:
            inside = begin + len(CALL_START)
            if text.find(CALL_END, max(inside, tried - len(CALL_END) + 1)) < 0:
                return whole, begin
            call, end, is_open = parse_tagged_call(text, inside, f"call_{len(whole)}", check)
            if is_open:
                return whole, begin
            whole.append(Whole(begin, end, call if isinstance(call, ToolCall) else None))
            start, tried = end, 0  # what follows stood behind an open call
        return whole, len(text)

    def _next_call(self, text: str, start: int) -> int:
        """Return where the next call opens that is not part of a further thought; -1: nowhere."""
        call = text.find(CALL_START, start)
        while self.think_tags and call >= 0 and (thought := text.find(THINK_START, start, call)) >= 0:
            if (closed := text.find(THINK_END, thought)) < 0:
                return -1
            start = closed + len(THINK_END)
            if call < start:
                call = text.find(CALL_START, start)
        return call

    def opening(self, text: str) -> int:
        return beginning(text, CALL_START)


QWEN3 = ChatML(think_tags=True, thoughts=True)
"""Qwen3's own template, with `enable_thinking` unset; also what a tokenizer made here is for."""
QWEN3_INSTRUCT = ChatML(think_tags=True)
"""Qwen3-Instruct-2507's, which is the same without thoughts."""
QWEN2_5 = ChatML(default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")


def _last_query(messages: Sequence[Message]) -> int:
    """Index of the last user message. A user cannot write a tool's response: in the text its tags are escaped."""
    users = (i for i in reversed(range(len(messages))) if messages[i].role == "user")
    return next(users, len(messages) - 1)


def parse_tagged_call(
    text: str, start: int, call_id: str, check: Callable[[ToolCall], str] | None = None
) -> tuple[Call, int, bool]:
    """Read the call whose opening tag ends at `start`.

    Returns:
        The call, the position behind its closing tag, and whether more text could make another of it.
    """
    # JSON decides where the call ends, so that a closing tag inside a string argument does not.
    body = _behind_spaces(text, start)
    problem, is_open = "", False
    try:
        value, json_end = decoded(text, body)
        closing = _behind_spaces(text, json_end)
        if text.startswith(CALL_END, closing):
            call: Call = checked_call(value, text[body:json_end], call_id)
            if isinstance(call, ToolCall) and check is not None and (problem := check(call)):
                call = MalformedCall(text[start:closing].strip(), problem)
            return call, closing + len(CALL_END), False
        is_open = CALL_END.startswith(text[closing : closing + len(CALL_END)])
        is_closed = text.find(CALL_END, closing) >= 0
        problem = "there is text behind the JSON object" if is_closed else f"{CALL_END} is missing"
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = error.msg
            # A word that a closing tag follows is not cut; in a string the tag may be text.
            in_string = error.msg.startswith("Unterminated")
            is_open = may_be_cut(error) and (in_string or CALL_END not in error.doc[error.pos :])
        problem = f"not valid JSON: {reason}"
    end = text.find(CALL_END, start)
    if end < 0:
        return MalformedCall(text[start:].strip(), problem), len(text), True
    return MalformedCall(text[start:end].strip(), problem), end + len(CALL_END), is_open


def _behind_spaces(text: str, start: int) -> int:
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)
