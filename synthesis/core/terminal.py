"""Text of strangers on a terminal: tool documents, answers, records, and what errors quote of them.

A terminal obeys what it is sent: escape sequences rename its window, move its cursor over what was said before, and, on
some, type for the user. Signs that turn the direction of writing show another text than there is (CVE-2021-42574).
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f"  # lines, annotations and tags that nobody sees
    "\ud800-\udfff"  # halves of characters, which no encoding of a terminal has
    "]"
)


def printable(text: object, *, lines: bool = True) -> str:
    r"""The text as a terminal may have it: signs that it would obey are written out, as `\x1b` or `\u202e`.

    Args:
        lines: keep line feeds; else they are written out too, so that the text stays one line.
    """
    safe = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return safe if lines else safe.replace("\n", "\\n")


def say(text: object = "", *, file: TextIO | None = None) -> None:
    """Print a line, or several, as `printable` makes them, at once; by default to standard output."""
    print(printable(text), file=file or sys.stdout, flush=True)
