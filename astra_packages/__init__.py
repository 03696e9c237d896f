"""The command `astra`, and the one name below which an installation has everything.

    astra sft --config=sft:14b …        the same as python -m launch.sft …
    astra --help                        the programs

In the repository the layers are at the top, and this folder has only this file. An installation has them in this
folder, which astra_packages.pth puts on the path. So nothing called `configs`, `launch` or `sandbox` lies among other
packages. Programs put our folder first on the path and the current one last, so a user's own `configs/` or `sandbox/`
hides nothing of ours.
"""

from __future__ import annotations

import ast
import difflib
import os
import runpy
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / "launch").is_dir() else _HERE.parent

GROUPS = {
    "make data": ("trajectories", "environments", "difficulty", "rehearse", "astra_sft", "astra_rl"),
    "train": ("sft", "grpo", "plan"),
    "serve and evaluate": ("serve", "evaluate", "compare"),
    "tools": ("quickstart", "watch", "inspect", "convert", "push", "sandbox_server"),
}
"""Programs by purpose, in the order of `astra --help`; programs that are missing here are listed as tools."""


def programs() -> dict[str, Path]:
    """The programs by name, and the file of each."""
    launch = ROOT / "launch"
    files = {file.stem: file for file in launch.glob("*.py")}
    files |= {file.parent.name: file for file in launch.glob("*/__main__.py")}
    return {name: file for name, file in sorted(files.items()) if "    cli.run(" in file.read_text(encoding="utf-8")}


def main() -> None:
    """Run the program that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "-help", "help"):
        print(_help())
        return
    every = programs()
    program = "sft" if name == "--version" else name.replace("-", "_")
    if program not in every:
        near = difflib.get_close_matches(program, every, n=1)
        meant = f"; did you mean astra {near[0]}?" if near else ""
        print(f"error: astra {name!r:.60}: there is no such program{meant} (astra --help lists them)", file=sys.stderr)
        sys.exit(2)
    if name != "--version":
        del sys.argv[1]
    here = os.getcwd()
    sys.path[:] = [str(ROOT), *(one for one in sys.path if one not in ("", here, str(ROOT))), here]
    runpy.run_module(f"launch.{program}", run_name="__main__", alter_sys=True)


def _help() -> str:
    lines = [
        "astra NAME [--FLAG=VALUE …]; astra NAME --help lists the flags. Try all of it with",
        "astra quickstart --workdir=runs/quick",
    ]
    every = programs()
    width = max(map(len, every))
    grouped = {name for names in GROUPS.values() for name in names}
    for title, names in GROUPS.items():
        others = [name for name in every if name not in grouped] if title == "tools" else []
        lines += ["", f"{title}:"]
        for name in [*names, *others]:
            about = ast.get_docstring(ast.parse(every[name].read_text(encoding="utf-8"))) or ""
            lines.append(f"  {name:<{width}}  {about.partition(chr(10))[0]}")
    return "\n".join(lines)
