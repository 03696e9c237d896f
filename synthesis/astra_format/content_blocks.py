"""Calls and results that stand as blocks in a message's content, as Anthropic's Messages API has them.

{"role": "assistant", "content": [{"type": "text", …}, {"type": "tool_use", "id": "t1", "name": …, "input": {…}}]}
{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "…"}, {"type": "text", …}]}
"""

from __future__ import annotations

from typing import Any

from synthesis.astra_format import keys
from synthesis.core.stages import Rejected

_CALL_KEYS, _RESULT_KEYS = ("type", "id", "name", "input"), ("type", "tool_use_id", "content", "is_error")


def without_blocks(given: Any) -> list[Any]:
    """Return a message with its calls in `tool_calls`, or the tool messages of its results and what remains of it.

    A message without such blocks is returned as it is.

    Raises:
        Rejected: `bad_record`: a call behind which text follows, or that no assistant makes, or a result that no user
            sends; `unknown_key`: see `keys`.
    """
    content = given.get("content") if isinstance(given, dict) else None
    if not isinstance(content, list) or not {"tool_use", "tool_result"} & set(map(_type, content)):
        return [given]
    wanted, sender = ("tool_use", "assistant") if given.get("role") == "assistant" else ("tool_result", "user")
    blocks = [one for one in content if _type(one) in ("tool_use", "tool_result")]
    if given.get("role") != sender or any(_type(one) != wanted for one in blocks):
        wrong = next(one for one in blocks if given.get("role") != sender or _type(one) != wanted)
        raise Rejected("bad_record", f"a message of role {given.get('role')!r} holds the block {wrong!r:.100}")
    rest = [one for one in content if _type(one) != wanted]
    if wanted == "tool_result":
        results = [_result(one) for one in blocks]
        return [*results, {**given, "content": rest}] if rest else results
    if content[-len(blocks) :] != blocks:
        raise Rejected("bad_record", "the content has a text behind a call; chat formats have calls at a turn's end")
    return [{**given, "content": rest, "tool_calls": [*(given.get("tool_calls") or ()), *map(_call, blocks)]}]


def _type(block: Any) -> str:
    return str(block.get("type")) if isinstance(block, dict) else ""


def _call(block: dict[str, Any]) -> dict[str, Any]:
    keys.check(block, _CALL_KEYS, keys.CALL | {"text"}, "a block tool_use")
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    keys.check(block, _RESULT_KEYS, keys.CALL | {"text"}, "a block tool_result")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
