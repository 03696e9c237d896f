"""Training metrics: TensorBoard for people, `metrics.jsonl` for programs.

The JSONL file is the record: one complete line a step, in order, no step twice, also after a crash and a resume.

In a bucket, whose objects cannot be appended to, both are written on disk first and copied up whole now and then.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from synthesis.core.datasets import Folder
from synthesis.core.files import copy_files, in_bucket, location, write_text
from synthesis.core.refusals import InputError

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

FILE = "metrics.jsonl"

FLUSH_SECONDS = 30.0
"""Between two copies to a bucket, which takes an object anew at most once a second, and whole."""


class MetricWriter:
    """Writes scalars by step to `dir`, which is made if it is not there.

    After a resume from step n call `truncate(n)` before the first `write`: steps that are trained again would otherwise
    be in the file twice. A half-written last line, from a crash, is dropped when the file is opened.
    """

    def __init__(self, dir: Folder) -> None:
        self.dir = location(dir)
        self._staging = tempfile.TemporaryDirectory(prefix="astra-metrics-") if in_bucket(self.dir) else None
        self._folder = Path(self.dir if self._staging is None else self._staging.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._flushed = time.monotonic()
        self._path = self._folder / FILE
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._purge: int | None = None
        if (self.dir / FILE).exists():
            rows = read_metrics(self.dir)
            self._rewrite(rows)
            self._purge = rows[-1]["step"] + 1 if rows else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row. Values are converted to Python floats; a non-finite one is written as null."""
        row = {name: float(value) for name, value in values.items()}
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (open for the run's life)
        board = self._opened_board()
        for name, value in row.items():
            board.add_scalar(name, value, step)
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        # One write call of a whole line: a crash leaves it there or not, or cut, which the next start repairs.
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Return when all rows are where a process that starts after a crash finds them; on disk each is at once.

        Call it before a checkpoint is saved: the steps up to there are never trained again.

        Raises:
            StorageError: they could not be written to the bucket; what was there before still is.
        """
        if self._staging is None:
            return
        if self._board is not None:
            self._board.flush()
        copy_files(self._folder, self.dir)
        self._flushed = time.monotonic()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Show a text in TensorBoard; it is in no row."""
        self._opened_board().add_text(name, "\n".join("    " + line for line in text.splitlines()), step)  # as it is

    def truncate(self, step: int) -> None:
        """Forget rows after `step`; call it when training resumes from there."""
        self.close()
        if self._path.exists():
            self._rewrite([row for row in read_metrics(self._folder) if row["step"] <= step])
        self._purge = step + 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None
            self.flush()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened_board(self) -> SummaryWriter:
        if self._board is None:
            # Not at a program's start: not every program or host gets here.
            with _without_torch():
                from tensorboardX import SummaryWriter

            # purge_step makes TensorBoard hide what an earlier process wrote for the steps that come again.
            self._board = SummaryWriter(str(self._folder), purge_step=self._purge)
        return self._board

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """For an import of tensorboardX, which takes torch's tensors where there is a torch: 1.6 s of processor time for
    what we never give it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


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
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON ({error}); delete the line") from None
    return rows
