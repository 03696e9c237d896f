"""Files of a watched run, and who works on it: on this machine's disk, or in a bucket.

Of a run in a bucket the files that `watched.py` reads are copied to this machine's disk, each again when it has
changed. Nothing is written to the bucket.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from etils import epath

from astra_jax.base.errors import InputError
from astra_jax.base.files import StorageError, first_line, names_itself
from astra_jax.base.leases import LEASE_SECONDS, NOBODY
from astra_jax.grpo.journal import FOLDER as ROLLOUTS
from astra_jax.run.metrics import FILE as METRICS
from synthesis.core.datasets import CARD_FILE
from synthesis.core.workdir import ENDING, LOCK

LOOK_SECONDS = 10.0
"""Between two looks into a bucket; longer where the last took more than a twentieth of it."""
MAX_EPISODES = 30
"""Pages of episodes that are shown of a training."""
MAX_BYTES = 256 << 20
"""Size limit of a file that is copied from a bucket."""
_EPISODE_PAGE = re.compile(r"(?P<kind>update|exhausted)_(?P<update>[0-9]{1,12})\.html")
_DEEP = ("metrics", "samples", "episodes", ROLLOUTS)
"""Folders of a training, which is at most two levels below the workdir."""
_SKIPPED = {"checkpoints", "compiled", "params", "states", "tokenizer", "traces", "weights"}


def _is_copied(path: PurePosixPath) -> bool:
    """Tell whether the pages show a file of a run."""
    name, folder = path.name, path.parent.name
    if folder in _DEEP:
        return name == METRICS or (folder == "samples" and path.suffix == ".txt") or folder == "episodes"
    if path.suffix == ".sqlite":
        return str(path.parent) in (".", "journals")
    return name in ("run.json", "summary.json", "report.html", "table.html", "table.json", CARD_FILE, ENDING)


def newest_pages(names: Iterable[str]) -> list[str]:
    """Return the newest pages of sampled episodes, the newest first: an update's, then the missing batch after it."""
    found = [_EPISODE_PAGE.fullmatch(name) for name in names]
    pages = sorted(((int(one["update"]), one["kind"] == "exhausted", one[0]) for one in found if one), reverse=True)
    return [name for _, _, name in pages[:MAX_EPISODES]]


class RunFolder(Protocol):
    """Folder of a run.

    Attributes:
        name: as the user knows it.
        files: a folder on this machine's disk that has the run's files.
    """

    name: str
    files: Path

    def look(self) -> list[str]:
        """Bring `files` up to date. Returns what could not be read, and why."""
        ...

    def holder(self) -> tuple[str, str]:
        """Return `running`, `elsewhere` (if it still does) or "" (no process works there), and who did last."""
        ...


class OnDisk:
    """Folder of this machine. See `RunFolder`."""

    def __init__(self, folder: Path) -> None:
        self.name, self.files = str(folder), folder

    def look(self) -> list[str]:
        return []

    def holder(self) -> tuple[str, str]:
        """Ask Linux who holds the lock: trying to take it would turn away a program that starts at that moment."""
        lock = self.files / LOCK
        try:
            said, inode = lock.read_text(encoding="utf-8", errors="replace").strip()[:200], lock.stat().st_ino
        except OSError:
            return "", ""
        process, _, host = said.removeprefix("process ").partition(" of ")
        if host != socket.gethostname():
            return ("elsewhere" if host else ""), said
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
            if rows:  # "1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF"; a waiting process has "->" before FLOCK
                held = any(row[1] == "FLOCK" and row[5].endswith(f":{inode}") for row in rows if len(row) > 5)
                return ("running" if held else ""), said
        alive = process.isdecimal() and _is_alive(int(process))
        return ("running" if alive else ""), said


@dataclass(frozen=True)
class _Object:
    """A file in a bucket; another `stamp` is another content, `modified` is in seconds since 1970."""

    address: str
    size: int
    stamp: tuple[Any, ...]
    modified: float


class InBucket:
    """Folder in a bucket, and copies of the files that are shown. See `RunFolder`.

    Checkpoints, the records of datasets, and the journal of GRPO's current batch (an object for each write) are not
    copied.

    Args:
        folder: `gs://BUCKET/FOLDER` or `s3://BUCKET/FOLDER`.

    Raises:
        InputError: there is no such folder.
        StorageError: it cannot be read.
    """

    def __init__(self, folder: epath.Path) -> None:
        import fsspec.core

        self.name = os.fspath(folder)
        copies = tempfile.TemporaryDirectory(prefix="astra-watched-")
        atexit.register(copies.cleanup)
        self.files = Path(copies.name)
        self._copied: dict[PurePosixPath, tuple[Any, ...]] = {}
        self._left_out: list[str] = []
        self._away: list[str] = []
        """Why the last look failed, until one succeeds."""
        self._lock = _Renewals()
        self._again = 0.0
        try:
            # Others write there: a cached listing would hide it.
            self._client, self._root = fsspec.core.url_to_fs(self.name, use_listings_cache=False)
            self._copy()
        except FileNotFoundError:
            raise InputError(f"there is no folder {self.name}; give the --workdir of a run") from None
        except Exception as error:  # of the bucket's client, without a common base
            raise StorageError(
                f"{self.name} cannot be read ({first_line(error)}); see that the service can be reached from here, and "
                "that the account may list the bucket and read its objects"
            ) from error

    def look(self) -> list[str]:
        if time.monotonic() >= self._again:
            try:
                self._copy()
                self._away = []
            except Exception as error:  # the network is down, say: what was copied is shown
                self._again = time.monotonic() + LOOK_SECONDS
                self._away = [f"{self.name}: {first_line(error)}"]
        return self._left_out + self._away

    def holder(self) -> tuple[str, str]:
        """Tell from the lock, which a working process renews and removes at its end."""
        return self._lock.state, self._lock.holder

    def _copy(self) -> None:
        started = time.monotonic()
        misnamed: set[str] = set()
        found = dict(self._listed(PurePosixPath(), misnamed))
        left_out = [f"{one!r:.200} is not the name of a file; it is left there" for one in sorted(misnamed)[:10]]
        self._see_lock(found.pop(PurePosixPath(LOCK), None))
        wanted = self._wanted(found)
        for path in self._copied.keys() - wanted.keys():
            (self.files / path).unlink(missing_ok=True)
            del self._copied[path]
        for path, there in wanted.items():
            if there.size > MAX_BYTES:
                left_out.append(
                    f"{path}: has {there.size >> 20:,} MiB; of a file in a bucket {MAX_BYTES >> 20} are read"
                )
            elif self._copied.get(path) != there.stamp:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    self._fetch(path, there)
        self._left_out = left_out
        self._again = time.monotonic() + max(LOOK_SECONDS, 20 * (time.monotonic() - started))

    def _listed(self, folder: PurePosixPath, misnamed: set[str]) -> Iterator[tuple[PurePosixPath, _Object]]:
        """List the files of a run but those of large folders; names that would lead elsewhere are added to a set."""
        above = f"{self._root}/{folder}" if folder.parts else self._root
        try:
            entries = self._client.ls(above, detail=True)
        except FileNotFoundError:
            if not folder.parts:
                raise
            return  # removed meanwhile
        for entry in entries:
            address = str(entry["name"]).rstrip("/")
            name = address.rpartition("/")[2]
            if address != above and not names_itself(name):
                misnamed.add(address)
            elif entry["type"] == "directory":
                if name in _DEEP or (len(folder.parts) < 2 and name not in _SKIPPED and folder.name not in _DEEP):
                    yield from self._listed(folder / name, misnamed)
            elif address != above:  # with some clients an object marks the folder itself
                modified = _modified(entry)
                mark = next((entry[key] for key in ("generation", "ETag", "etag") if entry.get(key)), "")
                size = int(entry.get("size") or 0)
                yield folder / name, _Object(address, size, (size, str(mark), modified), modified)

    def _wanted(self, found: Mapping[PurePosixPath, _Object]) -> dict[PurePosixPath, _Object]:
        """Choose the files to copy: of samples the newest, of episodes the newest pages."""
        for path, there in found.items():
            if path.parent.name == ROLLOUTS:  # an empty file as old as the newest shows that something was written
                self._note(path.parent / "newest", there.modified)
        wanted = {path: there for path, there in found.items() if _is_copied(path)}
        names: dict[PurePosixPath, list[str]] = {}
        for path in wanted:
            names.setdefault(path.parent, []).append(path.name)
        newest = {folder: sorted(one)[-1:] for folder, one in names.items() if folder.name == "samples"}
        newest |= {folder: newest_pages(one) for folder, one in names.items() if folder.name == "episodes"}
        return {path: there for path, there in wanted.items() if path.name in newest.get(path.parent, (path.name,))}

    def _note(self, path: PurePosixPath, modified: float) -> None:
        file = self.files / path
        if not file.exists() or file.stat().st_mtime < modified:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            os.utime(file, (modified, modified))

    def _fetch(self, path: PurePosixPath, there: _Object) -> None:
        file = self.files / path
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        with self._client.open(there.address, "rb") as given, partial.open("wb") as taken:
            shutil.copyfileobj(given, taken)
        os.utime(partial, (there.modified, there.modified))
        partial.replace(file)
        self._copied[path] = there.stamp

    def _see_lock(self, there: _Object | None) -> None:
        if there is None or self._lock.stamp == there.stamp:
            self._lock.seen(None if there is None else there.stamp)
            return
        with contextlib.suppress(FileNotFoundError):
            text = self._client.cat_file(there.address).decode(errors="replace")
            holder = (text.splitlines() or [""])[0][:200]
            self._lock.seen(None if holder == NOBODY else there.stamp, holder)


@dataclass
class _Renewals:
    """Renewals of a bucket's lock, timed by this machine's clock, as in `astra_jax/base/leases.py`.

    Attributes:
        holder: what it says of the process that holds it, or held it last.
    """

    holder: str = ""
    stamp: tuple[Any, ...] | None = None
    _since: float = 0.0
    _silent: float = 0.0
    _times: int = 0

    @property
    def state(self) -> str:
        if self.stamp is None or self._silent > LEASE_SECONDS:
            return ""
        return "running" if self._times > 1 else "elsewhere"

    def seen(self, stamp: tuple[Any, ...] | None, holder: str = "") -> None:
        """Note a look: None, the lock is gone; an equal stamp, it was not renewed."""
        if stamp is None:
            self.stamp, self._times = None, 0
        elif stamp == self.stamp:
            self._silent = time.monotonic() - self._since
        else:
            self._times = self._times + 1 if self.stamp is not None else 1
            self.stamp, self.holder, self._since, self._silent = stamp, holder, time.monotonic(), 0.0


def _modified(entry: Mapping[str, Any]) -> float:
    """Return when a client says that an object was written; now, where it does not say."""
    for key in ("mtime", "updated", "LastModified"):
        value = entry.get(key)
        with contextlib.suppress(ValueError):
            if isinstance(value, str):
                value = datetime.datetime.fromisoformat(value)
            if isinstance(value, datetime.datetime):
                return value.timestamp()
    return time.time()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
