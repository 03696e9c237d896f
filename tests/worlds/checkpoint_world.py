"""What goes wrong with checkpoints, and where it harms nobody else."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def cut_in_half(step: Path) -> None:
    """Damage what a step's folder holds of arrays: each of their files keeps its first half."""
    for path in step.rglob("*"):
        if path.is_file() and "d" in path.parts:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file of this process may have more bytes, as on a disk on which so much is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def in_its_own_process(file: Path) -> str:
    """What pytest says of a file of tests of disks that fail, in a process that ends with them.

    Threads of Orbax and TensorStore outlive a save that has failed, and in two of some forty runs one of them crashed,
    seconds later, the process that went on.
    """
    ends = "import os, sys, pytest; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"COLUMNS": "250"}
    command = [sys.executable, "-c", ends, "-q", "-n0", "-p", "no:cacheprovider", str(file)]
    ended = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout
