"""Stages in Ray's workers, on a real local Ray: the bytes of this process, whoever dies; an endpoint's limits hold."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from bucket_world import s3_storage
from flaky_endpoint import Flaky
from programs_world import Ended
from secrets_world import MARK, echoing, in_files, in_nothing, planted, variables

from sandbox import SandboxConfig, SandboxPool
from synthesis.core import progress
from synthesis.core.rate_limits import BudgetSpent
from synthesis.core.recording import Recording
from synthesis.core.records import Answer
from synthesis.core.stages import Journal, Rejected, StageResult, Stopped, Transient
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.pipeline import synthesize
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline import ray_executor
from synthesis.pipeline.executors import LocalExecutor, Resources, run_on
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.ray_executor import RayExecutor, RayUnavailable
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

ROOT = Path(__file__).parents[3]
ray: Any = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes(tpu_logs: Path) -> Iterator[Any]:
    """A Ray with room for two workers, which others can join."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=made.address, logging_level="error", log_to_driver=False)
    assert Path(ray.worker.global_worker.node.get_logs_dir_path(), "tpu_logs").resolve() == tpu_logs
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def tpu_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine's TPU logs, which Ray reads through a link that every program that joins it makes anew."""
    folder = tmp_path_factory.mktemp("tpu_logs").resolve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_LOG_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> str:
    """Its address."""
    return nodes.address


def tree(folder: Path, *names: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in names
        for path in sorted((folder / name).rglob("*"))
        if path.is_file()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Stages of the tests' own


class DrawnAnswer(msgspec.Struct, frozen=True):
    value: int
    note: str


@dataclass
class Noted:
    """A context with a folder in which it is noted what happens, and with the prompts of that folder."""

    resources: Resources
    folder: Path

    def note(self, name: str) -> str:
        """The name's notes, with one more."""
        with (self.folder / name).open("a") as file:
            file.write("x")
        return (self.folder / name).read_text()

    async def all_opened(self) -> None:
        """Nothing is proven by a worker that has done everything before the other was there."""
        while self.resources.worker is not None and len(os.listdir(self.folder / "opened")) < 2:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def notes(resources: Resources, folder: Path) -> AsyncIterator[Noted]:
    (folder / "opened").mkdir(parents=True, exist_ok=True)
    (folder / "opened" / str(os.getpid())).touch()
    yield Noted(resources, folder)


async def mixed(number: int, context: Noted, offset: int) -> list[Answer]:
    """Of each kind of end."""
    await context.all_opened()
    if number % 5 == 0:
        raise Rejected("fifth", f"{number} is divisible: by 5")
    if number % 7 == 1 and len(context.note(f"tried-{number}")) < (9 if number == 22 else 2):
        raise Transient("busy")
    if context.resources.worker is not None:
        assert "jax" not in sys.modules
    return [Answer(value=number + offset), Answer(value=f"é{number}")] * (number % 3)


async def broken(number: int, context: Any) -> list[Answer]:
    raise LookupError(f"{number} is nowhere")


async def poisonous(number: int, context: Noted) -> list[Answer]:
    """Whoever works at 3 dies."""
    if number == 3:
        context.note("died-3")
        os.kill(os.getpid(), signal.SIGKILL)
    return [Answer(value=number)]


async def asks(number: int, context: Noted) -> list[Answer]:
    await context.all_opened()
    given = await context.resources.teacher.ask(DrawnAnswer, {"record": number}, language="en", seed=number)
    return [Answer(value=given.value)]


@asynccontextmanager
async def hopeless(resources: Resources) -> AsyncIterator[None]:
    raise PermissionError("not on this machine")
    yield


async def stage(
    workers: Any, folder: Path, function: Any, inputs: Any, *, name: str = "stage", concurrency: int = 4
) -> StageResult[Answer]:
    with Journal(folder / "journal.sqlite") as journal:
        return await run_on(
            workers, name, function, inputs, key=str, out=Answer, journal=journal, concurrency=concurrency,
            backoff_seconds=0.001,
        )  # fmt: skip


def rows(folder: Path) -> list[Any]:
    return rows_of(folder / "journal.sqlite")


def rows_of(journal: Path) -> list[Any]:
    with closing(sqlite3.connect(journal)) as db:
        return db.execute("SELECT * FROM done ORDER BY stage, key").fetchall()


async def test_a_cluster_that_is_not_there_is_said_so() -> None:
    """The first test: once there is one, it is used whatever the address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(RayUnavailable, match=f"no Ray cluster at {address} .*ray start"):
        async with RayExecutor(sandbox=nullcontext, teacher=OfflineTeacher, address=address).workers(hopeless):
            pass


@pytest.mark.slow
async def test_a_stage_ends_as_it_does_here_whoever_dies(cluster: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    function = partial(mixed, offset=100)
    async with LocalExecutor(OfflineTeacher(), None).workers(partial(notes, folder=here)) as workers:  # type: ignore
        local = await stage(workers, here, function, range(40))
    assert local.rejected == {"fifth": 8, "transient_failure": 1} and local.details["fifth"] == "0 is divisible: by 5"
    async with RayExecutor(sandbox=nullcontext, teacher=OfflineTeacher, count=2).workers(
        partial(notes, folder=there)
    ) as workers:
        assert await stage(workers, there, function, range(40)) == local and rows(there) == rows(here)
        assert str(os.getpid()) not in os.listdir(there / "opened")
        with pytest.raises(LookupError, match="is nowhere"):
            await stage(workers, there, broken, range(4), name="broken")
        result = await stage(workers, there, poisonous, range(12), name="poisonous", concurrency=6)
    # Who kills its workers is rejected, and nobody who was with it.
    assert [answer.value for answer in result.outputs] == [number for number in range(12) if number != 3]
    assert result.rejected == {"worker_died": 1}
    assert (there / "died-3").read_text() == "x" * 4


@pytest.mark.slow
async def test_a_worker_that_cannot_begin_ends_the_run(cluster: str) -> None:
    with pytest.raises(PermissionError, match="not on this machine"):
        async with RayExecutor(sandbox=nullcontext, teacher=OfflineTeacher, count=1).workers(hopeless) as workers:
            await workers.bound(broken, 1)(0)


@asynccontextmanager
async def able(resources: Resources, folder: Path) -> AsyncIterator[Path]:
    """Notes on which machine it is; those that are listed lack something."""
    here = ray.get_runtime_context().get_node_id()
    if here in (folder / "unable").read_text():
        raise ModuleNotFoundError("No module named 'msgspec'")
    (folder / "able").mkdir(exist_ok=True)
    (folder / "able" / here).touch()
    yield folder


async def placed(number: int, folder: Path) -> list[Answer]:
    """The machine; later records wait until a second one works."""
    while number >= 8 and len(os.listdir(folder / "able")) < 2:
        await asyncio.sleep(0.02)
    return [Answer(value=ray.get_runtime_context().get_node_id())]


@pytest.mark.slow
async def test_a_machine_that_cannot_work_is_named_and_left_out_and_a_later_one_works(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_executor, "LOOK_SECONDS", 0.2)
    unable = nodes.add_node(num_cpus=2)
    (tmp_path / "unable").write_text(unable.node_id)
    joined = []
    executor = RayExecutor(sandbox=nullcontext, teacher=OfflineTeacher)
    async with executor.workers(partial(able, folder=tmp_path)) as workers:
        assert workers.count == 4

        async def join() -> None:
            while not (tmp_path / "able").is_dir():
                await asyncio.sleep(0.02)
            joined.append(nodes.add_node(num_cpus=1))  # it sets signals, so in this thread

        result, _ = await asyncio.gather(stage(workers, tmp_path, placed, range(40), concurrency=2), join())
        assert progress.TRAFFIC.workers.partition("/")[0] in ("1", "2", "3")
    head = ray.get_runtime_context().get_node_id()
    assert len(result.outputs) == 40 and not result.rejected
    assert {answer.value for answer in result.outputs} == {head, joined[0].node_id}
    (said,) = [one.message for one in caplog.records if "left out" in one.message]
    assert unable.node_id in said and said.endswith("ModuleNotFoundError: No module named 'msgspec'")
    for node in (unable, *joined):
        nodes.remove_node(node)


# ---------------------------------------------------------------------------------------------------------------------
# An endpoint


class Counted(Flaky):
    """Knows how many requests it has had at once; those after the first are answered when there were three.

    The first is alone: what a request costs, which a budget is leased by, is known from its answer.
    """

    at_once = most = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        deadline = time.monotonic() + 30
        try:
            while self.requests and self.most < 3 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            return await super().answer(request)
        finally:
            self.at_once -= 1


def endpoint(recording: Path, url: str, **config: Any) -> OpenAITeacher:
    settings = OpenAITeacherConfig(url, "m", answer_form="json_schema", **config)
    prompts = Prompts({"en/drawn_answer.jinja": "Draw for {{ record }}."})  # they travel to the workers
    return OpenAITeacher(settings, Recording(recording), "record", prompts)


@pytest.mark.slow
async def test_limits_and_budget_of_an_endpoint_hold_over_all_workers(cluster: str, tmp_path: Path) -> None:
    """40 records of 100 tokens in two workers with eight records each: three requests at once, and 20 are paid for."""
    served = Counted(latency=0.03)
    async with served as url:

        async def run(token_budget: int) -> StageResult[Answer]:
            make = partial(endpoint, tmp_path / "teacher.sqlite", url, concurrency=3, token_budget=token_budget)
            executor = RayExecutor(sandbox=nullcontext, endpoint=make, count=2)
            async with executor.workers(partial(notes, folder=tmp_path)) as workers:
                return await stage(workers, tmp_path, asks, range(40), concurrency=8)

        with pytest.raises(BudgetSpent, match="token_budget=2000") as stopped:
            await run(token_budget=2_000)
        assert isinstance(stopped.value, Stopped) and "stage stage: 20 of 40 inputs are finished" in str(stopped.value)
        assert len(served.requests) == 20 and served.most == 3
        result = await run(token_budget=4_000)
        assert result.resumed == 20 and len(result.outputs) == 40
        assert len(served.requests) == 40 and served.most == 3
    spent = Recording(tmp_path / "teacher.sqlite").spent("m")
    assert (spent.requests, spent.tokens) == (40, 4_000)


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


@asynccontextmanager
async def noted_pool(folder: Path) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(concurrency=4)) as pool:
        (folder / str(os.getpid())).touch()
        yield pool


class Deadly(Journal):
    """Kills one of the processes that are noted in a folder when so much is finished."""

    def __init__(self, path: Path, folder: Path, after: int) -> None:
        super().__init__(path)
        self.folder, self.left, self.killed = folder, after, 0

    def add(self, *row: Any) -> None:
        super().add(*row)
        self.left -= 1
        if self.left == 0:
            self.killed = int(min(os.listdir(self.folder)))
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.slow
async def test_environments_have_the_same_bytes_when_a_worker_is_killed(cluster: str, tmp_path: Path) -> None:
    config = EnvironmentsConfig(count=14, fact_distractors=False, concurrency=6)
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "here" / "journal.sqlite") as journal:
            executor = LocalExecutor(OfflineTeacher(), pool)
            here = await synthesize(config, executor=executor, journal=journal, out_dir=tmp_path / "here", seed=4)
    pids = tmp_path / "pids"
    pids.mkdir()
    deadly = Deadly(tmp_path / "there" / "journal.sqlite", pids, after=30)
    with deadly as journal:
        there = await synthesize(
            config,
            executor=RayExecutor(sandbox=partial(noted_pool, pids), teacher=OfflineTeacher, count=2),
            journal=journal,
            out_dir=tmp_path / "there",
            seed=4,
        )
    assert deadly.killed and not Path(f"/proc/{deadly.killed}").exists()
    assert there == here and sum(here.counts.values()) > 6
    assert tree(tmp_path / "there", "train", "held_out") == tree(tmp_path / "here", "train", "held_out")
    assert rows(tmp_path / "there") == rows(tmp_path / "here")


@pytest.mark.slow
async def test_a_killed_run_of_the_program_goes_on_in_a_bucket_and_does_nothing_twice(
    cluster: str, tpu_logs: Path, tmp_path: Path
) -> None:
    """What it reads is in the bucket too; of what it writes there each byte is that of a run on a disk."""
    settings = ("--config.trajectories=8", "--config.proposals=3",
                '--config.fact_servers=["numbers", "elements", "http"]', "--config.personas=s3://bucket/people.jsonl",
                "--config.sources=[]", "--config.mcp_share=0", "--config.min_tools=2")  # fmt: skip
    here, there, lost = tmp_path / "here", "s3://bucket/there", tmp_path / "lost"
    kept = Path("journals", "trajectories.sqlite")
    on_ray = ("--executor=ray", f"--ray_address={cluster}", "--ray_workers=2")

    def start(workdir: Path | str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "launch.trajectories", f"--workdir={workdir}", *settings, *more]
        options: dict[str, Any] = {"env": os.environ | bucket.environment, "cwd": ROOT, "text": True}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    async def said(process: subprocess.Popen[str], workdir: Path | str) -> str:
        out, errors = await asyncio.to_thread(process.communicate, timeout=300)
        assert process.returncode == 0, errors[-3000:]
        return out.replace(str(workdir), "WORKDIR")

    def finished() -> list[Any]:
        try:
            with closing(sqlite3.connect(f"file:{lost / kept}?mode=ro", uri=True)) as db:
                return db.execute("SELECT stage, key FROM done").fetchall()
        except sqlite3.OperationalError:  # not made yet
            return []

    with s3_storage() as bucket:
        bucket.put("people.jsonl", b'{"occupation": "a botanist"}\n{"occupation": "a baker"}\n')
        local, killed = start(here), start(lost, *on_ray)
        while len(finished()) < 30:
            assert killed.poll() is None, killed.communicate()[1][-3000:]
            with (tpu_logs / "tpu_driver.INFO").open("a") as log:
                log.write("what another program says to its chip\n")
            await asyncio.sleep(0.02)
        killed.kill()
        assert "chip" not in killed.communicate()[0]
        assert not (lost / "trajectories").exists()
        with closing(sqlite3.connect(lost / kept)) as db:  # whoever does a finished input again is stopped
            db.execute(
                "CREATE TRIGGER twice BEFORE INSERT ON done WHEN EXISTS "
                "(SELECT 1 FROM done WHERE stage = NEW.stage AND key = NEW.key) "
                "BEGIN SELECT RAISE(ABORT, 'done twice'); END"
            )
        bucket.put(f"there/{kept}", (lost / kept).read_bytes())
        assert await said(start(there, *on_ray), there) == await said(local, here)
        fetched = bucket.copy("there/", tmp_path / "fetched")
    names = ("servers", "chains", "tasks", "trajectories", "graphs")
    assert tree(fetched, *names) == tree(here, *names)
    assert {one.name for one in fetched.iterdir()} == {*names, "journals"}
    assert rows_of(fetched / kept) == rows_of(here / kept)


async def test_a_key_is_in_no_log_nor_state_of_ray(cluster: str, tmp_path: Path) -> None:
    """Of an endpoint that repeats it: asked by a worker, shown by the driver; and what is in the environment."""
    with echoing() as (server, url):
        command = [
            *(sys.executable, "-m", "launch.environments", f"--workdir={tmp_path / 'run'}", "--config.count=2"),
            *('--config.languages={"en": 1}', "--executor=ray", f"--ray_address={cluster}", "--ray_workers=1"),
            *(f"--teacher_url={url}/401/v1", "--teacher_model=m", "--judge_own_text", "--teacher_tries=1"),
            f"--teacher_key_file={planted(tmp_path, 'teacher')}",
        ]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=os.environ | variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await process.communicate()
        assert any("Bearer plantedsecret-teacher" in shown for shown in server.seen)
    assert process.returncode not in (0, 1) and "[key]" in errors.decode(), errors.decode()[-3000:]
    in_nothing(Ended(process.returncode, out.decode(), errors.decode()), tmp_path)
    state, session = ray._private.state, Path(ray.worker.global_worker.node.get_session_dir_path())
    assert "EndpointActor" in repr(state.actors()) and MARK not in repr([state.actors(), state.jobs()])
    assert len(list((session / "logs").iterdir())) > 5 and not in_files(session / "logs")
