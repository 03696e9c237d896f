"""A driver on one machine of a Ray cluster: a stage of sandbox work, here and then on the cluster's machines.

    python ray_machines.py GCS_ADDRESS FOLDER

No sandbox opens on a machine whose address is in FOLDER/broken. Exits with 0 where both made the same, or prints what
differs.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from synthesis.core.datasets import write_dataset
from synthesis.core.records import Answer
from synthesis.core.stages import Journal, run_stage
from synthesis.pipeline.context import in_sandbox
from synthesis.pipeline.ray_cluster import RayCluster

RECORDS = 60


@asynccontextmanager
async def placed(folder: Path) -> AsyncIterator[Path]:
    """Yield the file in which this machine's finished work is counted."""
    import ray

    address = ray.util.get_node_ip_address()
    if address in (folder / "broken").read_text():
        raise ModuleNotFoundError("No module named 'msgspec'")
    yield folder / f"done-{address}"


async def squared(number: int, file: Path | None) -> list[Answer]:
    """Keep a core busy for a while."""
    until = time.monotonic() + (0.2 if file is not None else 0.0)
    while time.monotonic() < until:
        pass
    if file is not None:
        with file.open("a") as done:
            done.write("x")
    return [Answer(value=number**2), Answer(value=f"é{number}")]


async def work(number: int, folder: Path, sandbox: Any) -> list[Answer]:
    """Half of the records wait until another machine has come."""
    while sandbox is not None and number >= RECORDS // 2 and not (folder / "joined").exists():
        await asyncio.sleep(0.05)
    return await in_sandbox(sandbox, squared, number)


async def main(gcs: str, folder: Path) -> None:
    made = {}
    cluster = RayCluster(sandbox=partial(placed, folder), address=gcs)  # type: ignore[arg-type]
    for name, opened in (("here", nullcontext()), ("there", cluster)):
        async with opened as sandbox:
            with Journal(folder / name / "journal.sqlite") as journal:
                stage = partial(work, folder=folder, sandbox=sandbox)
                result = await run_stage(
                    "work", stage, range(RECORDS), key=str, out=Answer, journal=journal, concurrency=12
                )
        assert not result.rejected, result.rejected
        write_dataset(folder / name / "data", Answer, result.outputs, card={})
        made[name] = sorted((one.name, one.read_bytes()) for one in (folder / name / "data").iterdir())
        with closing(sqlite3.connect(folder / name / "journal.sqlite")) as db:
            made[name].append(("journal", repr(db.execute("SELECT * FROM done ORDER BY key").fetchall()).encode()))
    assert made["here"] == made["there"], [one[0] for one in made["there"] if one not in made["here"]]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    import ray_machines  # under the name by which workers find it

    asyncio.run(ray_machines.main(sys.argv[1], Path(sys.argv[2])))
