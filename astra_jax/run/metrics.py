"""Training metrics: TensorBoard for people, `metrics.jsonl` for programs.

The JSONL file is the record: one complete line a step, in order, no step twice, also after a crash and a resume. A run
that is exhausted ends it with a line that is no step, see `EXHAUSTED`.

In a bucket, whose objects cannot be appended to, both are written on disk first and copied up whole now and then.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from astra_jax.run.trackers import Tracker
from synthesis.core.datasets import Folder
from synthesis.core.figures import FIGURES
from synthesis.core.files import check_held, copy_files, in_bucket, location, naming, write_text
from synthesis.core.refusals import InputError

FILE = "metrics.jsonl"
EXHAUSTED = "exhausted/"
"""First part of the names in a row that is no step: the run has no batch for the next one. Its `step` is the last
step that was made; when the run resumes, the row leaves."""

FLUSH_SECONDS = 30.0
"""Between two copies to a bucket, which takes an object anew at most once a second, and whole."""


class MetricWriter:
    """Writes scalars by step to `dir`, which is made if it is not there.

    After a resume from step n call `truncate(n)` before the first `write`: steps that are trained again would otherwise
    be in the file twice. A half-written last line, from a crash, is dropped when the file is opened.

    Args:
        trackers: get each row too, and are closed at the end.
    """

    def __init__(self, dir: Folder, trackers: Sequence[Tracker] = ()) -> None:
        self.dir = location(dir)
        self._trackers = trackers
        self._staging = tempfile.TemporaryDirectory(prefix="astra-metrics-") if in_bucket(self.dir) else None
        self._folder = Path(self.dir if self._staging is None else self._staging.name)
        check_held(self.dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._flushed = time.monotonic()
        self._path = self._folder / FILE
        self._file: TextIO | None = None
        self._board: _Board | None = None
        self._purge: int | None = None
        if (self.dir / FILE).exists():
            rows = read_metrics(self.dir)
            self._rewrite(rows)
            self._purge = rows[-1]["step"] + 1 if rows else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row. Values are converted to Python floats; a non-finite one is written as null.

        Raises:
            RemovedError: the workdir was removed or replaced.
        """
        check_held(self.dir)
        line = json.dumps({"step": step, **_finite(values)}) + "\n"
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (open for the run's life)
        with naming(self._path):
            # One write call of a whole line: a crash leaves it there or not, or cut, which the next start repairs.
            self._file.write(line)
            self._file.flush()
        self._show(step, values)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the newest row, where that is of this step; else append a row. Raises as `write`."""
        check_held(self.dir)
        rows = read_metrics(self._folder)
        if not rows or rows[-1]["step"] != step:
            self.write(step, values)
            return
        file, self._file = self._file, None
        with naming(self._path):
            if file is not None:
                file.close()
            self._rewrite([*rows[:-1], rows[-1] | _finite(values)])
        self._show(step, values)

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        """Give a row, or more of it, to TensorBoard, Prometheus and the trackers."""
        row = {name: float(value) for name, value in values.items()}
        with naming(self._path):
            self._opened_board().scalars(step, row)
        FIGURES.row(step, row)
        for tracker in self._trackers:
            tracker.log(step, row)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Return when all rows are where a process that starts after a crash finds them; on disk each is at once.

        Call it before a checkpoint is saved: the steps up to there are never trained again.

        Raises:
            StorageError: they could not be written to the bucket; what was there before still is.
            OSError: or to the disk.
        """
        if self._board is not None:
            with naming(self._path):
                self._board.flush()
        if self._staging is None:
            return
        copy_files(self._folder, self.dir)
        self._flushed = time.monotonic()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Show a text in TensorBoard; it is in no row."""
        with naming(self._path):  # indented, it is shown as it is
            self._opened_board().text(step, name, "\n".join("    " + line for line in text.splitlines()))

    def truncate(self, step: int) -> None:
        """Forget rows after `step`; call it when training resumes from there."""
        self._close_files()
        if self._path.exists():
            rows = read_metrics(self._folder)
            self._rewrite([row for row in rows if row["step"] <= step and not is_exhausted(row)])
        self._purge = step + 1

    def close(self) -> None:
        trackers, self._trackers = self._trackers, ()
        try:
            self._close_files()
        finally:
            for tracker in trackers:
                tracker.close()

    def _close_files(self) -> None:
        file, self._file = self._file, None
        board, self._board = self._board, None
        with naming(self._path):
            if file is not None:
                file.close()
            if board is not None:
                board.close()
        if board is not None:
            self.flush()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened_board(self) -> _Board:
        if self._board is None:
            self._board = _Board(self._folder, self._purge)
        return self._board

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows))


UNUSED = ("torch", "google.cloud.storage", "boto3")
"""What tensorboardX imports where it is installed, for tensors that we never give it and buckets that it never writes
to: 1.6 and 0.3 s of a start's processor time."""


@contextlib.contextmanager
def _without(modules: Iterable[str]) -> Iterator[None]:
    """For an import: those that nobody has imported are as if they were not installed."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # an import of None raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


class _Board:
    """TensorBoard's file of events, written here and now.

    `tensorboardX.SummaryWriter` writes in a thread, which a full disk ends; then it waits for that thread for ever.

    Args:
        purge: TensorBoard hides what an earlier process wrote for this step and those after, which come again.
    """

    def __init__(self, folder: Path, purge: int | None) -> None:
        # Not at a program's start: not every program or host gets here.
        with _without(UNUSED):
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2

        self._kinds, self._summary = event_pb2, summary
        self._events = EventsWriter(str(folder / "events"))
        if purge is not None:
            self._add(purge, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def scalars(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._add(step, summary=self._summary.scalar(name, value))

    def text(self, step: int, name: str, text: str) -> None:
        self._add(step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        try:
            self._events.close()
        except OSError:
            # It leaves its file open then, and Python 3.13 prints the error once more when it drops the file.
            with contextlib.suppress(OSError):
                self._events._py_recordio_writer.close()
            raise

    def _add(self, step: int, **what: Any) -> None:
        self._events.write_event(self._kinds.Event(wall_time=time.time(), step=step, **what))


def is_exhausted(row: Mapping[str, Any]) -> bool:
    """Whether a row is no step, see `EXHAUSTED`."""
    return any(name.startswith(EXHAUSTED) for name in row)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Values as a line of the file has them."""
    row = {name: float(value) for name, value in values.items()}
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def read_metrics(dir: Folder) -> list[dict[str, Any]]:
    """The complete rows of `dir/metrics.jsonl`, each `{"step": int, name: float | None, …}`; empty without a file.

    Raises:
        ValueError: a line other than a cut-off last one is not JSON.
    """
    path = location(dir) / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    complete, rows = lines[:-1], []  # what follows the last newline is empty, or a line that a crash cut off
    for number, line in enumerate(complete, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON ({error}); delete the line") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise InputError(f"{path}, line {number} is no row of metrics; delete the line")
        rows.append(row)
    return rows
