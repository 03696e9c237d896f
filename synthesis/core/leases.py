"""Who works in a bucket's folder: an object that its holder renews, since a bucket has no locks.

An object is made, or replaced, only if it is of the generation that the writer saw (Cloud Storage's preconditions,
`ifGenerationMatch`), so of two only one can. A holder that ends removes it. One that was killed no longer renews it:
who comes next sees that for as long as a lease holds, by its own clock, and then takes it over. Who was only asleep
finds that out at its next renewal, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

from synthesis.core.files import StorageError, first_line
from synthesis.core.refusals import Refusal
from synthesis.core.terminal import say

LEASE_SECONDS = 60.0
"""For so long nobody takes over from a holder that is silent."""


class LeaseError(Refusal):
    """Somebody else holds it, or has taken it over; the message says who."""


@contextlib.contextmanager
def leased(file: epath.Path, state: str, remedy: str) -> Iterator[None]:
    """Hold an object in a bucket.

    If another takes it over, because this process was asleep or cut off for `LEASE_SECONDS`, the main thread is
    interrupted in what it does under the lease.

    Args:
        file: the object's place, `gs://BUCKET/NAME`.
        state: what holding it means, to begin the message with.
        remedy: to end it with.

    Raises:
        LeaseError: another process holds it, or has taken it over meanwhile.
        StorageError: the bucket cannot be written.
    """
    from google.cloud import storage

    lease = _Lease(storage.Client().bucket(file.parts[2]).blob("/".join(file.parts[3:])), file, state, remedy)
    lease.take()
    renewing = threading.Thread(target=lease.keep, name=f"lease of {file}", daemon=True)
    renewing.start()
    try:
        try:
            yield
        finally:
            lease.ended.set()
            renewing.join()
    except (KeyboardInterrupt, asyncio.CancelledError):  # asyncio makes the one of the other
        if lease.taken_by is None:
            raise
    finally:
        lease.give_back()
    if lease.taken_by is not None:
        raise LeaseError(
            f"{state} by another process ({lease.taken_by}), which took over since this one was silent for more than "
            f"{LEASE_SECONDS:.0f} s; this one ended. {remedy}"
        )


class _Lease:
    """One hold; its text is this process's alone, so that a write whose answer was lost is known again."""

    def __init__(self, blob: Any, file: epath.Path, state: str, remedy: str) -> None:
        self.ended = threading.Event()
        self.taken_by: str | None = None
        self._blob, self._file, self._state, self._remedy = blob, file, state, remedy
        self._holder, self._token = f"process {os.getpid()} of {socket.gethostname()}", uuid.uuid4().hex
        self._generation = 0

    def take(self) -> None:
        """Make the object, or take it over from who renews it no longer."""
        try:
            while (found := self._refused(over=0)) is not None:
                generation, holder = found
                if generation and self._abandoned(generation, holder) and self._refused(over=generation) is None:
                    return
        except Refusal:
            raise
        except Exception as error:  # of the libraries below, without a common base
            raise StorageError(
                f"{self._file} could not be written ({first_line(error)}); see to the bucket and run the same command "
                "again"
            ) from error

    def keep(self) -> None:
        """Renew the object until the hold ends, or is another's."""
        while not self.ended.wait(LEASE_SECONDS / 4):
            try:
                if (found := self._refused(over=self._generation)) is None:
                    continue
                generation, holder = found
                # It is gone where somebody removed it by hand; then whoever wants it next may have it.
                if not generation and self._refused(over=0) is None:
                    continue
                self.taken_by = holder
            except Exception:  # such as of a network that is gone for a while: the next renewal will tell
                continue
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return

    def give_back(self) -> None:
        """Remove the object, if it is still this hold's."""
        if self.taken_by is None:
            with contextlib.suppress(Exception):  # who comes next waits for the lease's end
                self._blob.delete(if_generation_match=self._generation, timeout=LEASE_SECONDS / 4)

    def _refused(self, over: int) -> tuple[int, str] | None:
        """Write the object if its generation is `over` (0: there is none). None: it is this hold's now; else what is
        there, as `_found` says it."""
        from google.api_core.exceptions import PreconditionFailed

        text = f"{self._holder}\n{self._token}\n{time.time():.0f}\n"
        try:
            self._blob.upload_from_string(text, if_generation_match=over, timeout=LEASE_SECONDS / 4)
        except PreconditionFailed:
            generation, holder, mine = self._found()
            if not mine:
                return generation, holder
            self._generation = generation
            return None
        self._generation = int(self._blob.generation)
        return None

    def _found(self) -> tuple[int, str, bool]:
        """The object's generation, 0 if there is none, who wrote it, and whether this hold did."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        try:
            self._blob.reload(timeout=LEASE_SECONDS / 4)
            generation = int(self._blob.generation)
            lines = self._blob.download_as_bytes(if_generation_match=generation).decode(errors="replace").splitlines()
        except NotFound:
            return 0, "nobody", False
        except PreconditionFailed:  # written between the two questions
            return self._found()
        return generation, (lines or ["another process"])[0][:200], self._token in lines[1:2]

    def _abandoned(self, generation: int, holder: str) -> bool:
        """Watch a holder for as long as its lease holds. False: it ended properly meanwhile.

        Raises:
            LeaseError: it lives.
        """
        said, until = False, time.monotonic() + LEASE_SECONDS
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LEASE_SECONDS / 20))
            seen, _, _ = self._found()
            if not seen:
                return False
            if seen != generation:
                raise LeaseError(f"{self._state} by another process ({holder}); {self._remedy}")
            if not said:
                say(f"{self._file} is of {holder}: waiting for {LEASE_SECONDS:.0f} s to see whether it still runs")
                said = True
        return True
