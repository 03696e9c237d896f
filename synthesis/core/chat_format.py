"""Conversations as text: what every chat format is, and what they share.

A format is a value: it renders, escapes and parses, and is handed through with the tokenizer whose model it is of. The
rendered text is byte-equal to the model's own HF chat template; but it is made here, in plain Python, for one reason:
the loss mask. Each piece of text carries whether the model itself must emit it, decided where the piece is made and not
found again afterwards by searching the text or its tokens.

No text of a message can open or close anything: a tokenizer reads `<|im_start|>` inside a text as the token itself.
Where messages become text, the `<` of a tag becomes `\\u003c`, which in JSON means the same and elsewhere can be read:
the format's own tags and the tokenizer's other control tokens, in whatever a message or a tool's document holds, the
model's own words and arguments too. So the only tags of a conversation are those that the renderer writes.
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

from sandbox.protocol import check_nesting
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.refusals import InputError

_FIRST_PIECE = 4_096
_LONGEST_WORD = len("\\ud83d\\ude00")  # of those that mean something else when they are cut
_PIECE = 1 << 20
"""Characters that a regular expression goes over at a time: 20 ms where there is a `<` at every place."""

_GENERIC_TAG = re.compile(r"<(?=\|\w+\|>|/?(?:think|tool_call|tool_response)>)")


@dataclass(frozen=True)
class Segment:
    """A piece of rendered text. `trainable`: the model must emit it, so the loss is on it."""

    text: str
    trainable: bool


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that cannot be executed: its text and what is wrong with it, in one line."""

    text: str
    error: str


Call = ToolCall | MalformedCall


@dataclass(frozen=True)
class AssistantTurn:
    """A parsed assistant turn. `calls` keeps the order in which the model wrote them.

    Attributes:
        leak: markup of a chat format that the turn holds, and the fix; such a turn cannot be used. Empty: none.
        repairs: names of the repairs that were needed to read a call, by its index in `calls`.
        sent: the message as the model's endpoint sent it, to be sent back to it; None: no endpoint did.
    """

    reasoning: str
    content: str
    calls: list[Call] = field(default_factory=list)
    leak: str = ""
    repairs: dict[int, list[str]] = field(default_factory=dict)
    sent: dict[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CallFrame:
    """How a call is written: `before`, its name, `middle`, its arguments as JSON, `after`.

    Attributes:
        between: what stands between two calls of a turn; None: a turn has one at most.
        opens: the beginning of `before` that begins a call wherever it stands in a turn; "": a call is a whole turn.
    """

    before: str
    middle: str
    after: str
    between: str | None
    opens: str

    def text(self, name: str, arguments: str) -> str:
        """A call; `arguments`: JSON."""
        return f"{self.before}{name}{self.middle}{arguments}{self.after}"


class Whole(NamedTuple):
    """A piece of a turn's text, from `begin` to `end`, that was opened as a call and is closed; `call`: None where it
    is none all the same, and stays content."""

    begin: int
    end: int
    call: ToolCall | None


class NotInFormat(InputError):
    """A conversation has what its model's format cannot say, such as several calls in a turn."""


@dataclass(frozen=True)
class ChatFormat(ABC):
    """How conversations of a model are written, and what it says is read.

    Attributes:
        control: tokens of the tokenizer, beside the format's own, that no text may become.
    """

    control: tuple[str, ...] = field(default=(), kw_only=True)

    # ------------------------------------------------------------------------------------------------------- its tokens

    @property
    @abstractmethod
    def identity(self) -> Any:
        """JSON that tells it from another format, whatever the tokenizer."""

    @property
    @abstractmethod
    def turn_end(self) -> str:
        """The token that ends a turn, the last that the model emits in it."""

    @property
    @abstractmethod
    def pad(self) -> str:
        """The token that fills up; a model that was trained on documents ends them with it."""

    @property
    @abstractmethod
    def frame(self) -> tuple[str, ...]:
        """The tokens that mark the frame, which no reader wants to see; those above among them."""

    @property
    @abstractmethod
    def text_tokens(self) -> tuple[str, ...]:
        """Its other tags, which become single tokens of a model that knows no tools."""

    @property
    @abstractmethod
    def needed(self) -> tuple[str, ...]:
        """Those of its tags that are single tokens of every model of it."""

    @property
    @abstractmethod
    def call_frame(self) -> CallFrame:
        """How the model writes a call."""

    @property
    @abstractmethod
    def thought_start(self) -> str:
        """What a turn with a thought begins with, up to `thought_end` and an empty line; "": there are none."""

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
            tools: those that the model may call; may be empty.
            add_generation_prompt: end with an opened assistant turn.
            keep_reasoning: a template may drop the reasoning of turns before the last user message, so that a
                conversation of several user messages cannot be rendered by appending. True keeps it in every turn,
                which is what an append-only rollout sees.
            thinking: False opens the assistant turn with an empty thought, where the format has thoughts, as the
                template's `enable_thinking=False` does.

        Returns:
            Segments, alternately untrainable and trainable, none empty. Trainable is what follows the opening of an
            assistant's turn, up to and including the token that ends it.

        Raises:
            ValueError: there is no message.
            NotInFormat: the format cannot say it.
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
        """What `render` puts together; some may be empty, or stand beside others of their kind."""

    def tool_results_text(self, outputs: Sequence[str]) -> str:
        """What follows a sampled turn (which ended with `turn_end`): its tools' outputs, and the next turn opened.

        Raises:
            ValueError: there are no outputs; a turn without calls ends the episode.
        """
        if not outputs:
            raise ValueError("tool_results_text needs at least one output")
        return self.results_text(outputs)

    @abstractmethod
    def results_text(self, outputs: Sequence[str]) -> str:
        """`tool_results_text` of some outputs."""

    @abstractmethod
    def escape(self, text: str) -> str:
        """The text without a tag or control token: the first character of each, `<`, becomes `\\u003c`. What is
        escaped stays as it is."""

    # --------------------------------------------------------------------------------------------------------- parsing

    @abstractmethod
    def parse_assistant(
        self, text: str, *, keep_malformed: bool = False, check: Callable[[ToolCall], str] | None = None
    ) -> AssistantTurn:
        """Parse what the model emitted in one turn; never raises, since a policy may emit anything.

        Args:
            text: the turn's text, with or without the closing token.
            keep_malformed: what is no call stays in the content as it was written, instead of becoming a
                `MalformedCall`.
            check: says of a call why it is none all the same, or the empty string.

        Returns:
            Reasoning without its tags, the text outside tool calls, and the calls. A call whose JSON cannot be read,
            has no name, or whose arguments are not an object becomes a `MalformedCall`. Reasoning that is never closed
            takes all of the rest, so nothing in it is executed; a further thought of the turn is content, and no call
            in it is executed either.
        """

    @abstractmethod
    def split_reasoning(self, text: str) -> tuple[str, str]:
        """A turn's reasoning without its tags, and what follows it; one that is never closed takes all of the rest."""

    @abstractmethod
    def is_thinking(self, text: str) -> bool | None:
        """Whether a turn that has come so far is within its thought; None where that cannot be said yet."""

    @property
    @abstractmethod
    def thought_end(self) -> str:
        """The tag that closes a thought; "" where there are none."""

    @abstractmethod
    def whole_calls(
        self, text: str, start: int, tried: int, check: Callable[[ToolCall], str] | None = None
    ) -> tuple[list[Whole], int]:
        """What no further text changes of the calls of a turn that has come so far, as `parse_assistant` reads them.

        Args:
            start: the end of the last that was returned for less of the same text, or where reasoning ends.
            tried: length of the text for which this was asked before; 0: it was not. A call that was open then is read
                again only where something has closed since, so that a turn costs what its calls do, and not their
                number times its tokens.
            check: see `parse_assistant`.

        Returns:
            Those behind `start`, and where an open call begins; the text's length where none is open.
        """

    @abstractmethod
    def opening(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a call."""


def beginning(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`, and not all of it."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def merged(pieces: Sequence[Segment]) -> list[Segment]:
    """Segments, alternately untrainable and trainable, none empty."""
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
    """The text without the tags of any format here, for whoever does not know the reader's: Qwen3's, and `<|…|>`."""
    return _escaped(text, "<", _GENERIC_TAG)


def without_tags(value: Any) -> Any:
    """A JSON value with the tags of all its texts, names too, escaped; for whoever renders it and escapes nothing."""
    if isinstance(value, str):
        return escape_tags(value)
    if isinstance(value, dict):
        return {escape_tags(name): without_tags(one) for name, one in value.items()}
    return [without_tags(one) for one in value] if isinstance(value, list) else value


def escaped_of(text: str, names: tuple[str, ...], control: tuple[str, ...]) -> str:
    """The text without `<|…|>`, without `<NAME>` and `</NAME>`, and without the control tokens."""
    for first, pattern in _patterns(names, control):
        text = _escaped(text, first, pattern)
    return text


@cache
def _patterns(names: tuple[str, ...], control: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """For each first character of a tag: what it is, before the rest of one."""
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
    """A JSON value.

    Args:
        unique_names: refuse an object that has a name twice, of which otherwise the last counts.
        any_depth: leave the check of nesting to the caller.

    Raises:
        ValueError: it is no JSON that could be sent on, such as NaN, or a number beyond a float's range.
        RecursionError: it is nested too deeply.
    """
    value = (_STRICT_DECODER if unique_names else _DECODER).decode(text)
    return value if any_depth else check_nesting(value)


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


def written(value: Any) -> str:
    """JSON as transformers' `tojson` has it: ", " and ": ", Unicode as it is, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def decoded(text: str, start: int) -> tuple[Any, int]:
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
                return check_nesting(value), start + end
        except json.JSONDecodeError as error:
            if is_rest or not may_be_cut(error):
                raise
        size *= 8


def may_be_cut(error: json.JSONDecodeError) -> bool:
    """Whether what is wrong may be that the text ends too early: in a string, or within a word."""
    return error.msg.startswith("Unterminated") or error.pos >= len(error.doc) - _LONGEST_WORD


def checked_call(value: Any, text: str, call_id: str, *, arguments_name: str = "arguments") -> ToolCall | MalformedCall:
    """The call that a JSON value is, or why it is none."""
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
