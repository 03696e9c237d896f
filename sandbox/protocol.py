"""What crosses between the host, a slot and a call, and how it is framed. Standard library only: the zygote loads this.

    host  -- control socket: JSON frames, one descriptor with "open" -->  zygote   (trusted, forks slots)
    host  -- slot socket: request and reply frames                   <->  slot     (trusted, one for each environment)
    slot  <-- result pipe: LOCKED, then exactly one report           --   call     (untrusted from LOCKED on)

A slot never parses what a call wrote beyond the fixed-size head of its report, and never trusts it: the verdict comes
from how the process ended and from whether its bytes are one well-formed report.
"""

from __future__ import annotations

import enum
import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

LENGTH = struct.Struct("!I")  # of the frame that follows
REQUEST = struct.Struct("!QBH")  # call id, Operation, CPU seconds beyond the limit; then the payload
REPLY = struct.Struct("!QBBdd")  # call id, Verdict, signal or Report, CPU seconds, wall seconds; then the payload
REPORT = struct.Struct("!BI")  # Report, length; then the body

LOCKED = b"\x4c"
"""First byte from every call: all layers are in place. Without it nothing untrusted has run: the fault is ours."""

HELLO_ID = 0
"""Id of a slot's first reply, which reports its layers as JSON, or says why it could not be locked."""


class Operation(enum.IntEnum):
    """What the host asks of a slot."""

    LOAD = 0  # payload: the module's source, UTF-8
    CALL = 1  # payload: JSON, see `sandbox.call.call_function`; parsed only by the locked call
    CANCEL = 2  # kill the call with this id; it gets no reply


class Report(enum.IntEnum):
    """What a call says about itself. Untrusted, but it can only speak about itself."""

    RETURNED = 0
    SOURCE = 1  # the module does not parse
    LOAD = 2  # the module raised while it was executed
    FUNCTION = 3  # no such function
    ARGUMENTS = 4  # the function does not take these arguments
    RAISED = 5
    UNSERIALISABLE = 6
    TOO_LARGE = 7
    DIVERGED = 8  # calls of its history did not repeat


class Verdict(enum.IntEnum):
    """What the slot decided about a call, from the outside."""

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


@dataclass(frozen=True)
class Limits:
    """Limits of one call.

    Attributes:
        cpu_seconds: decides (`cpu_timeout`); whole seconds, as the kernel counts them.
        wall_seconds: backstop for calls that wait for ever; counts as infrastructure because it depends on load.
        memory_bytes: address space, the interpreter's own ~100 MiB included; beyond it `MemoryError`.
        result_bytes: largest JSON value returned (`too_large`).
        stdout_bytes: what is kept of standard output; the rest is cut and marked.
        argument_bytes: largest JSON arguments accepted, those of the history of an episode included.
        history_cpu_seconds: at most this much is granted, on top of `cpu_seconds`, to repeat an episode's calls.
        source_bytes: largest module accepted.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 30.0
    memory_bytes: int = 512 << 20
    result_bytes: int = 256 << 10
    stdout_bytes: int = 16 << 10
    argument_bytes: int = 256 << 10
    history_cpu_seconds: int = 30
    source_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name}={value!r}: must be greater than 0")
        if self.cpu_seconds != int(self.cpu_seconds):
            raise ValueError(f"Limits.cpu_seconds={self.cpu_seconds!r}: must be whole seconds (the kernel's unit)")


@dataclass(frozen=True)
class Plan:
    """The layers a slot is to put in place; the start-up self-test finds the strongest that holds.

    Attributes:
        tier: the name the plan earns if every attack is stopped: "A" to "D".
        namespaces: user, pid, net, mount, ipc, uts and cgroup namespaces and a pivoted read-only root.
        landlock: file access read-only and only below the interpreter's library directories; no signals out.
        seccomp: allow-list of system calls.
        allow_open: let that list name paths; False leaves only modules that are preloaded.
        drop_uid: as root, give each slot an unprivileged user id of its own.
    """

    tier: str
    namespaces: bool
    landlock: bool
    seccomp: bool
    allow_open: bool
    drop_uid: bool


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


def digest(result: str) -> str:
    """What tells one result from another, whatever the order of its keys. `result` is JSON."""
    canonical = json.dumps(json.loads(result), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
