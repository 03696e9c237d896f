"""The stage runner: order, exactly once, retries, rejections, resume."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peak_memory import peak_memory

from astra_jax.base.errors import InputError
from astra_jax.base.progress import TRAFFIC, Progress, progress_bar
from synthesis.core.records import Answer
from synthesis.core.stages import AbortRun, Journal, NothingAccepted, Rejected, Transient, rng_for, run_stage


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


async def test_transient_failures_are_retried_then_rejected(tmp_path, monkeypatch):
    tries: Counter[int] = Counter()
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds):
        pauses.extend([seconds] if 0 < seconds < 0.1 else [])  # the progress bar waits for longer
        await sleep(seconds)

    monkeypatch.setattr("synthesis.core.stages.asyncio.sleep", recorded)

    async def flaky(number):
        tries[number] += 1
        if tries[number] <= number:
            raise Transient("busy")
        return [Answer(value=number)]

    result = await run(flaky, range(5), tmp_path / "journal", retries=2)
    assert [a.value for a in result.outputs] == [0, 1, 2]
    assert result.rejected == Counter(transient_failure=2)
    assert tries == {0: 1, 1: 2, 2: 3, 3: 3, 4: 3}
    assert len(pauses) == 1 + 2 + 2 + 2 and min(pauses) < 0.0015 < max(pauses) <= 0.003


@pytest.mark.parametrize("inputs", [range(4), (number for number in range(4))], ids=["sequence", "iterable"])
async def test_what_failed_by_no_fault_of_its_own_is_tried_again_by_the_next_run(tmp_path, inputs):
    there: set[str] = set()
    calls: Counter[int] = Counter()

    async def wants(number):
        calls[number] += 1
        if number == 1 and "server" not in there:
            raise Rejected("mcp_server_unavailable", "install it")
        if number == 2 and "endpoint" not in there:
            raise Transient("busy")
        if number == 3:
            raise Rejected("three")
        return [Answer(value=number)]

    first = await run(wants, range(4), tmp_path / "journal", retries=0)
    assert first.rejected == Counter(mcp_server_unavailable=1, transient_failure=1, three=1)
    there.add("server")
    second = await run(wants, range(4), tmp_path / "journal", retries=0)
    assert second.rejected == Counter(transient_failure=1, three=1) and second.resumed == 2
    there.add("endpoint")
    third = await run(wants, inputs, tmp_path / "journal", retries=0)
    assert [a.value for a in third.outputs] == [0, 1, 2] and third.rejected == Counter(three=1)
    assert calls == {0: 1, 1: 2, 2: 3, 3: 1}


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


async def test_a_stage_that_asks_nobody_can_be_interrupted(tmp_path):
    """It held the event loop, and so Ctrl-C, until all its inputs were finished."""
    done = []

    async def at_once(n):
        done.append(n)
        return [Answer(value=n)]

    stage = asyncio.create_task(run(at_once, range(100), tmp_path / "journal"))
    while not done:
        await asyncio.sleep(0)
    stage.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage
    assert len(done) < 100


async def test_a_journal_of_other_records_is_refused_by_name(tmp_path):
    async def numbers(n):
        return [Answer(value=n)]

    class Other(msgspec.Struct):
        text: str

    with Journal(tmp_path / "journal") as journal:
        await run_stage("stage", numbers, [1], key=str, out=Answer, journal=journal)
        with pytest.raises(InputError, match="finished work of stage stage is of another version .*delete"):
            await run_stage("stage", numbers, [1], key=str, out=Other, journal=journal)


def test_rng_depends_on_all_parts():
    seeds = [(0, "a", "b"), (0, "a", "c"), (1, "a", "b"), (0, "ab"), (0, "b", "a")]
    draws = {rng_for(*seed).random() for seed in seeds}
    assert len(draws) == len(seeds)
    assert rng_for(0, "a", "b").random() in draws


async def test_inputs_are_taken_as_work_begins_and_outputs_go_to_a_sink(tmp_path):
    taken, given = [], []

    def numbers():
        for number in range(30):
            taken.append(number)
            yield number

    async def same(number):
        assert len(taken) <= number + 4
        await asyncio.sleep(0.001)
        return [Answer(value=number)]

    for resumed in (0, 30):
        taken.clear()
        given.clear()
        result = await run(same, numbers(), tmp_path / "journal", concurrency=4, sink=given.append)
        assert result.outputs == [] and result.resumed == resumed
        assert [answer.value for answer in given] == list(range(30))


async def test_keys_of_inputs_that_are_made_must_be_unique_too(tmp_path):
    async def nothing(_):
        return []

    with pytest.raises(ValueError, match="two inputs have the key '1'"):
        await run(nothing, iter([0, 1, 1]), tmp_path / "journal")


async def test_a_stop_lets_others_finish_and_says_what_is_done(tmp_path):
    async def stops_at_five(number):
        if number == 5:
            raise AbortRun("no more money", "earn some")
        await asyncio.sleep(0.05)
        return [Answer(value=number)]

    with pytest.raises(AbortRun) as caught:
        await run(stops_at_five, range(20), tmp_path / "journal", concurrency=4)
    assert str(caught.value) == (
        f"no more money; stage stage: 5 of 20 inputs are finished and kept in {tmp_path / 'journal'}; earn some"
    )
    with Journal(tmp_path / "journal") as journal:
        assert set(journal.load("stage")) == {"0", "1", "2", "3", "4"}


async def test_what_is_finished_is_committed_without_waiting_for_more(tmp_path):
    """A process that is killed while a stage's second input takes long, or after the stage, keeps what was finished."""
    second = asyncio.Event()

    async def slow(number):
        if number:
            await second.wait()
        return [Answer(value=number)]

    running = asyncio.create_task(run(slow, range(2), tmp_path / "journal", concurrency=1))
    await asyncio.sleep(0)
    reader = sqlite3.connect(tmp_path / "journal")

    def finished(stage: str) -> list[tuple[str]]:
        return reader.execute("SELECT key FROM done WHERE stage = ?", (stage,)).fetchall()

    async with asyncio.timeout(60):
        while not finished("stage"):
            await asyncio.sleep(Journal.COMMIT_SECONDS / 5)
    assert finished("stage") == [("0",)]
    second.set()
    await running
    with Journal(tmp_path / "journal") as journal:
        await run_stage("next", slow, range(1), key=str, out=Answer, journal=journal)
        assert finished("next") == [("0",)]


async def test_progress_shows_rejections_and_traffic(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Progress, "SECONDS", 0.02)

    async def half(number):
        TRAFFIC.requests += 1
        TRAFFIC.tokens += 100
        await asyncio.sleep(0.05)
        if number % 2:
            raise Rejected("odd")
        return []

    await run(half, range(10), tmp_path / "journal", concurrency=2)
    shown = capsys.readouterr().err
    assert "10/10" in shown and "rejected=5" in shown and "requests=10" in shown and "tokens/s=" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_over_itself_on_a_terminal_and_lines_in_a_log(terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    clock = iter(range(0, 10_000, 10))  # seconds
    monkeypatch.setattr("astra_jax.base.progress.time.monotonic", lambda: next(clock))
    bar = progress_bar(total=10, desc="stage", mininterval=0)
    for number in range(10):
        bar.set_postfix_str(f"now={number}")
        bar.update()
    bar.close()
    shown = capsys.readouterr().err
    if terminal:
        assert shown.count("\r") > 10 and shown.count("\n") == 1
    else:
        lines = shown.splitlines()
        assert "\r" not in shown and "now=9" in lines[-1] and 3 < len(lines) < 10
        assert all(line.startswith("stage:") for line in lines)


def peaks(folder: Path, given: str) -> tuple[int, int]:
    """Growth of memory over a stage of 500 records of 5 kB and one of 20,000, in bytes."""
    text = "x" * 5000

    async def thousand(number):
        return [Answer(value=f"{number}{text}")]

    async def same(answer):
        return [answer]

    async def work(count, name):
        total = 0

        def add(answer):
            nonlocal total
            total += len(answer.value)

        with Journal(folder / name) as journal, peak_memory() as peak:
            inputs = iter(range(count)) if given == "generator" else range(count)
            options = {"out": Answer, "journal": journal}
            if given == "stored":
                first = await run_stage("s", thousand, inputs, key=str, stored=True, **options)
                second = await run_stage(
                    "t", same, first.outputs, key=lambda one: one.value[:8], stored=True, **options
                )
                for answer in second.outputs:
                    add(answer)
            else:
                await run_stage("s", thousand, inputs, key=str, sink=add, **options)
        assert total > count * 5000
        return peak.bytes

    async def both():
        return await work(500, "small"), await work(20_000, "large")

    return asyncio.run(both())


@pytest.mark.slow
@pytest.mark.parametrize("given", ["sequence", "generator", "stored"])
def test_memory_stays_flat_over_many_records(tmp_path, given):
    """20,000 records of 5 kB are 100 MB; each stage holds their keys (at most 300 bytes each). In a process of its own:
    the heap of one that has run many tests grows by its holes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        small, large = fresh.submit(peaks, tmp_path, given).result()
    assert large - small < 300 * 19_500 * (2 if given == "stored" else 1)  # stages


# ---------------------------------------------------------------------------------------------------------------------
# A stage that accepts next to nothing


async def test_a_stage_that_accepts_next_to_nothing_stops_with_its_most_common_reasons(tmp_path: Path) -> None:
    """And what is finished stays: the same command goes on behind it."""
    fixed = False

    async def stage(number: int) -> list[int]:
        if fixed:
            return [number]
        raise Rejected(("bad_schema", "no_tools", "bad_schema", "empty", "rare")[min(number % 5, 4)], f"input {number}")

    options: dict[str, Any] = {"key": str, "out": int, "concurrency": 4, "stop_after": 20}
    with Journal(tmp_path / "journal") as journal:
        with pytest.raises(NothingAccepted) as caught:
            await run_stage("s", stage, range(1_000), journal=journal, **options)
        said = str(caught.value)
        assert (
            "stage s: none of 20 accepted. Most common reasons: 8 times bad_schema, such as: input 0; 4 times " in said
        )
        assert (
            said.count(" times ") == 3
            and "raise --config.stop_after=20, and run the same command again to resume" in said
        )
        assert 20 <= len(journal.load("s")) < 28  # what was in work is finished
        fixed = True
        result = await run_stage("s", stage, range(1_000), journal=journal, **options)
    assert result.resumed < 28 and len(result.outputs) == 1_000 - result.resumed


async def test_a_stage_that_accepts_less_than_one_in_a_hundred_stops_too(tmp_path: Path) -> None:
    async def first_only(number: int) -> list[int]:
        if number:
            raise Rejected("bad")
        return [number]

    options: dict[str, Any] = {"key": str, "out": int, "concurrency": 1, "stop_after": 20}
    with Journal(tmp_path / "journal") as journal, pytest.raises(NothingAccepted, match="only 1 of 101 accepted"):
        await run_stage("s", first_only, range(1_000), journal=journal, **options)


@pytest.mark.parametrize(
    ("rejects", "reason", "count"), [(98, "bad", 500), (100, "transient_failure", 100), (100, "bad", 19)]
)
async def test_a_stage_that_accepts_a_few_goes_on(tmp_path: Path, rejects: int, reason: str, count: int) -> None:
    """Failures of the infrastructure are no rejections, and a few records tell nothing."""

    async def stage(number: int) -> list[int]:
        if number % 100 >= 100 - rejects:
            raise Rejected(reason)
        return [number]

    with Journal(tmp_path / "journal") as journal:
        options: dict[str, Any] = {"key": str, "out": int, "concurrency": 1, "stop_after": 20}
        result = await run_stage("s", stage, range(count), journal=journal, **options)
    assert result.rejected.total() + len(result.outputs) == count
