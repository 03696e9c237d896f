"""Python environment of a benchmark's own code: installed once, checked, and run in a separate process for every
item."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from absl import logging

from astra_jax.base.files import check_held
from astra_jax.evaluation.suite import EvaluationError
from synthesis.core.stages import Transient

_WORKERS = Path(__file__).parent / "workers"
_LINE_BYTES = 256 * 2**20
"""Maximum bytes of an answer, which may be a conversation with all tool outputs."""


@dataclass(frozen=True, kw_only=True)
class HarnessEnvironment:
    """A virtual environment for a harness.

    Attributes:
        name: name of its folder, also used in messages.
        requirements: exact pins of all packages; nothing else is installed.
        python: the lowest supported, and the lowest unsupported minor version of Python 3. The running Python is used
            if it fits.
        wait_seconds: time limit of the installation.
    """

    name: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (11, 15)
    wait_seconds: float = 1800.0

    def folder(self, root: Path) -> Path:
        """Return its folder, which depends on the requirements."""
        digest = hashlib.sha256(json.dumps([self.requirements, self.python]).encode()).hexdigest()
        return root / f"{self.name}-{digest[:12]}"

    async def make(self, root: Path) -> Path:
        """Install missing packages.

        Returns:
            Path of its interpreter.

        Raises:
            EvaluationError: there is no such Python, or an installation failed.
        """
        folder = self.folder(root)
        interpreter, whole = folder / "bin" / "python", folder / "whole"
        if whole.exists():
            return interpreter
        root.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # another evaluation may be making it
            if not whole.exists():
                await self._install(folder, interpreter)
                whole.touch()
        return interpreter

    async def _install(self, folder: Path, interpreter: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        logging.info("making the environment of %s in %s", self.name, folder)
        await self._run(self._base(), "-m", "venv", str(folder))
        if self.requirements:
            # Without dependencies: a harness may name gigabytes that the part we call never imports.
            await self._run(
                str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                *self.requirements,
            )  # fmt: skip

    def _base(self) -> str:
        low, high = self.python
        if low <= sys.version_info.minor < high:
            return sys.executable
        versions = [f"3.{minor}" for minor in range(low, high)]
        pyenv = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")) / "versions"
        for version in versions:
            found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
            for python in filter(None, found):
                # A version manager's stand-in is on PATH for versions that are not active.
                if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
                    return python
        raise EvaluationError(
            f"{self.name} needs Python {' or '.join(versions)}, and there is none on PATH; install one"
        )

    async def _run(self, *command: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self.wait_seconds)
        except TimeoutError:
            process.kill()
            raise EvaluationError(f"{' '.join(command)} took longer than {self.wait_seconds:g} s") from None
        if process.returncode:
            last = "\n".join(output.decode(errors="replace").strip().splitlines()[-5:])
            raise EvaluationError(f"{self.name}: {' '.join(command)} failed with {process.returncode}:\n{last}")


def check_files(folder: Path, sha256: dict[str, str], remedy: str) -> None:
    """Compare files with their pinned digests.

    Args:
        sha256: hex digest by path below `folder`.
        remedy: how to get the right files.

    Raises:
        EvaluationError: a file is missing or has another digest.
    """
    for name, expected in sha256.items():
        file = folder / name
        if not file.is_file():
            raise EvaluationError(f"{file} is missing; {remedy}")
        if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != expected:
            raise EvaluationError(f"{file} has sha256 {found[:16]}, not the pinned {expected[:16]}; {remedy}")


def fingerprint(tree: Path, patterns: Sequence[str]) -> str:
    """Return the SHA-256 of a part of a checkout: of its files' lines `BLOB PATH`, sorted by path; BLOB is git's own
    id.

    It can be computed from a repository alone, whatever the working tree's modes: `git ls-tree -r
    --format='%(objectname) %(path)' TAG -- FILES | sha256sum`.

    Raises:
        FileNotFoundError: nothing matches a pattern; the error has the pattern.
    """
    files: set[str] = set()
    for pattern in patterns:
        found = {file.relative_to(tree).as_posix() for file in tree.glob(pattern)}
        if not found:
            raise FileNotFoundError(pattern)
        files |= found
    lines = []
    for name in sorted(files):
        content = (tree / name).read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lines.append(f"{blob} {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A harness that no package registry has: a git repository at a pinned commit.

    Attributes:
        repository: its URL.
        commit: a commit or tag.
        parts: patterns of its files, by part.
        sha256: the `fingerprint` of each part.
    """

    repository: str
    commit: str
    parts: Mapping[str, Sequence[str]]
    sha256: Mapping[str, str]

    def check(self, source: str, folder: Path | None) -> Path:
        """Compare a folder with the pinned commit.

        Args:
            source: its name in `--sources`.

        Returns:
            The folder, absolute.

        Raises:
            EvaluationError: the folder is not named, or it has other files.
        """
        remedy = (
            f"get it with: git clone {self.repository} DIR && git -C DIR checkout {self.commit}; and name it with "
            f"--sources={source}=DIR"
        )
        if folder is None:
            raise EvaluationError(f"no folder is named for {source}, which no package registry has; {remedy}")
        folder = folder.absolute()
        for part, patterns in self.parts.items():
            try:
                found = fingerprint(folder, patterns)
            except FileNotFoundError as missing:
                raise EvaluationError(f"{folder / str(missing)} is missing; {remedy}") from None
            if found != self.sha256[part]:
                raise EvaluationError(
                    f"{part} in {folder} is not that of {self.commit} (sha256 {found[:16]}, not "
                    f"{self.sha256[part][:16]}; `git status` there shows what was changed); {remedy}"
                )
        return folder


class WorkerFailed(Transient):
    """A harness's process ended, or its code raised an exception. It says nothing about the model."""


Answers = Mapping[str, Callable[..., Awaitable[Any]]]
"""Requests that a process may send while it works on a call (`serving.ask`), by name."""


class WorkerProcess:
    """One process of a harness, for one item."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
        self._reader, self._writer, self._answers = reader, writer, answers

    async def call(self, method: str, /, **params: Any) -> Any:
        """Call a method of the worker program.

        Raises:
            WorkerFailed: the method raised an exception, or the process ended.
        """
        message: dict[str, Any] = {"method": method, "params": params}
        while True:
            self._writer.write(json.dumps(message).encode() + b"\n")
            try:
                await self._writer.drain()
                line = await self._reader.readline()
            except (OSError, ValueError) as error:
                raise WorkerFailed(f"{method}: {error}") from None
            if not line.endswith(b"\n"):  # nothing, or what it had written when it was killed
                raise WorkerFailed(f"{method}: its process ended without an answer")
            answer = json.loads(line)
            if "error" in answer:
                logging.debug("%s", answer["trace"])
                raise WorkerFailed(f"{method}: {answer['error']}")
            if "ask" not in answer:
                return answer["result"]
            if answer["ask"] not in self._answers:
                raise WorkerFailed(f"{method}: it asked for {answer['ask']!r}, which nobody answers")
            message = {"reply": await self._answers[answer["ask"]](**answer["params"])}


class WorkerProgram:
    """A worker program, which forks a process for each connection.

    Args:
        interpreter: interpreter of the harness's environment.
        program: file name in `workers/`.
        arguments: arguments of the program, after its socket.
        env: its environment variables in addition to PATH and HOME.
        log: file for its output.
    """

    START_SECONDS = 300.0

    def __init__(
        self,
        interpreter: Path,
        program: str,
        arguments: Sequence[str] = (),
        *,
        env: dict[str, str] | None = None,
        log: Path,
    ) -> None:
        self._command = [str(interpreter), "-s", str(_WORKERS / program)]
        self._arguments = arguments
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        self._env = {**kept, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        # A socket's path has 107 bytes at most, which a workdir may exceed.
        self._folder = tempfile.TemporaryDirectory(prefix="astra-")
        self._socket = str(Path(self._folder.name) / "socket")

    async def start(self) -> None:
        """Start the program. Raises `EvaluationError` if it does not become ready."""
        check_held(self._log)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                self._socket,
                *self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), self.START_SECONDS)
        except TimeoutError:
            line = b""
        if line != b"ready\n":
            await self.close()
            last = "\n".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])
            raise EvaluationError(f"{' '.join(self._command)} did not start ({self._log}):\n{last}")

    @contextlib.asynccontextmanager
    async def open(self, answers: Answers = MappingProxyType({})) -> AsyncIterator[WorkerProcess]:
        """Open a separate process. Raises `WorkerFailed`.

        Args:
            answers: requests that it may send; an exception in one ends the call that sent it.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=_LINE_BYTES)
        except OSError as error:
            raise WorkerFailed(f"{self._command[-1]} ended unexpectedly ({error}); see {self._log}") from None
        try:
            yield WorkerProcess(reader, writer, answers)
        finally:
            writer.close()

    async def close(self) -> None:
        """End the program and all its processes."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        self._folder.cleanup()
