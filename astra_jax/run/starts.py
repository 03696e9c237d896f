"""Starts of a run that come to nothing, counted in its workdir, so that whatever starts it again does not for ever.

Engines that restart a job count its faults over the whole job, or not at all; what they cannot see is whether it gets
on. A start counts from its beginning, since a machine that is taken away says nothing; one that ends as it should
takes itself back.
"""

from __future__ import annotations

import contextlib

import msgspec

from synthesis.core.datasets import Folder
from synthesis.core.files import StorageError, location, write_text
from synthesis.core.refusals import Refusal
from synthesis.core.typed import decode_json

FILE = "starts.json"
"""In a run's workdir."""


class FaultsError(Refusal):
    """A run has ended with a fault again and again, and has not got on; the message says where it stands."""


class _Stand(msgspec.Struct, frozen=True):
    """How far the last start found the run, and how many in a row have found it there."""

    step: int
    kept: int
    faults: int


class Starts:
    """The count of one workdir; of several hosts the first one's alone.

    Args:
        workdir: on disk or in a bucket.
        most: starts in a row that may end with a fault from the same place; 0: any number.
    """

    def __init__(self, workdir: Folder, most: int) -> None:
        self._path, self._most = location(workdir) / FILE, most
        self._before: _Stand | None = None

    def begin(self, step: int, kept: int) -> None:
        """Note a start.

        Args:
            step: of the checkpoint that it goes on from; 0: of none.
            kept: of what is done since then and survives a fault, in whatever unit: more of it is progress too.

        Raises:
            FaultsError: `most` starts have found the run here, and ended with a fault. The next one is let again.
        """
        last = self._read()
        faults = last.faults if last is not None and (step, kept) <= (last.step, last.kept) else 0
        if self._most and faults >= self._most:
            self._write(_Stand(step, kept, 0))  # and stays so: a start that is refused here has nothing to take back
            raise FaultsError(
                f"{faults} starts in a row have ended with a fault and without progress, after step {step}: see what "
                "their logs end with, and mend it; the same command then tries as often again (max_faults)"
            )
        self._before = _Stand(step, kept, faults)
        self._write(_Stand(step, kept, faults + 1))

    def take_back(self) -> None:
        """This start has not ended with a fault. Where that cannot be written, it counts."""
        if self._before is not None:
            with contextlib.suppress(OSError, StorageError):
                self._write(self._before)

    def _read(self) -> _Stand | None:
        try:
            return decode_json(self._path.read_bytes(), _Stand)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _write(self, stand: _Stand) -> None:
        write_text(self._path, msgspec.json.encode(stand).decode())


def is_fault(error: BaseException | None) -> bool:
    """Whether a run that ends with this is one that may go well when it is started again, by whatever does that."""
    if isinstance(error, Refusal):
        return error.away
    return isinstance(error, Exception)
