"""Storage of a run's finished work: SQLite files with batched commits; every entry is read back whole."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import sqlite3
import sys
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import check_held
from astra_jax.base.terminal import say

Row = tuple[bytes | None, str, str]
"""Encoded outputs, or None when rejected; reason; detail."""

_AT_ONCE = 64
"""Rows that are held while a stage's are read."""
_PACKED = b"\x78"
"""First byte of zlib's streams, and of no JSON: journals of older versions have such entries."""
_WORTH = 256
"""Bytes; smaller rows are not packed."""

_open: weakref.WeakSet[Store] = weakref.WeakSet()


_OF_DISK = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
}


class StoreError(UserError):
    """A store cannot be written; what is in it is whole."""


class Store:
    """An SQLite file that is written often and committed at most every `COMMIT_SECONDS`.

    What a kill undoes is what was written since the last commit: at most `COMMIT_SECONDS` of work, since an event loop
    commits even when nothing more is written. What is read back is always whole.
    """

    COMMIT_SECONDS = 0.25
    NOUN: ClassVar[str] = "store"
    REMEDY: ClassVar[str] = "delete it to begin anew"
    TABLES: ClassVar[tuple[str, ...]] = ()
    PAGE_BYTES: ClassVar[int] = 4096
    CAUSE: ClassVar[bool] = False
    """Committed before any store that is none: a result must not outlive what it was made of."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        check_held(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._naming():
                self._db = sqlite3.connect(self.path)
                self._db.execute(f"PRAGMA page_size={self.PAGE_BYTES}")  # of a file that is made now
                self._db.execute("PRAGMA journal_mode=WAL")
                for table in self.TABLES:
                    self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{self.path} is not a {self.NOUN} ({error}); {self.REMEDY}") from None
        self._committed = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        _open.add(self)

    @contextlib.contextmanager
    def _naming(self, done: str = "written") -> Iterator[None]:
        """Add the file's name to errors of the disk. (Unlike an invalid file, such a file must not be deleted.)

        Raises:
            StoreError: instead of SQLite's errors that a disk, or another process, causes.
        """
        try:
            yield
        except sqlite3.OperationalError as error:
            if (error.sqlite_errorcode & 0xFF) not in _OF_DISK:
                raise
            raise StoreError(
                f"{self.path} could not be {done} ({error}); check that the disk has space, that the file is writable, "
                "and that no other process uses it. Then run the same command again; the file's content is kept"
            ) from None

    def commit(self) -> None:
        """Make everything durable that was written.

        Raises:
            StoreError: the disk refuses it.
            RemovedError: the workdir was removed. SQLite would write to the removed file without an error.
        """
        check_held(self.path)
        if not self.CAUSE:
            for other in list(_open):
                if other.CAUSE:
                    other.commit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._naming():
            self._flush()
            self._db.commit()
        self._committed = time.monotonic()

    def close(self) -> None:
        self.commit()
        _open.discard(self)
        self._db.close()

    def _flush(self) -> None:
        """Write what is kept in memory between commits."""

    def _written(self) -> None:
        """Commit now, or soon; called after each write."""
        if time.monotonic() - self._committed > self.COMMIT_SECONDS:
            self.commit()
        elif self._timer is None:
            with contextlib.suppress(RuntimeError):  # no loop is running: the next write or `close` commits
                self._timer = asyncio.get_running_loop().call_later(self.COMMIT_SECONDS, self._commit_later)

    def _commit_later(self) -> None:
        """Commit from the event loop, where nobody can catch an error: the next write or `close` raises it again."""
        self._timer = None
        with contextlib.suppress(UserError):
            self.commit()


class Journal(Store):
    """The finished inputs of all stages of one run, in one SQLite file: each exactly once. Large outputs are packed.

    Raises:
        ValueError: the file is no journal.
    """

    NOUN = "journal"
    REMEDY = "delete it to synthesise anew"
    PAGE_BYTES = 16_384
    """A quarter of a page is a row's, and what is beyond that has pages of its own: in small ones a packed row of 2 KB
    takes 5."""
    TABLES = (
        "done (stage TEXT, key TEXT, outputs BLOB, reason TEXT, detail TEXT, PRIMARY KEY (stage, key)) WITHOUT ROWID",
        # Of rejected inputs, for people: no stage reads it.
        "rejected (stage TEXT, key TEXT, kind TEXT, record BLOB, PRIMARY KEY (stage, key)) WITHOUT ROWID",
    )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, stage: str) -> dict[str, Row]:
        """key -> row of all the stage's finished inputs, which must fit in memory; see `rows`."""
        found = self._db.execute("SELECT key, outputs, reason, detail FROM done WHERE stage = ?", (stage,))
        return {key: (_unpacked(outputs), reason, detail) for key, outputs, reason, detail in found}

    def has_stage(self, prefix: str) -> bool:
        """Return whether there is a finished input of a stage whose name starts with `prefix`."""
        asked = "SELECT 1 FROM done WHERE stage >= ? AND stage < ? LIMIT 1"
        return self._db.execute(asked, (prefix, prefix + "\U0010ffff")).fetchone() is not None

    def finished(self, stage: str, keys: Iterable[str], *, but: Collection[str] = ()) -> Iterator[bool]:
        """For each key, whether its input is finished; where none is, the keys are not looked up.

        Args:
            but: reasons of rejections that do not count as finished.
        """
        if self._db.execute("SELECT 1 FROM done WHERE stage = ? LIMIT 1", (stage,)).fetchone() is None:
            yield from (False for _ in keys)
            return
        waiting = iter(keys)
        while some := list(islice(waiting, _AT_ONCE)):
            with self._looking():
                found = [
                    self._db.execute("SELECT reason FROM done WHERE stage = ? AND key = ?", (stage, key)).fetchone()
                    for key in some
                ]
            yield from (one is not None and one[0] not in but for one in found)

    def rows(self, stage: str, keys: Iterable[str]) -> Iterator[Row]:
        """Yield the rows of finished inputs, read a few at a time in the order of the keys. Raises `KeyError`."""
        asked = "SELECT outputs, reason, detail FROM done WHERE stage = ? AND key = ?"
        waiting = iter(keys)
        while some := list(islice(waiting, _AT_ONCE)):
            with self._looking():
                found = [self._db.execute(asked, (stage, key)).fetchone() for key in some]
            for key, row in zip(some, found, strict=True):
                if row is None:
                    raise KeyError(f"stage {stage}: the input {key!r} is not finished")
                yield _unpacked(row[0]), row[1], row[2]

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Lock the file once for reads of several rows: a lock for each takes longer than the read."""
        if self._db.in_transaction:  # of what was written since the last commit
            yield
            return
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.rollback()  # nothing was written

    def add(self, stage: str, key: str, outputs: bytes | None, reason: str = "", detail: str = "") -> None:
        """Write down one finished input."""
        with self._naming():
            row = (stage, key, _packed(outputs), reason, detail)
            self._db.execute("INSERT OR REPLACE INTO done VALUES (?, ?, ?, ?, ?)", row)
        self._written()

    def add_rejected(self, stage: str, key: str, kind: str, record: bytes) -> None:
        """Write down what a stage rejected.

        Args:
            kind: class of the record.
        """
        with self._naming():
            self._db.execute("INSERT OR REPLACE INTO rejected VALUES (?, ?, ?, ?)", (stage, key, kind, _packed(record)))
        self._written()

    def forget_rejected(self, stage: str) -> None:
        """Let the stage's rejected inputs be done again by the next run."""
        with self._naming():
            self._db.execute("DELETE FROM done WHERE stage = ? AND outputs IS NULL", (stage,))
        self._written()


@dataclass(frozen=True)
class RejectedRow:
    """Rejected input of a stage.

    Attributes:
        stage: in the journal's form, NAME/FINGERPRINT.
        kind: class of the record; "" if the journal has only the reason.
        record: JSON.
    """

    stage: str
    key: str
    reason: str
    detail: str
    kind: str = ""
    record: bytes = b""

    @property
    def id(self) -> str:
        """A short name that is unique in the journal."""
        return hashlib.sha256(f"{self.stage}\0{self.key}".encode()).hexdigest()[:16]


def read_rejected(path: Path, wanted: str = "") -> Iterator[RejectedRow]:
    """Yield the rejected inputs of a journal, which another process may be writing.

    Args:
        wanted: id of the only row to yield, with its record; "": all, without their records.

    Raises:
        sqlite3.Error: the file cannot be read.
    """
    with contextlib.closing(open_to_read(path)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "done" not in tables:
            return
        asked = "SELECT stage, key, reason, detail FROM done WHERE outputs IS NULL ORDER BY stage, key"
        for stage, key, reason, detail in database.execute(asked):
            row = RejectedRow(stage, key, reason or "rejected", detail or "")
            if not wanted:
                yield row
            elif row.id == wanted:
                record = "SELECT kind, record FROM rejected WHERE stage = ? AND key = ?"
                found = database.execute(record, (stage, key)).fetchone() if "rejected" in tables else None
                yield replace(row, kind=found[0], record=_unpacked(found[1]) or b"") if found else row


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a store that another process may be writing. Without a log, which a reader would create, it cannot change.

    Raises:
        sqlite3.Error: the file cannot be opened.
    """
    logged = path.with_name(f"{path.name}-wal").exists()
    address = f"file:{quote(str(path.absolute()))}?mode=ro{'' if logged else '&immutable=1'}"
    return sqlite3.connect(address, uri=True, timeout=2.0)


def _packed(text: bytes | None) -> bytes | None:
    return zlib.compress(text, 1) if text is not None and len(text) >= _WORTH else text


def _unpacked(outputs: bytes | None) -> bytes | None:
    return zlib.decompress(outputs) if outputs is not None and outputs.startswith(_PACKED) else outputs


@atexit.register
def _commit_all() -> None:
    said: set[str] = set()
    for store in list(_open):
        try:
            store.commit()
        except UserError as error:  # of this one, or of a recording that it is made of; others can be written
            if (problem := str(error)) not in said:
                say(problem, file=sys.stderr)
            said.add(problem)
        except sqlite3.Error:  # such as of one that is closed
            continue
