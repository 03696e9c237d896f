"""One program at a time in a folder; what it holds it may enter again, and nobody else's lock is taken away."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from astra_jax.base.files import RemovedError, write_text
from astra_jax.run.metrics import MetricWriter
from synthesis.astra_format.records import write_rows
from synthesis.core.datasets import write_dataset
from synthesis.core.journal import Journal
from synthesis.core.records import Trajectory
from synthesis.core.stages import run_stage
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


def replace_by_another(workdir: Path) -> None:
    """Leave an empty folder of the same name, as an unmounted disk does."""
    shutil.rmtree(workdir)
    workdir.mkdir()


def replace_by_other_run(workdir: Path) -> None:
    replace_by_another(workdir)
    assert try_elsewhere("locked", workdir) == ""


def replace_by_file(workdir: Path) -> None:
    shutil.rmtree(workdir)
    workdir.write_text("")


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != LOCK}


WAYS = {
    "removed": shutil.rmtree,
    "moved": lambda workdir: workdir.rename(workdir.with_name("elsewhere")),
    "its_parent_moved": lambda workdir: workdir.parent.rename(workdir.parent.with_name("elsewhere")),
    "replaced": replace_by_another,
    "of_another_run": replace_by_other_run,
    "a_file": replace_by_file,
    "its_lock_removed": lambda workdir: (workdir / LOCK).unlink(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_workdir_that_is_gone_is_refused_by_each_writer_and_not_made_again(tmp_path, way: str) -> None:
    workdir = tmp_path / "runs" / "mine"
    with pytest.raises(RemovedError), locked(workdir):
        journal, metrics = Journal(workdir / "journal.sqlite"), MetricWriter(workdir / "metrics")
        journal.add("stage", "before", b"{}")
        journal.commit()
        metrics.write(1, {"loss": 1.0})
        WAYS[way](workdir)
        there = files_below(tmp_path)
        writers: dict[str, Callable[[], object]] = {
            "text": lambda: write_text(workdir / "cards" / "card.json", "{}"),
            "dataset": lambda: write_dataset(workdir / "data", Trajectory, [], card={}),
            "rows": lambda: write_rows(workdir / "rows" / "all.jsonl", [{}]),
            "store": lambda: Journal(workdir / "journals" / "other.sqlite"),
            "journal": lambda: (journal.add("stage", "after", b"{}"), journal.commit()),
            "metrics": lambda: metrics.write(2, {"loss": 0.5}),
            "changed metrics": lambda: metrics.amend(1, {"seconds": 0.5}),
            "new metrics": lambda: MetricWriter(workdir / "metrics2"),
        }
        for name, write in writers.items():
            with pytest.raises(RemovedError, match=f"^{workdir} was removed, moved or replaced while") as raised:
                write()
                pytest.fail(name)
            assert "move it back" in str(raised.value)
        assert files_below(tmp_path) == there


def test_what_lies_beside_a_workdir_that_is_gone_can_be_written(tmp_path) -> None:
    with pytest.raises(RemovedError), locked(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        write_text(tmp_path / "run2" / "card.json", "{}")
    assert (tmp_path / "run2" / "card.json").exists()


def test_a_relative_path_and_a_workdir_that_is_a_link_are_known_again(tmp_path, monkeypatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RemovedError), locked("run"):
        write_text(Path("run/card.json"), "{}")
        (tmp_path / "disk").rename(tmp_path / "elsewhere")
        with pytest.raises(RemovedError):
            write_text(Path("run/../run/card.json"), "{}")


def test_a_target_whose_folder_is_gone_is_refused(tmp_path) -> None:
    with pytest.raises(RemovedError), locked_target(tmp_path / "out" / "data"):
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(RemovedError, match=f"^{tmp_path / 'out'} was removed"):
            write_dataset(tmp_path / "out" / "data", Trajectory, [], card={})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [FileNotFoundError("a library's"), RuntimeError("a library's"), None])
def test_the_end_of_a_hold_names_a_removed_workdir_whatever_failed_of_it(tmp_path, error: Exception | None) -> None:
    with pytest.raises(RemovedError, match="was removed"), locked(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        if error is not None:
            raise error
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        raise KeyboardInterrupt


async def test_a_stage_whose_workdir_is_removed_stops(tmp_path) -> None:
    workdir, begun = tmp_path / "run", []

    async def work(number: int) -> list[int]:
        begun.append(number)
        if number == 3:
            shutil.rmtree(workdir)
        return [number]

    with pytest.raises(RemovedError), locked(workdir), Journal(workdir / "journal.sqlite") as journal:
        journal.COMMIT_SECONDS = 0.0
        await run_stage("work", work, range(100), key=str, out=int, journal=journal, concurrency=1)
    assert len(begun) < 100 and not workdir.exists()
