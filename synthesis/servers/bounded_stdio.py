"""A text encoding that reads no more of a line than it may have: UTF-8, as whole lines, for servers over stdio.

The SDK's client keeps what it has read of a line, however long, and copies it with each part that comes. An encoding is
what it lets its user choose of that: this one keeps the parts itself, joins them once, and drops a line that is too
long, so that its request ends as one without an answer.
"""

from __future__ import annotations

import codecs
import logging

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Maximum size of a line, which is one message. A line from a single read of the pipe (64 KiB) is not measured."""
ENCODING = "utf_8_bounded_lines"


class _Lines(codecs.IncrementalDecoder):
    """Gives nothing until a line is whole."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self.reset()

    def reset(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._is_first = True

    def decode(self, given: bytes, final: bool = False) -> str:  # type: ignore[override]  # bytes are what a pipe gives
        end = given.rfind(b"\n") + 1  # no other character of UTF-8 has that byte
        whole = ""
        if end:
            first = given.index(b"\n") + 1
            if self._size + first <= MOST_BYTES:
                lines = b"".join([*self._parts, given[:end]])
            else:
                _log.warning("an MCP server's message has more than %d MiB, and is dropped", MOST_BYTES >> 20)
                lines = given[first:end]
            if self._is_first:  # what some runtimes write before anything else
                lines = lines.removeprefix(codecs.BOM_UTF8)
            whole = self._text(lines)
            self.reset()
            self._is_first = False
        self._size += len(given) - end
        if self._size <= MOST_BYTES:
            self._parts.append(given[end:])
        else:
            self._parts.clear()
        return whole

    def _text(self, lines: bytes) -> str:
        """Decode the lines without invalid UTF-8 lines: only the requests that those answer are lost."""
        try:
            return lines.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            kept = [line for line in lines.splitlines(keepends=True) if _is_utf8(line)]
            _log.warning("an MCP server's message is not UTF-8, and is dropped: %s", error)
            return b"".join(kept).decode("utf-8", self.errors)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _found(name: str) -> codecs.CodecInfo | None:
    if name != ENCODING:
        return None
    return codecs.CodecInfo(codecs.utf_8_encode, codecs.utf_8_decode, incrementaldecoder=_Lines, name=ENCODING)


codecs.register(_found)
