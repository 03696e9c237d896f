"""Measurement of `benchmarks.growth`: resources of a run's process by its number of records; prints a line of JSON.

    python -m benchmarks.record_side RECORDS

The process runs two stages of trajectories with their statistics and dataset, as in `trajectories/pipeline.py`. The
records are synthetic, 5 KB of JSON each: real ones would take an hour. Measured are the peak memory of this process
above its initial memory, its processor time, and the bytes of the journal and of the dataset.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from synthesis.core.records import EmulatedExecution, Message, ToolCall, ToolServer, ToolSpec, Trajectory
from synthesis.core.stages import Journal, rng_for
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.pipeline_run import PipelineRun
from synthesis.pipeline.stage_keys import StageSpec
from synthesis.trajectories.statistics import trajectory_statistics

WORDS = tuple(
    f"{first}{second}" for first in "bdfghklmnprst" for second in ("ar", "el", "ith", "on", "und", "yme", "osk")
)
SERVERS, TOOLS = 50, 12


@dataclass(frozen=True)
class RecordsConfig:
    """A run's settings are on its card."""

    records: int = 0


def text(count: int, *parts: object) -> str:
    return " ".join(rng_for(0, *parts).choices(WORDS, k=count))


def server(number: int) -> ToolServer:
    schema = {
        "type": "object",
        "properties": {"key": {"type": "string", "description": text(8, number)}},
        "required": [],
    }
    tools = [ToolSpec(f"tool_{number}_{one}", text(25, number, one), schema) for one in range(TOOLS)]
    return ToolServer(f"s{number}", "", text(12, number), "d", "en", tools, EmulatedExecution())


async def converse(number: int, context: None, servers: Sequence[ToolServer]) -> list[Trajectory]:
    """A request, two calls and an answer."""
    of = servers[number % len(servers)]
    messages = [Message("user", text(30, "user", number))]
    for turn in range(2):
        call = ToolCall(f"c{turn}", of.tools[turn].name, {"key": text(2, number, turn)})
        messages.append(Message("assistant", text(20, "says", number, turn), tool_calls=[call]))
        messages.append(Message("tool", text(60, "told", number, turn), tool_call_id=call.id, name=call.name))
    messages.append(Message("assistant", text(50, "answer", number)))
    name = f"task-0-{number:06d}"
    return [Trajectory(name, name, of.id, of.domain, "en", of.tools, messages, 0, {}, None, needs=[])]


async def rate(one: Trajectory, context: None) -> list[Trajectory]:
    return [msgspec.structs.replace(one, reward=rng_for(0, one.id).random())]


async def measure(records: int) -> dict[str, float]:
    servers = [server(number) for number in range(SERVERS)]
    by_id = {one.id: one for one in servers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        executor = Executor(OfflineTeacher(), None)  # type: ignore[arg-type]
        with Journal(folder / "journal.sqlite") as journal:
            pipeline = PipelineRun(
                executor, None, journal, folder, config=RecordsConfig(records), concurrency=16, seed=0
            )
            await run(pipeline, min(records, 100), servers, by_id, "warm")
            before, processor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            await run(pipeline, records, servers, by_id, "data")
            processor = time.process_time() - processor
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        kept = os.path.getsize(folder / "journal.sqlite")
        written = sum(one.stat().st_size for one in (folder / "data").iterdir())
    return {
        "held_kib": held,
        "processor_ms_a_record": 1000 * processor / records,
        "journal_bytes_a_record": kept / records,
        "dataset_bytes_a_record": written / records,
    }


async def run(
    pipeline: PipelineRun[None], records: int, servers: Sequence[ToolServer], by_id: dict[str, ToolServer], name: str
) -> None:
    talk = partial(converse, servers=servers)
    runs = await pipeline.stage(StageSpec(f"{name}-runs", Trajectory, str), talk, range(records))
    rated = await pipeline.stage(StageSpec(f"{name}-judge", Trajectory, lambda one: one.id), rate, runs)
    pipeline.write(name, Trajectory, rated, trajectory_statistics(rated, by_id))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1])))), flush=True)
