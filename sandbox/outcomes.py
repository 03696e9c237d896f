"""Results of calls: kind, value, and what ended the call.

There are two families of outcomes. Deterministic outcomes are a property of the code and its arguments: a model sees
them as observations, and they may be scored. Infrastructure outcomes are a property of the machine at that moment: the
pool retries them once, and a caller must mask the rest and never score it. No report by a call itself is an
infrastructure outcome, or a call could get itself masked.
"""

from __future__ import annotations

import enum
import json
import math
import signal
from dataclasses import dataclass
from typing import Any

from astra_jax.base.nesting import MOST_NESTING, nests_too_deeply
from sandbox.limits import Limits
from sandbox.protocol import ERROR_CHARACTERS, ERROR_CUT, OUTPUT_CUT, CallVerdict, Report


class SandboxError(Exception):
    """Error: the sandbox cannot be used: too little isolation on this machine, a closed pool, a failed start."""


class Outcome(enum.StrEnum):
    """Kind of a call's outcome."""

    OK = "ok"
    TOOL_ERROR = "tool_error"  # raised, does not parse, no such function, wrong arguments
    UNSERIALISABLE = "unserialisable"  # returned something that is not JSON, NaN and infinity included
    TOO_LARGE = "too_large"  # source, arguments or result above their limit
    CPU_TIMEOUT = "cpu_timeout"
    CRASH = "crash"  # died of a signal, or was killed twice for the memory that it took
    NO_RESULT = "no_result"  # ended without a report, e.g. `os._exit(0)`
    PROTOCOL_ERROR = "protocol_error"  # wrote other data on the result channel
    FLOOD = "flood"  # wrote more on it than any report may have
    IDLE_TIMEOUT = "idle_timeout"  # waited, where no layer forbids it (tier D), until the limit
    DIVERGED = "diverged"  # an episode's calls gave other results: the code is not deterministic

    WALL_TIMEOUT = "wall_timeout"  # had work to do and got too little processor time
    KILLED = "killed"  # SIGKILL from outside, or because other calls took the memory
    ENV_DIED = "env_died"  # its slot or the zygote ended
    OPEN_FAILED = "open_failed"  # no slot was available, or a layer could not be put in place


INFRASTRUCTURE = frozenset({Outcome.WALL_TIMEOUT, Outcome.KILLED, Outcome.ENV_DIED, Outcome.OPEN_FAILED})
"""Outcomes that tell nothing about the call."""

_IDLE_CPU_SECONDS = 0.1
"""CPU seconds below which a call at the wall limit was waiting.

A start takes a few milliseconds. A busy call that shares a core with a hundred others gets three times this in the
default 30 s.
"""


@dataclass(frozen=True)
class CallResult:
    """Result of one call.

    Attributes:
        kind: kind of the outcome.
        value: the function's value as decoded JSON; None unless `ok`.
        stdout: its standard output, cut at the limit; empty when the process was killed.
        error: one readable line or paragraph, which can be shown to a model; empty when `ok`.
        cpu_seconds: user and system time of the call's process.
        wall_seconds: time from its fork to its end.
        ended_by: the limit, stage or layer that ended it: "return", "exception", "source", "load", "function",
            "arguments", "result", "cpu_limit", "wall_limit", "seccomp", "signal SIGSEGV", "exit", "channel", "slot", …
    """

    kind: Outcome
    value: Any = None
    stdout: str = ""
    error: str = ""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    ended_by: str = ""

    @property
    def ok(self) -> bool:
        """True if the function returned a JSON value."""
        return self.kind is Outcome.OK

    @property
    def is_infrastructure(self) -> bool:
        """True if the outcome tells nothing about the code: mask it, never score it."""
        return self.kind in INFRASTRUCTURE


MEMORY = "memory"
"""`ended_by` of a call that was killed when it held more than its part of the pool's memory."""

CLOSED = CallResult(Outcome.ENV_DIED, error="the pool was closed during the call", ended_by="pool")


@dataclass(frozen=True)
class SlotReply:
    """Reply of a slot, not decoded."""

    verdict: CallVerdict
    detail: int
    cpu_seconds: float
    wall_seconds: float
    memory_kib: int
    payload: bytes


_REPORTED = {
    Report.SOURCE: (Outcome.TOOL_ERROR, "source"),
    Report.LOAD: (Outcome.TOOL_ERROR, "load"),
    Report.FUNCTION: (Outcome.TOOL_ERROR, "function"),
    Report.ARGUMENTS: (Outcome.TOOL_ERROR, "arguments"),
    Report.RAISED: (Outcome.TOOL_ERROR, "exception"),
    Report.UNSERIALISABLE: (Outcome.UNSERIALISABLE, "result"),
    Report.TOO_LARGE: (Outcome.TOO_LARGE, "result"),
    Report.DIVERGED: (Outcome.DIVERGED, "history"),
}


def decode(reply: SlotReply, limits: Limits, fair_bytes: float = math.inf) -> CallResult:
    """Return the result for a slot's reply. Never raises, whatever the untrusted payload contains.

    Args:
        reply: the slot's reply.
        limits: limits of the call.
        fair_bytes: memory that the call may hold when memory runs out.
    """
    if reply.verdict is CallVerdict.REPORTED:
        return _decode_report(reply, limits)
    # If calls can wait, one could work for a moment, wait for its limit, and be masked.
    idle = bool(reply.detail) or reply.cpu_seconds < _IDLE_CPU_SECONDS
    killed = "signal SIGKILL", "the call's process was killed from outside"
    if reply.memory_kib << 10 > fair_bytes:
        killed = MEMORY, f"MemoryError: the tool held {reply.memory_kib >> 10} MiB when memory ran out; take less"
    kind, ended_by, error = {
        CallVerdict.CPU_LIMIT: (
            Outcome.CPU_TIMEOUT,
            "cpu_limit",
            f"TimeoutError: the call used more than {limits.cpu_seconds} s of CPU time",
        ),
        CallVerdict.WALL_LIMIT: (
            Outcome.IDLE_TIMEOUT if idle else Outcome.WALL_TIMEOUT,
            "wall_limit",
            f"TimeoutError: the call was still waiting after {limits.wall_seconds:g} s of wall time",
        ),
        CallVerdict.KILLED: (Outcome.KILLED, *killed),
        CallVerdict.NO_REPORT: (Outcome.NO_RESULT, "exit", "RuntimeError: the tool ended the process without a result"),
        CallVerdict.MALFORMED: (
            Outcome.PROTOCOL_ERROR,
            "channel",
            "RuntimeError: the tool wrote on the result channel",
        ),
        CallVerdict.FLOOD: (Outcome.FLOOD, "channel", "RuntimeError: the tool flooded the result channel"),
        CallVerdict.NOT_LOCKED: (Outcome.OPEN_FAILED, "lockdown", "a layer could not be put in place for the call"),
        CallVerdict.NOT_FORKED: (Outcome.OPEN_FAILED, "fork", "no process could be had for the call"),
        CallVerdict.SLOT_DIED: (Outcome.ENV_DIED, "slot", "the environment's process ended during the call"),
        CallVerdict.SIGNAL: (Outcome.CRASH, _signal_name(reply.detail), _crash(reply.detail)),
    }[reply.verdict]
    return CallResult(kind, None, "", error, reply.cpu_seconds, reply.wall_seconds, ended_by)


def _signal_name(number: int) -> str:
    if number == signal.SIGSYS:
        return "seccomp"
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def _crash(number: int) -> str:
    if number == signal.SIGSYS:
        why = "it waited for another thread or process, of which there are none, or made a foreign system call"
        return f"RuntimeError: the tool was stopped: {why}"
    return f"RuntimeError: the tool's process crashed ({_signal_name(number)})"


def _decode_report(reply: SlotReply, limits: Limits) -> CallResult:
    try:
        body = _DECODER.decode(str(reply.payload, "utf-8"))
        if b"\\u" in reply.payload:  # an escaped lone surrogate would break the first writer downstream
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:  # the depth, above `MOST_NESTING`, depends on the host's own stack
        return _too_deep(reply)
    except ValueError:
        return _malformed(reply)
    returned = reply.detail == Report.RETURNED
    expected = {"value", "stdout"} if returned else {"error", "stdout"}
    if not isinstance(body, dict) or set(body) != expected or not isinstance(body["stdout"], str):
        return _malformed(reply)
    if len(body["stdout"]) > limits.stdout_bytes + len(OUTPUT_CUT):
        return _malformed(reply)
    if returned:
        # The call has checked its result's size itself: a report over the limit is forged.
        if len(reply.payload) > limits.result_bytes and _json_bytes(body["value"]) > limits.result_bytes:
            return _malformed(reply)
        if nests_too_deeply(body["value"], reply.payload):  # this one is forged, too
            return _too_deep(reply)
        return CallResult(
            Outcome.OK, body["value"], body["stdout"], "", reply.cpu_seconds, reply.wall_seconds, ended_by="return"
        )
    if not isinstance(body["error"], str) or len(body["error"]) > ERROR_CHARACTERS + len(ERROR_CUT):
        return _malformed(reply)
    kind, ended_by = _REPORTED[Report(reply.detail)]
    return CallResult(
        kind, None, body["stdout"], body["error"], reply.cpu_seconds, reply.wall_seconds, ended_by=ended_by
    )


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _too_deep(reply: SlotReply) -> CallResult:
    return CallResult(
        Outcome.UNSERIALISABLE,
        error=f"the result nests deeper than {MOST_NESTING} levels: return it flatter",
        cpu_seconds=reply.cpu_seconds,
        wall_seconds=reply.wall_seconds,
        ended_by="result",
    )


def _malformed(reply: SlotReply) -> CallResult:
    return CallResult(
        Outcome.PROTOCOL_ERROR,
        error="RuntimeError: the tool wrote on the result channel",
        cpu_seconds=reply.cpu_seconds,
        wall_seconds=reply.wall_seconds,
        ended_by="channel",
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
