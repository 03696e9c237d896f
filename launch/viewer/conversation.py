"""Conversations for people: each message with its calls, and each result at its call.

Messages are ours (`records.Message`) or OpenAI's, as an endpoint and a harness left them. Nothing is fixed or left out:
a reader wants to know what went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from astra_jax.base.typed import decode_json

if TYPE_CHECKING:
    from astra_jax.grpo.episode_pages import ShownVerdict

_MAX_CHARACTERS, _MAX_LINES = 600, 14
"""Longer texts are folded."""
_LINE = 110
TOO_DEEP = "(too deeply nested to be shown)"


@dataclass(frozen=True)
class Result:
    """Result of a call, as the agent saw it.

    Attributes:
        text: JSON is indented.
        preview: its beginning on one line, where it is folded.
        characters: of the text as it is stored.
        failure: `injected`: a failure was put in the result's place; `error`: any other error; else empty.
        kind: of the failure, such as `timeout`.
    """

    text: str
    preview: str
    characters: int
    failure: str
    kind: str


@dataclass
class Call:
    """A call as the model wrote it, or a result without a call.

    Attributes:
        arguments: as JSON, on one line where they are short.
        unreadable: they are not a JSON object, and `arguments` is what was written.
        result: None where the record has none.
        verdict: of the call, where its record has one.
    """

    id: str
    name: str
    arguments: str = ""
    unreadable: bool = False
    result: Result | None = None
    verdict: ShownVerdict | None = None


@dataclass
class Turn:
    """A message that is not a result; its calls were made at the same time.

    Attributes:
        stray: results that belong to none of its calls.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    stray: list[Call] = field(default_factory=list)


def turns_of(
    messages: Sequence[msgspec.Struct | Mapping[str, Any]],
    failures: Mapping[int, tuple[str, str]] | None = None,
    verdicts: Iterable[ShownVerdict] = (),
) -> list[Turn]:
    """Arrange a conversation. A result belongs to a call of the message before it, since ids may repeat later.

    Args:
        failures: what the record says of a result, as (failure, kind), by the index of its message.
        verdicts: of the results, in their order; may be fewer.
    """
    turns: list[Turn] = []
    remaining = iter(verdicts)
    for index, one in enumerate(messages):
        message = _mapping(one)
        role, content = _text(message.get("role")) or "(no role)", _text(message.get("content"))
        if role != "tool":
            reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
            calls = message.get("tool_calls")
            made = [_call(_mapping(call)) for call in calls] if isinstance(calls, list) else []
            turns.append(Turn(role, content, reasoning, made))
            continue
        if not turns:
            turns.append(Turn("assistant"))
        id, result = _text(message.get("tool_call_id")), result_of(content, *(failures or {}).get(index, ("", "")))
        call = next((call for call in turns[-1].calls if call.id == id and call.result is None), None)
        if call is None:
            call = Call(id, _text(message.get("name")))
            turns[-1].stray.append(call)
        call.result, call.verdict = result, next(remaining, None)
    return turns


def question_of(messages: Sequence[msgspec.Struct | Mapping[str, Any]]) -> str:
    """Return what the user says first, or ""."""
    said = map(_mapping, messages)
    return next((_text(one.get("content")) for one in said if one.get("role") == "user"), "")


def result_of(text: str, failure: str = "", kind: str = "") -> Result:
    """Return a result; without a failure of its record, the executor's form of an error makes it one."""
    structured = len(text) > _LINE and text.lstrip()[:1] in ("{", "[")
    try:
        pretty = msgspec.json.format(text, indent=2) if structured else text
    except (ValueError, RecursionError):  # not JSON after all
        pretty = text
    folded = len(pretty) > _MAX_CHARACTERS or pretty.count("\n") >= _MAX_LINES
    preview = f"{' '.join(text[: 2 * _LINE].split())[:_LINE]} …" if folded else ""
    return Result(pretty, preview, len(text), failure or ("error" if _is_error(text) else ""), kind)


def _call(call: Mapping[str, Any]) -> Call:
    function = _mapping(call.get("function") or call)
    id, name, written = _text(call.get("id")), _text(function.get("name")), function.get("arguments")
    if isinstance(written, dict):
        return Call(id, name, _arguments(written))
    text = _text(written)
    try:
        return Call(id, name, _arguments(decode_json(text, dict[str, Any]) if text else {}))
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return Call(id, name, text, unreadable=True)


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return value if isinstance(value, Mapping) else {}


def _arguments(arguments: dict[str, Any]) -> str:
    line = _json(arguments)
    return line if len(line) <= _LINE else _json(arguments, indent=2)


def _text(value: Any) -> str:
    """Return a string, the texts of a list of parts, or anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        texts = [one.get("text") if isinstance(one, dict) else one for one in value]
        return "\n".join(text if isinstance(text, str) else _json(one) for text, one in zip(texts, value, strict=True))
    return _json(value)


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent)
    except RecursionError:
        return TOO_DEEP


def _is_error(text: str) -> bool:
    try:
        return list(decode_json(text, dict)) == ["error"]
    except (ValueError, RecursionError):
        return False
