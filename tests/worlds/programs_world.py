"""Programs as they are started, cheaply: one process imports what is heavy, and forks for each start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("astra_jax.sft.train", "astra_jax.grpo.train", "astra_jax.run.weights", "configs.training")
"""What the programs that train import, most of what a start costs that is refused."""

_FORKS = """
import importlib, json, os, resource, runpy, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("ready", flush=True)
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if child == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{case['output']}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if case["file_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_bytes"], resource.RLIM_INFINITY))
        os.environ.update(case["environment"])
        sys.argv = [case["module"], *case["arguments"]]
        runpy.run_module(case["module"], run_name="__main__", alter_sys=True)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def as_users() -> dict[str, str]:
    """The environment without what makes tests compile fast (`tests/conftest.py`)."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it said."""

    code: int
    out: str
    errors: str

    @property
    def line(self) -> str:
        """All that it said of its refusal: one line."""
        said = [line for line in self.errors.splitlines() if line.startswith("error: ")]
        assert self.code == 2 and len(said) == 1 and "Traceback" not in self.errors, self
        return said[0]


class Programs:
    """Starts of programs, one after the other."""

    def __init__(self, process: subprocess.Popen[str], module: str, folder: Path) -> None:
        self._process, self._module, self._folder = process, module, folder

    def __call__(self, *arguments: str, module: str = "", file_bytes: int = 0, **environment: str) -> Ended:
        """Start the program, or another, with what the environment has besides, and wait for its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output = self._folder / "output"
        case = {
            "module": module or self._module,
            "arguments": arguments,
            "environment": environment,
            "file_bytes": file_bytes,
            "output": str(output),
        }
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        out, errors = (Path(f"{output}.{number}").read_text(encoding="utf-8") for number in (1, 2))
        return Ended(code, out, errors)


@contextmanager
def programs(module: str, folder: Path, *, heavy: Sequence[str] = (), **environment: str) -> Iterator[Programs]:
    """Starts of a program.

    Args:
        module: the program, where a start names no other.
        heavy: modules that it imports, which start no thread.
    """
    command = [sys.executable, "-c", _FORKS, *heavy]
    given = os.environ | {"ASTRA_CPU": "set"} | environment
    process = subprocess.Popen(
        command, cwd=ROOT, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield Programs(process, module, folder)
    finally:
        process.communicate("")
