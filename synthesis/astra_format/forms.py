"""Forms of conversations with tools, converted to the columns that `sft.import_record` reads. The columns of each form:

    messages, tools              OpenAI, Anthropic, TRL, Qwen-Agent; objects or JSON; tools as in `tools.TOOL_COLUMNS`
    prompt, completion           TRL, of messages or of text; turns of the prompt are not trained
    conversations, tools         ShareGPT, Hermes and LLaMA-Factory: {"from": "gpt", "value": "…"}; also with messages
    instruction, input, output   Alpaca; also with LLaMA-Factory's history of earlier questions and answers
    trajectory                   ASTRA's released record

A column `system` beside any of them is the conversation's system message. `keys` defines the keys that are read.

ShareGPT has turns of text. A call is a turn of its own (`function_call`, the value JSON), or stands in the assistant's
text (`text_calls`), as in any form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from astra_jax.base.typed import decode_json, value_or_json
from synthesis.astra_format import keys
from synthesis.astra_format.text_calls import result_fields, thinking_of, written_calls
from synthesis.astra_format.tools import TOOL_COLUMNS
from synthesis.core.openai_messages import text_of
from synthesis.core.stages import Rejected

FORMS = (
    "messages with tools (OpenAI, TRL, Qwen-Agent)",
    "prompt with completion (TRL)",
    "conversations with tools (ShareGPT)",
    "instruction with output (Alpaca)",
    "trajectory (ASTRA)",
)
"""Known forms, as an error lists them."""
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
"""Speaker in ShareGPT → our role; turns of `calls` and `results` hold nothing else."""
_SYSTEM = ("system", "developer")
_PAIR = ("user", "assistant")


def columns(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's columns, with its conversation in `messages` (or still in `trajectory`) and its tools unchanged.

    The weight of all its turns is in `weight`, and the names of unread columns are in `unread`.

    Raises:
        Rejected: `bad_record`: it has none of the `FORMS`, with the keys that it has. `unknown_key`, `bad_mark`: see
            `keys`.
    """
    row = {name: value for name, value in given.items() if value is not None}
    read, said = _conversation(row)
    said = _behind(row.get("system"), said)
    own = next((text_of(one.get("content")) for one in said if one.get("role") in _SYSTEM), "")
    beside = (*TOOL_COLUMNS, *(keys.ASTRA_ROW if "trajectory" in read else ()))
    return {
        **{name: row[name] for name in beside if name in row},
        "trajectory" if "trajectory" in read else "messages": said,
        "weight": keys.weight_of(row, "the row", of_row=True),
        "unread": keys.unread(row, [*read, "system", *beside], own),
    }


def _conversation(row: Mapping[str, Any]) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the columns that a row has its conversation in, and the messages. Raises as `columns`."""
    if (column := next((one for one in ("trajectory", "messages") if one in row), None)) is not None:
        return (column,), _opened(row[column], column)
    if "prompt" in row and "completion" in row:
        return ("prompt", "completion"), _prompt_completion(row["prompt"], row["completion"])
    if "conversations" in row:
        turns = _opened(row["conversations"], "conversations")
        return ("conversations",), turns if not turns or "role" in turns[0] else list(_sharegpt(turns))
    if "instruction" in row and "output" in row:
        return ("instruction", "input", "output", "history"), _alpaca(row)
    names = ", ".join(sorted(row)[:20]) or "none"
    raise Rejected("bad_record", f"it is of no known form; its keys are {names}; known are {'; '.join(FORMS)}")


def _behind(system: Any, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the system message of a separate column before the conversation, unless it is there already.

    Raises:
        Rejected: `bad_record`: it has another one, or that column is no text.
    """
    if not system:
        return said
    if isinstance(system, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in system):
        system = text_of(system)  # Anthropic's blocks
    if not isinstance(system, str):
        raise Rejected("bad_record", f"column system: wants a text, and is {system!r:.80}")
    own = next((text_of(one.get("content")) for one in said if one.get("role") in _SYSTEM), None)
    if own is None:
        return [{"role": "system", "content": system}, *said]
    if own.strip() != system.strip():
        raise Rejected("bad_record", f"column system: it is {system!r:.80}, and the conversation's own is {own!r:.80}")
    return said


def _opened(value: Any, column: str) -> list[dict[str, Any]]:
    """Return a list of objects, decoded if it is JSON. Raises `Rejected`."""
    try:
        # The export for TRL has in .parquet the JSON of each message.
        items = value_or_json(value, list[dict[str, Any] | str])
        return [decode_json(one, dict[str, Any]) if isinstance(one, str) else one for one in items]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected("bad_record", f"column {column}: {error}") from None


def _prompt_completion(prompt: Any, completion: Any) -> list[dict[str, Any]]:
    """Return the messages of prompt and completion. The prompt's assistant messages have weight 0: TRL trains on the
    completion alone."""

    def turns(value: Any, role: str, column: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": value}] if isinstance(value, str) else _opened(value, column)

    asked = [{**one, "weight": 0} if one.get("role") == "assistant" else one for one in turns(prompt, "user", "prompt")]
    return [*asked, *turns(completion, "assistant", "completion")]


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of an instruction, its input on lines of its own, and its output.

    The form and `history`, a list of pairs, are those of LLaMA-Factory's `data/README.md`, which trains on the answers
    of the history too.
    """
    parts = {name: row.get(name, "") for name in ("instruction", "input", "output")}
    for name, value in parts.items():
        if not isinstance(value, str):
            raise Rejected("bad_record", f"column {name}: wants a text, and is {value!r:.80}")
    try:
        history = value_or_json(row.get("history", []), list[tuple[str, str]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected("bad_record", f"column history: wants pairs of a question and its answer: {error}") from None
    question = "\n".join(filter(None, (parts["instruction"], parts["input"])))
    turns = [*history, (question, parts["output"])]
    return [{"role": role, "content": text} for turn in turns for role, text in zip(_PAIR, turn, strict=True)]


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
        keys.check(turn, ("from", "value", *keys.MARKS), keys.MESSAGE, where)
        marks = {name: turn[name] for name in keys.MARKS if name in turn}
        if role == "calls":
            reasoning, text = thinking_of(value)
            try:
                calls = written_calls(text)
            except (ValueError, RecursionError) as error:
                raise Rejected("bad_record", f"{where}: a call that is not JSON ({error}): {text!r:.200}") from None
            yield {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": calls, **marks}
        elif role == "results":
            yield {"role": "tool", **result_fields(value), **marks}
        else:
            yield {"role": role, "content": value, **marks}
