"""Rejected records: what a stage stores of them, and the pages that show them beside the stored ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import msgspec
import pytest
from pages_world import messages, tool, trajectory
from viewing import INJECTION

from launch.viewer.cards import ViewerService
from launch.viewer.service import ViewerConfig
from launch.viewer.stored import RejectedPages, find_pages
from launch.viewer.trajectories import TrajectoryPages
from launch.viewer.watch_pages import WatchService
from launch.viewer.watched import Watcher
from synthesis.core.datasets import write_dataset
from synthesis.core.journal import read_rejected
from synthesis.core.records import CodeExecution, Task, TaskScores, ToolChain, ToolServer, Trajectory, Verdict
from synthesis.core.stages import Journal, Rejected, run_stage
from synthesis.trajectories.runs import AgentRun, CallStatus

SCORED = msgspec.structs.replace(trajectory(2), reward=0.4)
TASK = Task(
    "task-1", "depot", "en", "chain", "original", "Find the amber of item 7.", ["find_amber"], TaskScores(5, 2, 5)
)
RUN = AgentRun(
    TASK, messages(f"What is this? {INJECTION}"), [CallStatus("1", True), CallStatus("2", False, "rate_limit")]
)
CHAIN = ToolChain("depot:find_amber", "depot", ["find_amber"], 1.0, {"vote": Verdict(False, "It leads nowhere.")})


async def reject(folder: Path) -> None:
    """Stages of which each rejects one of two inputs."""
    reasons = {"judge": ("low_reward", SCORED), "interact": ("turn_limit", RUN), "score": ("low_realism", None)}
    with Journal(folder / "journals" / "trajectories.sqlite") as journal:
        for name, (reason, record) in reasons.items():

            async def stage(task: Task, reason: str = reason, record: Any = record) -> list[Task]:
                if task.id == "task-1":
                    raise Rejected(reason, f"{task.id}: why", record)
                return [task]

            inputs = [TASK, msgspec.structs.replace(TASK, id="task-2")]
            await run_stage(
                f"{name}/0123", stage, inputs, key=lambda task: f"{task.id} 00ff", out=Task, journal=journal
            )


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    await reject(tmp_path)
    write_dataset(tmp_path / "trajectories", Trajectory, [trajectory(n) for n in range(3)], card={})
    write_dataset(tmp_path / "tasks", Task, [TASK], card={})
    write_dataset(tmp_path / "chains", ToolChain, [CHAIN], card={})
    server = ToolServer("depot", "Depot", "", "facts", "en", [tool("find_amber").spec], CodeExecution(""))
    write_dataset(tmp_path / "servers", ToolServer, [server], card={})
    return tmp_path


async def pages_of(service: Any, *paths: str) -> list[str]:
    await service.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{service.port}") as client:
            found = []
            for path in paths:
                async with client.get(path) as answer:
                    found.append(await answer.text())
                    assert answer.status == 200, found[-1]
            return found
    finally:
        await service.stop()


async def test_a_stage_stores_what_it_rejects_and_a_resumed_run_reads_none_of_it(tmp_path: Path) -> None:
    await reject(tmp_path)
    path = tmp_path / "journals" / "trajectories.sqlite"
    rows = {row.stage: row for row in read_rejected(path)}
    assert {stage: (row.reason, row.detail, row.kind, row.record) for stage, row in rows.items()} == {
        "judge/0123": ("low_reward", "task-1: why", "", b""), "interact/0123": ("turn_limit", "task-1: why", "", b""),
        "score/0123": ("low_realism", "task-1: why", "", b""),
    }  # fmt: skip
    whole = {stage: next(read_rejected(path, row.id)) for stage, row in rows.items()}
    assert {stage: (row.kind, row.record) for stage, row in whole.items()} == {
        "judge/0123": ("Trajectory", msgspec.json.encode(SCORED)),
        "interact/0123": ("AgentRun", msgspec.json.encode(RUN)),
        "score/0123": ("Task", msgspec.json.encode(TASK)),
    }

    async def never(task: Task) -> list[Task]:
        raise AssertionError(task)

    with Journal(path) as journal:
        inputs = [TASK, msgspec.structs.replace(TASK, id="task-2")]
        again = await run_stage(
            "judge/0123", never, inputs, key=lambda task: f"{task.id} 00ff", out=Task, journal=journal
        )
    assert [one.id for one in again.outputs] == ["task-2"] and again.rejected == {"low_reward": 1}


async def test_rejected_records_are_shown_beside_the_stored_ones(run: Path) -> None:
    for given in (run, run / "trajectories"):
        data, more = find_pages(str(given))
        assert data == str(run / "trajectories")
        assert {address: len(pages) for address, pages in more.items()} == {
            "/tasks": 1, "/chains": 1, "/servers": 1, "/rejected": 3
        }  # fmt: skip
    service = ViewerService(TrajectoryPages(data), {}, ViewerConfig(port=0), more)
    home, rejected, tasks, task, chains, server = await pages_of(
        service, "/", "/rejected", "/tasks?sort=server", "/tasks/record/task-1", "/chains", "/servers/record/depot"
    )
    assert all(f'href="{address}"' in page for address in more for page in (home, rejected, tasks))
    counted = re.findall(r'href="(/rejected\?[^"]+)">([^<]+)</a></td><td[^>]*>(\w+)</td><td[^>]*>(\d)', rejected)
    assert sorted((reason, stage, number) for _, reason, stage, number in counted) == [
        ("low realism", "score", "1"), ("low reward", "judge", "1"), ("turn limit", "interact", "1")
    ]  # fmt: skip
    assert "Find the amber of item 7." in tasks and "scenario realism" in task and "find_amber" in chains + server

    by_reason = [unquote(address.replace("&amp;", "&")) for address, *_ in sorted(counted, key=lambda one: one[1])]
    service = ViewerService(TrajectoryPages(data), {}, ViewerConfig(port=0), more)
    lists = await pages_of(service, *by_reason)
    links = [re.findall(r'href="(/rejected/[0-9a-f]{16})', page) for page in lists]
    assert [len(found) for found in links] == [1, 1, 1]
    service = ViewerService(TrajectoryPages(data), {}, ViewerConfig(port=0), more)
    realism, reward, limit = await pages_of(service, *(found[0] for found in links))
    assert "low realism" in realism and "Find the amber of item 7." in realism
    assert "0.400" in reward and "Every call was needed." in reward and "rate limit" in reward
    assert "task-1: why" in limit and "capital" in limit and "injected failure: rate limit" in limit
    assert INJECTION not in limit and "&lt;script&gt;" in limit


async def test_a_run_of_which_nothing_is_stored_and_one_under_way_show_them_too(tmp_path: Path) -> None:
    await reject(tmp_path)
    data, more = find_pages(str(tmp_path))
    assert (data, list(more)) == ("", ["/rejected"])
    [alone] = await pages_of(ViewerService(RejectedPages(tmp_path, "/"), {}, ViewerConfig(port=0)), "/")
    assert "low reward" in alone
    service = WatchService(Watcher(tmp_path), ViewerConfig(port=0), seconds=3.0)
    [page] = await pages_of(service, "/")
    [address] = [one for one in re.findall(r'href="(/rejected\?[^"]+)"', page) if "low" in one and "reward" in one]
    [listed] = await pages_of(
        WatchService(Watcher(tmp_path), ViewerConfig(port=0), seconds=3.0), unquote(address.replace("&amp;", "&"))
    )
    assert "task-1" in listed and "turn_limit" not in listed
