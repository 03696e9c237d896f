"""What a run has finished, on disk: SQLite files with batched commits; what is read back is always whole."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sqlite3
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from synthesis.core.refusals import InputError, Refusal

Row = tuple[bytes | None, str, str]
"""Encoded outputs, or None when rejected; reason; detail."""

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


class StoreError(Refusal):
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
    CAUSE: ClassVar[bool] = False
    """Committed before any store that is none: a result must not outlive what it was made of."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._naming():
                self._db = sqlite3.connect(self.path)
                self._db.execute("PRAGMA journal_mode=WAL")
                for table in self.TABLES:
                    self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{self.path} is not a {self.NOUN} ({error}); {self.REMEDY}") from None
        self._committed = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        _open.add(self)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """What the disk refuses names the file. (To be told from a file that is none: nobody should delete that one.)

        Raises:
            StoreError: instead of SQLite's errors that a disk, or another process, causes.
        """
        try:
            yield
        except sqlite3.OperationalError as error:
            if (error.sqlite_errorcode & 0xFF) not in _OF_DISK:
                raise
            raise StoreError(
                f"{self.path} could not be written ({error}); see that there is room, that it may be written, and that "
                "no other process uses it, and run the same command again: what it holds is kept"
            ) from None

    def commit(self) -> None:
        """Make everything durable that was written. Raises `StoreError`: it cannot be."""
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
        """To be called after each write: commits now, or soon."""
        if time.monotonic() - self._committed > self.COMMIT_SECONDS:
            self.commit()
        elif self._timer is None:
            with contextlib.suppress(RuntimeError):  # no loop is running: the next write or `close` commits
                self._timer = asyncio.get_running_loop().call_later(self.COMMIT_SECONDS, self.commit)


class Journal(Store):
    """The finished inputs of all stages of one run, in one SQLite file: each exactly once.

    Raises:
        ValueError: the file is no journal.
    """

    NOUN = "journal"
    REMEDY = "delete it to synthesise anew"
    TABLES = (
        "done (stage TEXT, key TEXT, outputs BLOB, reason TEXT, detail TEXT, PRIMARY KEY (stage, key)) WITHOUT ROWID",
    )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, stage: str) -> dict[str, Row]:
        """key -> row of all the stage's finished inputs, which must fit in memory; see `rows`."""
        found = self._db.execute("SELECT key, outputs, reason, detail FROM done WHERE stage = ?", (stage,))
        return {key: (outputs, reason, detail) for key, outputs, reason, detail in found}

    def keys(self, stage: str) -> set[str]:
        """The keys of the stage's finished inputs."""
        return {key for (key,) in self._db.execute("SELECT key FROM done WHERE stage = ?", (stage,))}

    def rows(self, stage: str, keys: Iterable[str]) -> Iterator[Row]:
        """The rows of finished inputs, read one at a time in the order of the keys. Raises `KeyError`."""
        asked = "SELECT outputs, reason, detail FROM done WHERE stage = ? AND key = ?"
        self.commit()
        self._db.execute("BEGIN")  # or every row would lock and unlock the file, which takes longer than to read it
        try:
            for key in keys:
                row = self._db.execute(asked, (stage, key)).fetchone()
                if row is None:
                    raise KeyError(f"stage {stage}: the input {key!r} is not finished")
                yield row
        finally:
            self._db.commit()

    def add(self, stage: str, key: str, outputs: bytes | None, reason: str = "", detail: str = "") -> None:
        """Write down one finished input."""
        with self._naming():
            self._db.execute(
                "INSERT OR REPLACE INTO done VALUES (?, ?, ?, ?, ?)", (stage, key, outputs, reason, detail)
            )
        self._written()

    def forget_rejected(self, stage: str) -> None:
        """Let the stage's rejected inputs be done again by the next run."""
        self._db.execute("DELETE FROM done WHERE stage = ? AND outputs IS NULL", (stage,))
        self._written()


@atexit.register
def _commit_all() -> None:
    for store in list(_open):
        with contextlib.suppress(sqlite3.Error):
            store.commit()
