"""What `--quick` and `--nightly` run and what starts first exists, and something of each layer is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from selection import NIGHTLY, QUICK, SECONDS, is_quick, unlisted

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


def test_nightly_files_exist_and_none_is_quick() -> None:
    assert [file for file in NIGHTLY if not (TESTS / file).is_file()] == []
    assert NIGHTLY.isdisjoint(QUICK)


@pytest.mark.parametrize(
    ("arguments", "is_run"), [(["tests/astra_jax/planner"], False), (["--nightly", "tests/astra_jax/planner"], True)]
)
def test_a_folder_is_run_without_its_nightly_files_and_a_file_that_is_named_is_run(
    arguments: list[str], is_run: bool
) -> None:
    file = "tests/astra_jax/planner/test_slices.py"
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", "-p", "no:cacheprovider"]
    for given, expected in (
        (arguments, is_run),
        ([file], True),
        ([f"{file}::test_slices_are_named_with_their_number"], True),
    ):
        result = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (file in result.stdout) == expected, result.stdout + result.stderr


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
    assert is_quick(
        "astra_jax/models/test_parity.py::test_logits_and_gradients_equal_hugging_face[qwen3, untied]", slow=False
    )
    assert not is_quick(
        "astra_jax/models/test_parity.py::test_logits_and_gradients_equal_hugging_face[qwen3]", slow=False
    )
    assert not is_quick("launch/test_quickstart.py::test_a_finished_run_only_writes_its_report_again", slow=True)


def test_the_option_collects_only_what_is_chosen() -> None:
    command = [sys.executable, "-m", "pytest", "--quick", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    given = ["tests/test_floors.py", "tests/launch/test_cli.py", "tests/launch/test_compare.py"]
    result = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tests/launch/test_cli.py::" in result.stdout and "test_compare" not in result.stdout
