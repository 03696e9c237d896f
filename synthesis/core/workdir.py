"""A run's folder: whose it is, and one program at a time in it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from synthesis.core.datasets import Folder
from synthesis.core.files import in_bucket, location

LOCK = "lock"
"""The file that the program which works in a workdir holds."""


class WorkdirError(Exception):
    """The workdir is another run's, or another program's at the moment; the message says whose, and what to do."""


@contextlib.contextmanager
def locked(workdir: Folder) -> Iterator[None]:
    """Hold a workdir, which is made if it is not there: two programs would interleave what they write.

    The lock ends with the process, however that ends. A bucket has no locks: there nothing is held.

    Raises:
        WorkdirError: another process holds it.
    """
    if in_bucket(workdir):
        yield
        return
    path = location(workdir) / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkdirError(
                f"{workdir} is in use by another process; wait for it, or use another --workdir"
            ) from None
        yield
