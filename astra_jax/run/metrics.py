"""Training metrics: TensorBoard for people, `metrics.jsonl` for programs.

The JSONL file is the record: one complete line a step, in order, without duplicates, also after a crash and a resume.
For an exhausted run the last line is not a step, see `EXHAUSTED`.

In a bucket, whose objects cannot be appended to, both are written on disk first and copied regularly as a whole.
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

from astra_jax.base.errors import InputError
from astra_jax.base.files import check_held, copy_files, in_bucket, location, naming, write_text
from astra_jax.base.metrics import METRICS
from astra_jax.run.trackers import LoggedSample, Tracker
from synthesis.core.datasets import Folder

FILE = "metrics.jsonl"
EXHAUSTED = "exhausted/"
"""Prefix of the names in a row that is not a step: there was no batch for the next step. Its `step` is the last
completed one; when the run resumes, the row is removed."""

_FORMER_METRICS = {
    **{name: f"train/{name}" for name in ("loss", "learning_rate", "trained_tokens", "skipped_steps")},
    **{name: f"train/{name}" for name in ("router_entropy", "router_max_load", "router_idle_share")},
    **{name: f"data/{name}" for name in ("mask_share", "padding_share", "row_tokens")},
    **{name: f"perf/{name}" for name in ("tokens_per_second", "mfu", "peak_host_memory_gib")},
    **{f"train/{name}": f"perf/{name}" for name in ("mfu", "peak_host_memory_gib")},
    "peak_memory_gib": "perf/peak_device_memory_gib",
    "train/peak_memory_gib": "perf/peak_device_memory_gib",
    "gradient_norm": "train/grad_norm",
    "train/gradient_norm": "train/grad_norm",
    "train/shared_share": "data/shared_share",
    "held_out_loss": "eval/loss",
    "checkpoint_seconds": "seconds/checkpoint",
    "tokens_per_second/rollout": "rollout/tokens_per_second",
    "goodput/began": "goodput/started_at",
    "filling/groups_within_delta": "filling/groups_below_min_std",
    "filling/groups_voided": "filling/groups_unscored",
    "filling/journal_unkept": "filling/journal_unwritten",
    "exhausted/groups_within_delta": "exhausted/groups_below_min_std",
    "exhausted/groups_voided": "exhausted/groups_unscored",
}
_FORMER_FILL = "train/row_fill"

FLUSH_SECONDS = 30.0
"""Seconds between two copies to a bucket, which accepts at most one whole write of an object a second."""


class MetricWriter:
    """Writes scalars by step to `dir`, which is created if missing.

    After a resume from step n call `truncate(n)` before the first `write`, or retrained steps would be in the file
    twice. A half-written last line from a crash is dropped on opening.

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
            # A single write of a whole line: after a crash it is complete, absent, or cut, which the next start
            # repairs.
            self._file.write(line)
            self._file.flush()
        self._show(step, values)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the newest row if it is of this step; otherwise append a row. Raises as `write`."""
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
        METRICS.row(step, row)
        for tracker in self._trackers:
            tracker.log(step, row)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Return when a process that starts after a crash would find all rows; on disk each row is durable at once.

        Call it before a checkpoint is saved, since earlier steps are never trained again.

        Raises:
            StorageError: they could not be written to the bucket; its previous contents are intact.
            OSError: they could not be written to the disk.
        """
        if self._board is not None:
            with naming(self._path):
                self._board.flush()
        if self._staging is None:
            return
        copy_files(self._folder, self.dir)
        self._flushed = time.monotonic()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Show a text in TensorBoard only."""
        with naming(self._path):  # indentation shows it verbatim
            self._opened_board().text(step, name, "\n".join("    " + line for line in text.splitlines()))

    def write_samples(self, step: int, samples: Sequence[LoggedSample], page: str = "") -> None:
        """Give samples of a step to the trackers, after its row.

        Args:
            page: an HTML page with whole episodes; "" if there is none.
        """
        for tracker in self._trackers if samples else ():
            tracker.log_samples(step, samples, page)

    def truncate(self, step: int) -> None:
        """Remove rows after `step`; call it when training resumes from there."""
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
"""Optional imports of tensorboardX, for tensors and buckets that are not used here: 1.6 and 0.3 s of a start's
processor time."""


@contextlib.contextmanager
def _without(modules: Iterable[str]) -> Iterator[None]:
    """Hide modules that are not imported yet, as if they were not installed."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # an import of None raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


class _Board:
    """TensorBoard's event file, written synchronously.

    `tensorboardX.SummaryWriter` writes in a thread; after a full disk ends that thread, it waits for it forever.

    Args:
        purge: TensorBoard hides earlier entries from this step on, which are written again.
    """

    def __init__(self, folder: Path, purge: int | None) -> None:
        # Imported late: not every program or host needs it.
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
            # It leaves its file open then, and Python 3.13 prints the error again when it drops the file.
            with contextlib.suppress(OSError):
                self._events._py_recordio_writer.close()
            raise

    def _add(self, step: int, **what: Any) -> None:
        self._events.write_event(self._kinds.Event(wall_time=time.time(), step=step, **what))


def is_exhausted(row: Mapping[str, Any]) -> bool:
    """Return whether a row is not a step, see `EXHAUSTED`."""
    return any(name.startswith(EXHAUSTED) for name in row)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return values in the form of the file's lines."""
    row = {name: float(value) for name, value in values.items()}
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def todays_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of any version under current names."""
    found = {name if (today := _FORMER_METRICS.get(name, name)) in row else today: row[name] for name in row}
    if _FORMER_FILL in found:
        fill = found.pop(_FORMER_FILL)
        found["data/padding_share"] = None if fill is None else 1 - fill
    return found


def read_metrics(dir: Folder) -> list[dict[str, Any]]:
    """Return the complete rows of `dir/metrics.jsonl`, each `{"step": int, name: float | None, …}`; empty without a
    file. Names of earlier versions are replaced by current ones.

    Raises:
        ValueError: a line other than a truncated last one is not JSON.
    """
    path = location(dir) / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    complete, rows = lines[:-1], []  # after the last newline there is nothing, or a truncated line
    for number, line in enumerate(complete, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON ({error}); delete the line") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise InputError(f"{path}, line {number} is no row of metrics; delete the line")
        rows.append(todays_metrics(row))
    return rows
