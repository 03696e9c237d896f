"""Run notebooks in a folder, and store the output of their cells in docs/notebooks.

    python -m docs.notebooks --folder=DIR --only=quickstart,evaluation

Notebooks share the folder: a later one finds the files of an earlier one, and `astra` resumes. Stored is standard
output without progress bars, and without this machine's folders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from absl import flags

from astra_jax.base.files import write_text
from astra_jax.base.terminal import say
from docs.notebooks import cells
from launch.flags import cli

_FOLDER = flags.DEFINE_string("folder", None, "Folder that they run in.", required=True)
_ONLY = flags.DEFINE_list("only", [], "Names of notebooks; by default all, by name.")


def main() -> None:
    folder = cli.local_folder(_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    there = {file.stem: file for file in cells.files()}
    if unknown := [name for name in _ONLY.value if name not in there]:
        raise cli.UsageError(f"--only={','.join(_ONLY.value)}: there is no {unknown[0]}; there are {', '.join(there)}")
    os.chdir(folder)

    def shell(command: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        python = f"{cells.FOLDER.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        given = os.environ | {"PATH": path, "PYTHONPATH": python}
        return subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE, text=True, env=given).stdout

    for name in _ONLY.value or there:
        notebook = cells.read(there[name])
        cells.run(notebook, shell)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        text = text.replace(f"{folder.resolve()}/", "").replace(str(Path.home()), "~")
        write_text(there[name], text + "\n")
        say(f"{there[name]}: {sum(1 for _ in cells.code(notebook))} cells")


if __name__ == "__main__":
    cli.run(main)
