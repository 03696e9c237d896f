"""The commands that pages print, for tests that run them.

As a program it starts another up to its main function, with one command line after the other: `MODULE JSON`, a list of
lists of arguments, and prints a list of what was said of each that was refused, null of the others.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from absl import app, flags

import astra_packages

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
OURS = re.compile(
    r"(?:python -m (?P<module>(?:launch|benchmarks|docs)\.\w+)"
    r"|(?:^|[;&|] |\b[A-Z_]+=\S* )astra (?P<name>[a-z_]+) )(?P<rest>.*)"
)
_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```$", re.M | re.S)
_INDENTED = re.compile(r"^    (?:python3?|astra|bash) .*(?:\n        .*)*", re.M)
_INLINE = re.compile(r"`((?:python -m|astra) [^`]+)`")


def printed(page: str) -> Iterator[str]:
    """The lines of a page's blocks of commands, without comments; a line that ends in a backslash goes on."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block[1] for block in _BLOCK.finditer(text)]
    indented = _INDENTED.findall(re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.M | re.S))
    for line in re.sub(r"\\\n\s*", "", "\n".join([*blocks, *indented])).splitlines():
        if command := re.sub(r"(?:^|\s+)#.*", "", line).strip():
            yield command


def inline(page: str) -> Iterator[str]:
    """Commands within a page's sentences."""
    text = re.sub(r"^ *```\w*\n.*?^ *```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for found in _INLINE.findall(text):
        if "NAME " not in f"{found} ":
            yield re.sub(r"\\? *\n\s*", " ", found)


def described() -> Iterator[tuple[str, str]]:
    """(file, command) of what programs print of themselves with `--help`."""
    for file in astra_packages.programs().values():
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        for line in re.findall(r"^    ((?:python -m|astra) (?:.*\\\n)*.*)", about, re.M):
            command = re.sub(r"\\\n\s*", "", line)
            yield file.relative_to(ROOT).as_posix(), re.sub(r"\s+#.*|\s{2,}.*", "", command)


def started(command: str) -> tuple[str, list[str]] | None:
    """(module, arguments) of a command of ours, what it leaves open filled in; None for any other."""
    if (found := OURS.search(command)) is None:
        return None
    module = found["module"] or f"launch.{found['name']}"
    rest = re.sub(r"\s*(?:&&|&|;|\.\.\.|…).*$", "", found["rest"])
    rest = re.sub(r"\[(--[^\]]*)\]", r"\1", rest)  # what may be left out, too
    rest = rest.replace('"$with"', "{}").replace("$name", "x")
    rest = re.sub(r"=N\b", "=1", re.sub(r"=(\w+)(?:\|\w+)+", r"=\1", rest))
    return module, shlex.split(rest)


def _refusal(arguments: list[str], flags_parser: Callable[[list[str]], object] | None) -> str | None:
    """What is said of a command line that is not taken; flags are as in a new process before it is read."""
    from launch.flags import cli

    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            (flags_parser or flags.FLAGS)([sys.argv[0], *arguments])
            settings = flags_parser.keywords["settings"] if isinstance(flags_parser, partial) else None
            if settings is not None:
                cli.overridden(settings())
        except SystemExit as ended:
            return said.getvalue() if ended.code else None
        except Exception as error:
            return f"{said.getvalue()}{error}"
    return None


def _main() -> None:
    module, lines = sys.argv[1], json.loads(sys.argv[2])
    sys.argv = [module]

    def instead(main: object, flags_parser: Callable[[list[str]], object] | None = None) -> None:
        print(json.dumps([_refusal(arguments, flags_parser) for arguments in lines]))

    app.run = instead
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
