"""Kernel confinement through ctypes: namespaces with a pivoted root, user id, capabilities, Landlock, rlimits.

A slot uses it before it serves anything: `enter_namespaces` (in its parent, because a pid namespace starts with the
next child), then `confine_slot`. A call uses it before untrusted code runs: `LandlockRules.restriction`,
`call_limits`, and the filter of `sandbox.seccomp`. Every function raises `OSError` if its layer is not available.
No caller continues without the layer: the self-test then tries a weaker plan by name. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sysconfig

from sandbox import libc
from sandbox.libc import LIBC
from sandbox.syscalls import NUMBERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from sandbox.limits import LockPlan

    Step = tuple[Callable[..., Any], tuple[Any, ...]]
    """A C function with its arguments. On failure it raises or returns a negative number."""

    Limit = tuple[int, tuple[int, int]]
    """Arguments of `resource.setrlimit`, hard limit included. Without privileges it can only be lowered further."""

_CLONE = {
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "mnt": 0x20000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
}
_CLONE["cgroup"] = 0x02000000
NAMESPACES = tuple(_CLONE)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 3, 4, 24, 38
_PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_ADDR_NO_RANDOMIZE = 0x0040000
_SIGKILL = 9
MOST_DESCRIPTORS = 4096
"""Upper end of the descriptors that are closed."""


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def death_with_parent() -> Step:
    """Return the step that asks for SIGKILL when the parent ends. Check afterwards whether the parent still exists."""
    return libc.PRCTL, (_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def no_restriction() -> Step:
    """Return a step that changes nothing."""
    return libc.PRCTL, (_PR_GET_DUMPABLE, 0, 0, 0, 0)


def close_descriptors(*kept: int) -> None:
    """Close every descriptor above 2 that is not in `kept`."""
    start = 3
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, MOST_DESCRIPTORS)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended, so that they can be reaped and killed by id."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop_address_randomisation() -> bool:
    """Fix the memory layout of programs exec'd from here, so that `id()` repeats. True if an exec is now needed."""
    current = LIBC.personality(ctypes.c_ulong(0xFFFFFFFF))
    if current < 0 or current & _ADDR_NO_RANDOMIZE:
        return False
    return LIBC.personality(ctypes.c_ulong(current | _ADDR_NO_RANDOMIZE)) >= 0


def address_randomisation_is_off() -> bool:
    """Return whether this process runs with a fixed memory layout."""
    return bool(LIBC.personality(ctypes.c_ulong(0xFFFFFFFF)) & _ADDR_NO_RANDOMIZE)


# --- what a call may read


def library_paths() -> list[str]:
    """Return the paths that Python code may need to read: the standard library, libc's directory, time zones."""
    paths = {os.path.realpath(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib")}
    with contextlib.suppress(OSError):
        mapped = {line.split(maxsplit=5)[-1] for line in _read("/proc/self/maps").splitlines()}
        libc = [path for path in mapped if os.path.basename(path).startswith(("libc.so", "libc-", "ld-musl"))]
        paths |= {os.path.dirname(os.path.realpath(path)) for path in libc}
    paths.add("/usr/share/zoneinfo")
    existing = sorted(path for path in paths if os.path.exists(path) and path != "/")
    return [path for path in existing if not any(path.startswith(other + "/") for other in existing)]


def hidden_paths() -> list[str]:
    """Return the directories in `library_paths` that calls must not see: installed third-party packages."""
    names = ("site-packages", "dist-packages")
    return [path for name in names if os.path.isdir(path := os.path.join(sysconfig.get_paths()["stdlib"], name))]


def require_readable_library() -> None:
    """Raise `PermissionError` if the standard library cannot be read, e.g. an interpreter below a private home."""
    for path in (sysconfig.get_paths()["stdlib"], os.__file__):
        if not os.access(path, os.R_OK):
            raise PermissionError(13, f"{path} is not readable by user id {os.getuid()}")


# --- namespaces


def enter_namespaces(*, as_superuser: bool) -> None:
    """Leave the host's namespaces; the next child is process 1 of the new pid namespace.

    A superuser that takes another user id later keeps the initial user namespace for now: only there may it bind
    directories below a private home. Other users need the user namespace first, to be allowed the others.
    """
    flags = sum(_CLONE.values())
    if as_superuser:
        libc.check(LIBC.unshare(flags & ~_CLONE["user"]), "unshare")
        return
    uid, gid = os.geteuid(), os.getegid()
    libc.check(LIBC.unshare(flags), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {uid} 1")
    _write("/proc/self/gid_map", f"65534 {gid} 1")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    libc.check(LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def _pivot_to_minimal_root(readable: Sequence[str], hidden: Sequence[str]) -> None:
    """Make an empty read-only tmpfs the root, holding read-only binds of `readable` and nothing else."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    candidates = ("/tmp", "/mnt", "/var/tmp", "/media", "/srv", "/opt", "/run")
    root = next(c for c in candidates if os.path.isdir(c) and not any((p + "/").startswith(c + "/") for p in readable))
    _mount("none", root, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=64k,nr_inodes=256,mode=755")
    for path in readable:
        target = root + path
        os.makedirs(target)
        _mount(path, target, None, _MS_BIND | _MS_REC)
        kept = os.statvfs(path).f_flag & (_MS_NODEV | _MS_NOEXEC)  # a user namespace may not clear these
        _mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)
    for path in hidden:
        if os.path.isdir(root + path):
            _mount("none", root + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=4k,mode=755")
    os.mkdir(root + "/.old")
    os.chdir(root)
    libc.syscall("pivot_root", b".", b".old")
    os.chdir("/")
    libc.check(LIBC.umount2(b"/.old", _MNT_DETACH), "umount2")
    os.rmdir("/.old")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


# --- identity and privileges


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _drop_capabilities() -> None:
    last = 63
    with contextlib.suppress(OSError):
        last = int(_read("/proc/sys/kernel/cap_last_cap"))
    for capability in range(last + 1):
        # Fails without CAP_SETPCAP (an ordinary user, whose set is empty anyway) and beyond the last capability.
        LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("II", _CAPABILITY_VERSION_3, 0))
    libc.check(LIBC.capset(header, ctypes.create_string_buffer(24)), "capset")


def confine_slot(plan: LockPlan, uid: int | None, readable: Sequence[str]) -> dict[str, str]:
    """Put the slot's layers in place. Return the state of each layer by name, for the run's record.

    Args:
        plan: the layers wanted.
        uid: user id to take, which needs root; None to keep the current one.
        readable: contents of the private root, from `library_paths`.
    """
    layers: dict[str, str] = {}
    if plan.namespaces:
        _pivot_to_minimal_root(readable, hidden_paths())
        libc.check(LIBC.sethostname(b"sandbox", 7), "sethostname")
    if uid is not None:
        _become(uid)
    if plan.namespaces and uid is not None:
        # Last, so that the mounts above belong to the host and not even a regained capability could undo them.
        libc.check(LIBC.unshare(_CLONE["user"]), "unshare(user)")
    if plan.allow_open:
        require_readable_library()
    if plan.seccomp or plan.landlock:
        _drop_capabilities()
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
        libc.prctl(_PR_SET_DUMPABLE, 0)  # no ptrace and no /proc/<pid>/mem, even by the same user
    layers["namespaces"] = ",".join(NAMESPACES) if plan.namespaces else "off"
    layers["root"] = "private read-only" if plan.namespaces else "host's"
    layers["uid"] = "the host's own" if uid is None else "one of its own for each slot"
    layers["capabilities"] = "none" if plan.seccomp or plan.landlock else "unchanged"
    layers["no_new_privileges"] = "on" if plan.seccomp or plan.landlock else "off"
    return layers


# --- Landlock

_ALL_ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NET_BIND_AND_CONNECT = 3
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def landlock_abi() -> int:
    """Return the version of Landlock in this kernel; 0 if there is none."""
    if "landlock_create_ruleset" not in NUMBERS:
        return 0
    return max(0, LIBC.syscall(NUMBERS["landlock_create_ruleset"], None, ctypes.c_size_t(0), 1))


class LandlockRules:
    """Landlock rules: read-only access below `readable`; everything else that this kernel can deny is denied.

    Built once per slot.

    Args:
        readable: directories and files.
        highest_abi: deny only what a kernel with this version of Landlock can; None for this kernel's version.
    """

    def __init__(self, readable: Sequence[str], highest_abi: int | None = None) -> None:
        abi = landlock_abi() if highest_abi is None else min(landlock_abi(), highest_abi)
        if abi < 1:
            raise OSError(38, "landlock: not offered by this kernel")
        access = _ALL_ACCESS_BY_ABI[min(abi, 5)]
        attributes = struct.pack("QQQ", access, _NET_BIND_AND_CONNECT, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
        size = 8 if abi < 4 else 16 if abi < 6 else 24
        buffer = ctypes.create_string_buffer(attributes, len(attributes))
        self.descriptor = libc.syscall("landlock_create_ruleset", buffer, ctypes.c_size_t(size), 0)
        for path in readable:
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, target), 12)
            libc.syscall("landlock_add_rule", self.descriptor, 1, rule, 0)
            os.close(target)

    def restriction(self) -> Step:
        """Return the step that binds the calling process. It needs no_new_privs and cannot be undone."""
        return libc.SYSCALL, (NUMBERS["landlock_restrict_self"], self.descriptor, 0)


# --- rlimits


def limit_slot() -> None:
    """Set limits on this slot and its calls for resources that neither needs."""
    for number, pair in _limits({"FSIZE": 0, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0}):
        resource.setrlimit(number, pair)


def call_limits() -> list[Limit]:
    """Return the rlimits that each call sets for itself, besides those on CPU time and memory."""
    return _limits({"NOFILE": 32, "NPROC": 0})


def _limits(wanted: Mapping[str, int]) -> list[Limit]:
    known = ((getattr(resource, f"RLIMIT_{name}", None), value) for name, value in wanted.items())
    return [(number, (value, value)) for number, value in known if number is not None]
