"""Peak memory of a block of code, native allocations included.

`tracemalloc` would count Python's allocations to the byte, but its `start` and `stop` replace the allocators of the
whole process. Before Python 3.12.9 and 3.13.2, and in every 3.11, this crashes a thread that starts, exits or takes the
GIL at that moment, as TensorStore's threads do (https://github.com/python/cpython/issues/128679).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RESET_PEAK = "5"
"""Written to `clear_refs`: see proc_pid_clear_refs(5)."""


@dataclass
class PeakMemory:
    """Growth of the process's resident memory.

    Attributes:
        bytes: the highest resident size within the block minus the size before it; set when the block ends.
    """

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure how much the resident memory of this process grows within the block, at most, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free but resident would hide growth
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before, peak = _status("VmRSS"), PeakMemory()
    try:
        yield peak
    finally:
        peak.bytes = max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
