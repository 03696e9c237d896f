"""Attempts to escape from the sandbox.

`sandbox.selftest` runs them at every start, as text that is sent in, and `sandbox.confine` runs them too. Each function
returns None if it was stopped, and otherwise a line that names what it reached. Signals are probed with number 0, which
is harmless if the sandbox fails.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket

_HOST_FILES = ("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/environ", "/proc/1/status")
_HOST_DIRECTORIES = ("/etc", "/home", "/proc", "/root", "/tmp", "/var")


def innocent(left: int, right: int) -> dict:
    """No attack: the control that checks that calls work at all."""
    import json

    return json.loads(f'{{"sum": {left + right}}}')


def lazy_import() -> str:
    """No attack: a module that is not preloaded can be read if the plan allows paths to be opened."""
    import tomllib

    return tomllib.loads("answer = 'read'")["answer"]


def read_host_files() -> str | None:
    """Read files of the host or of other processes."""
    for path in _HOST_FILES:
        try:
            with open(path, "rb") as file:
                return f"read {len(file.read(64))} bytes of {path}"
        except OSError:
            continue
    return None


def list_host_directories() -> str | None:
    """List directories of the host."""
    library = os.path.realpath(os.__file__)
    for path in _HOST_DIRECTORIES:
        try:
            # A private root has directories too: the ones on the path to the library.
            foreign = [name for name in os.listdir(path) if not library.startswith(os.path.join(path, name, ""))]
        except OSError:
            continue
        if foreign:
            return f"listed {path}: {len(foreign)} entries"
    return None


def write_files() -> str | None:
    """Leave something behind for a later call."""
    for directory in ("/tmp", "/var/tmp", "/dev/shm", "/", os.path.dirname(os.__file__)):
        path = os.path.join(directory, "sandbox-selftest")
        try:
            with open(path, "w") as file:
                file.write("x")
            os.unlink(path)
            return f"wrote {path}"
        except OSError:
            continue
    return None


def truncate_files() -> str | None:
    """Truncate a file of the library for all its readers. Tried on a directory, which the kernel never truncates.

    The kernel reports EISDIR once the attempt gets that far. Landlock is checked later, and before version 3 allows it.
    """
    folder = os.path.dirname(os.__file__)
    try:
        os.open(folder, os.O_RDONLY | os.O_TRUNC)
    except PermissionError:
        return None
    except OSError as error:
        return f"{folder} was to be emptied: {error.strerror}"
    return f"opened {folder} to empty it"


def open_sockets() -> str | None:
    """Reach the network, local daemons or the hypervisor."""
    for name in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_PACKET"):
        family = getattr(socket, name, None)
        if family is None:
            continue
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                socket.socket(family, kind).close()
                return f"opened a socket of {name}"
            except OSError:
                continue
    return None


def start_process() -> str | None:
    """Start processes: fork, and exec by posix_spawn."""
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return "forked"
    except OSError:
        pass
    try:
        os.posix_spawn("/bin/true", ["true"], {})
        return "spawned"
    except OSError:
        return None


def start_thread() -> str | None:
    """Start a thread in the process."""
    import threading

    try:
        threading.Thread(target=int).start()
        return "started a thread"
    except RuntimeError:
        return None


def signal_others() -> str | None:
    """Signal the group, the parent, process 1, everybody."""
    for target in (0, 1, -1, 2):
        try:
            os.kill(target, 0)
            return f"may signal {target}"
        except OSError:
            continue
    return None


def raw_system_calls() -> str | None:
    """Bypass libc's names: system calls whose numbers are the same on every machine since Linux 5."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, number in {"pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "fsopen": 430}.items():
        if libc.syscall(number, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1:
            return f"{name} was not refused (errno {ctypes.get_errno()})"
    return None


def new_namespaces() -> str | None:
    """Gain privileges in new namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    return "entered a user namespace" if libc.unshare(0x10000000) == 0 else None


def trace_parent() -> str | None:
    """Read or change another process through ptrace."""
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in (1, libc.getppid()):
        if libc.ptrace(16, pid, 0, 0) == 0:
            return f"attached to {pid}"
    return None


def raise_limits() -> str | None:
    """Lift the process's CPU and memory limits."""
    for name in ("RLIMIT_CPU", "RLIMIT_AS"):
        number = getattr(resource, name)
        if resource.getrlimit(number)[0] == resource.RLIM_INFINITY:
            return f"{name} is not set"
        try:
            resource.setrlimit(number, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return f"{name} was lifted"
        except (OSError, ValueError):
            continue
    return None


def exhaust_memory() -> str | None:
    """Allocate eight gibibytes."""
    try:
        return f"took {len(bytearray(8 << 30))} bytes"
    except MemoryError:
        return None


def share_memory() -> str | None:
    """Leave more memory behind than a limit on mappings counts: shareable memory stays whole while a page is mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    for flags in (0x21, 0x23):  # MAP_ANONYMOUS with MAP_SHARED or MAP_SHARED_VALIDATE
        if libc.mmap(None, ctypes.c_size_t(4096), 3, flags, -1, ctypes.c_long(0)) != ctypes.c_void_p(-1).value:
            return "mapped memory that can be shared"
    return None


def read_environment() -> str | None:
    """Find secrets in the environment."""
    extra = set(os.environ) - {"PATH", "TZ", "LC_CTYPE"}
    return f"found {sorted(extra)}" if extra else None
