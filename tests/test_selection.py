"""What `--quick` and `--nightly` run and what starts first exists, and something of each layer is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from selection import BUDGET, LONG, NIGHTLY, QUICK, SECONDS, by_day, is_quick, unlisted

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_what_is_chosen_exists() -> None:
    missing = {file: {name.partition("[")[0] for name in names} - functions(file) for file, names in QUICK.items()}
    wrong = {file: sorted(names) for file, names in missing.items() if names}
    assert not wrong, "tests/selection.py names tests that these files do not have"


def test_what_is_begun_first_exists() -> None:
    assert [file for file in SECONDS if not (TESTS / file).is_file()] == []
    assert list(SECONDS.values()) == sorted(SECONDS.values(), reverse=True)


def test_nightly_files_exist_and_none_is_quick() -> None:
    assert [file for file in NIGHTLY if not (TESTS / file).is_file()] == []
    assert NIGHTLY.isdisjoint(QUICK)


def collected(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_what_is_nightly_is_run_where_it_is_named_and_with_the_option() -> None:
    """A file by its name in `NIGHTLY`, a test by its mark."""
    file, marked = "tests/sandbox/test_sandbox_soak.py", "test_lower_tiers_compute_the_same[C]"
    folder, named = collected("tests/sandbox"), collected(file, "tests/sandbox/test_sandbox_pool.py")
    nightly = collected("--nightly", "tests/sandbox")
    assert file not in folder and marked not in folder and "test_lower_tiers_compute_the_same[D]" in folder
    assert file in named and marked in named
    assert file in nightly and marked in nightly


def test_cases_that_are_not_chosen_are_nightly() -> None:
    one, pair, other = by_day(["a", (1, 2), "c"], "a")
    assert (one.values, one.marks, pair.values, [mark.name for mark in pair.marks]) == (("a",), (), (1, 2), ["nightly"])
    assert other.marks == pair.marks
    with pytest.raises(AssertionError, match="not among them"):
        by_day(["a"], "b")


def test_a_run_says_which_long_files_are_not_begun_first() -> None:
    file, seconds = next(iter(SECONDS.items()))
    short = {"test_short.py": LONG - 0.1}
    assert unlisted({file: seconds * 1.9, "test_new.py": LONG + 1.4} | short) == [f'"test_new.py": {LONG + 1.4:.0f}']
    assert unlisted({file: seconds * 2.1}) == [f'"{file}": {seconds * 2.1:.0f}']


def test_the_longest_files_of_a_day_leave_time_for_the_others() -> None:
    """A complete run prints what all of them took, and which of these numbers are wrong."""
    by_day = sum(seconds for file, seconds in SECONDS.items() if file not in NIGHTLY)
    assert by_day <= BUDGET, "mark cases that few changes touch nightly, or make them cheaper"


@pytest.mark.parametrize("layer", ["launch", "astra_jax", "synthesis", "sandbox"])
def test_each_package_with_tests_of_its_own_is_touched(layer: str) -> None:
    assert any(file.startswith(f"{layer}/") for file in QUICK)


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
    files = (
        "tests/test_architecture.py",
        "tests/sandbox/test_sandbox_seccomp.py",
        "tests/sandbox/test_sandbox_layers.py",
    )
    chosen = collected("--quick", *files)
    assert "test_sandbox_seccomp.py::" in chosen and "test_sandbox_layers" not in chosen
