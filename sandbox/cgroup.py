"""Control group for all of a pool's processes: their limits together. Linux, version 1 or 2 of the interface.

rlimits limit each process; a group limits their sum, so that many calls at once cannot exhaust the machine that the
trainer runs on. It needs a writable hierarchy: root on a host, or a delegated subtree
(https://docs.kernel.org/admin-guide/cgroup-v2.html#delegation). Without one the pool works without this layer, and
reports it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
_PREFIX = "sandbox-"
_CPU_PERIOD_MICROSECONDS = 100_000
_GRACE_SECONDS = 2.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Share:
    """Limits of the group.

    Attributes:
        memory_bytes: page cache and kernel memory of its processes included; beyond it the kernel kills one of them.
        processes: processes at once.
        cpus: CPU seconds per second; None for no limit.
    """

    memory_bytes: int
    processes: int
    cpus: float | None = None


class Cgroup:
    """New group in each hierarchy that has a needed controller.

    Raises:
        OSError: no group can be made here; the message has the reason.
    """

    def __init__(self, share: Share) -> None:
        self._folders: list[Path] = []
        self._parents: set[Path] = set()
        name = f"{_PREFIX}{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"
        try:
            own = _own_groups()
            self._parents = set(own.values())  # including one whose controller only a killed pool used
            self._remove_abandoned()
            for parent, settings in _settings(own, share).items():
                folder = parent / name
                folder.mkdir()
                self._folders.append(folder)
                for file, value in settings.items():
                    (folder / file).write_text(value)
        except OSError:
            self.remove()
            raise
        cpus = "" if share.cpus is None else f", {share.cpus:g} CPUs"
        self.description = f"{share.memory_bytes / 2**30:.1f} GiB, {share.processes} processes{cpus}"

    def add(self, pid: int) -> None:
        """Add a process; its later children are in the group too. Raises `OSError`."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the group once its processes have ended."""
        until = time.monotonic() + _GRACE_SECONDS
        while self._folders:
            try:
                self._folders[-1].rmdir()
            except OSError:
                if time.monotonic() < until:
                    time.sleep(0.01)
                    continue
            self._folders.pop()
        self._remove_abandoned()  # whose last processes were still ending at our start

    def _remove_abandoned(self) -> None:
        """Remove the groups of hosts that were killed."""
        for folder in (folder for parent in self._parents for folder in parent.glob(f"{_PREFIX}*-*-*")):
            pid, start, _ = folder.name.removeprefix(_PREFIX).split("-", 2)
            # Another process may have its id by now, soon in a container; id and start time together are unique.
            if pid.isdigit() and _start_of(int(pid)) != start:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def machine_memory_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _settings(own: Mapping[str, Path], share: Share) -> dict[Path, dict[str, str]]:
    """Return the files to write, by the directory in which the group is made."""
    quota = None if share.cpus is None else round(share.cpus * _CPU_PERIOD_MICROSECONDS)
    if set(own) == {""}:
        wanted = {"memory.max": str(share.memory_bytes), "pids.max": str(share.processes)}
        if quota is not None:
            wanted["cpu.max"] = f"{quota} {_CPU_PERIOD_MICROSECONDS}"
        return {_delegated(own[""], sorted({file.partition(".")[0] for file in wanted})): wanted}
    files: dict[str, dict[str, str]] = {
        "memory": {"memory.limit_in_bytes": str(share.memory_bytes)},
        "pids": {"pids.max": str(share.processes)},
    }
    if quota is not None:
        files["cpu"] = {"cpu.cfs_period_us": str(_CPU_PERIOD_MICROSECONDS), "cpu.cfs_quota_us": str(quota)}
    if missing := sorted(set(files) - set(own)):
        raise OSError(errno.ENOENT, f"no hierarchy has the controller {missing[0]}")
    settings: dict[Path, dict[str, str]] = {}
    for controller, values in files.items():
        settings.setdefault(own[controller], {}).update(values)
    return settings


def _own_groups() -> Mapping[str, Path]:
    """Return this process's directory for each controller of version 1, or for "" that of version 2."""
    mounts: dict[str, tuple[Path, str]] = {}
    for line in (_PROC / "mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        _, _, _, root, point, *_ = fields.split(" ")
        if kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), (Path(point), root))
        elif kind == "cgroup2":
            mounts[""] = Path(point), root
    own: dict[str, Path] = {}
    for line in (_PROC / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts and path.startswith(mounts[controller][1]):
                folder, root = mounts[controller]
                own[controller] = folder / path[len(root) :].lstrip("/")
    if {"memory", "pids"} <= set(own):
        own.pop("", None)
    elif "" in own:
        own = {"": own[""]}
    if not own:
        raise OSError(errno.ENOENT, "no control groups are mounted")
    return own


def _delegated(folder: Path, controllers: list[str]) -> Path:
    """Enable these controllers for the directory's children, and return the directory."""
    active = (folder / "cgroup.subtree_control").read_text().split()
    if missing := [controller for controller in controllers if controller not in active]:
        # Refused with EBUSY below the root while processes are in this group itself: delegate a subtree then.
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in missing))
    return folder


def _start_of(pid: int) -> str:
    """Return a process's start time, in ticks since boot; empty if no process has this id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
