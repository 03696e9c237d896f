"""Linux system call numbers on x86_64 and aarch64, for the seccomp filter and for the calls that libc does not wrap.

The numbers are the kernel's ABI (`asm/unistd_64.h` and `asm-generic/unistd.h`) and never change. A name that one
machine does not have is absent from its table. Standard library only: the zygote loads this file.
"""

from __future__ import annotations

import os

_X86_64 = """
    read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12
    rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 readv=19 writev=20 access=21 pipe=22 select=23
    sched_yield=24 mremap=25 msync=26 mincore=27 madvise=28 dup=32 dup2=33 nanosleep=35 getitimer=36 alarm=37
    setitimer=38 getpid=39 clone=56 exit=60 uname=63 fcntl=72 getdents=78 getcwd=79 readlink=89 gettimeofday=96
    getrlimit=97 getrusage=98 times=100 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110 sigaltstack=131
    personality=135 arch_prctl=158 gettid=186 time=201 futex=202 sched_getaffinity=204 getdents64=217
    set_tid_address=218 restart_syscall=219 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231
    epoll_wait=232 epoll_ctl=233 openat=257 newfstatat=262 readlinkat=267 faccessat=269 pselect6=270 ppoll=271
    set_robust_list=273 epoll_pwait=281 epoll_create1=291 dup3=292 pipe2=293 prlimit64=302 seccomp=317 membarrier=324
    statx=332 rseq=334 pivot_root=155 clone3=435 faccessat2=439 landlock_create_ruleset=444 landlock_add_rule=445
    landlock_restrict_self=446
"""

_AARCH64 = """
    getcwd=17 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 dup=23 dup3=24 fcntl=25 ioctl=29 pivot_root=41 faccessat=48
    openat=56 close=57 pipe2=59 getdents64=61 lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 pselect6=72
    ppoll=73 readlinkat=78 newfstatat=79 fstat=80 personality=92 exit=93 exit_group=94 set_tid_address=96 futex=98
    set_robust_list=99 nanosleep=101 getitimer=102 setitimer=103 clock_gettime=113 clock_getres=114 clock_nanosleep=115
    sched_getaffinity=123 sched_yield=124 restart_syscall=128 sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135
    rt_sigreturn=139 times=153 uname=160 getrlimit=163 getrusage=165 gettimeofday=169 getpid=172 getppid=173 getuid=174
    geteuid=175 getgid=176 getegid=177 gettid=178 brk=214 munmap=215 mremap=216 clone=220 mmap=222 mprotect=226
    msync=227 mincore=232 madvise=233 prlimit64=261 seccomp=277 membarrier=283 statx=291 rseq=293 clone3=435
    faccessat2=439 landlock_create_ruleset=444 landlock_add_rule=445 landlock_restrict_self=446
"""


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (item.split("=") for item in text.split())}


TABLES = {"x86_64": _table(_X86_64), "aarch64": _table(_AARCH64)}
"""System call numbers by machine, as `uname` calls it."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Architecture of a call, as seccomp reports it. Any other value is a foreign ABI such as `int 0x80`."""

MACHINE = os.uname().machine
NUMBERS: dict[str, int] = TABLES.get(MACHINE, {})
"""This machine's table; empty if the sandbox knows no numbers for it, which leaves only tier D."""
