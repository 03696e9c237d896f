"""Where the files of a watched run are, and who works on it: on this machine's disk, or in a bucket.

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

from astra_jax.grpo.journal import FOLDER as ROLLOUTS
from astra_jax.run.metrics import FILE as METRICS
from synthesis.core.datasets import CARD_FILE
from synthesis.core.files import StorageError, first_line, names_itself
from synthesis.core.leases import LEASE_SECONDS, NOBODY
from synthesis.core.refusals import InputError
from synthesis.core.workdir import LOCK

LOOK_SECONDS = 10.0
"""Between two looks into a bucket; longer where the last took more than a twentieth of it."""
_EPISODE_PAGE = re.compile(r"(?P<kind>update|exhausted)_(?P<update>[0-9]{1,12})\.html")
MOST_EPISODES = 30
"""Pages of episodes that are shown of a training."""
MOST_BYTES = 256 << 20
"""Of a file that is copied from a bucket: a journal, say, whose snapshots come every minute."""
_LOOKED_INTO = ("metrics", "samples", "episodes", ROLLOUTS, "journals")
_NOT_LOOKED_INTO = ("checkpoints", "compiled", "params", "states", "tokenizer", "traces", "weights")
_STORE = ".sqlite"


def newest_pages(names: Iterable[str]) -> list[str]:
    """Of a folder's files the newest pages of sampled episodes, the newest first. Of one update the page of the batch
    that never came after it is the newer one."""
    found = [_EPISODE_PAGE.fullmatch(name) for name in names]
    pages = sorted(((int(one["update"]), one["kind"] == "exhausted", one[0]) for one in found if one), reverse=True)
    return [name for _, _, name in pages[:MOST_EPISODES]]


class RunFolder(Protocol):
    """Where a run's files are.

    Attributes:
        name: as the user knows it.
        files: a folder on this machine's disk that has them.
    """

    name: str
    files: Path

    def look(self) -> list[str]:
        """Have `files` as they are now. Returns what could not be read, and why."""
        ...

    def holder(self) -> tuple[str, str]:
        """Whether somebody works there, `running` or `elsewhere` (if it still does), else ""; and who did last."""
        ...


class OnDisk:
    """A folder of this machine, as it is. See `RunFolder`."""

    def __init__(self, folder: Path) -> None:
        self.name, self.files = str(folder), folder

    def look(self) -> list[str]:
        return []

    def holder(self) -> tuple[str, str]:
        """Trying to lock it would turn away a program that starts at that moment, so Linux is asked who holds it."""
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
            if rows:  # "1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF"; of one that waits it is behind "->"
                held = any(row[1] == "FLOCK" and row[5].endswith(f":{inode}") for row in rows if len(row) > 5)
                return ("running" if held else ""), said
        alive = process.isdecimal() and _is_alive(int(process))
        return ("running" if alive else ""), said


@dataclass(frozen=True)
class _Object:
    """A file in a bucket: what its client says of it.

    Attributes:
        stamp: another one when its content is.
        modified: seconds since 1970.
    """

    address: str
    size: int
    stamp: tuple[Any, ...]
    modified: float


class InBucket:
    """A folder in a bucket, and copies of what is shown of it. See `RunFolder`.

    Not copied are checkpoints and the like, datasets but for their cards, and the journal of GRPO's batch under way,
    which is an object for each write.

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
        self._misnamed: set[str] = set()
        self._away: list[str] = []
        """Why the last look failed, until one succeeds."""
        self._lock = _Renewals()
        self._again = 0.0
        try:
            # Others write there: a listing that is kept hides what they wrote.
            self._client, self._root = fsspec.core.url_to_fs(self.name, use_listings_cache=False)
            self._copy()
        except FileNotFoundError:
            raise InputError(f"there is no folder {self.name}; give that of a run") from None
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
            except Exception as error:  # of a network that is gone for a while, say: what was copied is shown
                self._again = time.monotonic() + LOOK_SECONDS
                self._away = [f"{self.name}: {first_line(error)}"]
        return self._left_out + self._away

    def holder(self) -> tuple[str, str]:
        """Who works there renews the lock, which is removed at the end; who was killed no longer does."""
        return self._lock.state, self._lock.holder

    def _copy(self) -> None:
        began = time.monotonic()
        self._misnamed.clear()
        found = dict(self._found(PurePosixPath(), 0))
        self._see_lock(found.pop(PurePosixPath(LOCK), None))
        left_out = [f"{name!r:.200} is no name of a file; it is left there" for name in sorted(self._misnamed)[:10]]
        for path in self._copied.keys() - found.keys():
            (self.files / path).unlink(missing_ok=True)
            del self._copied[path]
        for path, there in found.items():
            if there.size > MOST_BYTES:
                left_out.append(
                    f"{path}: has {there.size >> 20:,} MiB; of a file in a bucket {MOST_BYTES >> 20} are read"
                )
            elif self._copied.get(path) != there.stamp:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    self._fetch(path, there)
        self._left_out = left_out
        self._again = time.monotonic() + max(LOOK_SECONDS, 20 * (time.monotonic() - began))

    def _found(self, folder: PurePosixPath, depth: int) -> Iterator[tuple[PurePosixPath, _Object]]:
        """What is to be copied, below a folder of the run."""
        files, folders = self._listed(folder)
        if folder.name in _LOOKED_INTO:
            yield from self._of_those(folder, files)
            return
        for name, there in files.items():
            if name in ("run.json", "summary.json", LOCK, CARD_FILE) or (depth == 0 and name.endswith(_STORE)):
                yield folder / name, there
        for name in folders:
            if name in _LOOKED_INTO or (depth < 2 and name not in _NOT_LOOKED_INTO):
                yield from self._found(folder / name, depth + 1)

    def _of_those(self, folder: PurePosixPath, files: Mapping[str, _Object]) -> Iterator[tuple[PurePosixPath, _Object]]:
        names = sorted(files)
        if folder.name == "metrics":
            names = [name for name in names if name == METRICS]
        elif folder.name == "samples":
            names = [name for name in names if name.endswith(".txt")][-1:]
        elif folder.name == "episodes":
            names = newest_pages(names)
        elif folder.name == "journals":
            names = [name for name in names if name.endswith(_STORE)]
        else:
            self._note_newest(folder, files)
            return
        for name in names:
            yield folder / name, files[name]

    def _note_newest(self, folder: PurePosixPath, files: Mapping[str, _Object]) -> None:
        """An empty file as old as the newest of these: that something was written is seen without them."""
        if files:
            (self.files / folder).mkdir(parents=True, exist_ok=True)
            newest = max(there.modified for there in files.values())
            (self.files / folder / "newest").touch()
            os.utime(self.files / folder / "newest", (newest, newest))

    def _listed(self, folder: PurePosixPath) -> tuple[dict[str, _Object], list[str]]:
        """Its files, and the names of the folders in it."""
        files, folders = {}, []
        above = f"{self._root}/{folder}" if folder.parts else self._root
        try:
            entries = self._client.ls(above, detail=True)
        except FileNotFoundError:
            if not folder.parts:
                raise
            return {}, []  # removed meanwhile
        for entry in entries:
            address = str(entry["name"]).rstrip("/")
            name = address.rpartition("/")[2]
            if address != above and not names_itself(name):
                self._misnamed.add(address)
            elif entry["type"] == "directory":
                folders.append(name)
            elif address != above:  # what marks a folder, for some clients
                modified = _modified(entry)
                mark = next((entry[key] for key in ("generation", "ETag", "etag") if entry.get(key)), "")
                size = int(entry.get("size") or 0)
                files[name] = _Object(address, size, (size, str(mark), modified), modified)
        return files, sorted(folders)

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
        if there is None:
            self._lock.gone()
        elif self._lock.stamp == there.stamp:
            self._lock.unchanged()
        else:
            with contextlib.suppress(FileNotFoundError):
                text = self._client.cat_file(there.address).decode(errors="replace")
                if (holder := (text.splitlines() or [""])[0][:200]) == NOBODY:
                    self._lock.gone()
                else:
                    self._lock.renewed(there.stamp, holder)


@dataclass
class _Renewals:
    """What is seen of a bucket's lock: like whoever waits for it, by this machine's clock (`synthesis/core/leases.py`).

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

    def renewed(self, stamp: tuple[Any, ...], holder: str) -> None:
        again = self.stamp is not None
        self.stamp, self.holder = stamp, holder
        self._since, self._silent = time.monotonic(), 0.0
        self._times = self._times + 1 if again else 1

    def unchanged(self) -> None:
        """It was looked at again, and is as it was."""
        self._silent = time.monotonic() - self._since

    def gone(self) -> None:
        self.stamp, self._times = None, 0


def _modified(entry: Mapping[str, Any]) -> float:
    """When a client says that an object was written; now, where it does not."""
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
        pass  # somebody else's
    return True
