"""A driver on one machine of a Ray cluster: a stage that asks an endpoint, here and then in the cluster's workers.

    python ray_machines.py GCS_ADDRESS OWN_ADDRESS FOLDER

A machine whose address is in FOLDER/broken lacks a package. Ends with 0 where both made the same, or says what differs.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from flaky_endpoint import Flaky

from synthesis.core.datasets import write_dataset
from synthesis.core.recording import Recording
from synthesis.core.records import Answer
from synthesis.core.stages import Journal
from synthesis.pipeline.executors import LocalExecutor, Resources, run_on
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.ray_executor import RayExecutor
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

RECORDS = 60
IN_FLIGHT = 3


class MachineAnswer(msgspec.Struct, frozen=True):
    value: int
    note: str


@dataclass
class Place:
    teacher: Any
    folder: Path
    address: str


@asynccontextmanager
async def placed(resources: Resources, folder: Path) -> AsyncIterator[Place]:
    import ray

    address = "" if resources.worker is None else ray.util.get_node_ip_address()
    if address and address in (folder / "broken").read_text():
        raise ModuleNotFoundError("No module named 'msgspec'")
    yield Place(resources.teacher, folder, address)


async def ask(number: int, place: Place) -> list[Answer]:
    """Half of the records wait until another machine has come."""
    while place.address and number >= RECORDS // 2 and not (place.folder / "joined").exists():
        await asyncio.sleep(0.05)
    given = await place.teacher.ask(MachineAnswer, {"record": number}, language="en", seed=number)
    with (place.folder / f"done-{place.address}").open("a") as file:
        file.write("x")
    return [Answer(value=given.value), Answer(value=given.note)]


class Watched(Flaky):
    """Knows how many requests it has had at once."""

    at_once = most = 0

    async def answer(self, request: Any) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            return await super().answer(request)
        finally:
            self.at_once -= 1


def teacher(url: str, recording: Path) -> OpenAITeacher:
    config = OpenAITeacherConfig(url, "m", answer_form="json_schema", concurrency=IN_FLIGHT)
    return OpenAITeacher(config, Recording(recording), "record", Prompts({"en/machine_answer.jinja": "{{ record }}"}))


async def main(gcs: str, host: str, folder: Path) -> None:
    served = Watched(latency=0.05, host=host)
    async with served as url:
        made = {}
        for name in ("here", "there"):
            (folder / name).mkdir()
            make = partial(teacher, url, folder / name / "teacher.sqlite")
            executor: Any = (
                LocalExecutor(make(), None)  # type: ignore[arg-type]
                if name == "here"
                else RayExecutor(sandbox=nullcontext, endpoint=make, address=gcs)
            )
            async with executor.workers(partial(placed, folder=folder)) as workers:
                with Journal(folder / name / "journal.sqlite") as journal:
                    result = await run_on(
                        workers, "ask", ask, range(RECORDS), key=str, out=Answer, journal=journal, concurrency=6
                    )
            assert not result.rejected, result.rejected
            write_dataset(folder / name / "data", Answer, result.outputs, card={})
            made[name] = sorted((one.name, one.read_bytes()) for one in (folder / name / "data").iterdir())
            with sqlite3.connect(folder / name / "journal.sqlite") as db:
                made[name].append(("journal", repr(db.execute("SELECT * FROM done ORDER BY key").fetchall()).encode()))
            with sqlite3.connect(folder / name / "teacher.sqlite") as db:
                rows = db.execute("SELECT digest, answer FROM answers ORDER BY digest").fetchall()
                made[name].append(("recording", repr(rows).encode()))
                (requests,) = db.execute("SELECT requests FROM spent").fetchone()
                assert RECORDS <= requests <= RECORDS + (IN_FLIGHT if name == "there" else 0), requests
        assert served.most <= IN_FLIGHT + 1  # a request of whoever died may still be there
        assert made["here"] == made["there"], [one[0] for one in made["there"] if one not in made["here"]]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    import ray_machines  # under the name by which workers find it

    asyncio.run(ray_machines.main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
