"""Page of an evaluation, or of several runs compared: one HTML file."""

from __future__ import annotations

from pathlib import Path

from astra_jax.base.files import write_text
from astra_jax.evaluation.comparison import Comparison
from astra_jax.evaluation.grids import Grid, report_of
from astra_jax.evaluation.table import Table
from launch.viewer.service import rendered


def write_evaluation(path: Path, one: Table | Comparison) -> None:
    """Write the page of an evaluation or a comparison, atomically."""
    write_text(path, rendered("evaluation.html.jinja", report=report_of(one), numeric=_numeric))


def _numeric(grid: Grid) -> list[bool]:
    """Tell of each column whether its cells are numbers."""
    if not grid.rows:
        return [False] * len(grid.columns)
    every = zip(*grid.rows, *grid.published, strict=True)
    return [all(cell[:1] in "+-–0123456789" for cell in column) for column in every]
