"""Work for Ray's workers, in a module that they import quickly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.records import Answer
from synthesis.core.stages import Rejected, Transient
from synthesis.pipeline.ray_cluster import TRIES


@contextmanager
def two_cpus() -> Iterator[str]:
    """Start a Ray of two CPUs, which this process joins; yield its address."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        yield context.address_info["address"]
    finally:
        ray.shutdown()


async def mixed(number: int, folder: Path, processes: int, sandbox: None) -> list[Answer]:
    """End in each way that work can end, once as many processes are at it."""
    (folder / "processes").mkdir(parents=True, exist_ok=True)
    (folder / "processes" / str(os.getpid())).touch()
    while len(os.listdir(folder / "processes")) < processes:
        await asyncio.sleep(0.01)
    assert processes == 1 or "jax" not in sys.modules
    if number % 5 == 0:
        raise Rejected("fifth", f"{number} is divisible: by 5")
    if number % 7 == 1 and noted(folder / f"tried-{number}") < (9 if number == 22 else 2):
        raise Transient("busy")
    return [Answer(value=number), Answer(value=f"é{number}")] * (number % 3)


async def broken(number: int, sandbox: None) -> list[Answer]:
    raise LookupError(f"{number} is nowhere")


async def deadly(number: int, folder: Path, sandbox: None) -> list[Answer]:
    """Whoever works at 3 dies; whoever works at 5 dies once."""
    if number in (3, 5) and noted(folder / f"died-{number}") <= (TRIES if number == 3 else 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return [Answer(value=number)]


def noted(file: Path) -> int:
    """Add one to a file's count, and return it."""
    with file.open("a") as notes:
        notes.write("x")
    return file.stat().st_size


def unopened() -> Any:
    raise PermissionError("not here")


@asynccontextmanager
async def noted_pool(folder: Path) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(concurrency=4)) as pool:
        (folder / str(os.getpid())).touch()
        yield pool


@asynccontextmanager
async def keyed(key: str) -> AsyncIterator[str]:
    yield key


async def refused(sandbox: str) -> None:
    raise RuntimeError(f"refused, with a key of {len(sandbox)} characters")
