"""Text of strangers on a terminal: tool documents, answers, records, and what errors quote of them.

A terminal obeys what it is sent: escape sequences rename its window, move its cursor over what was said before, and, on
some, type for the user. Signs that turn the direction of writing show another text than there is (CVE-2021-42574).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import unicodedata
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


def fitting(line: str, columns: int) -> str:
    """A line in at most so many columns of a terminal, of which Chinese characters take two; cut, with an ellipsis."""
    kept: list[str] = []
    used = 0
    for one in printable(line, lines=False):
        size = 0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        if used + size > columns:
            while kept and used + 1 > columns:
                used -= 2 if unicodedata.east_asian_width(kept.pop()) in "WF" else 1
            return f"{''.join(kept)}…" if columns else ""
        kept.append(one)
        used += size
    return "".join(kept)


class Screen:
    """A terminal that is drawn over, as a program's own page: what was there comes back when it is left, and what was
    drawn last is said below it."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> Screen:
        self._send("\x1b[?1049h\x1b[?25l")  # the other page; no cursor
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._send("\x1b[?25h\x1b[?1049l")
            say(self._last)

    def draw(self, text: str) -> None:
        """Show a text from the first line on, as much of it as there is room for."""
        self._last = text
        size = shutil.get_terminal_size()
        lines = [fitting(line, size.columns) for line in text.splitlines()]
        if len(lines) > size.lines:
            lines = [*lines[: size.lines - 1], "…"]
        # Each line is cleared behind its end, and the rest below: nothing flickers.
        self._send("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")

    def _send(self, signs: str) -> None:
        sys.stdout.buffer.write(signs.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
        sys.stdout.flush()
