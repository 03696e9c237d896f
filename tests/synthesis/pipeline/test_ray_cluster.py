"""Sandbox work on a real Ray of this machine: the same bytes as here, whoever dies; nothing secret reaches its logs."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray_work import broken, deadly, keyed, mixed, noted_pool, refused, unopened
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

ROOT = Path(__file__).parents[3]
ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def tpu_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine's TPU logs, which Ray reads through a link that every program that joins it makes anew."""
    folder = tmp_path_factory.mktemp("tpu_logs").resolve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_LOG_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def address(tpu_logs: Path) -> Iterator[str]:
    """The address of a Ray of two CPUs, which this process has joined."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    assert Path(ray.worker.global_worker.node.get_logs_dir_path(), "tpu_logs").resolve() == tpu_logs
    yield context.address_info["address"]
    ray.shutdown()


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


@pytest.mark.slow
def test_a_killed_run_of_the_program_resumes_and_does_nothing_twice(
    address: str, tpu_logs: Path, tmp_path: Path
) -> None:
    settings = ("--config.trajectories=6", "--config.proposals=3", "--config.sources=[]", "--config.mcp_share=0",
                '--config.fact_servers=["numbers", "elements", "http"]', "--config.min_tools=2")  # fmt: skip
    on_ray = ("--executor=ray", f"--ray_address={address}", "--ray_workers=2")
    lost, journal = tmp_path / "there", Path("journals", "trajectories.sqlite")

    def start(workdir: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "launch.trajectories", f"--workdir={workdir}", *settings, *more]
        return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def said(process: subprocess.Popen[str], workdir: Path) -> str:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        return out.replace(str(workdir), "WORKDIR")

    def finished() -> int:
        try:
            with closing(sqlite3.connect(f"file:{lost / journal}?mode=ro", uri=True)) as db:
                return int(db.execute("SELECT count(*) FROM done").fetchone()[0])
        except sqlite3.OperationalError:  # not made yet
            return 0

    killed = start(lost, *on_ray)
    while finished() < 30:
        assert killed.poll() is None, killed.communicate()[1][-3000:]
        with (tpu_logs / "tpu_driver.INFO").open("a") as log:
            log.write("what another program says to its chip\n")
        time.sleep(0.02)
    killed.kill()
    assert "chip" not in killed.communicate()[0] and not (lost / "trajectories").exists()
    with closing(sqlite3.connect(lost / journal)) as db:  # whoever does a finished input again is stopped
        db.execute(
            "CREATE TRIGGER twice BEFORE INSERT ON done WHEN EXISTS "
            "(SELECT 1 FROM done WHERE stage = NEW.stage AND key = NEW.key) "
            "BEGIN SELECT RAISE(ABORT, 'done twice'); END"
        )
    assert said(start(lost, *on_ray), lost) == said(start(tmp_path / "here"), tmp_path / "here")
    assert rows(lost / journal) == rows(tmp_path / "here" / journal)
    for name in ("servers", "chains", "tasks", "trajectories", "graphs"):
        one, other = [{path.name: path.read_bytes() for path in (folder / name).iterdir()} for folder in
                      (lost, tmp_path / "here")]  # fmt: skip
        assert one == other and one


async def test_a_sandbox_services_key_is_in_no_log_nor_state_of_ray(address: str) -> None:
    async with RayCluster(sandbox=partial(keyed, f"{MARK}-sandbox")) as cluster:
        with pytest.raises(RuntimeError, match="refused, with a key"):
            await cluster.run(refused)
    state, session = ray._private.state, Path(ray.worker.global_worker.node.get_session_dir_path())
    assert MARK not in repr([state.actors(), state.jobs()])
    assert len(list((session / "logs").iterdir())) > 5 and not in_files(session / "logs")
