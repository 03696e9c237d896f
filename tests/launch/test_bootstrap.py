"""The README's two commands, before the program that they start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import bootstrap

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [("--version", 0, "astra_jax "), ("--help", 0, "Install the project on a bare machine"), ("tset", 2, "error: ")],
)
def test_bootstrap_says_what_it_is_before_it_installs(argument: str, code: int, said: str) -> None:
    command = [sys.executable, "-S", str(ROOT / "launch" / "bootstrap.py"), argument]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == code and (result.stdout or result.stderr).startswith(said)


def test_setup_readme_and_bootstrap_promise_the_same_pythons() -> None:
    setup = (ROOT / "setup.py").read_text()
    promised = [tuple(map(int, found.split("."))) for found in re.findall(r"Python :: (3\.\d+)", setup)]
    oldest, newest = bootstrap.OLDEST, bootstrap.NEWEST
    assert promised == [(3, minor) for minor in range(oldest[1], newest[1] + 1)]
    assert f'python_requires=">=3.{oldest[1]},<3.{newest[1] + 1}"' in setup
    first, last = (", ".join(f"3.{minor}" for _, minor in promised[:-1]), f"3.{newest[1]}")
    for page in ("README.md", "docs/index.md"):
        assert f"Python {first} or {last}" in (ROOT / page).read_text()


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_bootstrap_names_the_pythons_to_use(version: tuple[int, ...], monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert bootstrap.main(["test", "--quick"]) == 2
    assert (
        "use Python 3.11 to 3.13, for example: python3.13 launch/bootstrap.py test --quick" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("command", "arguments", "extras"),
    [
        ("test", [], ["test", "demo"]),
        ("quickstart", [], ["demo"]),
        ("quickstart", ["--profile=ci"], ["demo"]),
        ("quickstart", ["--profile=pretrained", "--seed=1"], ["smollm2", "demo"]),
        ("quickstart", ["--profile", "pretrained"], ["smollm2", "demo"]),
        ("quickstart", ["--profile=pretrained", "--profile=quick"], ["demo"]),
    ],
)
def test_bootstrap_installs_what_a_profile_needs(command: str, arguments: list[str], extras: list[str]) -> None:
    assert bootstrap.extras_of(command, arguments) == extras


BOOTSTRAPPED = """
import sys
from pathlib import Path
from launch import bootstrap

bootstrap.environment = lambda: Path(sys.argv[1])
bootstrap.install = lambda *_, **__: None
bootstrap.main(["quickstart"])
"""


@pytest.mark.parametrize(("number", "to"), [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)])
def test_a_signal_to_bootstrap_is_the_programs(
    tmp_path, number: signal.Signals, to: Callable[[int, int], None]
) -> None:
    """It was killed a quarter of a second after a Ctrl-C, while it saved, and went on after a SIGTERM to its parent."""
    program = tmp_path / "python"
    program.write_text(
        f"""#!{sys.executable}
import os, signal, time

def stopped(*_):
    time.sleep(0.5)
    os.write(1, b"saved\\n")  # a `print` may be at work, and is not to be entered again
    raise SystemExit(7)

signal.signal(signal.SIGINT, stopped)
signal.signal(signal.SIGTERM, stopped)
os.write(1, b"up\\n")
time.sleep(60)
"""
    )
    program.chmod(0o755)
    command = [sys.executable, "-c", BOOTSTRAPPED, str(program)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        to(started.pid, number)
        assert started.communicate(timeout=30)[0] == "saved\n"
        assert started.returncode == 7


def test_bootstrap_leaves_what_an_environment_without_pip_holds(tmp_path, monkeypatch) -> None:
    """uv makes such ones; all that was installed into it was deleted."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / ".venv")
    installed = tmp_path / ".venv" / "installed"
    installed.touch()
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    python = bootstrap.environment()
    assert installed.exists() and bootstrap.has_pip(python) and python.is_relative_to(tmp_path)


def test_bootstrap_names_a_folder_that_it_cannot_write_to(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    (tmp_path / ".venv").write_text("in the way")
    assert bootstrap.main(["quickstart"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
