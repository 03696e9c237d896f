"""Files of a run, on disk or in a bucket; each write is atomic.

A bucket's objects appear whole, and cannot be appended to. Code that only knows directories on disk writes to one, and
its files are copied to the bucket (`copy_files`).
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from etils import epath

from astra_jax.base.errors import InputError, UserError

Folder = str | os.PathLike[str]
"""Location of a file or folder: a path on disk, or gs://bucket/folder."""

GCS, S3 = "gs://", "s3://"
"""Google Cloud Storage, supported everywhere; S3 and services with its protocol, supported in synthesis."""
_CLIENTS = {GCS: ("gcsfs", "gcs"), S3: ("s3fs", "s3")}
"""Package that a kind of bucket needs, and the extra that installs it; fsspec uses the extra's name for its
settings."""

_guards: dict[str, Callable[[], None]] = {}
"""Folder or file that this process holds → check that raises if it no longer does (`workdir`; `leases` in a bucket)."""

MOST_BYTES = 2 << 30
"""Maximum size of a file that is read whole, bytes."""
MOST_LINE_BYTES = 64 << 20


class StorageError(UserError):
    """A bucket cannot be used, or a write to it failed; the message says why, and how to fix it."""

    away = True


class RemovedError(UserError):
    """A folder was removed, moved or replaced while this process held it, so nothing more is written there.

    Attributes:
        folder: its absolute path, with which the message starts.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(
            f"{folder} was removed, moved or replaced while this process used it, so the process stopped. Results "
            "since then are lost. If it was moved or its disk unmounted, move it back or mount the disk, and run the "
            "same command again: it resumes. If it was deleted, restore a copy; without one the command starts from "
            "scratch"
        )
        self.folder = folder


def may_be_storage(error: Exception, folder: Folder) -> bool:
    """Return whether a library's error while writing there may come from the disk or bucket, and not only from a bug.

    tensorstore raises a disk's as ValueError, Orbax as RuntimeError; errors of bucket clients have no common base.
    """
    return in_bucket(folder) or isinstance(error, (OSError, ValueError, RuntimeError))


def in_bucket(path: Folder) -> bool:
    """Return whether the path is `gs://BUCKET/...` or `s3://BUCKET/...`."""
    return os.fspath(path).startswith((GCS, S3))


def names_itself(name: str) -> bool:
    """Return whether the last part of an object's name, joined to a folder on disk, is a file or folder in it.

    A bucket is flat, so its objects may be called `tools/../../.bashrc`.
    """
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0")


def location(path: Folder, *, s3: bool = False) -> epath.Path:
    """Return the location of a file or folder: on disk, absolute, or in a bucket.

    Args:
        s3: allow `s3://BUCKET/...`; checkpoints, and datasets that training reads, cannot be there.

    Raises:
        ValueError: it is a URL of another kind, names only a bucket, or its client is not installed.
    """
    text = os.fspath(path)
    if "://" not in text:
        return epath.Path(Path(text).absolute())
    kind = next((one for one in _CLIENTS if text.startswith(one)), None)
    if kind is None or (kind == S3 and not s3):
        kinds = f"{GCS}BUCKET/FOLDER nor {S3}BUCKET/FOLDER" if s3 else f"{GCS}BUCKET/FOLDER"
        raise InputError(f"{text} is neither a folder nor {kinds}; give one of these")
    package, extra = _CLIENTS[kind]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{text} needs {package}, which is not installed: pip install 'astra-jax[{extra}]'")
    if not all(text.removeprefix(kind).partition("/")[::2]):
        raise InputError(f"{text} names no folder in a bucket; write {kind}BUCKET/FOLDER")
    import fsspec

    # Other hosts write there too, and so does tensorstore: a listing that is kept hides what they wrote.
    fsspec.config.conf.setdefault(extra, {})["use_listings_cache"] = False
    return epath.Path(text)


@contextlib.contextmanager
def guarding(place: Folder, check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before any write there or below (`holding`, `check_held`), until the context is left."""
    name = _absolute(place)
    _guards[name] = check
    try:
        yield
    finally:
        del _guards[name]


def holding(path: Folder) -> Callable[[], None]:
    """Return the check to call before each write there or below. It covers what the process holds now.

    A process that was asleep may find its folder in a bucket taken over by another one, which has resumed its run. A
    folder on disk may be removed or replaced while a run uses it; a write would recreate a part of it.

    Raises:
        LeaseError: by the check: another process has taken over the folder in a bucket.
        StorageError: by the check: the bucket cannot be asked.
        RemovedError: by the check: the folder on disk was removed or replaced.
    """
    name = _absolute(path)
    guards = [check for held, check in list(_guards.items()) if name == held or name.startswith(f"{held}/")]

    def check() -> None:
        for guard in guards:
            guard()

    return check


def check_held(path: Folder) -> None:
    """Call the check of `holding` at once, before a write by other means than this module's. Raises as `holding`."""
    if _guards:
        holding(path)()


def _absolute(path: Folder) -> str:
    return os.fspath(path) if in_bucket(path) else os.path.abspath(path)


def user_cache(name: str) -> Path:
    """Return a folder in the user's cache, for files that can be made again; it is created if needed.

    Raises:
        InputError: there is no home directory, as in a container whose user id has no passwd entry, or the folder
            cannot be written.
    """
    set_it = "set XDG_CACHE_HOME to a folder that can be written"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith(("~", os.devnull)):  # programs set HOME to the latter where there is none
        raise InputError(f"HOME is not set, and user id {os.getuid()} has no home directory; {set_it}")
    folder = Path(cache, "astra-jax", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror}; {set_it}") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} cannot be written; {set_it}")
    return folder


def unpacked(path: Path) -> IO[bytes]:
    """Open a file on disk for reading; gunzipped if its name ends in .gz."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def read_unpacked(path: Path) -> bytes:
    """Read all of such a file, up to `MOST_BYTES`, since a few packed megabytes may unpack to any size.

    Raises:
        InputError: it has more.
        OSError, EOFError, zlib.error: it cannot be read, or its content is not valid.
    """
    with unpacked(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InputError(f"{path} has more than {MOST_BYTES >> 20:,} MiB unpacked; cut it into several files")
    return data


def unpacked_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of such a file, each of `MOST_LINE_BYTES` at most. Raises as `read_unpacked`."""
    with unpacked(path) as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise InputError(
                    f"{path}, line {number} has more than {MOST_LINE_BYTES >> 20} MiB; a record has a line of its own"
                )
            yield line


def write_text(path: Path | epath.Path, text: str) -> None:
    """Write UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path | epath.Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, also after a crash. Makes the folder.

    Raises:
        StorageError: it could not be written to a bucket.
        LeaseError: another process has taken over the location that this one held.
        RemovedError: the folder that this process holds was removed or replaced.
        OSError: it could not be written to the disk.
    """
    check_held(path)
    if in_bucket(path):
        try:
            path.write_bytes(data)
        except Exception as error:
            raise StorageError(
                f"{path} could not be written ({first_line(error)}); check the bucket and run the same command again"
            ) from error
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with naming(path), open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextlib.contextmanager
def naming(path: Folder) -> Iterator[None]:
    """Add this file's name to an operating system error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def copy_files(source: Path, target: epath.Path) -> None:
    """Copy all files below a folder on disk to the same names below another. Raises as `write_bytes` does."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            write_bytes(target / file.relative_to(source), file.read_bytes())


@contextlib.contextmanager
def on_disk(folder: epath.Path) -> Iterator[Path]:
    """Yield a folder for code that knows no buckets: `folder` itself, or one whose files are copied there
    afterwards."""
    if not in_bucket(folder):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="astra-") as made:
        try:
            yield Path(made)
        finally:
            copy_files(Path(made), folder)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
