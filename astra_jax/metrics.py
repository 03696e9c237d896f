"""Training metrics: TensorBoard for people, `metrics.jsonl` for programs.

The JSONL file is the record: one complete line a step, in order, no step twice, also after a crash and a resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboardX import SummaryWriter

from astra_jax.files import write_text

FILE = "metrics.jsonl"


class MetricWriter:
    """Writes scalars by step to `dir`, which is made if it is not there.

    After a resume from step n call `truncate(n)` before the first `write`: steps that are trained again would otherwise
    be in the file twice. A half-written last line, from a crash, is dropped when the file is opened.
    """

    def __init__(self, dir: Path | str) -> None:
        self.dir = Path(dir)
        self.dir.mkdir(parents=True, exist_ok=True)
        self._path = self.dir / FILE
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._purge: int | None = None
        if self._path.exists():
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

    def write_text(self, step: int, name: str, text: str) -> None:
        """Show a text in TensorBoard; it is in no row."""
        self._opened_board().add_text(name, "\n".join("    " + line for line in text.splitlines()), step)  # as it is

    def truncate(self, step: int) -> None:
        """Forget rows after `step`; call it when training resumes from there."""
        self.close()
        if self._path.exists():
            self._rewrite([row for row in read_metrics(self.dir) if row["step"] <= step])
        self._purge = step + 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened_board(self) -> SummaryWriter:
        if self._board is None:
            # purge_step makes TensorBoard hide what an earlier process wrote for the steps that come again.
            self._board = SummaryWriter(str(self.dir), purge_step=self._purge)
        return self._board

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(dir: Path | str) -> list[dict[str, Any]]:
    """The complete rows of `dir/metrics.jsonl`, each `{"step": int, name: float | None, …}`; empty without a file.

    Raises:
        ValueError: a line other than a cut-off last one is not JSON.
    """
    path = Path(dir) / FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    complete, rows = lines[:-1], []  # what follows the last newline is empty, or a line that a crash cut off
    for number, line in enumerate(complete, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); delete the line") from None
    return rows
