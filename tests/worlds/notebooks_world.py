"""Notebooks, run as they are printed but for the cell of parameters, with `astra` started cheaply."""

from __future__ import annotations

import shlex
from typing import Any

from programs_world import Programs

from docs.notebooks import cells


def run_notebook(name: str, start: Programs, **parameters: Any) -> tuple[str, dict[str, Any]]:
    """Run a notebook's cells in order.

    Args:
        parameters: all of what the cell of parameters says, in tiny.

    Returns:
        What the cells have shown, and the names that they have made.
    """

    def shell(command: str) -> str:
        program, module, *arguments = shlex.split(command)
        assert program == "astra", command
        ended = start(*arguments, module=f"launch.{module}")
        assert ended.code == 0, f"{command}: {ended.errors[-3000:]}"
        return ended.out

    notebook = cells.read(cells.FOLDER / f"{name}.ipynb")
    names = cells.run(notebook, shell, parameters)
    return cells.page(notebook), names
