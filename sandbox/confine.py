"""Confinement of a process outside the pool: a third-party program that is about to act on a model's output.

A benchmark's simulators run in the benchmark's own environment, with its own interpreter, so the pool cannot call them.
Their process puts the layers of tier B on itself (Landlock, seccomp, rlimits, no capabilities), after it has imported
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
    only `cpu_seconds` (from the process's start; SIGXCPU ends it) and `memory_bytes` count.

    Args:
        channel: a stream to read and write as a file, since socket calls are refused. It becomes `CHANNEL`; all other
            descriptors above 2 are closed.
        parent: process id of the parent.

    Raises:
        OSError: a layer is not available; the process must then stop.
    """
    if channel != CHANNEL:  # before the rules, whose own descriptor could be CHANNEL
        os.dup2(channel, CHANNEL)
    readable = lockdown.library_paths()
    lockdown.confine_slot(_PLAN, None, readable)
    lockdown.limit_slot()
    calls = call_filter(allow_open=True, allow_waiting=True)  # to wait for the parent's messages
    locks = Locks(lockdown.LandlockRules(readable), calls, parent)
    locks.close(CHANNEL, limits.cpu_seconds, limits.memory_bytes)


def breaches() -> list[str]:
    """Return the attacks that succeed from this process: none if `confine` has locked it.

    Call it only in a locked process: without the lock the attacks would stop the parent to trace it and take 8 GiB. The
    environment's variables are not checked.
    """
    reached = ((name, getattr(attacks, name)()) for name in ATTACKS if name != "read_environment")
    return [f"{name}: {what}" for name, what in reached if what is not None]
