"""Llama 3's chat formats: turns with headers, a call as JSON, one a turn. 3.1, 3.2 and 3.3 share one, 3.0 has its own.

    <|begin_of_text|><|start_header_id|>system<|end_header_id|> … <|eot_id|>
    <|start_header_id|>user<|end_header_id|> … one JSON schema after the other … the question <|eot_id|>
    <|start_header_id|>assistant<|end_header_id|> {"name": …, "parameters": …}<|eot_id|>
    <|start_header_id|>ipython<|end_header_id|> "…"<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|> …<|eot_id|>

As its template has it, what the assistant says beside a call is left out, and there are no thoughts. 3.0's template has
no dates, no turn of the system that no message asked for, and no tools: calls and results are written as 3.1's are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from synthesis.core.chat_format import (
    AssistantTurn,
    Call,
    CallFrame,
    ChatFormat,
    MalformedCall,
    NotInFormat,
    Segment,
    Whole,
    checked_call,
    decoded,
    escaped_of,
    written,
)
from synthesis.core.records import Message, ToolCall, ToolSpec

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
HEADER_START, HEADER_END, TURN_END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
PYTHON_TAG = "<|python_tag|>"

TODAY = "26 Jul 2024"
"""Date that the template writes by default. The day of a run would make its tokens differ from another run's."""
_ARGUMENTS = "parameters"
_CALL = CallFrame(before='{"name": "', middle=f'", "{_ARGUMENTS}": ', after="}", between=None, opens="")
_TOOLS_HEADER = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


def _header(role: str) -> str:
    return f"{HEADER_START}{role}{HEADER_END}\n\n"


@dataclass(frozen=True)
class Llama3(ChatFormat):
    """A format of this kind; `LLAMA3` is 3.1's, `LLAMA3_0` is 3.0's.

    Attributes:
        dates: every conversation starts with a system's turn that has the dates.
    """

    dates: bool = True

    @property
    def identity(self) -> Any:
        return {"llama3": TODAY if self.dates else None}

    @property
    def turn_end(self) -> str:
        return TURN_END

    @property
    def pad(self) -> str:
        return END

    @property
    def frame(self) -> tuple[str, ...]:
        return (BEGIN, END, HEADER_START, HEADER_END, TURN_END)

    @property
    def text_tokens(self) -> tuple[str, ...]:
        return ()

    @property
    def needed(self) -> tuple[str, ...]:
        return self.frame

    @property
    def call_frame(self) -> CallFrame:
        return _CALL

    @property
    def thought_start(self) -> str:
        return ""

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
        rest = list(messages)
        system = self._said(rest.pop(0)) if rest[0].role == "system" else None
        pieces = [Segment(BEGIN + self._system(system, shows_tools=bool(tools)), False)]
        if tools:
            if not rest or rest[0].role != "user":
                raise NotInFormat("Llama 3's format shows tools in a user's message, which has to come first")
            documents = "".join(
                self.escape(json.dumps(tool.to_openai(), ensure_ascii=False, indent=4)) + "\n\n" for tool in tools
            )
            asked = self._said(rest.pop(0))
            pieces.append(Segment(f"{_header('user')}{_TOOLS_HEADER}{documents}{asked}{TURN_END}", False))
        for message in rest:
            if message.role == "assistant":
                pieces += [
                    Segment(_header("assistant"), False),
                    Segment(self._assistant_text(message) + TURN_END, True),
                ]
            elif message.role == "tool":
                pieces.append(Segment(self._response(message.content), False))
            else:
                pieces.append(Segment(f"{_header(message.role)}{self._said(message)}{TURN_END}", False))
        if add_generation_prompt:
            pieces.append(Segment(_header("assistant"), False))
        return pieces

    def results_text(self, outputs: Sequence[str]) -> str:
        return "".join(map(self._response, outputs)) + _header("assistant")

    def escape(self, text: str) -> str:
        return escaped_of(text, (), self.control)

    def _system(self, said: str | None, *, shows_tools: bool) -> str:
        if not self.dates:
            return "" if said is None else f"{_header('system')}{said}{TURN_END}"
        environment = "Environment: ipython\n" if shows_tools else ""
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {TODAY}\n\n"
        return f"{_header('system')}{environment}{dates}{said or ''}{TURN_END}"

    def _said(self, message: Message) -> str:
        return self.escape(message.content.strip())

    def _assistant_text(self, message: Message) -> str:
        if not message.tool_calls:
            return self._said(message)
        if len(message.tool_calls) > 1:
            raise NotInFormat(f"Llama 3's format has one call a turn, not {len(message.tool_calls)}")
        call = message.tool_calls[0]
        return _CALL.text(self.escape(call.name), self.escape(written(call.arguments)))

    def _response(self, output: str) -> str:
        return f"{_header('ipython')}{self.escape(written(output))}{TURN_END}"

    # --------------------------------------------------------------------------------------------------------- parsing

    def parse_assistant(
        self, text: str, *, keep_malformed: bool = False, check: Callable[[ToolCall], str] | None = None
    ) -> AssistantTurn:
        text = text.removesuffix(TURN_END)
        body = text.strip().removeprefix(PYTHON_TAG).strip()
        if not body.startswith("{"):
            return AssistantTurn("", text)
        call = _parse_call(body)
        if isinstance(call, ToolCall) and check is not None and (problem := check(call)):
            call = MalformedCall(body, problem)
        if call is None or (keep_malformed and isinstance(call, MalformedCall)):
            return AssistantTurn("", text)
        return AssistantTurn("", "", [call])

    def split_reasoning(self, text: str) -> tuple[str, str]:
        return "", text

    def is_thinking(self, text: str) -> bool | None:
        return False

    @property
    def thought_end(self) -> str:
        return ""

    def whole_calls(
        self, text: str, start: int, tried: int, check: Callable[[ToolCall], str] | None = None
    ) -> tuple[list[Whole], int]:
        begun = text.lstrip()
        # A call is the whole turn, so that only the end says whether it is one.
        may_call = begun.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(begun)
        return [], 0 if may_call else len(text)

    def opening(self, text: str) -> int:
        return 0


LLAMA3, LLAMA3_0 = Llama3(), Llama3(dates=False)


def _parse_call(body: str) -> Call | None:
    """Parse a turn that is a call; None: it is other JSON, or similar text."""
    try:
        value, end = decoded(body, 0)
    except (ValueError, RecursionError) as error:
        if not body.removeprefix("{").lstrip().startswith('"name"'):
            return None
        return MalformedCall(body, f"not valid JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}")
    if not isinstance(value, dict) or "name" not in value or _ARGUMENTS not in value:
        return None
    if body[end:].strip():
        return MalformedCall(body, "there is text behind the JSON object")
    return checked_call(value, body, "call_0", arguments_name=_ARGUMENTS)
