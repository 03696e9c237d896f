"""Goodput over starts, faults and steps that are taken back."""

from __future__ import annotations

import pytest

from astra_jax.run.goodput import Goodput


def test_goodput_counts_kept_steps_over_all_of_the_time() -> None:
    first = Goodput([], now=110.0, began=100.0)  # a start takes ten seconds
    rows = [first.step(120.0), first.step(130.0), first.step(140.0)]
    assert [row["goodput/share"] for row in rows] == [10 / 20, 20 / 30, 30 / 40]
    # Killed at 145, started again at 160, the third step was not saved; steps begin at 170.
    again = Goodput(rows[:2], now=170.0, began=160.0)
    assert again.step(180.0) == {"goodput/share": 30 / 80, "goodput/kept_seconds": 30.0, "goodput/started_at": 100.0}


def test_a_clock_that_was_set_back_breaks_nothing() -> None:
    row = Goodput([], now=110.0, began=100.0).step(90.0)
    assert row["goodput/kept_seconds"] == 0.0 and row["goodput/share"] == 0.0


@pytest.mark.parametrize("now", [40.0, 3e9])
def test_a_clock_that_was_set_between_two_starts_is_reported(now, caplog) -> None:
    last = {"goodput/started_at": 100.0, "goodput/kept_seconds": 50.0}
    with caplog.at_level("WARNING"):
        row = Goodput([last], now=now, began=now - 5.0).step(now + 50.0)
    assert row == {"goodput/share": 1.0, "goodput/kept_seconds": 100.0, "goodput/started_at": now - 50.0}
    assert "The clock was set meanwhile" in caplog.text


@pytest.mark.parametrize("row", [{"step": 3}, {"step": 3, "goodput/started_at": None, "goodput/kept_seconds": None}])
def test_rows_of_a_version_before_have_none(row) -> None:
    assert Goodput([row], now=110.0, began=100.0).step(120.0)["goodput/share"] == 0.5
