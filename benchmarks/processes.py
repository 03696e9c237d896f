"""Programs that a benchmark starts, and what runs below them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from astra_jax.base.errors import InputError
from benchmarks import rows


def run(module: str, *arguments: str, environment: Mapping[str, str] | None = None, keep: bool = False) -> str:
    """Run a program of this checkout to its end, its errors where this process's are.

    Args:
        environment: beside this process's.
        keep: return what it prints, in place of showing it.

    Raises:
        InputError: it ended with an error, which it has said itself.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=rows.ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE if keep else None,
        text=True,
    )
    if done.returncode:
        raise InputError(f"python -m {module} ended with {done.returncode}; what it said of that is above")
    return done.stdout or ""


def descendants() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat, from the state on (proc(5)), of each process below this one, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(path.parent.name)] = fields
    below = {}
    for pid, fields in found.items():
        above = pid
        while above in found and above != os.getpid():
            above = int(found[above][1])
        if above == os.getpid() != pid:
            below[pid] = fields
    return below
