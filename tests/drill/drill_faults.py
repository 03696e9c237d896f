"""Which faults a drill has, drawn from its seed alone: the same seed, the same faults at the same times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from synthesis.core.stages import rng_for

HOSTS, SERVERS, SANDBOXES = ("host-0", "host-1"), ("server-0", "server-1"), ("sandbox-0", "sandbox-1")
MEETING, ENDPOINT, SYNTHESIS = "meeting", "endpoint", "synthesis"

KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(HOSTS, ("kill", "kill_program", "stop", "hang", "term", "full_disk")),
    **dict.fromkeys(SERVERS, ("kill", "stop", "hang", "mute", "old", "refused", "silent", "term")),
    **dict.fromkeys(SANDBOXES, ("kill", "stop", "hang", "refused", "silent", "term")),
    MEETING: ("refused", "silent"),
    ENDPOINT: ("refused", "silent"),
    SYNTHESIS: ("kill", "stop", "full_disk"),
}
"""By part. `stop` is a SIGSTOP for less than any deadline, `hang` one for longer; `mute` answers looks and draws
nothing; `old` is started again with weights of before; `refused` and `silent` are its wire."""

OF_VLLM = KINDS | dict.fromkeys(SERVERS, ("kill", "stop", "hang", "refused", "silent", "term"))
"""As `KINDS`, where the servers are real: those hold no weights when they start, and cannot be told to draw nothing."""

_SECONDS: dict[str, tuple[float, float]] = {
    "stop": (0.5, 2.5),
    "hang": (14.0, 20.0),
    "mute": (3.0, 15.0),
    "refused": (0.5, 8.0),
    "silent": (1.0, 16.0),
    "full_disk": (1.0, 5.0),
}
"""How long each lasts; others are over at once."""


@dataclass(frozen=True)
class Planned:
    """A fault.

    Attributes:
        at: seconds from the beginning.
        seconds: how long it lasts.
    """

    at: float
    part: str
    kind: str
    seconds: float


def planned(
    seed: int, seconds: float, pause: tuple[float, float], kinds: Mapping[str, tuple[str, ...]] = KINDS
) -> list[Planned]:
    """The faults of a drill.

    Args:
        seconds: after which there are none any more.
        pause: least and most between two that begin.
        kinds: of each part.
    """
    rng = rng_for(seed, "drill")
    found, at = [], rng.uniform(*pause)
    while at < seconds:
        part = rng.choice([*kinds])
        kind = rng.choice(kinds[part])
        found.append(Planned(round(at, 2), part, kind, round(rng.uniform(*_SECONDS.get(kind, (0, 0))), 2)))
        at += rng.uniform(*pause)
    return found
