"""The project as a user has it: the wheel, installed into an environment of its own, and its command `astra`.

The wheel is built once for a test run. Its dependencies come from the environment that runs the tests, because a
download of JAX takes minutes.
"""

from __future__ import annotations

import fcntl
import os
import site
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BUILT = ("astra_jax", "astra_packages", "configs", "launch", "sandbox", "synthesis")
"""Folders that the wheel is made of."""


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code, and what it printed to both streams together."""

    code: int
    output: str


@dataclass(frozen=True)
class InstalledAstra:
    """The command `astra` of an environment that has only the wheel: `installed_astra("sft", "--help", cwd=folder)`.

    Attributes:
        folder: the virtual environment; `folder / "bin" / "python"` is its interpreter.
    """

    folder: Path
    _home: Path = field(repr=False)

    @property
    def command(self) -> str:
        """Path of `astra`, for a program that is to run in the background."""
        return str(self.folder / "bin" / "astra")

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables of a command: those of the tests, without the checkout, with an empty cache."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        path = os.pathsep.join([str(self.folder / "bin"), kept.get("PATH", "")])
        return kept | {"PATH": path, "XDG_CACHE_HOME": str(self._home), "HF_HUB_OFFLINE": "1"} | dict(more or {})

    def __call__(
        self, *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 600
    ) -> Ended:
        """Run `astra ARGUMENTS` to its end.

        Args:
            cwd: current folder.
            env: further variables of its environment.
            timeout: seconds; `subprocess.TimeoutExpired` is raised after them.
        """
        command = [self.command, *map(str, arguments)]
        ended = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return Ended(ended.returncode, ended.stdout)


@pytest.fixture(scope="session")
def installed_astra(tmp_path_factory: pytest.TempPathFactory) -> InstalledAstra:
    """The command `astra` of the installed wheel."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers of this run
    with (shared / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / "installed"
        if not (folder / "bin" / "astra").exists():
            _install(_build(shared), folder)
    return InstalledAstra(folder, tmp_path_factory.mktemp("cache"))


def _build(shared: Path) -> Path:
    """Build the wheel from a copy of the sources, since setuptools writes beside them; return its path."""
    tree, built = shared / "tree", shared / "wheel"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:  # an unpacked source distribution
        files = [str(one.relative_to(ROOT)) for name in _BUILT for one in (ROOT / name).rglob("*") if one.is_file()]
        files += [one.name for one in ROOT.iterdir() if one.is_file()]
    else:
        files = [
            one for one in listed.stdout.split("\0") if one.partition("/")[0] in _BUILT or (one and "/" not in one)
        ]
    for name in files:
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    _ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={built}", str(tree))
    return next(built.glob("*.whl"))


def _install(wheel: Path, folder: Path) -> None:
    """Make a virtual environment with the wheel, which finds its dependencies in the tests' environment."""
    venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(folder)
    python = str(folder / "bin" / "python")
    # A path alone: .pth files of that folder, such as the one of an editable installation, are not read.
    own = Path(_ran(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    (own / "zz_others.pth").write_text(site.getsitepackages()[0] + "\n")
    _ran(sys.executable, "-m", "pip", f"--python={python}", "install", "-q", "--no-deps", "--no-index", str(wheel))


def _ran(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout
