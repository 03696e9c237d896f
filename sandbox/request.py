"""Request of a call, and its JSON for the process that runs it."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from astra_jax.base.nesting import MOST_NESTING, nests_too_deeply
from sandbox.json_values import MOST_DIGITS, NotJsonError, to_json
from sandbox.outcomes import CallResult, Outcome

_MOST_SECONDS = 365 * 86_400


@dataclass(frozen=True)
class PastCall:
    """Call that succeeded, to repeat before a call that must see its changes.

    Attributes:
        function: name of the function.
        arguments: arguments of the call.
        digest: digest of its result, from `sandbox.protocol.digest`; the repetition must give the same.
        cpu_seconds: CPU time of the call, added to the next call's limit; a year at most.
    """

    function: str
    arguments: Mapping[str, Any]
    digest: str
    cpu_seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.cpu_seconds <= _MOST_SECONDS:
            shown = str(self.cpu_seconds)[:80]
            raise ValueError(f"PastCall.cpu_seconds={shown}: must be from 0 to {_MOST_SECONDS}")


def encode_request(
    function: str,
    arguments: Mapping[str, Any],
    *,
    seed: int = 0,
    now: int | None = None,
    history: Sequence[PastCall] = (),
    **more: str,
) -> bytes | CallResult:
    """Return a call as JSON, or the error to show to a model if its arguments are not a JSON object."""
    wanted: dict[str, Any] = {"function": function, "seed": seed, **more}
    if now is not None:
        wanted["now"] = now
    if history:
        wanted["history"] = [astuple(past) for past in history]
    try:
        wanted["arguments"] = dict(arguments)
        request = json.dumps(wanted, allow_nan=False).encode()
        if sys.get_int_max_str_digits() != MOST_DIGITS:  # the program writes integers that the call cannot read
            to_json([wanted["arguments"], wanted.get("history")])
    except (TypeError, ValueError, RecursionError) as error:
        message = f"TypeError: the arguments are not a JSON object: {_named(arguments) or error}"
        return CallResult(Outcome.TOOL_ERROR, error=message, ended_by="arguments")
    if any(nests_too_deeply(given, request) for given in (wanted["arguments"], *(past.arguments for past in history))):
        message = f"ValueError: the arguments nest deeper than {MOST_NESTING} levels"
        return CallResult(Outcome.TOOL_ERROR, error=message, ended_by="arguments")
    return request


def _named(arguments: Mapping[str, Any]) -> str:
    """Return the first fault of arguments, with its path; empty if only types are at fault, which results may have."""
    try:
        to_json(arguments)
    except NotJsonError as error:
        return str(error)
    return ""


def source_digest(code: str) -> str:
    """Return the name of a module: SHA-256 of its source as UTF-8, in hexadecimal.

    Raises:
        UnicodeEncodeError: the text has a lone surrogate, which no source has.
    """
    return hashlib.sha256(code.encode()).hexdigest()


def cpu_seconds_of(history: Sequence[PastCall]) -> int:
    """Return the whole CPU seconds that repeating these calls may take."""
    return math.ceil(sum(past.cpu_seconds for past in history))
