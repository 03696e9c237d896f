"""Limit on the nesting of JSON data from untrusted text. Standard library only: the sandbox's processes load this."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_NESTING = 200
"""Most nested arrays and objects in arguments and results.

It is far below the depth at which JSON libraries fail, which depends on the caller's stack.
"""


def check_nesting(value: Any) -> Any:
    """Check the nesting of JSON data from untrusted text, and return the data.

    A JSON parser of Python 3.12 and later reads thousands of levels, at which recursive code fails.

    Raises:
        RecursionError: `value` has more than `MOST_NESTING` levels.
    """
    if nests_too_deeply(value):
        raise RecursionError(f"it is nested too deeply, more than {MOST_NESTING} levels")
    return value


def nests_too_deeply(value: Any, written: bytes | None = None) -> bool:
    """Return whether data has more than `MOST_NESTING` nested arrays and objects, or contains itself.

    An object that occurs many times, as YAML's aliases make them, is checked once per level.

    Args:
        written: the data as JSON, or a text that contains it. If it has few enough brackets, the data is not walked.
    """
    if written is not None and written.count(b"[") + written.count(b"{") <= MOST_NESTING:
        return False
    level = [value]
    for _ in range(MOST_NESTING + 1):
        holders = {id(one): one for one in level if isinstance(one, dict | list | tuple)}
        if not holders:
            return False
        level = [part for one in holders.values() for part in (one.values() if isinstance(one, dict) else one)]
    return True
