"""The forms in which conversations with tools are written down, brought to the columns that `sft.import_record` reads.

    messages, tools              OpenAI, TRL, Qwen-Agent; `functions` for `tools`; JSON strings or objects
    prompt, completion           TRL, of messages or of text
    conversations, tools         ShareGPT, Hermes and LLaMA-Factory: {"from": "gpt", "value": "…"}; also with messages
    trajectory                   ASTRA's released record

A column `system` beside any of them is the conversation's system message.

ShareGPT has turns of text. A call is a turn of its own (`function_call`, the value JSON), or stands in the assistant's
text between <tool_call> and </tool_call>; so do results, which <tool_response> may enclose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from synthesis.core.openai_messages import text_of
from synthesis.core.stages import Rejected
from synthesis.core.typed import decode_any_json, value_or_json

FORMS = (
    "messages with tools (OpenAI, TRL, Qwen-Agent)",
    "prompt with completion (TRL)",
    "conversations with tools (ShareGPT)",
    "trajectory (ASTRA)",
)
"""What an error says is known."""
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of what no model here reads."""
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "calls",
    "tool_call": "calls",
    "function_response": "results",
    "observation": "results",
    "tool": "results",
}
"""Who speaks in ShareGPT → our role; `calls` and `results` are turns of nothing else."""
_MEANS_NULL = ("default", "const")
"""Of a schema: where null is a value, and not what a columnar file fills up with."""
_CALL, _RESULT = ("<tool_call>", "</tool_call>"), ("<tool_response>", "</tool_response>")


def columns(given: Mapping[str, Any]) -> dict[str, Any]:
    """A row's columns with its conversation in `messages` (or still in `trajectory`) and its tools in `tools`.

    Raises:
        Rejected: `bad_record`: it has none of the `FORMS`, with the keys that it has; or what no model here reads.
    """
    row = {name: value for name, value in given.items() if value is not None}
    for name in _MEDIA:
        if row.get(name):
            raise Rejected("bad_record", f"it has {name}, and the models here read text alone; leave the row out")
    if "tools" not in row and "functions" in row:
        row["tools"] = row["functions"]
    if isinstance(row.get("tools"), list):
        row["tools"] = [_without_nulls(tool) for tool in row["tools"]]
    if (column := next((one for one in ("trajectory", "messages") if one in row), None)) is not None:
        return {**row, column: _behind(row["system"], _opened(row[column], column))} if row.get("system") else row
    if "prompt" in row and "completion" in row:
        said = _prompt_completion(row["prompt"], row["completion"])
        return {**row, "messages": _behind(row.get("system"), said)}
    if "conversations" in row:
        turns = _opened(row["conversations"], "conversations")
        said = turns if not turns or "role" in turns[0] else list(_sharegpt(turns))
        return {**row, "messages": _behind(row.get("system"), said)}
    keys = ", ".join(sorted(given)[:20]) or "none"
    raise Rejected("bad_record", f"it is of no known form; its keys are {keys}; known are {'; '.join(FORMS)}")


def _behind(system: Any, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation behind the system message of a column of its own, which it may have already.

    Raises:
        Rejected: `bad_record`: it has another one, or that column is no text.
    """
    if not system:
        return said
    if not isinstance(system, str):
        raise Rejected("bad_record", f"column system: wants a text, and is {system!r:.80}")
    own = next((text_of(one.get("content")) for one in said if one.get("role") in ("system", "developer")), None)
    if own is None:
        return [{"role": "system", "content": system}, *said]
    if own.strip() != system.strip():
        raise Rejected("bad_record", f"column system: it is {system!r:.80}, and the conversation's own is {own!r:.80}")
    return said


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {name: one for name, one in schema.items() if one is not None or name in _MEANS_NULL}
        return {name: one if name in _MEANS_NULL else _without_nulls(one) for name, one in kept.items()}
    return [_without_nulls(one) for one in schema] if isinstance(schema, list) else schema


def _opened(value: Any, column: str) -> list[dict[str, Any]]:
    """A list of objects, or the JSON of one. Raises `Rejected`."""
    try:
        return value_or_json(value, list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected("bad_record", f"column {column}: {error}") from None


def _prompt_completion(prompt: Any, completion: Any) -> list[dict[str, Any]]:
    """TRL trains on the completion alone, here every turn of the assistant is trained on: so it has all of them."""

    def turns(value: Any, role: str, column: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": value}] if isinstance(value, str) else _opened(value, column)

    asked = turns(prompt, "user", "prompt")
    if any(one.get("role") == "assistant" for one in asked):
        raise Rejected(
            "bad_record",
            "column prompt: it has turns of the assistant, which would be trained on; give the row as messages",
        )
    return [*asked, *turns(completion, "assistant", "completion")]


def _sharegpt(turns: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, turn in enumerate(turns):
        who, value = turn.get("from"), turn.get("value")
        role = _ROLES.get(who) if isinstance(who, str) else None
        if role is None or not isinstance(value, str):
            known = ", ".join(_ROLES)
            raise Rejected(
                "bad_record", f"turn {number}: wants a text value, and from, one of {known}; from is {who!r:.40}"
            )
        where = f"turn {number}"
        if role == "calls":
            yield {"role": "assistant", "content": "", "tool_calls": [*_calls(value, where)]}
        elif role == "results":
            _, results = _enclosed(value, _RESULT, where)
            for text in results or [value]:
                yield {"role": "tool", **_result(text if results else value)}
        elif role == "assistant":
            content, texts = _enclosed(value, _CALL, where)
            calls = [call for text in texts for call in _calls(text, where)]
            yield {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}
        else:
            yield {"role": role, "content": value}


def _enclosed(text: str, tags: tuple[str, str], where: str) -> tuple[str, list[str]]:
    """What stands outside of the tags, and what stands inside of each pair. Raises `Rejected`: one is not closed."""
    first, last = tags
    outside, *parts = text.split(first)
    found = []
    for part in parts:
        inside, closed, behind = part.partition(last)
        if not closed:
            raise Rejected("bad_record", f"{where}: {first} without {last}")
        found.append(inside.strip())
        outside += behind
    return (outside.strip() if found else outside), found


def _calls(text: str, where: str) -> Iterator[dict[str, Any]]:
    """The calls of a JSON object {"name", "arguments"}, or of a list of them. Raises `Rejected`."""
    try:
        given = decode_any_json(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected("bad_record", f"{where}: a call that is no JSON ({error}): {text!r:.80}") from None
    for one in given if isinstance(given, list) else [given]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise Rejected("bad_record", f"{where}: a call without a name: {text!r:.80}")
        yield {"function": {"name": one["name"], "arguments": one.get("arguments", one.get("parameters", {}))}}


def _result(text: str) -> dict[str, Any]:
    """A result's message: Hermes names the tool in it, with the result as `content`."""
    try:
        given = decode_any_json(text)
    except (msgspec.DecodeError, RecursionError):
        return {"content": text}
    if not isinstance(given, dict) or set(given) != {"name", "content"} or not isinstance(given["name"], str):
        return {"content": text}
    content = given["content"]
    return {
        "name": given["name"],
        "content": content if isinstance(content, str) else msgspec.json.encode(content).decode(),
    }
