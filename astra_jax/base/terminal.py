"""Standard output and standard error: text of strangers on a terminal, and streams that cannot be written.

A terminal obeys what it is sent: escape sequences rename its window, move its cursor over earlier lines, and, on some,
type for the user. Signs that turn the direction of writing show another text than there is (CVE-2021-42574).

A full disk, a terminal that is gone or a closed pipe fails each write to it. `protect_streams` keeps such a failure
from ending a run whose result is files.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import shutil
import sys
import unicodedata
from typing import Any, TextIO

from astra_jax.base.errors import UserError
from astra_jax.base.metrics import METRICS

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f"  # lines, annotations and tags that nobody sees
    "\ud800-\udfff"  # halves of characters, which no encoding of a terminal has
    "]"
)


def printable(text: object, *, lines: bool = True) -> str:
    r"""Return the text as a terminal may have it: signs that it would obey are written out, as `\x1b` or `\u202e`.

    Args:
        lines: keep line feeds; else they are written out too, so that the text stays one line.
    """
    safe = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return safe if lines else safe.replace("\n", "\\n")


def say(text: object = "", *, file: TextIO | None = None) -> None:
    """Print a line, or several, as `printable` makes them, at once; by default to standard output."""
    print(printable(text), file=file or sys.stdout, flush=True)


class OutputError(UserError):
    """Standard output cannot be written, and printing is all that the program was asked for."""


class _Stream(io.FileIO):
    """Descriptor of a standard stream whose failed writes are discarded, counted, and reported once on the other one.

    The first failure of standard output raises instead while `is_required`: `OutputError`, or `BrokenPipeError` where
    the reader of a pipe is gone.
    """

    is_required = True
    """True for standard output: its text is the result of the program."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title, self._other = ("standard output", 2) if descriptor == 1 else ("standard error", 1)
        self._failures = 0

    def write(self, data: Any, /) -> int:
        """Write a bytes-like object; returns how many bytes were written or discarded."""
        size = memoryview(data).nbytes
        try:
            while (written := super().write(data)) is None:  # the process that started this one made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            self._failures += 1
            METRICS.put("output_failures", self._failures, stream=self._title)
            if self._failures == 1:
                self._report(error)
            return size

    def _report(self, error: OSError) -> None:
        reason = f"{self._title} cannot be written: {error.strerror}"
        is_unread = isinstance(error, BrokenPipeError)
        if self._other == 2 and _Stream.is_required:
            raise error if is_unread else OutputError(f"{reason}. Send it to another file, and run the command again")
        if not is_unread:  # as Unix programs, which a closed pipe ends without a word
            with contextlib.suppress(OSError):
                # Not through the other stream: another thread may hold its lock, and wait for the lock of this one.
                os.write(self._other, f"warning: {reason}; its text is lost, the run continues\n".encode())


def protect_streams() -> None:
    """Let standard output and standard error take any text in any locale, and let no failure of theirs end a run.

    Where one is closed, a file that is opened later would get its descriptor, and receive its text: it is opened for
    reading, so that writes to it fail.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    sys.stdout, sys.stderr = _protected(sys.stdout, 1), _protected(sys.stderr, 2)


def make_output_optional() -> None:
    """From now on the result is files, or a service: a run continues without standard output."""
    _Stream.is_required = False


def _protected(stream: TextIO | None, descriptor: int) -> TextIO:
    encoding, is_unbuffered, by_line = "utf-8", False, descriptor == 2
    if stream is not None:
        if not isinstance(stream, io.TextIOWrapper) or not _is_of(stream, descriptor):  # such as a test's
            return stream
        with contextlib.suppress(OSError):
            stream.flush()
        encoding, is_unbuffered, by_line = stream.encoding, stream.write_through, stream.line_buffering
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(descriptor)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=by_line,
        write_through=is_unbuffered,
    )


def _is_of(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except OSError:  # it has none
        return False


def fitting(line: str, columns: int) -> str:
    """Cut a line to so many columns of a terminal, with an ellipsis; Chinese characters take two columns."""
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
    """A full-screen page on a terminal. Leaving it restores the earlier content and prints the last page below."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> Screen:
        self._send("\x1b[?1049h\x1b[?25l")  # the other page; no cursor
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError, OutputError):
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
        sys.stdout.write(signs)
        sys.stdout.flush()
