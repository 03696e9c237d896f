"""Conversations as text: Qwen3's chat format, rendered and parsed.

The rendered text is byte-equal to the HF chat template that Qwen3 ships (with `enable_thinking` unset), or to that of
Qwen3-Instruct-2507, which is the same without thoughts; but it is made here, in plain Python, for one reason: the loss
mask. Each piece of text carries whether the model itself must emit it, decided where the piece is made and not found
again afterwards by searching the text or its tokens.

No text of a message can open or close anything: a tokenizer reads `<|im_start|>` inside a text as the token itself.
Where messages become text, the `<` of a tag becomes `\\u003c`, which in JSON means the same and elsewhere can be read:
`<|…|>`, `<think>`, `<tool_call>` and `<tool_response>`, in whatever a message or a tool's document holds, the model's
own words and arguments too. So the only tags of a conversation are those that the renderer writes.

A conversation in that format:

    <|im_start|>system … <tools> one JSON schema a line </tools> …<|im_end|>
    <|im_start|>user … <|im_end|>
    <|im_start|>assistant <think> … </think> text <tool_call> {"name": …, "arguments": …} </tool_call><|im_end|>
    <|im_start|>user <tool_response> … </tool_response> <tool_response> … </tool_response><|im_end|>
    <|im_start|>assistant … <|im_end|>
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.refusals import InputError

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"

_TAG = re.compile(r"<(?=\|\w+\|>|/?(?:think|tool_call|tool_response)>)")

_NO_SPACE = re.compile(r"\S")
_FIRST_PIECE = 4_096
_LONGEST_WORD = len("\\ud83d\\ude00")  # of those that mean something else when they are cut
_PIECE = 1 << 20
"""Characters that a regular expression goes over at a time: 20 ms where there is a `<` at every place."""

_ASSISTANT_PROMPT = f"{TURN_START}assistant\n"
_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


@dataclass(frozen=True)
class Segment:
    """A piece of rendered text. `trainable`: the model must emit it, so the loss is on it."""

    text: str
    trainable: bool


@dataclass(frozen=True)
class MalformedCall:
    """A `<tool_call>` block that cannot be executed: its inner text and what is wrong with it, in one line."""

    text: str
    error: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class AssistantTurn:
    """A parsed assistant turn. `calls` keeps the order in which the model wrote them."""

    reasoning: str
    content: str
    calls: list[Call] = field(default_factory=list)


def render(
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    add_generation_prompt: bool = False,
    keep_reasoning: bool = False,
    thinking: bool = True,
    thoughts: bool = True,
) -> list[Segment]:
    """Render a conversation; the concatenated texts are what Qwen3's chat template gives, with tags escaped.

    Args:
        messages: at least one; a system message in front is merged with the tools.
        tools: those that the model may call; may be empty.
        add_generation_prompt: end with an opened assistant turn.
        keep_reasoning: the template drops the reasoning of turns before the last user message, so that a conversation
            of several user messages cannot be rendered by appending. True keeps it in every turn, which is what an
            append-only rollout sees. The two differ only where there is reasoning before the last user message.
        thinking: False opens the assistant turn with an empty thought, as the template's `enable_thinking=False` does.
        thoughts: False renders as Qwen3-Instruct-2507's template does, which knows none: reasoning is left out, and no
            turn has a thought, not even an empty one. `chat_template.writes_thoughts` says it of a model's folder.

    Returns:
        Segments, alternately untrainable and trainable, none empty. Trainable is what follows
        `<|im_start|>assistant\\n`, up to and including `<|im_end|>`; the newline after that is the template's.

    Raises:
        ValueError: there is no message.
    """
    if not messages:
        raise InputError("render needs at least one message")
    pieces = [Segment(_header(messages[0], tools), trainable=False)]
    last_query = -1 if keep_reasoning else _last_query(messages)
    for i, message in enumerate(messages):
        last = i + 1 == len(messages)
        if message.role == "assistant":
            text = _assistant_text(message, thought=thoughts and i > last_query, last=last)
            pieces += [Segment(_ASSISTANT_PROMPT, False), Segment(text + TURN_END, True), Segment("\n", False)]
        elif message.role == "tool":
            # Consecutive tool results share one user turn.
            opening = f"{TURN_START}user" if i == 0 or messages[i - 1].role != "tool" else ""
            closing = f"{TURN_END}\n" if last or messages[i + 1].role != "tool" else ""
            pieces.append(Segment(opening + _response(message.content) + closing, False))
        elif message.role == "user" or i > 0:
            pieces.append(Segment(f"{TURN_START}{message.role}\n{escape_tags(message.content)}{TURN_END}\n", False))
    if add_generation_prompt:
        thought = "" if thinking or not thoughts else f"{THINK_START}\n\n{THINK_END}\n\n"
        pieces.append(Segment(_ASSISTANT_PROMPT + thought, False))
    return _merge(pieces)


def tool_results_text(outputs: Sequence[str]) -> str:
    """What follows a sampled turn (which ended with `<|im_end|>`): its tools' outputs, and the next turn opened.

    Raises:
        ValueError: there are no outputs; a turn without calls ends the episode.
    """
    if not outputs:
        raise ValueError("tool_results_text needs at least one output")
    responses = "".join(_response(output) for output in outputs)
    return f"\n{TURN_START}user{responses}{TURN_END}\n{_ASSISTANT_PROMPT}"


def escape_tags(text: str) -> str:
    """The text without a tag of the chat format: the `<` of each becomes `\\u003c`. What is escaped stays as it is."""
    # In pieces, so that no other thread waits for all of a long text. Each ends before a `<`, so no tag is cut.
    pieces, start = [], 0
    while start < len(text):
        end = text.find("<", start + _PIECE)
        end = len(text) if end < 0 else end
        pieces.append(_TAG.sub(r"\\u003c", text[start:end]))
        start = end
    return "".join(pieces)


def without_tags(value: Any) -> Any:
    """A JSON value with the tags of all its texts, names too, escaped; for whoever renders it and escapes nothing."""
    if isinstance(value, str):
        return escape_tags(value)
    if isinstance(value, dict):
        return {escape_tags(name): without_tags(one) for name, one in value.items()}
    return [without_tags(one) for one in value] if isinstance(value, list) else value


def parse_json(text: str, *, unique_names: bool = False) -> Any:
    """A JSON value.

    Args:
        unique_names: refuse an object that has a name twice, of which otherwise the last counts.

    Raises:
        ValueError: it is no JSON that could be sent on, such as NaN, or a number beyond a float's range.
        RecursionError: it is nested too deeply.
    """
    return (_STRICT_DECODER if unique_names else _DECODER).decode(text)


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call in OpenAI's form, a JSON object as text.

    Raises:
        ValueError: it is none, or holds what no record could (lone surrogates).
    """
    try:
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the arguments must be an object, not {text[:80]!r}")
    return value


def parse_assistant(
    text: str, *, keep_malformed: bool = False, check: Callable[[ToolCall], str] | None = None
) -> AssistantTurn:
    """Parse what the model emitted in one turn; never raises, since a policy may emit anything.

    Args:
        text: the turn's text, with or without the closing `<|im_end|>`.
        keep_malformed: what is no call stays in the content as it was written, instead of becoming a `MalformedCall`.
        check: says of a call why it is none all the same, or the empty string.

    Returns:
        Reasoning without its tags, the text outside tool calls, and the calls. A call whose JSON cannot be read, has no
        name, or whose arguments are not an object becomes a `MalformedCall`. Reasoning that is never closed takes all
        of the rest, so nothing in it is executed.
    """
    text = text.removesuffix(TURN_END)
    reasoning, text = split_reasoning(text)
    content: list[str] = []
    calls: list[Call] = []
    position = end = 0
    while (start := text.find(CALL_START, end)) >= 0:
        call, end = _parse_call(text, start + len(CALL_START), f"call_{len(calls)}")
        if isinstance(call, ToolCall) and check is not None and (problem := check(call)):
            call = MalformedCall(text[start + len(CALL_START) : end].removesuffix(CALL_END).strip(), problem)
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


def split_reasoning(text: str) -> tuple[str, str]:
    """A turn's reasoning without its tags, and what follows it; one that is never closed takes all of the rest."""
    opened = text.lstrip("\n").startswith(THINK_START)
    end, first_call = text.find(THINK_END), text.find(CALL_START)
    if opened and end < 0:
        return text.lstrip("\n").removeprefix(THINK_START).strip("\n"), ""
    # A closing tag inside a tool call's arguments is data, unless the turn began with an opening one.
    if end < 0 or not (opened or first_call < 0 or end < first_call):
        return "", text
    reasoning = text[:end].lstrip("\n").removeprefix(THINK_START)
    return reasoning.strip("\n"), text[end + len(THINK_END) :].lstrip("\n")


# ---------------------------------------------------------------------------------------------------------------------
# Rendering


def _header(first: Message, tools: Sequence[ToolSpec]) -> str:
    system = escape_tags(first.content) if first.role == "system" else None
    if tools:
        lines = "".join("\n" + escape_tags(_json(tool.to_openai())) for tool in tools)
        prefix = "" if system is None else system + "\n\n"
        return f"{TURN_START}system\n{prefix}{_TOOLS_HEADER}{lines}{_TOOLS_FOOTER}{TURN_END}\n"
    return "" if system is None else f"{TURN_START}system\n{system}{TURN_END}\n"


def _last_query(messages: Sequence[Message]) -> int:
    """Index of the last user message. A user cannot write a tool's response: in the text its tags are escaped."""
    users = (i for i in reversed(range(len(messages))) if messages[i].role == "user")
    return next(users, len(messages) - 1)


def _assistant_text(message: Message, *, thought: bool, last: bool) -> str:
    reasoning, content = message.reasoning, message.content
    if not reasoning and THINK_END in content:  # reasoning that was left inside the content
        reasoning = content.split(THINK_END)[0].rstrip("\n").split(THINK_START)[-1].lstrip("\n")
        content = content.split(THINK_END)[-1].lstrip("\n")
    text = content = escape_tags(content)
    if thought and (last or reasoning):
        text = f"{THINK_START}\n{escape_tags(reasoning.strip(chr(10)))}\n{THINK_END}\n\n" + content.lstrip("\n")
    for i, call in enumerate(message.tool_calls):
        newline = "\n" if content or i else ""
        written = escape_tags(f'{{"name": "{call.name}", "arguments": {_json(call.arguments)}}}')
        text += f"{newline}{CALL_START}\n{written}\n{CALL_END}"
    return text


def _response(output: str) -> str:
    return f"\n{RESPONSE_START}\n{escape_tags(output)}\n{RESPONSE_END}"


def _json(value: Any) -> str:
    # The template's `tojson` as transformers defines it: ", " and ": ", Unicode as it is, keys in their order.
    return json.dumps(value, ensure_ascii=False)


def _merge(pieces: Sequence[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for piece in pieces:
        if not piece.text:
            continue
        if merged and merged[-1].trainable == piece.trainable:
            piece = Segment(merged.pop().text + piece.text, piece.trainable)
        merged.append(piece)
    return merged


# ---------------------------------------------------------------------------------------------------------------------
# Parsing


def _parse_call(text: str, start: int, call_id: str) -> tuple[Call, int]:
    """The call whose opening tag ends at `start`, and the position behind its closing tag."""
    # JSON decides where the call ends, so that a closing tag inside a string argument does not.
    body = _behind_spaces(text, start)
    problem = ""
    try:
        value, json_end = _decoded(text, body)
        closing = _behind_spaces(text, json_end)
        if text.startswith(CALL_END, closing):
            return _checked_call(value, text[body:json_end], call_id), closing + len(CALL_END)
        is_closed = text.find(CALL_END, closing) >= 0
        problem = "there is text behind the JSON object" if is_closed else f"{CALL_END} is missing"
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        problem = f"not valid JSON: {reason}"
    end = text.find(CALL_END, start)
    if end < 0:
        return MalformedCall(text[start:].strip(), problem), len(text)
    return MalformedCall(text[start:end].strip(), problem), end + len(CALL_END)


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends.

    It is read from a piece that grows until the value ends in it: an error of `json` counts the lines before it, from
    the beginning of what it was given, which for thousands of malformed calls in one turn took seconds.
    """
    size = _FIRST_PIECE
    while True:
        piece, is_rest = text[start : start + size], start + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(piece)
            if is_rest or end < len(piece):
                return value, start + end
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos >= len(piece) - _LONGEST_WORD
            if is_rest or not is_cut:
                raise
        size *= 8


def _behind_spaces(text: str, start: int) -> int:
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)


def _checked_call(value: Any, text: str, call_id: str) -> ToolCall | MalformedCall:
    if not isinstance(value, dict):
        return MalformedCall(text, "a call must be a JSON object with the fields 'name' and 'arguments'")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, "the field 'name' must be a non-empty string")
    if not isinstance(arguments, dict):
        return MalformedCall(text, "the field 'arguments' must be a JSON object")
    try:
        # Lone surrogates pass the parser, but are no JSON that could be sent on.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        return MalformedCall(text, f"not valid JSON: {error}")
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, inner in pairs:
        if name in value:
            raise ValueError(f"the name {name[:80]!r} is in one object twice")
        value[name] = inner
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
