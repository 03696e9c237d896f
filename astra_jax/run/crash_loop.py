"""Count of a run's starts without progress, kept in its workdir, so that a restarting service gives up eventually.

Services that restart a job count its faults in total, or not at all, and cannot see its progress. A start is counted
when it begins, since a reclaimed machine gives no notice; a start without a fault is subtracted when it ends.
"""

from __future__ import annotations

import contextlib

import msgspec

from astra_jax.base.errors import UserError
from astra_jax.base.files import StorageError, location, write_text
from astra_jax.base.typed import decode_json
from synthesis.core.datasets import Folder

FILE = "starts.json"
"""File name in a run's workdir."""


class FaultsError(UserError):
    """A run ended with a fault repeatedly without progress. The message says at which step."""


class _LastStart(msgspec.Struct, frozen=True):
    """Progress of the run at its last start, and the number of consecutive starts with the same progress."""

    step: int
    kept: int
    faults: int


class CrashLoopGuard:
    """Count of starts in one workdir, on the first host only.

    Args:
        workdir: on disk or in a bucket.
        most: starts in a row that may end with a fault at the same progress; 0 for no limit.
    """

    def __init__(self, workdir: Folder, most: int) -> None:
        self._path, self._most = location(workdir) / FILE, most
        self._before: _LastStart | None = None

    def begin(self, step: int, kept: int) -> None:
        """Count a start.

        Args:
            step: of the checkpoint that it resumes from; 0 without one.
            kept: amount of later work that survives a fault, in any unit; more of it is progress too.

        Raises:
            FaultsError: `most` starts in a row ended with a fault at this progress. The next start is allowed again.
        """
        last = self._read()
        faults = last.faults if last is not None and (step, kept) <= (last.step, last.kept) else 0
        if self._most and faults >= self._most:
            self._write(_LastStart(step, kept, 0))  # stays so: a refused start has nothing to subtract
            raise FaultsError(
                f"{faults} starts in a row have ended with a fault and without progress, after step {step}: see the "
                "end of their logs, and fix the cause; the same command then tries as often again "
                "(max_failed_restarts)"
            )
        self._before = _LastStart(step, kept, faults)
        self._write(_LastStart(step, kept, faults + 1))

    def take_back(self) -> None:
        """Subtract this start, which did not end with a fault. If that cannot be written, the start counts."""
        if self._before is not None:
            with contextlib.suppress(OSError, StorageError):
                self._write(self._before)

    def _read(self) -> _LastStart | None:
        try:
            return decode_json(self._path.read_bytes(), _LastStart)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _write(self, stand: _LastStart) -> None:
        write_text(self._path, msgspec.json.encode(stand).decode())


def is_fault(error: BaseException | None) -> bool:
    """Return whether a run that ends with this error may succeed when it is restarted."""
    if isinstance(error, UserError):
        return error.away
    return isinstance(error, Exception)
