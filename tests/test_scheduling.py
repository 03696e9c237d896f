"""A worker that dies costs its own test, and a run that ends early says how many tests were not run and fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from selection import by_day

from launch.bootstrap import BY_FILE

TESTS = Path(__file__).parent
FILES = {
    "test_first.py": ["pass", "pass", "os.kill(os.getpid(), signal.SIGSEGV)", "pass", "pass"],
    "test_alone.py": ["os._exit(3)"],
    "test_last.py": ["pass", "pass", "os._exit(0)"],
    **{f"test_short_{number}.py": ["pass"] for number in range(4)},
}
"""Test files, each with the bodies of its tests."""
COUNT = sum(map(len, FILES.values()))
DIE = ["test_first.py::test_2", "test_alone.py::test_0", "test_last.py::test_2"]


LATE = """
    from xdist.workermanage import WorkerController
    WorkerController.shutting_down = property(lambda self: self._shutdown_sent)

def pytest_runtest_logfinish():
    import time
    time.sleep(0.1)
"""
"""Further lines of `pytest_configure`: a worker is dead long before the main process knows."""


def run_tests(folder: Path, *arguments: str, further: str = "") -> subprocess.CompletedProcess[str]:
    """Run `FILES` with the project's hooks in a pytest of its own; each test appends its name to `ran.txt`."""
    for file, bodies in FILES.items():
        tests = [
            f'def test_{i}():\n    open("ran.txt", "a").write("{file}::test_{i}\\n")\n    {body}\n'
            for i, body in enumerate(bodies)
        ]
        (folder / file).write_text("\n".join(["import os, pytest, signal", *tests]))
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\naddopts = -ra -p xdist.plugin\n")
    (folder / "conftest.py").write_text(
        f"import scheduling\n\ndef pytest_configure(config):\n    config.pluginmanager.register(scheduling)\n{further}"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which takes most of each process's start
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("workers", "further"), by_day([(1, ""), (3, ""), (3, LATE)], (3, ""), (3, LATE)))
def test_a_worker_that_dies_fails_its_own_test_and_all_others_are_run_once(
    tmp_path: Path, workers: int, further: str
) -> None:
    result = run_tests(tmp_path, f"-n{workers}", *BY_FILE, further=further)
    assert f"{len(DIE)} failed, {COUNT - len(DIE)} passed" in result.stdout, result.stdout + result.stderr
    assert all(f"FAILED {test}" in result.stdout for test in DIE) and result.returncode == 1
    assert "were not run" not in result.stdout
    ran = (tmp_path / "ran.txt").read_text().split()
    assert len(ran) == len(set(ran)) == COUNT


def test_a_run_without_replacement_says_how_many_tests_were_not_run(tmp_path: Path) -> None:
    result = run_tests(tmp_path, "-n2", *BY_FILE, "--max-worker-restart=0")
    last = result.stdout.rstrip().splitlines()[-1]
    missing = COUNT - len(set((tmp_path / "ran.txt").read_text().split()))
    assert missing > 0 and last == f"{missing} of {COUNT} tests were not run" and result.returncode == 1


@pytest.mark.parametrize("workers", by_day([0, 2], 0))
def test_a_run_that_a_test_ends_fails(tmp_path: Path, workers: int) -> None:
    """Even where the test asks for exit code 0."""
    (tmp_path / "test_0_ends.py").write_text('import pytest\ndef test_ends():\n    pytest.exit("enough", 0)\n')
    result = run_tests(tmp_path, f"-n{workers}", *BY_FILE, "-x")
    assert result.stdout.rstrip().splitlines()[-1].endswith(f"of {COUNT + 1} tests were not run"), result.stdout
    assert result.returncode != 0


@pytest.mark.parametrize("arguments", [["--collect-only"], ["-k", "short"]])
def test_tests_that_nobody_asked_for_are_not_counted(tmp_path: Path, arguments: list[str]) -> None:
    result = run_tests(tmp_path, "-n0", *arguments)
    assert "were not run" not in result.stdout and result.returncode == 0, result.stdout + result.stderr
