"""What crosses between the host, a slot and a call, and how it is framed. Standard library only: the zygote loads this.

    host  -- control socket: JSON frames, one descriptor with "open" -->  zygote   (trusted, forks slots)
    host  -- slot socket: request and reply frames                   <->  slot     (trusted, one for each environment)
    slot  <-- result pipe: LOCKED, then exactly one report           --   call     (untrusted from LOCKED on)

A slot never parses what a call wrote beyond the fixed-size head of its report, and never trusts it: the verdict comes
from how the process ended and from whether its bytes are one well-formed report.
"""

from __future__ import annotations

import enum
import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LENGTH = struct.Struct("!I")  # of the frame that follows
REQUEST = struct.Struct("!QBIdQQ")  # call id, Operation, CPU and wall seconds, bytes of memory and result; the payload
REPLY = struct.Struct("!QBBddQ")  # call id, Verdict, its detail, CPU and wall seconds, KiB of memory; then the payload
REPORT = struct.Struct("!BI")  # Report, length; then the body

LOCKED = b"\x4c"
"""First byte from every call: all layers are in place. Without it nothing untrusted has run: the fault is ours."""

MOST_NESTING = 200
"""Arrays and objects inside each other, in arguments and results: far from where a JSON library, here or behind HTTP,
gives up, which depends on how deep its caller is."""

ERROR_CHARACTERS = 2_000
"""Kept of an error's text."""
ERROR_CUT, OUTPUT_CUT = " […]", "\n[output cut]"
"""Marks where text was cut."""

HELLO_ID = 0
"""Id of a slot's first reply, which reports its layers as JSON, or says why it could not be locked."""


class Operation(enum.IntEnum):
    """What the host asks of a slot."""

    LOAD = 0  # payload: the module's source, UTF-8
    CALL = 1  # payload: JSON, see `sandbox.call.call_function`; parsed only by the locked call
    CANCEL = 2  # kill the call with this id; it gets no reply


class Report(enum.IntEnum):
    """What a call says about itself. Untrusted, but it can only speak about itself: none of it is infrastructure."""

    RETURNED = 0
    SOURCE = 1  # the module does not parse
    LOAD = 2  # the module raised while it was executed
    FUNCTION = 3  # no such function
    ARGUMENTS = 4  # the function does not take these arguments
    RAISED = 5
    UNSERIALISABLE = 6
    TOO_LARGE = 7
    DIVERGED = 8  # calls of its history did not repeat


class CallVerdict(enum.IntEnum):
    """Decision of the slot about a call, from the outside.

    The detail of `REPORTED` is the report's kind; of `SIGNAL`, `KILLED` and `NOT_LOCKED` the signal; of `WALL_LIMIT` 1
    where calls can wait.
    """

    REPORTED = 0
    CPU_LIMIT = 1
    WALL_LIMIT = 2
    SIGNAL = 3  # died of a signal of its own making
    KILLED = 4  # SIGKILL that is not a limit of ours: the kernel's out-of-memory killer, or an operator
    NO_REPORT = 5
    MALFORMED = 6
    FLOOD = 7
    NOT_LOCKED = 8
    NOT_FORKED = 9  # no process could be had
    PART = 10  # no verdict yet: the payload is a part of the report's body, more will follow
    SLOT_DIED = 11  # made by the host when the socket closes


def frame(payload: bytes) -> bytes:
    """A length-prefixed frame."""
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream back into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take in what was read; yield each frame that is now complete."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield payload


def digest(result: str | bytes) -> str:
    """Digest of a result, written as JSON, which does not depend on the order of keys."""
    # Not above: it brings OpenSSL, of which each call would be a copy. Nor in a slot once it is needed: the calls after
    # that would find other memory than those before.
    import hashlib

    canonical = json.dumps(json.loads(result), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def check_nesting(value: Any) -> Any:
    """Return JSON data that was read from a stranger's text.

    A JSON parser of Python 3.12 and later reads thousands of levels, at which recursive code fails.

    Raises:
        RecursionError: `value` has more than `MOST_NESTING` levels.
    """
    if nests_too_deeply(value):
        raise RecursionError(f"it is nested too deeply, more than {MOST_NESTING} levels")
    return value


def nests_too_deeply(value: Any, written: bytes | None = None) -> bool:
    """Whether data has more than `MOST_NESTING` arrays and objects inside each other, or holds itself.

    An object that is met many times, as YAML's aliases make them, is looked into once a level.

    Args:
        written: the same as JSON, or more around it; where that has few enough brackets, nothing need be looked at.
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
