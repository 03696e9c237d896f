"""Conversations as text: the interface of every chat format, and the code that all formats share.

A format is a value that renders, escapes and parses; it is passed on with the tokenizer of its model. The rendered text
is byte-equal to the output of the model's own HF chat template. It is made here, in plain Python, for the loss mask:
each piece of text carries whether the model itself must emit it. This is decided where the piece is made, not found
afterwards by searching the text or its tokens.

No text of a message can open or close a tag. A tokenizer reads `<|im_start|>` inside a text as the token itself, so the
`<` of a tag becomes `\\u003c` in rendered text. In JSON this means the same, elsewhere it stays readable. The format's
own tags and the tokenizer's other control tokens are escaped, in messages, tool documents and the model's own words and
arguments. So only the renderer writes tags.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from astra_jax.base.errors import InputError
from astra_jax.base.nesting import check_nesting
from synthesis.core.records import Message, ToolCall, ToolSpec

_FIRST_PIECE = 4_096
_LONGEST_WORD = len("\\ud83d\\ude00")  # of those that mean something else when they are cut
_PIECE = 1 << 20
"""Characters that a regular expression scans at a time: 20 ms if every character is a `<`."""

_GENERIC_TAG = re.compile(r"<(?=\|\w+\|>|/?(?:think|tool_call|tool_response)>)")


@dataclass(frozen=True)
class Segment:
    """A piece of rendered text. `trainable`: the model must emit it, so it contributes to the loss."""

    text: str
    trainable: bool


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that cannot be executed: its text, and the problem in one line."""

    text: str
    error: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class AssistantTurn:
    """A parsed assistant turn. `calls` keeps the order in which the model wrote them.

    Attributes:
        leak: markup of a chat format in the turn, and the fix; such a turn cannot be used. Empty: none.
        repairs: names of the repairs that were needed to read a call, by its index in `calls`.
        sent: the message as the model's endpoint sent it, to be sent back; None: it came from no endpoint.
    """

    reasoning: str
    content: str
    calls: list[Call] = field(default_factory=list)
    leak: str = ""
    repairs: dict[int, list[str]] = field(default_factory=dict)
    sent: dict[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CallFrame:
    """Notation of a call: `before`, its name, `middle`, its arguments as JSON, `after`.

    Attributes:
        between: text between two calls of a turn; None: a turn has at most one call.
        opens: the start of `before` that opens a call anywhere in a turn; "": a call is a whole turn.
    """

    before: str
    middle: str
    after: str
    between: str | None
    opens: str

    def text(self, name: str, arguments: str) -> str:
        """Return the text of a call; `arguments` is JSON."""
        return f"{self.before}{name}{self.middle}{arguments}{self.after}"


class Whole(NamedTuple):
    """A closed piece of a turn that was opened as a call, from `begin` to `end`. `call` is None if it is no valid call
    and stays content."""

    begin: int
    end: int
    call: ToolCall | None


class NotInFormat(InputError):
    """A conversation has something that its model's format cannot express, such as several calls in a turn."""


@dataclass(frozen=True)
class ChatFormat(ABC):
    """Rules by which conversations of a model are written and its output is parsed.

    Attributes:
        control: further control tokens of the tokenizer; no text may become one.
    """

    control: tuple[str, ...] = field(default=(), kw_only=True)

    # ------------------------------------------------------------------------------------------------------- its tokens

    @property
    @abstractmethod
    def identity(self) -> Any:
        """Return JSON that distinguishes the format from others, whatever the tokenizer."""

    @property
    @abstractmethod
    def turn_end(self) -> str:
        """Return the token that ends a turn, the last that the model emits in it."""

    @property
    @abstractmethod
    def pad(self) -> str:
        """Return the padding token; a model that was trained on documents ends them with it."""

    @property
    @abstractmethod
    def frame(self) -> tuple[str, ...]:
        """Return the tokens that mark the frame, `turn_end` and `pad` included; they are hidden from readers."""

    @property
    @abstractmethod
    def text_tokens(self) -> tuple[str, ...]:
        """Return the other tags; they become single tokens of a model that does not know tools."""

    @property
    @abstractmethod
    def needed(self) -> tuple[str, ...]:
        """Return the tags that are single tokens in every model of the format."""

    @property
    @abstractmethod
    def call_frame(self) -> CallFrame:
        """Return the notation of a call."""

    @property
    @abstractmethod
    def thought_start(self) -> str:
        """Return the start of a turn with a thought, up to `thought_end` and an empty line; "" without thoughts."""

    # ------------------------------------------------------------------------------------------------------- rendering

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        add_generation_prompt: bool = False,
        keep_reasoning: bool = False,
        thinking: bool = True,
    ) -> list[Segment]:
        """Render a conversation; the concatenated texts are what the model's chat template gives, with tags escaped.

        Args:
            messages: at least one; a system message in front is merged with the tools.
            tools: tools that the model may call; may be empty.
            add_generation_prompt: end with an opened assistant turn.
            keep_reasoning: a template may drop the reasoning of turns before the last user message, so that a
                conversation of several user messages cannot be rendered by appending. True keeps it in every turn, as
                in an append-only rollout.
            thinking: False opens the assistant turn with an empty thought, where the format has thoughts, as the
                template's `enable_thinking=False` does.

        Returns:
            Segments, alternately untrainable and trainable, none empty. The trainable part starts after the opening of
            an assistant's turn and includes the token that ends it.

        Raises:
            ValueError: there is no message.
            NotInFormat: the format cannot express it.
        """
        if not messages:
            raise InputError("render needs at least one message")
        return merged(
            self.pieces(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                keep_reasoning=keep_reasoning,
                thinking=thinking,
            )
        )

    @abstractmethod
    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        add_generation_prompt: bool,
        keep_reasoning: bool,
        thinking: bool,
    ) -> list[Segment]:
        """Return the pieces that `render` merges; some may be empty, or stand next to others of their kind."""

    def tool_results_text(self, outputs: Sequence[str]) -> str:
        """Return the text after a sampled turn, which ended with `turn_end`: tool outputs and the next turn's opening.

        Raises:
            ValueError: there are no outputs; a turn without calls ends the episode.
        """
        if not outputs:
            raise ValueError("tool_results_text needs at least one output")
        return self.results_text(outputs)

    @abstractmethod
    def results_text(self, outputs: Sequence[str]) -> str:
        """Return `tool_results_text` for at least one output."""

    @abstractmethod
    def escape(self, text: str) -> str:
        """Replace the first character `<` of each tag or control token by `\\u003c`. Escaped text stays the same."""

    # --------------------------------------------------------------------------------------------------------- parsing

    @abstractmethod
    def parse_assistant(
        self, text: str, *, keep_malformed: bool = False, check: Callable[[ToolCall], str] | None = None
    ) -> AssistantTurn:
        """Parse the model's text of one turn; never raises, since a policy may emit anything.

        Args:
            text: the turn's text, with or without the closing token.
            keep_malformed: a call that cannot be read stays in the content unchanged, instead of becoming a
                `MalformedCall`.
            check: returns why a call is invalid all the same, or the empty string.

        Returns:
            Reasoning without its tags, the text outside tool calls, and the calls. A call whose JSON cannot be read,
            has no name, or whose arguments are not an object becomes a `MalformedCall`. Unclosed reasoning takes the
            whole rest, so nothing in it is executed. A second thought of the turn is content, and no call in it is
            executed either.
        """

    @abstractmethod
    def split_reasoning(self, text: str) -> tuple[str, str]:
        """Return a turn's reasoning without its tags, and the rest. Unclosed reasoning takes all of the rest."""

    @abstractmethod
    def is_thinking(self, text: str) -> bool | None:
        """Return whether an incomplete turn is within its thought; None if that is not known yet."""

    @property
    @abstractmethod
    def thought_end(self) -> str:
        """Return the tag that closes a thought; "" if there are no thoughts."""

    @abstractmethod
    def whole_calls(
        self, text: str, start: int, tried: int, check: Callable[[ToolCall], str] | None = None
    ) -> tuple[list[Whole], int]:
        """Return the calls of an incomplete turn that further text cannot change, as `parse_assistant` reads them.

        Args:
            start: end of the last call returned for a shorter piece of the same text, or the end of the reasoning.
            tried: length of the text at the previous request; 0: there was none. A call that was open then is parsed
                again only if something has closed since. So the cost of a turn grows with its calls, not with their
                number times its tokens.
            check: see `parse_assistant`.

        Returns:
            The calls after `start`, and the position of an open call; the text's length if none is open.
        """

    @abstractmethod
    def opening(self, text: str) -> int:
        """Return how many characters at the end of a text may be the start of a call."""


def beginning(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def merged(pieces: Sequence[Segment]) -> list[Segment]:
    """Merge pieces into segments, alternately untrainable and trainable, none empty."""
    found: list[Segment] = []
    for piece in pieces:
        if not piece.text:
            continue
        if found and found[-1].trainable == piece.trainable:
            piece = Segment(found.pop().text + piece.text, piece.trainable)
        found.append(piece)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Escaping


def escape_tags(text: str) -> str:
    """Escape the tags of all formats in this module (Qwen3's and `<|…|>`), for a reader whose format is unknown."""
    return _escaped(text, "<", _GENERIC_TAG)


def without_tags(value: Any) -> Any:
    """Escape the tags in all texts and names of a JSON value, for a renderer that escapes nothing."""
    if isinstance(value, str):
        return escape_tags(value)
    if isinstance(value, dict):
        return {escape_tags(name): without_tags(one) for name, one in value.items()}
    return [without_tags(one) for one in value] if isinstance(value, list) else value


def escaped_of(text: str, names: tuple[str, ...], control: tuple[str, ...]) -> str:
    """Escape `<|…|>`, `<NAME>`, `</NAME>` and the control tokens in a text."""
    for first, pattern in _patterns(names, control):
        text = _escaped(text, first, pattern)
    return text


@cache
def _patterns(names: tuple[str, ...], control: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return, for each first character of a tag, a pattern that finds it before the rest of a tag."""
    named = rf"|/?(?:{'|'.join(map(re.escape, names))})>" if names else ""
    rests = {"<": [rf"\|\w+\|>{named}"]}
    for token in control:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    return tuple((first, re.compile(f"{re.escape(first)}(?={'|'.join(rest)})")) for first, rest in rests.items())


def _escaped(text: str, first: str, pattern: re.Pattern[str]) -> str:
    # In pieces, so that no other thread waits for all of a long text. Each ends before a first character, so no tag is
    # cut.
    pieces, start, written = [], 0, rf"\\u{ord(first):04x}"
    while start < len(text):
        end = text.find(first, start + _PIECE)
        end = len(text) if end < 0 else end
        pieces.append(pattern.sub(written, text[start:end]))
        start = end
    return "".join(pieces)


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def parse_json(text: str, *, unique_names: bool = False, any_depth: bool = False) -> Any:
    """Parse a JSON value.

    Args:
        unique_names: refuse an object that has a name twice; otherwise the last one counts.
        any_depth: leave the check of nesting to the caller.

    Raises:
        ValueError: it is not JSON that can be sent on, e.g. NaN or a number beyond a float's range.
        RecursionError: it is nested too deeply.
    """
    value = (_STRICT_DECODER if unique_names else _DECODER).decode(text)
    return value if any_depth else check_nesting(value)


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call in OpenAI's form, a JSON object as text.

    Raises:
        ValueError: it is not an object, or holds text that no record can (lone surrogates).
    """
    try:
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the arguments must be an object, not {text[:80]!r}")
    return value


def written(value: Any) -> str:
    """Return JSON as transformers' `tojson` writes it: ", " and ": ", Unicode unescaped, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that starts at `start`, and its end.

    It is read from a piece that grows until the value ends in it. An error of `json` counts all lines before it, which
    took seconds for thousands of malformed calls in one turn.
    """
    size = _FIRST_PIECE
    while True:
        piece, is_rest = text[start : start + size], start + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(piece)
            if is_rest or end < len(piece):
                return check_nesting(value), start + end
        except json.JSONDecodeError as error:
            if is_rest or not may_be_cut(error):
                raise
        size *= 8


def may_be_cut(error: json.JSONDecodeError) -> bool:
    """Return whether the error may come from a text that is cut off: in a string, or within a word."""
    return error.msg.startswith("Unterminated") or error.pos >= len(error.doc) - _LONGEST_WORD


def checked_call(value: Any, text: str, call_id: str, *, arguments_name: str = "arguments") -> ToolCall | MalformedCall:
    """Return the call that a JSON value holds, or the reason why it is invalid."""
    if not isinstance(value, dict):
        return MalformedCall(text, f"a call must be a JSON object with the fields 'name' and {arguments_name!r}")
    name, arguments = value.get("name"), value.get(arguments_name)
    if not isinstance(name, str) or not name:
        return MalformedCall(text, "the field 'name' must be a non-empty string")
    if not isinstance(arguments, dict):
        return MalformedCall(text, f"the field {arguments_name!r} must be a JSON object")
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
