"""The stage runner: order, exactly once, retries, rejections, resume."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from synthesis.records import Answer
from synthesis.runner import Journal, Rejected, Transient, rng_for, run_stage


async def run(function, inputs, path, **options):
    with Journal(path) as journal:
        return await run_stage(
            "stage", function, inputs, key=str, out=Answer, journal=journal, backoff_seconds=0.001, **options
        )


async def test_outputs_keep_the_order_of_inputs_whatever_finishes_first(tmp_path):
    async def slow_first(number):
        await asyncio.sleep(0.02 / (number + 1))
        return [Answer(value=number), Answer(value=-number)]

    result = await run(slow_first, range(20), tmp_path / "journal", concurrency=7)
    assert [a.value for a in result.outputs] == [v for n in range(20) for v in (n, -n)]


async def test_concurrency_is_bounded(tmp_path):
    active = peak = 0

    async def count(number):
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        await asyncio.sleep(0.001)
        active -= 1
        return []

    await run(count, range(50), tmp_path / "journal", concurrency=5)
    assert peak == 5


async def test_rejections_are_counted_with_a_reason_and_an_example(tmp_path):
    async def odd_only(number):
        if number % 2 == 0:
            raise Rejected("even", f"{number} is even")
        return [Answer(value=number)]

    result = await run(odd_only, range(10), tmp_path / "journal", concurrency=1)
    assert result.rejected == Counter(even=5)
    assert result.details == {"even": "0 is even"}
    assert len(result.outputs) == 5


async def test_transient_failures_are_retried_then_rejected(tmp_path):
    tries: Counter[int] = Counter()

    async def flaky(number):
        tries[number] += 1
        if tries[number] <= number:
            raise Transient("busy")
        return [Answer(value=number)]

    result = await run(flaky, range(5), tmp_path / "journal", retries=2)
    assert [a.value for a in result.outputs] == [0, 1, 2]
    assert result.rejected == Counter(transient_failure=2)
    assert tries == {0: 1, 1: 2, 2: 3, 3: 3, 4: 3}


async def test_a_stopped_run_goes_on_and_does_nothing_twice(tmp_path):
    calls: Counter[int] = Counter()

    async def breaks_at_seven(number):
        calls[number] += 1
        if number == 7 and calls[7] == 1:
            raise RuntimeError("power cut")
        if number == 3:
            raise Rejected("three")
        return [Answer(value=number)]

    with pytest.raises(RuntimeError, match="power cut"):
        await run(breaks_at_seven, range(12), tmp_path / "journal", concurrency=1)
    result = await run(breaks_at_seven, range(12), tmp_path / "journal", concurrency=1)
    assert [a.value for a in result.outputs] == [n for n in range(12) if n != 3]
    assert result.rejected == Counter(three=1)
    assert result.resumed == 7
    assert calls == {n: 2 if n == 7 else 1 for n in range(12)}


async def test_keys_must_be_unique(tmp_path):
    async def nothing(_):
        return []

    with pytest.raises(ValueError, match="two inputs have the key '1'"):
        await run(nothing, [0, 1, 1], tmp_path / "journal")


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "journal").write_text("not a database, but long enough to be read as a header of one" * 20)
    with pytest.raises(ValueError, match="is not a journal"):
        Journal(tmp_path / "journal")


def test_rng_depends_on_all_parts():
    draws = {rng_for(0, "a", "b").random(), rng_for(0, "a", "c").random(), rng_for(1, "a", "b").random()}
    assert len(draws) == 3
    assert rng_for(0, "a", "b").random() in draws
