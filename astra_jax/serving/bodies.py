"""Parsing of a request's body as JSON, with limits that make every value safe to handle.

A thread beside the event loop parses it. But the interpreter parses a body in one step, and no other thread runs
meanwhile. So the number of values, which determines the duration, is limited first.
"""

from __future__ import annotations

from typing import Any

from astra_jax.base.nesting import MOST_NESTING
from astra_jax.serving.protocol import InvalidRequest
from synthesis.core.chat_format import parse_json

MOST_VALUES = 1 << 18
"""Most values of a body, an array or object counting as four: eight prompts of 32k token ids.

Parsing them takes 35 ms, as long as 16 MiB of text.
"""


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises:
        InvalidRequest: it is not an object, or not JSON in UTF-8. Or it has a name twice, a number beyond a float's
            range, half a character (a lone surrogate), more than `MOST_VALUES` values or more than `MOST_NESTING`
            levels.
    """
    if len(body) > MOST_VALUES // 4:  # a shorter body cannot have more
        _check_count(body)
    try:
        value = parse_json(body.decode("utf-8"), unique_names=True, any_depth=True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is a JSON {type(value).__name__}; send an object")
    _check_values(value)
    return value


def _check_count(body: bytes) -> None:
    """Check the number of values. Outside strings each follows a comma or bracket, or has a name, a string too."""
    count, start = 0, 0
    while start < len(body):
        opened = body.find(b'"', start)
        opened = len(body) if opened < 0 else opened
        count += 1 + body.count(b",", start, opened)
        count += 4 * (body.count(b"[", start, opened) + body.count(b"{", start, opened))
        if count > MOST_VALUES:
            raise InvalidRequest(f"the body has more than {MOST_VALUES} values; ask in parts")
        start = opened + 1
        while (closed := body.find(b'"', start)) >= 0 and _escaped(body, closed):
            start = closed + 1
        start = len(body) if closed < 0 else closed + 1


def _escaped(body: bytes, at: int) -> bool:
    """Return whether the quote at an index is part of a string: an odd number of backslashes precedes it."""
    first = at
    while first and body[first - 1] == 0x5C:
        first -= 1
    return (at - first) % 2 == 1


def _check_values(fields: dict[str, Any]) -> None:
    # A path is kept as a link to its parent: full paths would repeat a long name a thousand times.
    waiting: list[tuple[Any, Any, int]] = [(fields, None, 1)]
    while waiting:
        value, path, depth = waiting.pop()
        if isinstance(value, str):
            _check_text(value, path)
            continue
        if depth > MOST_NESTING:
            raise _too_deep(_spelled(path))
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in inside:
            if isinstance(name, str):
                _check_text(name, path)
            if isinstance(inner, (str, dict, list)):
                waiting.append((inner, (path, name), depth + 1))


def _check_text(text: str, path: Any) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = _spelled(path)
        raise InvalidRequest(
            f"{where or 'the body'} has half a character, the lone surrogate \\u{ord(text[error.start]):04x}, at "
            f"position {error.start}; send whole ones",
            param=where or None,
        ) from None


def _too_deep(where: str = "") -> InvalidRequest:
    text = f"{where or 'the body'} nests deeper than {MOST_NESTING} arrays and objects; send it flatter"
    return InvalidRequest(text, param=where or None)


def _spelled(path: Any) -> str:
    """Format a path as in `messages[0].content`, its first levels only."""
    names = []
    while path is not None:
        path, name = path
        names.append(f".{name[:64]}" if isinstance(name, str) else f"[{name}]")
    shown = "".join(reversed(names[-6:])).removeprefix(".")
    return shown.encode("utf-8", "replace").decode()
