"""Exclusive lock on a bucket's folder: an object that its holder renews, since a bucket has no locks.

The object is created or replaced only if it is unchanged since the writer read it (`buckets.Guarded`), so only one of
two writers succeeds. A holder removes it at its end.

A killed holder stops renewing. Another process watches the object for the length of a lease, by its own clock, and then
takes it over. A holder that was only suspended notices this at its next renewal, and ends. Its writes before that are
refused (`files.check_held`). After a takeover the new holder leaves the object at its end, marked as free. Otherwise a
suspended holder could not notice that it was taken over meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from etils import epath

from astra_jax.base.buckets import Guarded, guarded
from astra_jax.base.errors import UserError
from astra_jax.base.files import StorageError, first_line, guarding
from astra_jax.base.terminal import say

LEASE_SECONDS = 60.0
"""For so long nobody takes over from a holder that is silent."""
_FRESH_SECONDS = 1.0
"""A renewal that is younger is not repeated before a write: a service takes one write of an object a second."""
NOBODY = "nobody"
"""In the place of a holder's name."""


class LeaseError(UserError):
    """Somebody else holds it, or has taken it over; the message says who."""


@contextlib.contextmanager
def leased(file: epath.Path, state: str, remedy: str, *, of: epath.Path) -> Iterator[None]:
    """Hold a lease in a bucket.

    Another process may take it over if this one was suspended or disconnected for `LEASE_SECONDS`. Then the main thread
    is interrupted inside the context, and `files.check_held` refuses its writes.

    Args:
        file: path of the object, `gs://BUCKET/NAME` or `s3://BUCKET/NAME`.
        of: path that the lease protects: a folder with everything below it, or a file.
        state: start of the error message: what holding the lease means.
        remedy: end of the error message: the fix.

    Raises:
        LeaseError: another process holds it, or has taken it over.
        StorageError: the bucket cannot be written.
    """
    lease = _Lease(guarded(file, LEASE_SECONDS / 4), file, state, remedy)
    lease.take()
    renewing = threading.Thread(target=lease.keep, name=f"lease of {file}", daemon=True)
    renewing.start()
    try:
        try:
            with guarding(of, lease.check):
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
        raise lease.lost()


class _Lease:
    """One hold; its text is this process's alone, so that a write whose answer was lost is known again."""

    def __init__(self, object: Guarded, file: epath.Path, state: str, remedy: str) -> None:
        self.ended = threading.Event()
        self.taken_by: str | None = None
        self._object, self._file, self._state, self._remedy = object, file, state, remedy
        self._holder, self._token = f"process {os.getpid()} of {socket.gethostname()}", uuid.uuid4().hex
        self._stamp = ""
        self._renewed = -math.inf
        self._took_over = False
        self._writing = threading.Lock()
        """Renewals come from the thread that keeps it, and from each writer before it writes."""

    def take(self) -> None:
        """Make the object, or take it over from who renews it no longer."""
        try:
            while (found := self._refused(over="")) is not None:
                stamp, holder = found
                if not stamp or not (holder == NOBODY or self._abandoned(stamp, holder)):
                    continue
                if self._refused(over=stamp) is None:
                    self._took_over = True
                    return
        except UserError:
            raise
        except Exception as error:  # of the libraries below, without a common base
            raise StorageError(
                f"{self._file} could not be written ({first_line(error)}); check the bucket and run the same command "
                "again"
            ) from error

    def keep(self) -> None:
        """Renew the object until the hold ends, or is another's."""
        while not self.ended.wait(LEASE_SECONDS / 4):
            try:
                if self._renew():
                    continue
            except Exception:  # such as of a network that is gone for a while: the next renewal will tell
                continue
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return

    def check(self) -> None:
        """Check that this process still holds the lease, with time left: a lease that was just renewed is not taken
        over.

        Raises:
            LeaseError: another process holds it.
            StorageError: it cannot be checked, and the last renewal was long ago.
        """
        if self.taken_by is None and not self.ended.is_set():
            if _clock() - self._renewed < _FRESH_SECONDS:
                return
            try:
                if self._renew():
                    return
            except Exception as error:
                if _clock() - self._renewed < LEASE_SECONDS / 2:
                    return
                raise StorageError(
                    f"{self._file} could not be renewed ({first_line(error)}), so this process may have lost the lock; "
                    "check the bucket and run the same command again"
                ) from error
        raise self.lost()

    def lost(self) -> LeaseError:
        """Return the error for a lease that another process holds."""
        if self.taken_by is None:  # whoever held it has left it, and something of it still writes
            return LeaseError(f"{self._file} is held no longer, and what would be written under it is given up")
        silent = f"since this one was silent for more than {LEASE_SECONDS:.0f} s; this one ended"
        if self.taken_by == NOBODY:
            return LeaseError(
                f"{self._file} was taken over by another process, which has ended, {silent}, and work that was not "
                "written by then is lost. Run the same command again to resume"
            )
        return LeaseError(
            f"{self._state} by another process ({self.taken_by}), which took over {silent}, and what it had not "
            f"written by then is given up; {self._remedy}"
        )

    def give_back(self) -> None:
        """Remove the object, if it is still this hold's; or leave it as nobody's."""
        if self.taken_by is None:
            with contextlib.suppress(Exception):  # who comes next waits for the lease's end
                if self._took_over:
                    self._object.write(f"{NOBODY}\n\n{time.time_ns()}\n".encode(), self._stamp)
                else:
                    self._object.remove(self._stamp)

    def _renew(self) -> bool:
        """Replace the object to renew the lease. Return False if another process holds it."""
        with self._writing:
            if self.taken_by is None and (found := self._refused(over=self._stamp)) is not None:
                # It is gone where somebody removed it by hand; then whoever wants it next may have it.
                if not found[0]:
                    found = self._refused(over="")
                if found is not None:
                    self.taken_by = found[1]
            return self.taken_by is None

    def _refused(self, over: str) -> tuple[str, str] | None:
        """Write the object if its stamp is `over` (empty: there is none). None: it is this hold's now; else the stamp
        of what is there, empty if nothing is, and who wrote that."""
        began = _clock()
        text = f"{self._holder}\n{self._token}\n{time.time_ns()}\n"  # on S3 the stamp is of the content
        stamp = self._object.write(text.encode(), over)
        if stamp is None:
            stamp, holder, mine = self._found()
            if not mine:
                return stamp, holder
        else:
            self._renewed = began
        self._stamp = stamp
        return None

    def _found(self) -> tuple[str, str, bool]:
        """The object's stamp, empty if there is none, who wrote it, and whether this hold did."""
        stamp, data = self._object.read()
        if not stamp:
            return "", NOBODY, False
        lines = data.decode(errors="replace").splitlines()
        return stamp, (lines or ["another process"])[0][:200], self._token in lines[1:2]

    def _abandoned(self, stamp: str, holder: str) -> bool:
        """Watch a holder for as long as its lease holds. False: it ended properly meanwhile.

        Raises:
            LeaseError: it lives.
        """
        said, until = False, time.monotonic() + LEASE_SECONDS
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LEASE_SECONDS / 20))
            seen, who, _ = self._found()
            if who == NOBODY:
                return False
            if seen != stamp:
                raise LeaseError(f"{self._state} by another process ({holder}); {self._remedy}")
            if not said:
                say(f"{self._file} is of {holder}: waiting for {LEASE_SECONDS:.0f} s to see whether it still runs")
                said = True
        return True


def _clock() -> float:
    """Seconds, those in which the machine slept too."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # the first is Linux's alone
