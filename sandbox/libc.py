"""Functions of the C library that the sandbox uses, bound once. Standard library only.

`ctypes` looks a function up at its first use. In a call, which is a fresh process each time, this would touch forty
pages of memory, and each touched page is copied. They are bound through `PyDLL`, which keeps the interpreter's lock,
since the zygote and everything forked from it have one thread.
"""

from __future__ import annotations

import ctypes
import os
import struct

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
"""The real id of the parent process."""

SYSCALL = LIBC.syscall
PRCTL = LIBC.prctl
PRCTL.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def check(result: int, what: str) -> int:
    """Return the result of a C function. Raises `OSError` with `errno` if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


_wait4 = LIBC.wait4
_status = ctypes.create_string_buffer(4)
_usage = ctypes.create_string_buffer(256)  # `struct rusage`, whose first fields are five `long`
_WAIT_ARGUMENTS = (-1, _status, os.WNOHANG, _usage)
_TIMES_AND_MEMORY = struct.Struct("5l")
_STATUS = struct.Struct("i")


def reap() -> tuple[int, int, float, int]:
    """Reap a child that has ended, without waiting. `os.wait4` would import `resource` and make twenty objects.

    Returns:
        Its process id, 0 if none has ended; its status as from `os.waitpid`; its seconds of processor time; its peak
        memory, in KiB. Raises `ChildProcessError` if there are no children.
    """
    pid = check(_wait4(*_WAIT_ARGUMENTS), "wait4")
    user, user_us, system, system_us, memory_kib = _TIMES_AND_MEMORY.unpack_from(_usage)
    return pid, _STATUS.unpack_from(_status)[0], user + system + (user_us + system_us) / 1e6, memory_kib


def syscall(name: str, *arguments: Any) -> int:
    """Make a system call that libc does not wrap. Raises `OSError`."""
    if name not in NUMBERS:
        raise OSError(38, f"{name}: no system call number is known for this machine")
    return check(SYSCALL(NUMBERS[name], *arguments), name)


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    """Make a `prctl` call. Raises `OSError`."""
    return check(PRCTL(option, first, second, 0, 0), f"prctl({option})")
