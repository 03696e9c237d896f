"""Seccomp filter of a call: an allow-list of the system calls that CPython needs to run pure-Python tool code.

Every other call fails with EPERM, so tool code sees `PermissionError` and does not die. A call through a foreign ABI
(i386 `int 0x80`, x32) kills the process. Examples of calls that are not on the list:

- fork, execve, every socket call, kill and every other way to signal;
- ptrace, prctl, mount, unshare, keyctl, bpf, io_uring, memfd, timers that signal, file locks;
- `getrandom` (so that only seeded entropy can be read), and every call that waits.

Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from sandbox import libc
from sandbox.syscalls import AUDIT_ARCH, MACHINE, NUMBERS, TABLES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sandbox.lockdown import Step

_CORE = [
    "read",
    "write",
    "close",
    "lseek",
    "readv",
    "writev",
    "pread64",
    "mprotect",
    "munmap",
    "brk",
    "mremap",
    "msync",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "sigaltstack",
    "restart_syscall",
    "exit",
    "exit_group",
    "dup",
    "dup2",
    "dup3",
    "clock_gettime",
    "clock_getres",
    "gettimeofday",
    "time",
    "times",
    "getpid",
    "getppid",
    "gettid",
    "getuid",
    "geteuid",
    "getgid",
    "getegid",
    "getcwd",
    "uname",
    "getrlimit",
    "getrusage",
    "set_robust_list",
    "set_tid_address",
    "rseq",
    "arch_prctl",
    "sched_getaffinity",
    "fstat",
]
_OPEN = [
    "stat",
    "lstat",
    "newfstatat",
    "statx",
    "access",
    "faccessat",
    "faccessat2",
    "readlink",
    "readlinkat",
    "getdents",
    "getdents64",
]
_WAITING = [
    "pipe",
    "pipe2",
    "poll",
    "ppoll",
    "select",
    "pselect6",
    "epoll_create1",
    "epoll_ctl",
    "epoll_wait",
    "epoll_pwait",
    "nanosleep",
    "clock_nanosleep",
    "membarrier",
    "sched_yield",
]
"""System calls that take time and no processor. A call needs none: it has one thread, no sockets, a virtual clock.

A call that could wait would use a little of its time, wait for the rest, and blame its end on a busy machine. The
kernel counts processor time at its ticks, which a process that yields all the time mostly escapes.
"""

_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC.

No locks, and no owner. F_SETFL is excluded, since its flags belong to the open file, which other processes share.
"""

_PRIVATE, _REALTIME = 128, 256
_FUTEX_WAITS = tuple(_PRIVATE | operation for operation in (0, 9, 9 | _REALTIME))
_FUTEX_OPERATIONS = tuple(_PRIVATE | operation for operation in (1, 3, 4, 5, 10))
"""Futex operations that wake and requeue in this process alone.

On a page of a library, and without the private flag, they would affect all processes that map it.
"""

_ADVICE = (0, 1, 2, 4, 8, 14, 15)
"""MADV_NORMAL, _RANDOM, _SEQUENTIAL, _DONTNEED, _FREE, _HUGEPAGE, _NOHUGEPAGE: the advice that allocators give.

Excluded are advice that pages out a library for all processes that map it, and sharing of equal pages.
"""

_MAP_SHARED = 1
"""MAP_SHARED, also a bit of MAP_SHARED_VALIDATE.

Memory without a file stays while any part of such a mapping does. So a call could leave more of it behind than its
limit, which counts mappings, and take memory from others.
"""

_O_DIRECT = {"x86_64": 0o40000, "aarch64": 0o200000}
"""Flag that bypasses the page cache: reading would be waiting for a disk."""

_OPEN_TO_CHANGE = 0o3 | 0o100 | 0o1000 | 0o20000000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE.

Landlock covers truncation only from version 3 on, and O_TRUNC needs none of the other flags. `truncate`, `creat` and
`openat2`, whose flags a filter cannot see, are not on the list.
"""

_RET_ALLOW, _RET_KILL_PROCESS, _RET_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
_SECCOMP_SET_MODE_FILTER = 1

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
_ALLOWED: list[Instruction] = [(_RETURN, 0, 0, _RET_ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


class SyscallFilter:
    """Assembled BPF program, built once and attached in every call's process."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        packed = [struct.pack("HBBI", *instruction) for instruction in instructions]
        self._code = ctypes.create_string_buffer(b"".join(packed))  # the kernel copies it on attach; keep it until then
        self._program = _Program(len(packed), ctypes.addressof(self._code))
        self._address = ctypes.byref(self._program)

    def attachment(self) -> Step:
        """Return the step that binds the calling process and its children. Needs no_new_privs; cannot be undone."""
        return libc.SYSCALL, (NUMBERS["seccomp"], _SECCOMP_SET_MODE_FILTER, 0, self._address)


def call_filter(*, allow_open: bool, allow_waiting: bool = False) -> SyscallFilter:
    """Return the filter of a call.

    Args:
        allow_open: False (tier C): no path can be named at all.
        allow_waiting: for a process that talks to its parent, see `sandbox.confine`. A call that tries to wait gets
            EPERM. A call that waits for a lock, which no other thread can release, is killed (the C library would abort
            it).
    """
    return SyscallFilter(call_program(allow_open=allow_open, allow_waiting=allow_waiting))


def allowed_names(*, allow_open: bool, allow_waiting: bool = False) -> list[str]:
    """Return the system calls that a call may make with any arguments."""
    return _CORE + (_OPEN if allow_open else []) + (_WAITING if allow_waiting else [])


def call_program(*, allow_open: bool, allow_waiting: bool = False, machine: str = MACHINE) -> list[Instruction]:
    """Return the instructions of `call_filter` for one kind of machine."""
    numbers = TABLES[machine]
    names = allowed_names(allow_open=allow_open, allow_waiting=allow_waiting)
    answers = {numbers[name]: _ALLOWED for name in names if name in numbers}
    answers[numbers["ioctl"]] = _refused(errno.ENOTTY)  # CPython then sets descriptor flags through fcntl
    answers[numbers["clone3"]] = _refused(errno.ENOSYS)  # glibc then tries clone, which is refused too
    answers[numbers["clone"]] = _refused(errno.EAGAIN)  # "can't start new thread": the message of an exhausted system
    answers[numbers["fcntl"]] = _only_values(argument=1, values=_FCNTL_COMMANDS)
    answers[numbers["mmap"]] = _only_without(argument=3, bits=_MAP_SHARED)
    answers[numbers["madvise"]] = _only_values(argument=2, values=_ADVICE)
    if allow_waiting:
        answers[numbers["futex"]] = _only_values(argument=1, values=_FUTEX_OPERATIONS + _FUTEX_WAITS)
    else:
        answers[numbers["futex"]] = _only_values(argument=1, values=_FUTEX_OPERATIONS, killed=_FUTEX_WAITS)
    if allow_open:
        refused = _OPEN_TO_CHANGE | _O_DIRECT[machine]
        answers[numbers["openat"]] = _only_without(argument=2, bits=refused)
        if "open" in numbers:
            answers[numbers["open"]] = _only_without(argument=1, bits=refused)
    answers[numbers["prlimit64"]] = _only_null(argument=2)  # a limit may be read but not set
    return _preamble(machine) + _search(answers)


def _search(answers: Mapping[int, list[Instruction]]) -> list[Instruction]:
    """Return a binary search over runs of numbers with the same answer; numbers without an answer are refused.

    On attach the kernel tries the filter on every system call, to remember which need no further check. A list of 95
    comparisons took 0.3 ms of each call for this; the search takes 0.04 ms.
    """
    refused = _refused(errno.EPERM)
    edges = [0, *(n for n in range(1, max(answers) + 2) if answers.get(n, refused) != answers.get(n - 1, refused))]

    def search(edges: list[int]) -> list[Instruction]:
        if len(edges) == 1:
            return answers.get(edges[0], refused)
        middle = len(edges) // 2
        below, above = search(edges[:middle]), search(edges[middle:])
        return [(_JUMP_GREATER_EQUAL, len(below), 0, edges[middle]), *below, *above]

    return search(edges)


def _preamble(machine: str) -> list[Instruction]:
    """Return instructions that refuse foreign ABIs, then leave the call's number in the accumulator."""
    program = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _RET_KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _RET_KILL_PROCESS)]
    return program


def _refused(error: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, _RET_ERRNO | error)]


def _only_values(*, argument: int, values: tuple[int, ...], killed: tuple[int, ...] = ()) -> list[Instruction]:
    """Allow the call if the low half of its argument, an `int`, is one of `values`; kill it for `killed`."""
    body: list[Instruction] = [(_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * argument)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _RET_ALLOW)]
    for value in killed:
        body += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _RET_KILL_PROCESS)]
    return body + _refused(errno.EPERM)


def _only_without(*, argument: int, bits: int) -> list[Instruction]:
    """Allow the call if its argument, an `int` to the kernel, has none of `bits`."""
    return [
        (_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * argument),
        (_JUMP_ANY_BIT, 0, 1, bits),
        *_refused(errno.EPERM),
        *_ALLOWED,
    ]


def _only_null(*, argument: int) -> list[Instruction]:
    """Allow the call if its argument, a pointer, is null in both halves (little-endian machines)."""
    low = _OFFSET_ARGUMENTS + 8 * argument
    return [
        (_LOAD, 0, 0, low),
        (_JUMP_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, low + 4),
        (_JUMP_EQUAL, 0, 1, 0),
        *_ALLOWED,
        *_refused(errno.EPERM),
    ]
