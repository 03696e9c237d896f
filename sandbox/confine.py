"""Locks a process that is not the pool's: somebody else's program that is about to act on what a model wrote.

A benchmark's simulators run in the benchmark's own environment, with its own interpreter, so the pool cannot call them.
Their process takes the layers of tier B on itself (Landlock, seccomp, rlimits, no capabilities), once it has imported
all that it needs. Standard library only.
"""

from __future__ import annotations

import os

from sandbox import attacks, lockdown
from sandbox.call import CHANNEL, Locks
from sandbox.limits import Limits, LockPlan
from sandbox.seccomp import call_filter
from sandbox.selftest import ATTACKS

__all__ = ["CHANNEL", "breaches", "confine"]

_PLAN = LockPlan(tier="B", namespaces=False, landlock=True, seccomp=True, allow_open=True, drop_uid=False)


def confine(channel: int, parent: int, limits: Limits) -> None:
    """Lock this process, a fresh fork with one thread, for good.

    It can then read the standard library, read and write `CHANNEL`, and compute. It ends with its parent. Of `limits`
    only `cpu_seconds` (of the process from its start; SIGXCPU ends it) and `memory_bytes` count.

    Args:
        channel: a stream, to be read and written as a file: sockets' own calls are refused. It becomes `CHANNEL`; all
            other descriptors above 2 are closed.
        parent: process id of the parent.

    Raises:
        OSError: a layer cannot be had; the process must then not go on.
    """
    if channel != CHANNEL:  # before the rules, whose own descriptor could be that one
        os.dup2(channel, CHANNEL)
    readable = lockdown.library_paths()
    lockdown.confine_slot(_PLAN, None, readable)
    lockdown.limit_slot()
    calls = call_filter(allow_open=True, allow_waiting=True)  # for what its parent sends
    locks = Locks(lockdown.LandlockRules(readable), calls, parent)
    locks.close(CHANNEL, limits.cpu_seconds, limits.memory_bytes)


def breaches() -> list[str]:
    """What attacks reach from this process: nothing, where `confine` has locked it.

    Only for such a process: without the lock they would stop the parent to trace it and take 8 GiB. What is in the
    environment is not asked.
    """
    reached = ((name, getattr(attacks, name)()) for name in ATTACKS if name != "read_environment")
    return [f"{name}: {what}" for name, what in reached if what is not None]
