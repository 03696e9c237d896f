"""Common fields of all benchmarks' rows: time, hardware, commit and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from astra_jax.base import versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_LOCAL = {
    "--workdir": "DIR",
    "--save_hlo": "FILE",
    "--figure": "FILE",
    "--trl": "PYTHON",
    "--tunix": "PYTHON",
    "--maxtext": "PYTHON",
    "--checkout": "FOLDER",
}
"""Flags whose values only this machine has, and what a row says for them."""


def append(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Append one row to `results/NAME.jsonl`, print it, and return it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    row = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "commit": commit(),
        "command": shlex.join([*program, *map(_general, sys.argv[1:])]),
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    print("saved; `python -m benchmarks.report` puts the row in the pages", file=sys.stderr)
    return row


def read(name: str) -> list[dict[str, Any]]:
    """The rows of `results/NAME.jsonl`, oldest first; none where there is no such file."""
    file = RESULTS / f"{name}.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def newest(found: Iterable[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the last row of each combination of these fields; a missing field counts as None."""
    last = {json.dumps([row.get(name) for name in names]): row for row in sorted(found, key=lambda row: row["date"])}
    return list(last.values())


def rewrite(page: Path, mark: str, content: str) -> None:
    """Put content between `<!-- MARK -->` and the next `<!-- end -->` of a page; ValueError if they are not there."""
    begin = f"<!-- {mark} -->\n"
    text = page.read_text(encoding="utf-8")
    start = text.index(begin) + len(begin)
    page.write_text(text[:start] + content + text[text.index("<!-- end -->", start) :], encoding="utf-8")


def report(name: str, figures: dict[str, Any], *, save: bool) -> None:
    """Append the figures as a row when asked to, else only print them."""
    if save:
        append(name, figures)
    else:
        print(json.dumps(figures), flush=True)


def _general(argument: str) -> str:
    """The argument without what only this machine has: its folders and files."""
    name, _, _ = argument.partition("=")
    return f"{name}={_LOCAL[name]}" if name in _LOCAL else argument


def hardware() -> str:
    """The processor's name, on x86 its family and model, and how many of its CPUs this process may use.

    Virtual machines may say no more than "AMD EPYC" of processors that are generations apart.
    """
    said: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    name = said.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in said:
        name += f" (family {said['cpu family']}, model {said['model']})"
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


@cache
def commit() -> str:
    """The checkout's commit; ends in `+` when files that git tracks were changed before the first row was appended."""
    return versions.commit(ROOT) or "unknown"
