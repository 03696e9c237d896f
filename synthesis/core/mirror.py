"""Files of a run in buckets: its input files, and its folder.

The run works on this machine's disk (SQLite files and ArrayRecord's writer need one). The folder is kept in the bucket,
so that another machine can resume. The stores and the datasets' cards are fetched at the start. Snapshots of the stores
are uploaded during the run, and all files at its end, however it ends. A lost machine loses only the work since the
last snapshot.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from etils import epath

from astra_jax.base.errors import InputError
from astra_jax.base.files import StorageError, first_line, holding, in_bucket, location, names_itself
from astra_jax.base.proxies import may_be_proxied, via
from synthesis.core.datasets import CARD_FILE, Folder
from synthesis.core.workdir import LOCK

_log = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 60.0
"""Time between two snapshots; longer if the last took more than a twentieth of it."""
_STORES = ".sqlite"
_OF_STORES = (_STORES, f"{_STORES}-wal", f"{_STORES}-shm")
_BLOCK = 16 << 20
_MOST_DOWNLOADED = 256 << 20
_DOWNLOAD_SECONDS = 120.0
"""Timeout for each wait, and for a whole document at a URL."""


@contextlib.asynccontextmanager
async def mirrored(workdir: epath.Path) -> AsyncIterator[Path]:
    """Yield the folder to work in: `workdir` itself or, if it is in a bucket, one on this machine's disk.

    A process that holds it (`workdir.locked`) and loses it while it sleeps writes nothing there any more.

    Raises:
        StorageError: the bucket cannot be read or written.
        LeaseError: another process has taken it over.
    """
    if not in_bucket(workdir):
        yield Path(workdir)
        return
    with tempfile.TemporaryDirectory(prefix="astra-run-") as name:
        kept = _Mirror(workdir, Path(name))
        await asyncio.to_thread(kept.fetch)
        keeping = asyncio.create_task(kept.keep())
        try:
            yield Path(name)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await asyncio.to_thread(kept.finish)


@functools.cache
def fetched(name: Folder) -> Path:
    """Return the local path of an input file or folder.

    From a URL or a bucket it is copied to this machine's disk; the copy is removed when the process ends.

    Raises:
        InputError: it is a URL of another kind, has no document, or names nothing in its bucket.
        StorageError: the bucket cannot be read.
    """
    if "://" not in os.fspath(name):
        return Path(name)
    folder = tempfile.TemporaryDirectory(prefix="astra-input-")
    atexit.register(folder.cleanup)
    if os.fspath(name).startswith(("http://", "https://")):
        return _downloaded(os.fspath(name), Path(folder.name))
    source = location(name, s3=True)
    copy = Path(folder.name) / source.name
    found = list(_below(source)) if source.is_dir() else [source]
    for path in found:
        file = copy / path.relative_to(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        _copy(path, epath.Path(file), f"{path} could not be read")
    return copy


def _downloaded(url: str, folder: Path) -> Path:
    """Return the copy of a document, with a suffix that tells how to read it.

    Raises:
        InputError: nothing is there, or too much.
    """
    import httpx2  # here, since few runs read from URLs, and it takes long to import

    try:
        trusts = may_be_proxied(url)
        with httpx2.stream("GET", url, timeout=_DOWNLOAD_SECONDS, follow_redirects=True, trust_env=trusts) as answer:
            if not answer.is_success:
                raise InputError(
                    f"{url}{via(url)} is not a document (HTTP {answer.status_code} {answer.reason_phrase}); of an MCP "
                    f'server at this address write a file {{"mcpServers": {{"NAME": {{"url": "{url}"}}}}}} and name it'
                )
            data, deadline = bytearray(), time.monotonic() + _DOWNLOAD_SECONDS
            for part in answer.iter_bytes():
                data += part
                if len(data) > _MOST_DOWNLOADED or time.monotonic() > deadline:
                    limits = f"{_MOST_DOWNLOADED >> 20} MiB and {_DOWNLOAD_SECONDS:g} s"
                    raise InputError(f"{url} has more than {limits} allow; download it, and name the file")
            name = Path(answer.url.path).name or "document"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise InputError(f"{url}{via(url)} cannot be read ({type(error).__name__}: {first_line(error)})") from error
    if Path(name.removesuffix(".gz")).suffix.lower() not in (".json", ".jsonl", ".ndjson", ".yaml", ".yml"):
        name += ".json" if data.lstrip()[:1] in (b"{", b"[") else ".yaml"
    copy = folder / name
    copy.write_bytes(data)
    return copy


class _Mirror:
    """Files below a folder, and their copies of the same names in a bucket."""

    def __init__(self, bucket: epath.Path, folder: Path) -> None:
        self._bucket, self._folder = bucket, folder
        self._check = holding(bucket)
        self._there: dict[Path, tuple[int, int]] = {}
        """Times and sizes of the files whose copies in the bucket are current."""
        self._writing = threading.Lock()
        """Held while a snapshot is written: one under way at the run's end finishes first, so it cannot replace the
        last one."""

    def fetch(self) -> None:
        """Download the files that a run needs to resume."""
        for path in _below(self._bucket):
            if path.name == CARD_FILE or path.name.endswith(_STORES):
                file = self._folder / path.relative_to(self._bucket)
                file.parent.mkdir(parents=True, exist_ok=True)
                _copy(path, epath.Path(file), f"{path} could not be read")
                self._there[file] = _state(file)

    async def keep(self) -> None:
        """Upload snapshots of the stores from time to time. Raises `LeaseError`."""
        pause = SNAPSHOT_SECONDS
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                await asyncio.to_thread(self._stores)
            except (StorageError, sqlite3.Error) as error:  # the next one may be written, and the last one must be
                _log.warning("%s: no snapshot was stored (%s); retrying", self._bucket, first_line(error))
            pause = max(SNAPSHOT_SECONDS, 20 * (time.monotonic() - began))

    def finish(self) -> None:
        """Upload all files, a dataset's card last: without it there is no dataset. Raises `LeaseError` and
        `StorageError`."""
        self._stores()
        every = [path for path in sorted(self._folder.rglob("*")) if path.is_file() and self._is_kept(path)]
        changed = [path for path in every if self._there.get(path) != _state(path)]
        cards = [path for path in changed if path.name == CARD_FILE]
        for card in cards:
            self._check()
            (self._bucket / card.relative_to(self._folder)).unlink(missing_ok=True)
        for path in [*(path for path in changed if path.name != CARD_FILE), *cards]:
            self._send(path, path)

    def _stores(self) -> None:
        """Upload the stores. A journal must not hold results of an answer that the recording lacks. So journals, known
        by their name or their folder's, are copied first and uploaded last."""
        with self._writing:
            self._snapshot()

    def _snapshot(self) -> None:
        stores = sorted(
            self._folder.rglob(f"*{_STORES}"), key=lambda path: "journal" not in str(path.relative_to(self._folder))
        )
        with tempfile.TemporaryDirectory(prefix="astra-snapshot-") as name:
            taken = []
            for number, path in enumerate(stores):
                state = max(_state(one) for one in (path, path.with_name(path.name + "-wal")) if one.exists())
                if self._there.get(path) != state:
                    snapshot = Path(name) / str(number)
                    with (
                        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store,
                        contextlib.closing(sqlite3.connect(snapshot)) as copy,
                    ):
                        store.backup(copy)
                    taken.append((path, snapshot, state))
            for path, snapshot, state in reversed(taken):
                self._send(path, snapshot)
                self._there[path] = state

    def _is_kept(self, path: Path) -> bool:
        """Return whether a file is uploaded at the end: it is no store, which has snapshots, no lock, and not
        hidden."""
        hidden = any(part.startswith(".") for part in path.relative_to(self._folder).parts)
        return not hidden and path.name != LOCK and not path.name.endswith(_OF_STORES)

    def _send(self, path: Path, source: Path) -> None:
        target = self._bucket / path.relative_to(self._folder)
        self._check()
        _copy(epath.Path(source), target, f"{target} could not be written")
        self._there[path] = _state(path)


def _below(folder: epath.Path) -> Iterator[epath.Path]:
    """Yield all files below a folder; none if it does not exist.

    Raises:
        StorageError: an object's name would place its copy elsewhere on this machine.
    """
    if folder.exists():
        for path in sorted(folder.iterdir()):
            if not names_itself(path.name):
                raise StorageError(f"{path} is not the name of a file; remove that object, or give another folder")
            if path.is_dir():
                yield from _below(path)
            else:
                yield path


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _copy(source: epath.Path, target: epath.Path, problem: str) -> None:
    """Copy in blocks; an object appears when all of it is there. Raises `StorageError`."""
    try:
        with source.open("rb") as given, target.open("wb") as taken:
            shutil.copyfileobj(given, taken, _BLOCK)
    except Exception as error:  # of the bucket's client, without a common base
        raise StorageError(
            f"{problem} ({first_line(error)}); check the bucket and the disk, and run the same command again"
        ) from error
