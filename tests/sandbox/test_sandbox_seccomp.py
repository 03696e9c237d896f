"""The seccomp program, interpreted here: what it answers to every call number, on both kinds of machine."""

from __future__ import annotations

import ast
import errno
import os
import re
from pathlib import Path

import pytest

from sandbox.seccomp import allowed_names, call_program
from sandbox.syscalls import AUDIT_ARCH, TABLES

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LINUX_CALLS = range(0, 600)
HEADERS = {
    "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", "asm/unistd_64.h"),
    "aarch64": ("asm-generic/unistd.h",),  # installed with the kernel's headers on every machine
}
HOSTILE = Path(__file__).with_name("hostile_tools.py").read_text(encoding="utf-8")


def answer(
    program: list[tuple[int, int, int, int]],
    number: int,
    arch: int,
    arguments: tuple[int, ...] = (),
    steps: list[int] | None = None,
) -> int:
    """Run a filter over one system call, as the kernel does; how many instructions it took is appended to `steps`."""
    words = {0: number, 4: arch}
    for i, value in enumerate(arguments):
        words[16 + 8 * i], words[20 + 8 * i] = value & 0xFFFFFFFF, value >> 32
    accumulator, at, taken = 0, 0, 0
    while True:
        taken += 1
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = words.get(operand, 0)
        elif code == 0x15:
            at += if_true if accumulator == operand else if_false
        elif code == 0x45:
            at += if_true if accumulator & operand else if_false
        elif code == 0x35:
            at += if_true if accumulator >= operand else if_false
        else:
            assert code == 0x06
            if steps is not None:
                steps.append(taken)
            return operand


@pytest.mark.parametrize("machine", TABLES)
def test_each_number_is_found_in_a_few_steps(machine: str) -> None:
    """The kernel runs the filter over all of them for each call's process: with a list before the search it was 19."""
    program, arch = call_program(allow_open=True, machine=machine), AUDIT_ARCH[machine]
    steps: list[int] = []
    for number in LINUX_CALLS:
        answer(program, number, arch, steps=steps)
    assert sum(steps) / len(LINUX_CALLS) < 14, sum(steps) / len(LINUX_CALLS)


def kernel_numbers(machine: str) -> dict[str, int]:
    """What the kernel's headers say."""
    texts = [path.read_text() for name in HEADERS[machine] if (path := Path("/usr/include", name)).exists()]
    if not texts:
        pytest.skip(f"the kernel's headers are not installed: no {HEADERS[machine][0]} (linux-libc-dev)")
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", texts[0])}
    return {"newfstatat": numbers.get("fstatat", -1)} | numbers


@pytest.mark.parametrize("machine", TABLES)
def test_numbers_are_the_kernels(machine: str) -> None:
    numbers = kernel_numbers(machine)
    assert TABLES[machine] == {name: numbers.get(name) for name in TABLES[machine]}
    wanted = set(allowed_names(allow_open=True))
    assert wanted & set(numbers) == wanted & set(TABLES[machine]), "an allowed call has no number in the table"


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_attacks_by_number_are_the_attacks_meant(machine: str, column: int) -> None:
    (text,) = re.findall(r"^_NUMBERS = (\{.*?^\})", HOSTILE, re.DOTALL | re.MULTILINE)
    used = {name: pair[column] for name, pair in ast.literal_eval(text).items()}
    numbers = kernel_numbers(machine)
    assert used == {name: numbers.get(name) for name in used}


@pytest.mark.parametrize("machine", TABLES)
@pytest.mark.parametrize("allow_open", [True, False])
def test_exactly_the_listed_calls_are_allowed(machine: str, allow_open: bool) -> None:
    table, arch = TABLES[machine], AUDIT_ARCH[machine]
    program = call_program(allow_open=allow_open, machine=machine)
    listed = {table[name] for name in allowed_names(allow_open=allow_open) if name in table}
    special = {table[name] for name in ("ioctl", "clone", "clone3", "fcntl", "futex", "madvise", "mmap", "prlimit64")}
    special |= {table[name] for name in ("open", "openat") if name in table and allow_open}
    for number in LINUX_CALLS:
        if number not in special:
            expected = ALLOW if number in listed else ERRNO | errno.EPERM
            assert answer(program, number, arch) == expected, number
    assert ("statx" in allowed_names(allow_open=allow_open)) is allow_open
    assert (answer(program, table["openat"], arch, (0, 0, 0)) == ALLOW) is allow_open
    assert max(len(program), *(max(jt, jf) for _, jt, jf, _ in program)) < 4096
    assert all(jt < 256 and jf < 256 for _, jt, jf, _ in program)


@pytest.mark.parametrize("machine", TABLES)
def test_special_calls_look_at_their_arguments(machine: str) -> None:
    table, arch = TABLES[machine], AUDIT_ARCH[machine]
    program = call_program(allow_open=True, machine=machine)
    assert answer(program, table["ioctl"], arch) == ERRNO | errno.ENOTTY
    assert answer(program, table["clone3"], arch) == ERRNO | errno.ENOSYS
    assert answer(program, table["clone"], arch, (0x00010000,)) == ERRNO | errno.EAGAIN
    for command, expected in {
        0: ALLOW,
        3: ALLOW,
        1030: ALLOW,
        4: ERRNO | 1,
        6: ERRNO | 1,
        8: ERRNO | 1,
        1024: ERRNO | 1,
    }.items():
        assert answer(program, table["fcntl"], arch, (0, command)) == expected
    waiting = call_program(allow_open=True, allow_waiting=True, machine=machine)
    for operation, expected, of_waiting in (
        (129, ALLOW, ALLOW),
        (128, KILL, ALLOW),
        (137 | 256, KILL, ALLOW),
        (0, ERRNO | 1, ERRNO | 1),
        (1, ERRNO | 1, ERRNO | 1),
        (9, ERRNO | 1, ERRNO | 1),
    ):
        assert answer(program, table["futex"], arch, (0, operation)) == expected
        assert answer(waiting, table["futex"], arch, (0, operation)) == of_waiting
    for name in {"ppoll", "pselect6", "epoll_pwait", "pipe2", "clock_nanosleep", "membarrier"}:
        assert (answer(program, table[name], arch), answer(waiting, table[name], arch)) == (ERRNO | 1, ALLOW)
    for flags, expected in {0x22: ALLOW, 0x4022: ALLOW, 0x21: ERRNO | 1, 0x01: ERRNO | 1, 0x23: ERRNO | 1}.items():
        assert answer(program, table["mmap"], arch, (0, 0, 3, flags)) == expected
        assert answer(waiting, table["mmap"], arch, (0, 0, 3, flags)) == expected
    for advice, expected in {4: ALLOW, 8: ALLOW, 12: ERRNO | 1, 20: ERRNO | 1, 21: ERRNO | 1}.items():
        assert answer(program, table["madvise"], arch, (0, 0, advice)) == expected
    reading = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_PATH | os.O_NONBLOCK
    writing = (
        os.O_WRONLY,
        os.O_RDWR,
        os.O_CREAT,
        os.O_TRUNC,
        os.O_TRUNC | os.O_CLOEXEC,
        os.O_TMPFILE & ~os.O_DIRECTORY,
        {"x86_64": 0o40000, "aarch64": 0o200000}[machine],  # O_DIRECT
    )
    for name, place in {"open": 1, "openat": 2}.items():
        for flags, expected in ({reading: ALLOW} | dict.fromkeys(writing, ERRNO | 1)).items():
            if name in table:
                assert answer(program, table[name], arch, (*[0] * place, flags)) == expected, flags
    for pointer, expected in {0: ALLOW, 1: ERRNO | 1, 1 << 32: ERRNO | 1, 0x7FFF_0000_0000: ERRNO | 1}.items():
        assert answer(program, table["prlimit64"], arch, (0, 7, pointer)) == expected


@pytest.mark.parametrize("machine", TABLES)
def test_foreign_interfaces_kill(machine: str) -> None:
    program = call_program(allow_open=True, machine=machine)
    assert answer(program, TABLES[machine]["getpid"], 0x40000003) == KILL  # i386
    if machine == "x86_64":
        assert answer(program, TABLES[machine]["getpid"] | 0x40000000, AUDIT_ARCH[machine]) == KILL  # x32
