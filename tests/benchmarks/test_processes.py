"""Programs that a benchmark starts: what they print, and a refusal that is theirs and no fault of the benchmark."""

from __future__ import annotations

import pytest
from benchmark_world import program

from astra_jax.base.errors import InputError

processes = program("benchmarks.processes")


def test_what_a_program_prints_is_kept() -> None:
    assert processes.run("platform", keep=True).strip()
    assert processes.run("os", environment={"A": "b"}, keep=True) == ""


def test_a_program_s_refusal_is_a_refusal(capfd) -> None:
    with pytest.raises(InputError, match=r"python -m launch.convert ended with 2; what it said of that is above"):
        processes.run("launch.convert", "--no_such_flag=1")
    assert "error: " in capfd.readouterr().err
