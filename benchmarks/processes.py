"""What runs below this process, for benchmarks of programs that start others."""

from __future__ import annotations

import os
from pathlib import Path


def descendants() -> dict[int, list[str]]:
    """What /proc says of each process below this one, from its state on (proc(5)), by its id."""
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
