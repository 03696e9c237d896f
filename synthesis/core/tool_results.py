"""Text of a tool call's result for a model: one rule for cutting, escaping, errors and the check of arguments.

Trajectory runs, and so SFT data, rollouts and evaluation call these functions. So a policy sees in training the form
that it learnt to read.

JSON is written without spaces and with Unicode unescaped. Token counts use Qwen's vocabulary (the tiktoken file of
qwen-agent 0.0.34). Without spaces, 36,074 results of the fact tools and of the quickstart's data have 365,706 tokens
instead of 401,217 (8.9 % fewer). 1,704 nested documents of public MCP servers have 3,534,390 instead of 4,142,592 (14.7
% fewer). Escaping non-ASCII text costs 5.6 % more on the latter, and 4.4 times as much on Chinese.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from synthesis.core.chat_format import Call, MalformedCall, escape_tags, parse_json
from synthesis.core.loose_json import JSON_STRING
from synthesis.core.records import ToolSpec
from synthesis.core.tool_schemas import argument_error

if TYPE_CHECKING:
    from sandbox import CallResult

MAX_CHARACTERS = 8_192
"""Longer results are cut: about 2k tokens, so that one careless call cannot fill the context."""
_MOST_PARSED = 10_000_000
"""Maximum length of a server's text that is parsed."""
_STRING_OR_SPACE = re.compile(rf"{JSON_STRING.pattern}|\s+", re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def value_text(value: Any, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the shown text of a tool's JSON value.

    The chat format's tags are escaped, which in JSON means the same: a tool must not be able to end its turn and speak
    for the user. Lone surrogates, which no tokenizer takes, become question marks.
    """
    return _shown(_spelled(value), max_characters)


def server_text(text: str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the shown text of a server's answer: as `value_text` if it is JSON, else stripped.

    Numbers in JSON keep the server's digits (`1.10` may be a version), and duplicate names in an object stay.
    """
    return _shown(_respelled(text), max_characters)


def error_text(message: str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return an error in the one form that errors have: `{"error":…}`."""
    return value_text({"error": message}, max_characters=max_characters)


def server_error_text(text: str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return a server's text about a failed call in the form of `error_text`."""
    return error_text(_respelled(text) or "the tool failed and gave no message", max_characters=max_characters)


def outcome_text(result: CallResult, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the shown text of a sandbox call: the value, the tool's error, or the kind of outcome if there is no
    text."""
    if result.ok:
        return value_text(result.value, max_characters=max_characters)
    return error_text(result.error.strip() or result.kind.value, max_characters=max_characters)


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _respelled(text: str) -> str:
    if len(text) <= _MOST_PARSED:
        try:
            parse_json(text)
        except (ValueError, RecursionError):  # no JSON, an endless number, or brackets a thousand deep
            pass
        else:
            return _STRING_OR_SPACE.sub(_respelled_part, text)
    return text.strip()


def _respelled_part(found: re.Match[str]) -> str:
    """Return a string with Unicode unescaped; nothing for the space between values."""
    part = found[0]
    if not part.startswith('"'):
        return ""
    return _spelled(json.loads(part)) if "\\" in part else part


def _shown(text: str, max_characters: int) -> str:
    text = escape_tags(text.encode("utf-8", "replace").decode("utf-8"))
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}... [truncated, {len(text) - max_characters} more characters]"


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def refusal(call: Call, specs: Mapping[str, ToolSpec]) -> tuple[str, str] | None:
    """Return why a call is not executed.

    Args:
        specs: the tools that are offered, by name.

    Returns:
        None if the call is valid; else the kind (`malformed`, `unknown_tool`, `invalid_arguments`) and the message for
        `error_text`.

    Raises:
        UncheckableSchema: as `tool_schemas.argument_error`.
    """
    if isinstance(call, MalformedCall):
        return "malformed", f"the tool call could not be read: {call.error}"
    spec = specs.get(call.name)
    if spec is None:
        return "unknown_tool", f"there is no tool named {call.name!r}"
    problem = argument_error(spec.parameters, call.arguments)
    return ("invalid_arguments", problem) if problem else None
