"""A run of two stages that ask a teacher, one of which refuses records. To be killed and started again.

    python chaos_run.py FOLDER URL PROMPTS MODE

writes FOLDER/out.json when it is done.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import synthesis.pipeline.prompts
from synthesis.core.recording import Recording
from synthesis.core.stages import Journal, Rejected, rng_for, run_stage
from synthesis.pipeline.teacher import Mode, OpenAITeacher, OpenAITeacherConfig

COUNT = 160


class DrawnAnswer(msgspec.Struct, frozen=True):
    value: int
    note: str


class Record(msgspec.Struct, frozen=True):
    id: str
    values: list[int]


async def synthesize(folder: Path, url: str, prompts: Path, mode: Mode) -> None:
    synthesis.pipeline.prompts.PROMPTS = prompts
    config = OpenAITeacherConfig(url, "m", timeout_seconds=0.8, backoff_seconds=0.01, tries=8, failures=30)
    teacher = OpenAITeacher(config, Recording(folder / "teacher.sqlite"), mode)

    async def draw(record: Record, turn: int) -> int:
        seed = rng_for(0, record.id, turn).getrandbits(31)
        answer = await teacher.ask(DrawnAnswer, {"record": record}, language="en", seed=seed)
        return answer.value

    async def first(record: Record) -> list[Record]:
        value = await draw(record, 0)
        if value % 7 == 0:
            raise Rejected("unlucky", f"{record.id} drew {value}")
        return [Record(f"{record.id}.{part}", [value]) for part in range(1 + value % 2)]

    async def second(record: Record) -> list[Record]:
        more = await asyncio.gather(draw(record, 1), draw(record, 2))
        return [Record(record.id, [*record.values, *more])]

    def records() -> Iterator[Record]:
        for number in range(COUNT):
            yield Record(f"r{number}", [])

    options: dict[str, Any] = {"key": lambda record: record.id, "out": Record, "concurrency": 16}
    with Journal(folder / "journal.sqlite") as journal:
        drawn = await run_stage("first", first, records(), journal=journal, **options)
        made = await run_stage("second", second, drawn.outputs, journal=journal, **options)
    written = [made.outputs, dict(drawn.rejected), drawn.details]
    (folder / "out.json").write_bytes(msgspec.json.encode(written, order="deterministic"))


if __name__ == "__main__":
    asyncio.run(synthesize(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]))  # type: ignore[arg-type]
