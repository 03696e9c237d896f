"""The seccomp program, interpreted here: what it answers to every call number, on both kinds of machine."""

from __future__ import annotations

import errno

import pytest

from sandbox.seccomp import allowed_names, call_program
from sandbox.syscalls import AUDIT_ARCH, TABLES

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LINUX_CALLS = range(0, 600)


def answer(program: list[tuple[int, int, int, int]], number: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a filter over one system call, as the kernel does."""
    words = {0: number, 4: arch}
    for i, value in enumerate(arguments):
        words[16 + 8 * i], words[20 + 8 * i] = value & 0xFFFFFFFF, value >> 32
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = words.get(operand, 0)
        elif code == 0x15:
            at += if_true if accumulator == operand else if_false
        elif code == 0x35:
            at += if_true if accumulator >= operand else if_false
        else:
            assert code == 0x06
            return operand


@pytest.mark.parametrize("machine", TABLES)
@pytest.mark.parametrize("allow_open", [True, False])
def test_exactly_the_listed_calls_are_allowed(machine: str, allow_open: bool) -> None:
    table, arch = TABLES[machine], AUDIT_ARCH[machine]
    program = call_program(allow_open=allow_open, machine=machine)
    listed = {table[name] for name in allowed_names(allow_open=allow_open) if name in table}
    special = {table[name] for name in ("ioctl", "clone", "clone3", "fcntl", "prlimit64")}
    for number in LINUX_CALLS:
        if number not in special:
            expected = ALLOW if number in listed else ERRNO | errno.EPERM
            assert answer(program, number, arch) == expected, number
    assert ("openat" in allowed_names(allow_open=allow_open)) is allow_open
    assert max(len(program), *(max(jt, jf) for _, jt, jf, _ in program)) < 4096
    assert all(jt < 256 and jf < 256 for _, jt, jf, _ in program)


@pytest.mark.parametrize("machine", TABLES)
def test_special_calls_look_at_their_arguments(machine: str) -> None:
    table, arch = TABLES[machine], AUDIT_ARCH[machine]
    program = call_program(allow_open=True, machine=machine)
    assert answer(program, table["ioctl"], arch) == ERRNO | errno.ENOTTY
    assert answer(program, table["clone3"], arch) == ERRNO | errno.ENOSYS
    assert answer(program, table["clone"], arch, (0x00010000,)) == ERRNO | errno.EAGAIN
    for command, expected in {0: ALLOW, 3: ALLOW, 1030: ALLOW, 6: ERRNO | 1, 8: ERRNO | 1, 1024: ERRNO | 1}.items():
        assert answer(program, table["fcntl"], arch, (0, command)) == expected
    for pointer, expected in {0: ALLOW, 1: ERRNO | 1, 1 << 32: ERRNO | 1, 0x7FFF_0000_0000: ERRNO | 1}.items():
        assert answer(program, table["prlimit64"], arch, (0, 7, pointer)) == expected


@pytest.mark.parametrize("machine", TABLES)
def test_foreign_interfaces_kill(machine: str) -> None:
    program = call_program(allow_open=True, machine=machine)
    assert answer(program, TABLES[machine]["getpid"], 0x40000003) == KILL  # i386
    if machine == "x86_64":
        assert answer(program, TABLES[machine]["getpid"] | 0x40000000, AUDIT_ARCH[machine]) == KILL  # x32
