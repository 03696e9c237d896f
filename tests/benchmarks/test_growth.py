"""How cost grows: the ideal lines, the page of the newest rows, and a small point of each kind that costs little."""

from __future__ import annotations

import asyncio
import json

import pytest
from benchmark_world import program

from benchmarks import growth_page, growth_side
from launch.flags.cli import UsageError

growth = program("benchmarks.growth")

POINT = {"processor_seconds": 1.0, "state_bytes": 2**20, "temporary_bytes": 2**21, "flops": 100.0}
ROW = {
    "part": "tokens",
    "axis": "T",
    "at": [1, 2],
    "curves": {"s": {"measured": [1.0, 3.0], "ideal": [1.0, 2.0]}},
    "load": 1.5,
    "hardware": "one",
    "date": "2026-11-25",
    "commit": "0123456789ab",
}


@pytest.mark.parametrize(
    ("part", "mib"),
    [("tokens", [3.0, 6.0]), ("vocabulary", [3.0, 4.0]), ("layers", [3.0, 6.0]), ("devices", [3.0, 1.5])],
)
def test_ideal_lines_begin_at_what_was_measured(part: str, mib: list[float]) -> None:
    """Time goes by the arithmetic; memory by the state, and by what of the temporaries has to grow."""
    second = {**POINT, "processor_seconds": 2.5, "state_bytes": 2 * 2**20, "flops": 200.0}
    curves = growth.step_curves(part, [1, 2], [POINT, second])
    assert curves["processor s a step"] == {"measured": [1.0, 2.5], "ideal": [1.0, 2.0]}
    assert curves["MiB a device"]["ideal"] == mib
    assert curves["MiB a device"]["measured"] == [3.0, 4.0]


def test_the_page_has_the_newest_row_of_each_part(tmp_path) -> None:
    newer = {**ROW, "curves": {"s": {"measured": [1.0, 2.0], "ideal": [1.0, 2.0]}}}
    words = {**ROW, "part": "restart", "axis": "start", "at": ["first", "again"]}
    found = growth_page.newest([ROW, words, newer])
    assert found == [newer, words]
    assert "| s | T | 1, 2 | 1, 2 | 1, 2 | 1.00 x | one, 1.5 | 2026-11-25 | 0123456789ab |" in growth_page.table(found)
    growth_page.figure(found, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().count(">s</text>") == 2


def test_a_step_is_compiled_and_taken() -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ff": 16}
    point = growth_side.step(json.dumps({**sizes, "rows": 1, "tokens": 16, "devices": 1}))
    assert all(point[name] > 0 for name in ("seconds", "processor_seconds", "state_bytes", "temporary_bytes", "flops"))


def test_calls_are_counted(monkeypatch) -> None:
    monkeypatch.setattr(growth_side, "SECONDS", 0.2)
    assert asyncio.run(growth_side.sandboxed(2))["calls_per_second"] > 0


def test_parts_that_there_are_not_are_refused() -> None:
    with pytest.raises(UsageError, match="--only=tokns: use some of tokens, vocabulary"):
        growth.chosen(["tokns"])
    assert growth.chosen([]) == list(growth.PARTS) and growth.chosen(["ray"]) == ["ray"]
