"""A run's folder: whose it is, one program at a time in it, and how the last one ended."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import fcntl
import functools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from etils import epath

from astra_jax.base.errors import UserError
from astra_jax.base.files import RemovedError, guarding, in_bucket, location, write_text
from astra_jax.base.leases import leased
from astra_jax.base.settings import SettingError
from astra_jax.base.terminal import make_output_optional
from astra_jax.base.typed import decode_json
from synthesis.core.datasets import Folder

LOCK = "lock"
"""The file that the program which works in a workdir holds."""

ENDING = "ending.json"
"""The file of a workdir that has its `RunEnding`."""

_MAX_CHARACTERS = 2_000

_held: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("held", default=frozenset())
"""Locks held in this context: a training that a program calls need not acquire the program's locks."""


class WorkdirError(UserError):
    """The workdir is another run's, or another program's at the moment; the message says whose, and what to do."""


class RunEnding(msgspec.Struct, frozen=True):
    """Ending of the last program that held a workdir.

    Attributes:
        state: `working`: it holds the workdir, or its process ended without a chance to record why. `finished`: it
            left without an error. `preempted`, `stopped`, `exhausted`: as in `astra_jax.run.trainer.StopReason`.
            `interrupted`: Ctrl-C. `failed`: an error ended it.
        why: the error's message, or advice; "" if there is none.
        time: ISO 8601.
    """

    state: Literal["working", "finished", "preempted", "stopped", "exhausted", "interrupted", "failed"]
    why: str = ""
    time: str = ""


def record_ending(workdir: Folder, ending: RunEnding) -> None:
    """Write how a program ends to its workdir, for people and `astra watch`. A failure to write it is ignored."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    whole = msgspec.structs.replace(ending, why=ending.why[:_MAX_CHARACTERS], time=now)
    with contextlib.suppress(OSError, UserError):
        write_text(location(workdir, s3=True) / ENDING, msgspec.json.encode(whole).decode() + "\n")


def read_ending(workdir: Folder) -> RunEnding | None:
    """Return how the last program ended; None if an earlier version wrote the workdir, or the file is damaged."""
    try:
        return decode_json((location(workdir, s3=True) / ENDING).read_bytes(), RunEnding)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None


def _ending_by(error: BaseException) -> RunEnding:
    """Return the ending of a program by an error, with the message that the program prints."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return RunEnding("interrupted")
    said = str(error).strip()
    is_clear = isinstance(error, (UserError, SettingError))
    return RunEnding("failed", said if is_clear else f"{type(error).__name__}{f': {said}' if said else ''}")


@contextlib.contextmanager
def _ending_recorded(workdir: Folder) -> Iterator[None]:
    """Record how the holder of a workdir ends, unless it has recorded that itself."""
    record_ending(workdir, RunEnding("working"))
    try:
        yield
    except BaseException as error:
        record_ending(workdir, _ending_by(error))
        raise
    ending = read_ending(workdir)
    if ending is None or ending.state == "working":
        record_ending(workdir, RunEnding("finished"))


@contextlib.contextmanager
def locked(workdir: Folder) -> Iterator[None]:
    """Hold a workdir, which is made if it is not there: two programs would interleave what they write.

    The lock ends with the process, however that ends; in a bucket, a minute after it (`leases.leased`). Who holds one
    may enter it again. If the workdir is removed, moved or replaced meanwhile, every write below it raises
    `RemovedError` (`files.check_held`), and so does the end of the hold. How the holder ends is recorded (`RunEnding`).

    Raises:
        WorkdirError: another process holds it, or it cannot be held.
        LeaseError: the same, in a bucket.
        StorageError: the bucket cannot be written.
    """
    state, remedy = f"{workdir} is in use", "wait for it, or use another folder"
    if in_bucket(workdir):
        place = location(workdir, s3=True)
        name = os.fspath(place / LOCK)
        holding = _leased(place / LOCK, state, remedy, of=place)
    else:
        folder = Path(location(workdir))
        folder.mkdir(parents=True, exist_ok=True)
        name = os.path.realpath(folder / LOCK)
        holding = _locked_file(folder / LOCK, state, remedy, of=folder)
    recording: contextlib.AbstractContextManager[None]
    recording = contextlib.nullcontext() if name in _held.get() else _ending_recorded(workdir)
    with holding, recording:
        yield


@contextlib.contextmanager
def locked_target(path: Folder) -> Iterator[None]:
    """Hold the place of a folder or file that is written whole, as `locked` does, by a hidden file beside it.

    Raises:
        WorkdirError, LeaseError, StorageError: as `locked`.
    """
    state, remedy = f"{path} is being written", "wait for it, or give another name"
    target = location(path, s3=True)
    hidden = target.with_name(f".{target.name}.{LOCK}")
    if in_bucket(path):
        with _leased(hidden, state, remedy, of=target):
            yield
        return
    Path(target.parent).mkdir(parents=True, exist_ok=True)
    with _locked_file(Path(hidden), state, remedy, of=Path(target), leave=False):
        yield


@contextlib.contextmanager
def _locked_file(file: Path, state: str, remedy: str, *, of: Path, leave: bool = True) -> Iterator[None]:
    """Hold a lock's file, which says who holds it.

    Args:
        of: the folder or file that is held by it, and that nothing may be written to once the lock's file is gone.
        state: what holding it means, to begin the message with.
        remedy: to end it with.
        leave: the file stays when it is held no longer.

    Raises:
        WorkdirError: another process holds it, or its disk knows no locks.
        RemovedError: when it is left, in place of any other error: the file was removed or replaced.
    """
    name = os.path.realpath(file)
    if name in _held.get():
        yield
        return
    with _opened(file, state, remedy) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
        check = functools.partial(_check_present, file, descriptor)
        with _noted(name), guarding(of, check):
            try:
                yield
                check()  # the last results may have been removed
            except Exception:
                check()  # a library's error that a file is missing does not name the cause
                raise
            finally:
                if not leave and _is_open(file, descriptor):
                    file.unlink(missing_ok=True)


def _check_present(file: Path, descriptor: int) -> None:
    """Check that a lock's file is still in its place. Raises `RemovedError`."""
    if not _is_open(file, descriptor):
        raise RemovedError(os.path.abspath(file.parent))


def _is_open(file: Path, descriptor: int) -> bool:
    """Return whether the file of this name is the open one. The number of an open file is given to no other one."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def _leased(file: epath.Path, state: str, remedy: str, *, of: epath.Path) -> Iterator[None]:
    if (name := os.fspath(file)) in _held.get():
        yield
        return
    with leased(file, state, remedy, of=of), _noted(name):
        yield


@contextlib.contextmanager
def _noted(name: str) -> Iterator[None]:
    make_output_optional()
    _held.set(_held.get() | {name})
    try:
        yield
    finally:
        _held.set(_held.get() - {name})


@contextlib.contextmanager
def _opened(file: Path, state: str, remedy: str) -> Iterator[int]:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                raise WorkdirError(f"{state} by another process ({holder}); {remedy}") from None
            except OSError as error:  # such as a disk of the network without its lock service
                raise WorkdirError(
                    f"{file} cannot be locked ({error.strerror}); use a folder on another disk"
                ) from None
            # The holder may have removed the file meanwhile: then this lock protects nothing.
            if _is_open(file, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)
