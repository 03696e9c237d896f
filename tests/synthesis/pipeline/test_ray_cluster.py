"""Sandbox work on a real Ray of this machine: the same bytes as here, whoever dies; nothing secret reaches its logs."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray_work import broken, deadly, keyed, mixed, noted_pool, refused, two_cpus, unopened
from secrets_world import MARK, in_files

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.records import Answer
from synthesis.core.stages import Journal, StageResult, run_stage
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.pipeline import synthesize
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.context import in_sandbox
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.ray_cluster import TRIES, RayCluster, RayUnavailable

ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray of two CPUs, which this process has joined."""
    with two_cpus() as found:
        yield found


async def stage(
    sandbox: Any, journal: Path, work: Any, *arguments: Any, name: str = "stage", count: int = 40
) -> StageResult[Answer]:
    async def one(number: int) -> list[Answer]:
        return await in_sandbox(sandbox, work, number, *arguments)

    options: dict[str, Any] = {"key": str, "out": Answer, "concurrency": 8, "backoff_seconds": 0.001}
    with Journal(journal) as opened:
        return await run_stage(name, one, range(count), journal=opened, **options)


def rows(journal: Path) -> list[Any]:
    with closing(sqlite3.connect(journal)) as db:
        return db.execute("SELECT * FROM done ORDER BY stage, key").fetchall()


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for split in ("train", "held_out") for path in sorted((folder / split).rglob("*"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------------


async def test_a_cluster_that_is_not_there_is_said_so() -> None:
    """The first test: once there is one, it is used whatever the address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(RayUnavailable, match=f"no Ray cluster at {address} .*ray start"):
        async with RayCluster(sandbox=nullcontext, address=address):  # type: ignore[arg-type]
            pass


@pytest.mark.nightly
async def test_work_ends_as_it_does_here_whoever_dies(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    local = await stage(None, here / "journal.sqlite", mixed, here, 1)
    assert local.rejected == {"fifth": 8, "transient_failure": 1} and local.details["fifth"] == "0 is divisible: by 5"
    async with RayCluster(sandbox=nullcontext) as cluster:  # type: ignore[arg-type]
        assert cluster.cores == 2 and Executor(OfflineTeacher(), cluster).records_at_once(1) == 4
        assert await stage(cluster, there / "journal.sqlite", mixed, there, 2) == local
        assert rows(there / "journal.sqlite") == rows(here / "journal.sqlite")
        with pytest.raises(LookupError, match="3 is nowhere"):
            await cluster.run(broken, 3)
        result = await stage(cluster, there / "journal.sqlite", deadly, there, name="deadly", count=12)
    # Work that kills its processes is rejected, and nothing beside it.
    assert [answer.value for answer in result.outputs] == [number for number in range(12) if number != 3]
    assert result.rejected == {"worker_died": 1} and (there / "died-3").stat().st_size == TRIES
    assert "WorkerCrashedError" in result.details["worker_died"]
    assert len([one for one in caplog.messages if "runs again" in one]) == TRIES


@pytest.mark.nightly
async def test_a_sandbox_that_opens_nowhere_ends_the_run(address: str) -> None:
    async with RayCluster(sandbox=unopened) as cluster:
        with pytest.raises(RayUnavailable, match="no machine .* can run tool code; .*PermissionError: not here"):
            await cluster.run(broken, 0)


class Deadly(Journal):
    """Kills the processes that are noted in a folder when so much is finished."""

    def __init__(self, path: Path, folder: Path, after: int) -> None:
        super().__init__(path)
        self.folder, self.left, self.killed = folder, after, 0

    def add(self, *row: Any) -> None:
        super().add(*row)
        self.left -= 1
        for pid in os.listdir(self.folder) if self.left == 0 else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
                self.killed += 1


@pytest.mark.nightly
async def test_environments_have_the_same_bytes_when_their_workers_are_killed(address: str, tmp_path: Path) -> None:
    config = EnvironmentsConfig(count=8, fact_distractors=False, concurrency=6)
    made = []
    pids = tmp_path / "pids"
    pids.mkdir()
    journal_there = Deadly(tmp_path / "there" / "journal.sqlite", pids, after=20)
    for name, journal, opened in (
        ("here", Journal(tmp_path / "here" / "journal.sqlite"), SandboxPool(SandboxConfig())),
        ("there", journal_there, RayCluster(sandbox=partial(noted_pool, pids))),
    ):
        with journal:
            async with opened as sandbox:
                executor = Executor(OfflineTeacher(), sandbox)
                made.append(
                    await synthesize(config, executor=executor, journal=journal, out_dir=tmp_path / name, seed=4)
                )
    assert journal_there.killed and len(os.listdir(pids)) > journal_there.killed
    assert made[0] == made[1] and sum(made[0].counts.values()) > 3
    assert tree(tmp_path / "there") == tree(tmp_path / "here")
    assert rows(tmp_path / "there" / "journal.sqlite") == rows(tmp_path / "here" / "journal.sqlite")


@pytest.mark.nightly
async def test_a_sandbox_services_key_is_in_no_log_nor_state_of_ray(address: str) -> None:
    async with RayCluster(sandbox=partial(keyed, f"{MARK}-sandbox")) as cluster:
        with pytest.raises(RuntimeError, match="refused, with a key"):
            await cluster.run(refused)
    state, session = ray._private.state, Path(ray.worker.global_worker.node.get_session_dir_path())
    assert MARK not in repr([state.actors(), state.jobs()])
    assert len(list((session / "logs").iterdir())) > 5 and not in_files(session / "logs")
