"""What `benchmarks.growth` measures of Ray's workers before an endpoint; prints a line of JSON.

    python -m benchmarks.ray_side WORKERS RECORDS IN_WORK LATENCY

A stage of records that ask twice, of an endpoint with a latency, with journal and recording: records a second, and what
one costs all processes but the endpoint's (this one, Ray's, its workers) in processor time, once everything has begun.
WORKERS is 0 for this process alone; IN_WORK is of each worker, or of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import rows
from benchmarks.processes import descendants
from synthesis.core.recording import Recording
from synthesis.core.records import Answer
from synthesis.core.stages import Journal
from synthesis.pipeline.executors import LocalExecutor, Resources, run_on
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

PROMPT = "What is the capital of {{ country }}?" + " Think of rivers, of roads and of what was built there." * 20
OPENED = 30.0
"""Seconds for all workers to be there."""


class CapitalAnswer(msgspec.Struct, frozen=True):
    """What `benchmarks.teacher_side` answers."""

    city: str
    certain: bool


async def capitals(number: int, context: Resources) -> list[Answer]:
    """Two questions, one after the other."""
    found = []
    for turn in range(2):
        country = {"country": f"number {number}, {turn}"}
        given = await context.teacher.ask(CapitalAnswer, country, language="en", seed=number)
        found.append(Answer(value=given.city))
    return found


async def arrive(number: int, context: Resources, folder: Path, workers: int) -> list[Answer]:
    """All workers have begun."""
    (folder / str(context.worker)).touch()
    until = time.monotonic() + OPENED
    while len(os.listdir(folder)) < workers and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return []


@asynccontextmanager
async def given(resources: Resources) -> AsyncIterator[Resources]:
    yield resources


def teacher(url: str, recording: Path, in_flight: int) -> OpenAITeacher:
    config = OpenAITeacherConfig(url, "m", answer_form="json_schema", concurrency=in_flight)
    return OpenAITeacher(config, Recording(recording), "record", Prompts({"en/capital_answer.jinja": PROMPT}))


def processor_seconds(but: int) -> float:
    """Of this process and all that descend from it, without one of them; of those that live."""
    ticks = sum(int(field) for pid, fields in descendants().items() if pid != but for field in fields[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


async def measure(workers: int, records: int, in_work: int, latency: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.teacher_side", str(latency)]
    served = subprocess.Popen(command, cwd=rows.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(served.stdout.readline())}/v1"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make = partial(teacher, url, folder / "teacher.sqlite", in_work * max(1, workers))
            if not workers:
                asked = make()
                executor: Any = LocalExecutor(asked, None)  # type: ignore[arg-type]
                made = await _run(executor, folder, 0, records, in_work, served.pid)
                await asked.close()
                return made
            import ray

            from synthesis.pipeline.ray_executor import RayExecutor

            options = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
            ray.init(address="local", num_cpus=workers, **options)
            try:
                executor = RayExecutor(sandbox=nullcontext, endpoint=make, count=workers)
                return await _run(executor, folder, workers, records, in_work, served.pid)
            finally:
                ray.shutdown()
    finally:
        served.kill()
        served.wait()


async def _run(
    executor: Any, folder: Path, workers: int, records: int, in_work: int, endpoint: int
) -> dict[str, float]:
    async with executor.workers(given) as crew:
        with Journal(folder / "journal.sqlite") as journal:
            options: dict[str, Any] = {"key": str, "out": Answer, "journal": journal, "concurrency": in_work}
            (folder / "there").mkdir()
            first = partial(arrive, folder=folder / "there", workers=workers)
            await run_on(crew, "arrive", first, range(in_work * max(1, workers)), **options)
            await run_on(crew, "warm", capitals, range(-20 * max(1, workers), 0), **options)
            processor, began = processor_seconds(endpoint), time.perf_counter()
            await run_on(crew, "capitals", capitals, range(records), **options)
            seconds, processor = time.perf_counter() - began, processor_seconds(endpoint) - processor
    return {"records_per_second": records / seconds, "processor_ms_a_record": 1000 * processor / records}


def main(arguments: Sequence[str]) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    workers, records, in_work, latency = arguments
    print(json.dumps(asyncio.run(measure(int(workers), int(records), int(in_work), float(latency)))), flush=True)


if __name__ == "__main__":
    from benchmarks import ray_side  # under its own name, by which workers find it

    ray_side.main(sys.argv[1:])
