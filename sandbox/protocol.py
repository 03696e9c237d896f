"""Messages between the host, a slot and a call, and their framing. Standard library only: the zygote loads this.

    host  -- control socket: JSON frames, one descriptor with "open" -->  zygote   (trusted, forks slots)
    host  -- slot socket: request and reply frames                   <->  slot     (trusted, one for each environment)
    slot  <-- result pipe: LOCKED, then exactly one report           --   call     (untrusted from LOCKED on)

A slot parses only the fixed-size head of a call's report, and never trusts it. The verdict follows from how the process
ended and from whether its bytes are one well-formed report.
"""

from __future__ import annotations

import enum
import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = struct.Struct("!I")  # length of the frame that follows
REQUEST = struct.Struct("!QBIdQQ")  # call id, Operation, CPU and wall seconds, bytes of memory and result; the payload
REPLY = struct.Struct("!QBBddQ")  # call id, Verdict, its detail, CPU and wall seconds, KiB of memory; then the payload
REPORT = struct.Struct("!BI")  # Report, length; then the body

LOCKED = b"\x4c"
"""First byte from every call: all layers are in place. Without it no untrusted code has run: the fault is ours."""

ERROR_CHARACTERS = 2_000
"""Most characters kept of an error's text."""
ERROR_CUT, OUTPUT_CUT = " […]", "\n[output cut]"
"""Marks at the end of cut text."""

HELLO_ID = 0
"""Id of a slot's first reply: its layers as JSON, or the reason why it could not be locked."""


class Operation(enum.IntEnum):
    """Operation that the host requests from a slot."""

    LOAD = 0  # payload: the module's source, UTF-8
    CALL = 1  # payload: JSON, see `sandbox.call.call_function`; parsed only by the locked call
    CANCEL = 2  # kill the call with this id; it gets no reply


class Report(enum.IntEnum):
    """Kind of a call's report about itself. Untrusted, but only about the call: none is an infrastructure outcome."""

    RETURNED = 0
    SOURCE = 1  # the module does not parse
    LOAD = 2  # the module raised while it was executed
    FUNCTION = 3  # no such function
    ARGUMENTS = 4  # the function does not accept these arguments
    RAISED = 5
    UNSERIALISABLE = 6
    TOO_LARGE = 7
    DIVERGED = 8  # the calls of its history gave other results


class CallVerdict(enum.IntEnum):
    """Decision of the slot about a call, from the outside.

    The detail of `REPORTED` is the report's kind. The detail of `SIGNAL`, `KILLED` and `NOT_LOCKED` is the signal. The
    detail of `WALL_LIMIT` is 1 if calls can wait.
    """

    REPORTED = 0
    CPU_LIMIT = 1
    WALL_LIMIT = 2
    SIGNAL = 3  # died of a signal that it caused itself
    KILLED = 4  # SIGKILL that is not one of our limits: from the kernel's out-of-memory killer, or an operator
    NO_REPORT = 5
    MALFORMED = 6
    FLOOD = 7
    NOT_LOCKED = 8
    NOT_FORKED = 9  # the fork failed
    PART = 10  # no verdict yet: the payload is a part of the report's body, more follows
    SLOT_DIED = 11  # made by the host when the socket closes


def frame(payload: bytes) -> bytes:
    """Return the payload as a length-prefixed frame."""
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Parser that splits a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the bytes that were read, and yield each frame that is now complete."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield payload


def digest(result: str | bytes) -> str:
    """Return the digest of a result, given as JSON, which does not depend on the order of keys."""
    # Imported here: OpenSSL would be copied into each call. A slot must not import it late either: later calls would
    # then find other memory than earlier ones.
    import hashlib

    canonical = json.dumps(json.loads(result), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
