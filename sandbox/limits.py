"""Limits of a call, and the layers that a slot puts in place: set by the host, sent to the zygote as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from astra_jax.base.settings import Bound, Count, Seconds, Settings, Total


@dataclass(frozen=True)
class Limits(Settings):
    """Limits of one call.

    Attributes:
        cpu_seconds: the effective time limit (`cpu_timeout`); whole seconds, as the kernel counts them.
        wall_seconds: backstop for a busy machine. Counts as infrastructure, except for calls that waited.
        memory_bytes: address space, the interpreter's own ~100 MiB included; beyond it `MemoryError`.
        result_bytes: largest JSON value returned (`too_large`).
        stdout_bytes: kept bytes of standard output; the rest is cut and marked.
        argument_bytes: largest JSON arguments accepted, including those of an episode's history.
        history_cpu_seconds: most CPU seconds granted on top of `cpu_seconds`, to repeat an episode's calls.
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
        """Return the wall seconds of a call that has more CPU seconds than `cpu_seconds`.

        Wall time grows in proportion. Otherwise calls that use all of their CPU time on a shared processor would end at
        the wall limit and be masked.
        """
        return self.wall_seconds + more_cpu_seconds * max(1.0, self.wall_seconds / self.cpu_seconds)


@dataclass(frozen=True)
class LockPlan:
    """Layers that a slot puts in place; the start-up self-test finds the strongest plan that works.

    Attributes:
        tier: tier of the plan if every attack is stopped: "A" to "D".
        namespaces: user, pid, net, mount, ipc, uts and cgroup namespaces and a pivoted read-only root.
        landlock: file access read-only and only below the interpreter's library directories; no signals out.
        seccomp: allow-list of system calls.
        allow_open: let that list name paths; False leaves only what `sandbox.modules` has loaded.
        drop_uid: as root, give each slot its own unprivileged user id.
    """

    tier: str
    namespaces: bool
    landlock: bool
    seccomp: bool
    allow_open: bool
    drop_uid: bool
