"""Cells of a notebook: run in order as in Jupyter, and converted to a page.

Supported is the part of Jupyter's language that our notebooks use. It is Python with `await` outside functions, lines
that start with `!` and run in the shell, with names in braces, and a last expression whose value is shown. The cell
tagged `parameters` holds the values that a reader changes, by papermill's convention
(https://papermill.readthedocs.io/en/latest/usage-parameterize.html), so papermill can run the notebooks too.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from astra_jax.base.errors import InputError

FOLDER = Path(__file__).parent
PARAMETERS = "parameters"
"""The tag of the cell that holds them."""
Notebook = dict[str, Any]
"""As nbformat 4 has it: https://nbformat.readthedocs.io/en/latest/format_description.html."""
Shell = Callable[[str], str]
"""Function that runs a command line and returns its standard output. Raises if the command fails."""
_SHELL = re.compile(r"^( *)!(.*)$", re.M)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def files() -> list[Path]:
    """Return the files of all notebooks, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(file: Path) -> Notebook:
    """Read a stored notebook. Raises `InputError`: it has another format."""
    notebook: Notebook = json.loads(file.read_text(encoding="utf-8"))
    if notebook.get("nbformat") != 4:
        raise InputError(f"{file} has nbformat {notebook.get('nbformat')!r}; store it as version 4")
    return notebook


def code(notebook: Notebook) -> Iterator[dict[str, Any]]:
    """Yield the code cells, in order."""
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def run(notebook: Notebook, shell: Shell, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run all cells as printed, in one namespace, and store the output of each.

    Args:
        shell: runs the lines that start with `!`.
        parameters: values that replace those of the cell of parameters.

    Returns:
        The names that the cells have defined.

    Raises:
        InputError: no cell of parameters has such a name.
        Exception: any exception of a cell.
    """
    names: dict[str, Any] = {"__name__": "__main__", "_shell": lambda command: print(shell(command), end="")}
    given = dict(parameters or {})
    with asyncio.Runner() as runner:
        for number, cell in enumerate(code(notebook), start=1):
            cell["outputs"] = _run(cell, names, number, runner)
            cell["execution_count"] = number
            if PARAMETERS in cell["metadata"].get("tags", ()):
                if unknown := given.keys() - names.keys():
                    raise InputError(f"parameters: the notebook has no {', '.join(sorted(unknown))}")
                names.update(given)
                given = {}
    if given:
        raise InputError(f"parameters: no cell is tagged {PARAMETERS!r}, and {', '.join(given)} are given")
    return names


def page(notebook: Notebook) -> str:
    """Return the notebook as Markdown, with the output of its cells."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        shown = _COLOUR.sub("", "".join(_text(output) for output in cell["outputs"])).rstrip()
        if shown:
            parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def _run(cell: Mapping[str, Any], names: dict[str, Any], number: int, runner: asyncio.Runner) -> list[dict[str, Any]]:
    """Run a cell; its outputs, as nbformat has them."""
    tree = ast.parse(_SHELL.sub(_command, "".join(cell["source"]).replace("\\\n", "")))
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _do(compile(tree, f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names, runner)
        value = None
        if last is not None:
            value = _do(compile(last, f"cell {number}", "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names, runner)
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": said.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _do(compiled: Any, names: dict[str, Any], runner: asyncio.Runner) -> Any:
    found = eval(compiled, names)  # the notebooks are ours
    if not (compiled.co_flags & inspect.CO_COROUTINE):
        return found

    async def awaited() -> Any:
        return await found

    return runner.run(awaited())


def _command(line: re.Match[str]) -> str:
    indent, command = line.groups()
    return f"{indent}_shell(f{command.strip()!r})"


def _text(output: Mapping[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "".join(output["text"])
    return "".join(output["data"].get("text/plain", ())) + "\n"
