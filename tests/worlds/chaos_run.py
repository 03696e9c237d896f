"""A run of two stages that ask a teacher, one of which refuses records. To be killed and started again.

    python chaos_run.py FOLDER URL MODE [COUNT [ray]]

writes FOLDER/out.json when it is done. MODE is of the recording; `ray`: what needs no teacher is done by Ray's workers.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from synthesis.core.recording import Recording
from synthesis.core.stages import Journal, Rejected, rng_for, run_stage
from synthesis.pipeline.context import in_sandbox
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.ray_cluster import RayCluster
from synthesis.pipeline.teacher import Mode, OpenAITeacher, OpenAITeacherConfig, Teacher

COUNT = 160


class DrawnAnswer(msgspec.Struct, frozen=True):
    value: int
    note: str


class Record(msgspec.Struct, frozen=True):
    id: str
    values: list[int]


async def draw(record: Record, turn: int, teacher: Teacher) -> int:
    seed = rng_for(0, record.id, turn).getrandbits(31)
    return (await teacher.ask(DrawnAnswer, {"record": record}, language="en", seed=seed)).value


async def first(record: Record, teacher: Teacher) -> list[Record]:
    value = await draw(record, 0, teacher)
    if value % 7 == 0:
        raise Rejected("unlucky", f"{record.id} drew {value}")
    return [Record(f"{record.id}.{part}", [value]) for part in range(1 + value % 2)]


async def second(record: Record, teacher: Teacher, sandbox: Any) -> list[Record]:
    more = await asyncio.gather(draw(record, 1, teacher), draw(record, 2, teacher))
    return await in_sandbox(sandbox, extended, record, more)


async def extended(record: Record, more: list[int], sandbox: Any) -> list[Record]:
    return [Record(record.id, [*record.values, *more])]


def endpoint(folder: Path, url: str, mode: Mode) -> OpenAITeacher:
    config = OpenAITeacherConfig(url, "m", timeout_seconds=0.8, backoff_seconds=0.01, tries=8, failures=30)
    prompts = Prompts({"en/drawn_answer.jinja": "Draw for {{ record | json }}."})
    return OpenAITeacher(config, Recording(folder / "teacher.sqlite"), mode, prompts)


async def synthesize(folder: Path, url: str, mode: Mode, count: int = COUNT, *, on_ray: bool = False) -> None:
    """Go on with what FOLDER has, and write `out.json`."""
    given = (Record(f"r{number}", []) for number in range(count))
    teacher = endpoint(folder, url, mode)
    opened: AbstractAsyncContextManager[Any] = (
        RayCluster(sandbox=nullcontext, count=2) if on_ray else nullcontext()  # type: ignore[arg-type]
    )
    with Journal(folder / "journal.sqlite") as journal:
        options: dict[str, Any] = {"key": attrgetter("id"), "out": Record, "concurrency": 16, "journal": journal}
        async with opened as sandbox:
            drawn = await run_stage("first", partial(first, teacher=teacher), given, **options)
            more = partial(second, teacher=teacher, sandbox=sandbox)
            made = await run_stage("second", more, drawn.outputs, **options)
        await teacher.close()
    written = [[*made.outputs], dict(drawn.rejected), drawn.details]
    (folder / "out.json").write_bytes(msgspec.json.encode(written, order="deterministic"))


async def main(folder: str, url: str, mode: Mode, count: str = str(COUNT), where: str = "") -> None:
    await synthesize(Path(folder), url, mode, int(count), on_ray=where == "ray")


if __name__ == "__main__":
    import chaos_run  # under its own name, by which workers find its stages

    asyncio.run(chaos_run.main(*sys.argv[1:]))  # type: ignore[arg-type]
