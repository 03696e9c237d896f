"""What a call may take, and the layers that a slot is to put in place: set by the host, sent to the zygote as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sandbox.settings import Bound, Count, Seconds, Settings, Total


@dataclass(frozen=True)
class Limits(Settings):
    """Limits of one call.

    Attributes:
        cpu_seconds: decides (`cpu_timeout`); whole seconds, as the kernel counts them.
        wall_seconds: backstop, for when the machine is too busy; counts as infrastructure, but for calls that waited.
        memory_bytes: address space, the interpreter's own ~100 MiB included; beyond it `MemoryError`.
        result_bytes: largest JSON value returned (`too_large`).
        stdout_bytes: what is kept of standard output; the rest is cut and marked.
        argument_bytes: largest JSON arguments accepted, those of the history of an episode included.
        history_cpu_seconds: at most this much is granted, on top of `cpu_seconds`, to repeat an episode's calls.
        source_bytes: largest module accepted.
    """

    cpu_seconds: Annotated[int, Bound(least=1, most=86_400)] = 2
    wall_seconds: Seconds = 30.0
    memory_bytes: Total = 512 << 20
    result_bytes: Count = 256 << 10
    stdout_bytes: Count = 16 << 10
    argument_bytes: Count = 256 << 10
    history_cpu_seconds: Annotated[int, Bound(least=1, most=65_535)] = 30
    source_bytes: Count = 1 << 20

    def wall_seconds_with(self, more_cpu_seconds: int) -> float:
        """Wall seconds of a call that has more CPU seconds than `cpu_seconds`.

        They grow alike: otherwise calls that use up what they are granted, on a processor that they share, would end at
        the wall limit and be masked.
        """
        return self.wall_seconds + more_cpu_seconds * max(1.0, self.wall_seconds / self.cpu_seconds)


@dataclass(frozen=True)
class LockPlan:
    """The layers a slot is to put in place; the start-up self-test finds the strongest that holds.

    Attributes:
        tier: the name the plan earns if every attack is stopped: "A" to "D".
        namespaces: user, pid, net, mount, ipc, uts and cgroup namespaces and a pivoted read-only root.
        landlock: file access read-only and only below the interpreter's library directories; no signals out.
        seccomp: allow-list of system calls.
        allow_open: let that list name paths; False leaves only what `sandbox.modules` has loaded.
        drop_uid: as root, give each slot an unprivileged user id of its own.
    """

    tier: str
    namespaces: bool
    landlock: bool
    seccomp: bool
    allow_open: bool
    drop_uid: bool
