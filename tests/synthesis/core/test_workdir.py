"""One program at a time in a folder; what it holds it may enter again, and nobody else's lock is taken away."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from synthesis.core.workdir import LOCK, WorkdirError, locked, locked_target

ROOT = Path(__file__).parent.parent.parent.parent


def try_elsewhere(kind: str, path: Path) -> str:
    """What another process is told that wants it; "" where it gets it."""
    code = (
        "import sys; from synthesis.core.workdir import WorkdirError, locked, locked_target\n"
        f"try:\n    with {kind}(sys.argv[1]): pass\nexcept WorkdirError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_a_folder_that_is_held_is_refused_to_others_and_open_to_its_holder(tmp_path) -> None:
    with locked(tmp_path), locked(tmp_path):
        said = try_elsewhere("locked", tmp_path)
        assert said.startswith(f"{tmp_path} is in use by another process (process {os.getpid()} of ")
        assert said.endswith("wait for it, or use another folder")
    assert try_elsewhere("locked", tmp_path) == ""
    assert (tmp_path / LOCK).exists()


def test_the_inner_of_two_holds_ends_nothing(tmp_path) -> None:
    with locked(tmp_path):
        with locked(tmp_path):
            pass
        assert "in use" in try_elsewhere("locked", tmp_path)


def test_a_target_is_held_beside_it_and_leaves_nothing(tmp_path) -> None:
    with locked_target(tmp_path / "data"):
        assert "is being written by another process" in try_elsewhere("locked_target", tmp_path / "data")
        assert not (tmp_path / "data").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_asked_for_again(tmp_path, monkeypatch) -> None:
    """Its holder removes it at the end: who opened it before would hold a file that nobody else finds."""
    real, removed = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not removed:
            removed.append((tmp_path / ".data.lock").unlink())
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked_target(tmp_path / "data"):
        monkeypatch.undo()
        assert "is being written" in try_elsewhere("locked_target", tmp_path / "data")


def test_a_disk_without_locks_is_not_called_in_use(tmp_path, monkeypatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    refused = pytest.raises(
        WorkdirError, match="lock cannot be locked .No locks available.; use a folder on another disk"
    )
    with refused, locked(tmp_path):
        pytest.fail("it was not held")
