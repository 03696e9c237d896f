"""What `--quick` runs and what is begun first exists, and of each floor something is run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from selection import EXOTIC, QUICK, SECONDS, begun, is_quick, unlisted

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("file", QUICK)
def test_what_is_chosen_exists(file: str) -> None:
    missing = {name.partition("[")[0] for name in QUICK[file]} - functions(file)
    assert not missing, f"tests/selection.py names tests that tests/{file} does not have: {sorted(missing)}"


def test_what_is_begun_first_exists() -> None:
    assert [file for file in SECONDS if not (TESTS / file).is_file()] == []
    assert list(SECONDS.values()) == sorted(SECONDS.values(), reverse=True)


def test_exotic_files_come_last_where_not_all_are_run_each_commit_with_others_first() -> None:
    assert [file for file in EXOTIC if not (TESTS / file).is_file()] == []
    longest = next(iter(SECONDS))
    assert longest in EXOTIC and "test_floors.py" not in EXOTIC
    files = sorted([*EXOTIC, "test_floors.py", "launch/test_sft_program.py"])
    assert min(files, key=lambda file: begun(file, "")) == longest
    first, second = (sorted(files, key=lambda file: begun(file, commit)) for commit in ("a" * 40, "b" * 40))
    assert first[:2] == second[:2] == ["launch/test_sft_program.py", "test_floors.py"]
    assert first != second and sorted(first) == sorted(second) == files


@pytest.mark.parametrize(("minutes", "passed"), [("0", 1), ("5", 2)])
def test_exotic_tests_that_would_begin_too_late_are_left_out_and_say_so(minutes: str, passed: int) -> None:
    slices = "tests/astra_jax/planner/test_slices.py::test_slices_are_named_with_their_number"
    chosen = [slices, "tests/test_selection.py::test_what_is_begun_first_exists"]
    command = [sys.executable, "-m", "pytest", f"--exotic_minutes={minutes}", "-n0", "-rs", "-p", "no:cacheprovider"]
    result = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert f"{passed} passed" in result.stdout, result.stdout + result.stderr
    left_out = "exotic, and 0 minutes of such are over (--exotic_minutes)"
    assert (left_out in result.stdout) == ("1 skipped" in result.stdout) == (minutes == "0")


def test_a_run_says_which_long_files_are_not_begun_first() -> None:
    file, seconds = next(iter(SECONDS.items()))
    assert unlisted({file: seconds * 1.9, "test_new.py": 31.4, "test_short.py": 19.9}) == ['"test_new.py": 31']
    assert unlisted({file: seconds * 2.1}) == [f'"{file}": {seconds * 2.1:.0f}']


@pytest.mark.parametrize("floor", ["launch", "astra_jax", "synthesis", "sandbox"])
def test_each_room_with_tests_of_its_own_is_touched(floor: str) -> None:
    assert any(file.startswith(f"{floor}/") for file in QUICK)


def test_quick_leaves_out_what_is_slow_unless_it_is_named() -> None:
    assert is_quick("synthesis/core/test_stages.py::test_keys_must_be_unique", slow=False)
    assert not is_quick("synthesis/core/test_stages.py::test_memory_stays_flat_over_many_records[True]", slow=True)
    assert is_quick("astra_jax/models/test_parity.py::test_logits_equal_hugging_face[qwen3, untied]", slow=False)
    assert not is_quick("astra_jax/models/test_parity.py::test_logits_equal_hugging_face[qwen3]", slow=False)
    assert not is_quick("launch/test_quickstart.py::test_a_finished_run_only_writes_its_report_again", slow=True)


def test_the_option_collects_only_what_is_chosen() -> None:
    command = [sys.executable, "-m", "pytest", "--quick", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    given = ["tests/test_floors.py", "tests/launch/test_cli.py", "tests/launch/test_compare.py"]
    result = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tests/launch/test_cli.py::" in result.stdout and "test_compare" not in result.stdout
