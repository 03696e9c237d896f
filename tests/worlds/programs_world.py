"""Programs as they are started, cheaply: one process imports what is heavy, and forks for each start.

The same one for all files of a worker: a test that is about what a program imports, or about how its process begins,
starts it as users do.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HEAVY = (
    "astra_jax.sft.train",
    "astra_jax.grpo.train",
    "astra_jax.run.weights",
    "configs.training",
    "synthesis.environments.pipeline",
    "synthesis.trajectories.pipeline",
    "synthesis.offline.facts.relations:all_relations",
    "launch.quickstart.stages",
    "launch.quickstart.report",
    "astra_jax.planner.search",
    "launch.viewer.cards",
    "launch.viewer.environments",
    "launch.viewer.service",
)
"""What the programs import, most of what a start costs that is refused; and the relations that some build first."""

_FORKS = """
import atexit, gc, importlib, json, os, resource, runpy, sys, threading
gc.disable()  # nothing of it is garbage
for heavy in sys.argv[1:]:
    name, _, call = heavy.partition(":")
    module = importlib.import_module(name)
    if call:
        getattr(module, call)()
import jax
gc.collect()
gc.freeze()  # so that children neither look through what is imported nor copy it
gc.enable()
print("ready", flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if "ended" in case:
        child, status = os.waitpid(case["ended"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if child else None), flush=True)
        continue
    child = os.fork()
    os.setpgid(child, child)  # of 0, itself: who ends it ends what it starts
    if child == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{case['output']}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if case["file_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_bytes"], resource.RLIM_INFINITY))
        os.environ.clear()
        os.environ.update(case["environment"])
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))  # which it read as it was imported
        sys.argv = [case["module"], *case["arguments"]]
        code = 0
        try:
            runpy.run_module(case["module"], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        threading._shutdown()  # as Python ends: its threads, then what is registered
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
    print(child, flush=True)
"""
"""It says how a child ended, or null, and goes on: several may run at a time. Children leave what was imported for them
as it is: taking it down, page by page, was half of what a start costs that is refused."""


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
        assert self.code in (2, 69) and len(said) == 1 and "Traceback" not in self.errors, self
        return said[0]


@dataclass
class Started:
    """A program that runs, or has ended."""

    asks: Callable[[dict[str, object]], str]
    pid: int
    output: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, less than 0 for the signal that ended it; None while it runs."""
        if self.code is None:
            self.code = json.loads(self.asks({"ended": self.pid}))
        return self.code

    def kill(self) -> None:
        """End it with SIGKILL, with what it has started, and wait for that."""
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        """Send it and what it has started a signal."""
        if self.poll() is None:
            os.killpg(self.pid, number)

    def said(self) -> str:
        """What it has said on standard output so far."""
        return self._said(1)

    def errors(self) -> str:
        """What it has said on standard error so far."""
        return self._said(2)

    def wait(self, seconds: float = 500) -> Ended:
        """How it ended. Raises `TimeoutError`."""
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} still runs after {seconds} s")
            time.sleep(0.01)
        assert self.code is not None
        return Ended(self.code, self._said(1), self._said(2))

    def _said(self, number: int) -> str:
        file = Path(f"{self.output}.{number}")
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


class Programs:
    """Starts of programs."""

    def __init__(
        self, process: subprocess.Popen[str], module: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._process, self._module, self._folder, self._environment = process, module, folder, environment
        self._started: list[Started] = []

    def __call__(self, *arguments: str, module: str = "", file_bytes: int = 0, **environment: str) -> Ended:
        """Start the program, or another, with what the environment has besides, and wait for its end."""
        return self.begin(*arguments, module=module, file_bytes=file_bytes, **environment).wait()

    def begin(self, *arguments: str, module: str = "", file_bytes: int = 0, **environment: str) -> Started:
        """As a call, without waiting."""
        output = self._folder / f"output{len(self._started)}"
        case = {
            "module": module or self._module,
            "arguments": arguments,
            "environment": os.environ | _SET | self._environment | environment,
            "file_bytes": file_bytes,
            "output": str(output),
        }
        self._started.append(Started(self._ask, int(self._ask(case)), output))
        return self._started[-1]

    def _ask(self, case: dict[str, object]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        """End what still runs."""
        for one in self._started:
            one.kill()


_SET = {"ASTRA_CPU": "set"}


@contextmanager
def programs(module: str, folder: Path, **environment: str) -> Iterator[Programs]:
    """Starts of a program.

    Args:
        module: the program, where a start names no other.
        folder: for what they say.
        environment: of each start.
    """
    with closing(Programs(_forking(), module, folder, environment)) as made:
        yield made


def ended(module: str, *arguments: str, **environment: str) -> Ended:
    """A program that is started once, and how it ended."""
    with tempfile.TemporaryDirectory() as folder, programs(module, Path(folder), **environment) as start:
        return start(*arguments)


@functools.cache
def _forking() -> subprocess.Popen[str]:
    """It ends with its input, so with this process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS, *HEAVY],
        cwd=ROOT,
        env=os.environ | _SET,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def journal_of(to: Path) -> Path:
    """Where a program keeps what is finished of the dataset that it writes to `to`."""
    return to.with_name(f"{to.name}.journal.sqlite")


def in_journal(to: Path) -> int:
    """How many records of it are finished."""
    with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(journal_of(to))) as journal:
        return journal.execute("SELECT COUNT(*) FROM done").fetchone()[0]
    return 0
