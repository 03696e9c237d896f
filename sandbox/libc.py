"""The C library's functions that the sandbox uses, bound once. Standard library only.

`ctypes` looks a function up when it is first used. In a call, which is a fresh process each time, that would touch
forty pages of memory, and each touched page is copied. Bound through `PyDLL`, which keeps the interpreter's lock: the
zygote and everything forked from it have one thread.
"""

from __future__ import annotations

import ctypes
import os

from sandbox.syscalls import NUMBERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LIBC = ctypes.PyDLL(None, use_errno=True)

fork = LIBC.fork
"""Fork without `os.fork`'s work for threads and `os.register_at_fork`: half the time. Only for a single thread."""

getpid = LIBC.getpid
"""The real process id; `os.getpid` is replaced for determinism."""

getppid = LIBC.getppid
"""The real id of the parent."""

SYSCALL = LIBC.syscall
PRCTL = LIBC.prctl
PRCTL.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def check(result: int, what: str) -> int:
    """The result of a C function. Raises `OSError` with `errno` when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: Any) -> int:
    """Make a system call that libc does not wrap. Raises `OSError`."""
    if name not in NUMBERS:
        raise OSError(38, f"{name}: no system call number is known for this machine")
    return check(SYSCALL(NUMBERS[name], *arguments), name)


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    """Make a `prctl` call. Raises `OSError`."""
    return check(PRCTL(option, first, second, 0, 0), f"prctl({option})")
