"""A run of two stages that ask a teacher, one of which refuses records. To be killed and started again.

    python chaos_run.py FOLDER URL MODE [COUNT [ray]]

writes FOLDER/out.json when it is done. MODE is of the recording; `ray`: the stages are in Ray's workers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from synthesis.core.recording import Recording
from synthesis.core.stages import Journal, Rejected, rng_for
from synthesis.pipeline.executors import Executor, LocalExecutor, Resources, run_on
from synthesis.pipeline.prompts import Prompts
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


async def second(record: Record, teacher: Teacher) -> list[Record]:
    more = await asyncio.gather(draw(record, 1, teacher), draw(record, 2, teacher))
    return [Record(record.id, [*record.values, *more])]


@asynccontextmanager
async def asked(resources: Resources) -> AsyncIterator[Teacher]:
    yield resources.teacher


def endpoint(folder: Path, url: str, mode: Mode) -> OpenAITeacher:
    config = OpenAITeacherConfig(url, "m", timeout_seconds=0.8, backoff_seconds=0.01, tries=8, failures=30)
    prompts = Prompts({"en/drawn_answer.jinja": "Draw for {{ record | json }}."})
    return OpenAITeacher(config, Recording(folder / "teacher.sqlite"), mode, prompts)


def executor_of(make: Callable[[], OpenAITeacher], *, on_ray: bool) -> Executor:
    if not on_ray:
        return LocalExecutor(make(), None)  # type: ignore[arg-type]
    from synthesis.pipeline.ray_executor import RayExecutor

    return RayExecutor(sandbox=nullcontext, endpoint=make, count=2)  # type: ignore[arg-type]


async def synthesize(folder: Path, url: str, mode: Mode, count: int = COUNT, *, on_ray: bool = False) -> None:
    """Go on with what FOLDER has, and write `out.json`."""
    options: dict[str, Any] = {"key": attrgetter("id"), "out": Record, "concurrency": 16}
    given = (Record(f"r{number}", []) for number in range(count))
    executor = executor_of(partial(endpoint, folder, url, mode), on_ray=on_ray)
    with Journal(folder / "journal.sqlite") as journal:
        async with executor.workers(asked) as workers:
            drawn = await run_on(workers, "first", first, given, journal=journal, **options)
            made = await run_on(workers, "second", second, drawn.outputs, journal=journal, **options)
    written = [[*made.outputs], dict(drawn.rejected), drawn.details]
    (folder / "out.json").write_bytes(msgspec.json.encode(written, order="deterministic"))


async def main(folder: str, url: str, mode: Mode, count: str = str(COUNT), where: str = "") -> None:
    await synthesize(Path(folder), url, mode, int(count), on_ray=where == "ray")


if __name__ == "__main__":
    import chaos_run  # under its own name, by which workers find its stages

    asyncio.run(chaos_run.main(*sys.argv[1:]))  # type: ignore[arg-type]
