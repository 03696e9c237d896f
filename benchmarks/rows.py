"""What every row of a benchmark says besides its figures: when, on what hardware, of which commit, by which command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from astra_jax.run import record as run_record

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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
    return row


def report(name: str, figures: dict[str, Any], *, save: bool) -> None:
    """Append the figures as a row when asked to, else only print them."""
    if save:
        append(name, figures)
    else:
        print(json.dumps(figures), flush=True)


def _general(argument: str) -> str:
    """The argument without what only this machine has: its folders and files."""
    name, _, _ = argument.partition("=")
    return {"--workdir": "--workdir=DIR", "--save_hlo": "--save_hlo=FILE"}.get(name, argument)


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


def commit() -> str:
    """The checkout's commit; ends in `+` when files that git tracks were changed since."""
    return run_record.commit(ROOT) or "unknown"
