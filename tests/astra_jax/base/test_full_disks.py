"""What is written to a disk without room is refused by name, and what was there stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from astra_jax.base.errors import InputError
from synthesis.core.journal import Journal, StoreError

ROOT = Path(__file__).parent.parent.parent.parent

WRITE = """
import resource, sys
from pathlib import Path
folder = Path(sys.argv[1])
from synthesis.core.datasets import DatasetError, read_dataset, write_dataset
from astra_jax.base.files import write_text
from synthesis.core.records import Verdict
from astra_jax.run.metrics import MetricWriter
card, some, many = {"from": "tests"}, [Verdict(True, "kept")], [Verdict(True, str(i) * 50) for i in range(2000)]
write_dataset(folder / "data", Verdict, some, card=card)
write_text(folder / "text", "kept")
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
for what in (
    lambda: write_dataset(folder / "data", Verdict, many, card=card),
    lambda: write_text(folder / "text", "x" * 20000),
    lambda: [metrics.write(step, {"loss": 1.0, "norm": 2.0}) for step in range(1000)],
):
    try:
        with MetricWriter(folder / "metrics") as metrics:
            what()
    except (DatasetError, OSError) as error:
        print(type(error).__name__, error)
assert read_dataset(folder / "data", Verdict) == some and (folder / "text").read_text() == "kept"
"""


def test_what_was_there_stays_and_the_path_is_said(tmp_path) -> None:
    """Metrics too, whose writer for TensorBoard waited for ever for a thread that the disk had ended."""
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    dataset, text, metrics = done.stdout.splitlines()
    assert dataset.startswith(f"DatasetError {tmp_path}/data could not be written (write() failed: File too large")
    assert text == f"OSError [Errno 27] File too large: '{tmp_path}/text'"
    assert metrics.startswith(f"OSError [Errno 27] File too large: '{tmp_path}/metrics/metrics.jsonl'")


def test_a_journal_on_a_full_disk_is_not_called_broken(tmp_path) -> None:
    """The remedy was to delete it: all finished work, of a paid teacher's too."""
    path = tmp_path / "journal.sqlite"
    said = r"journal.sqlite could not be written \(database or disk is full\); .* is kept"
    with pytest.raises(StoreError, match=said), Journal(path) as journal:
        journal.add("stage", "kept", b"whole")
        journal.commit()
        journal._db.execute("PRAGMA max_page_count=8")
        for number in range(100):
            journal.add("stage", str(number), os.urandom(4096))  # which packs to no less
            journal.commit()
    with Journal(path) as again:
        assert "kept" in again.load("stage")


def test_a_file_that_is_no_journal_still_is_none(tmp_path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no SQLite at all" * 100)
    with pytest.raises(InputError, match="is not a journal .file is not a database.; delete it to synthesise anew"):
        Journal(tmp_path / "journal.sqlite")


AT_EXIT = """
import sys
from pathlib import Path
from synthesis.core.journal import Journal
folder = Path(sys.argv[1])
made = [Journal(folder / f"{name}.sqlite") for name in "abcde"]
for one in made:
    one.COMMIT_SECONDS = 1e9
    one.add("stage", "key", b"[]")
made[2].commit()
made[2]._db.execute("PRAGMA query_only=1")
made[2]._flush = lambda: made[2]._db.execute("DELETE FROM done")
"""


def test_one_store_that_cannot_be_written_keeps_no_other_from_it_at_exit(tmp_path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{tmp_path}/c.sqlite could not be written (attempt to write a readonly database)" in done.stderr
    for name in "abcde":
        with Journal(tmp_path / f"{name}.sqlite") as journal:
            assert journal.load("stage").keys() == {"key"}
