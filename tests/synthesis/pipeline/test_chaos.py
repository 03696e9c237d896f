"""A run against a flaky endpoint that is killed again and again gives the bytes of a quiet one."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest
from flaky_endpoint import Flaky

ROOT = Path(__file__).parents[3]
KILLS = 10


async def run(folder: Path, url: str, *, mode: str = "off", kill: asyncio.Event | None = None) -> int:
    """One process of the run; its exit status."""
    folder.mkdir(exist_ok=True)
    program = ROOT / "tests" / "worlds" / "chaos_run.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), str(folder), url, mode,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    finished = asyncio.ensure_future(process.wait())
    if kill is not None:
        killing = asyncio.ensure_future(kill.wait())
        await asyncio.wait({finished, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if not finished.done():
            process.kill()
    return await finished


@pytest.mark.slow
async def test_a_killed_run_on_a_flaky_endpoint_gives_the_bytes_of_a_quiet_one(tmp_path: Path) -> None:
    async with Flaky() as url:
        assert await run(tmp_path / "quiet", url) == 0
    quiet = (tmp_path / "quiet" / "out.json").read_bytes()
    assert quiet.count(b"r1") > 50 and b"unlucky" in quiet

    rng = random.Random(5)
    flaky = Flaky(0.2, kinds=Flaky.OF_THE_ENDPOINT, seed=5)
    async with flaky as url:
        kills = 0
        while kills < KILLS:
            wanted, kill = len(flaky.requests) + rng.randrange(5, 50), asyncio.Event()
            flaky.on_request = [lambda wanted=wanted, kill=kill: len(flaky.requests) >= wanted and kill.set()]
            if await run(tmp_path / "killed", url, mode="record", kill=kill) == 0:
                pytest.fail(f"the run ended after {kills} kills, too early to prove anything")
            kills += 1
        flaky.on_request = []
        assert not (tmp_path / "killed" / "out.json").exists()
        assert await run(tmp_path / "killed", url, mode="record") == 0
        assert (tmp_path / "killed" / "out.json").read_bytes() == quiet
        assert set(flaky.went_wrong) == set(Flaky.OF_THE_ENDPOINT)
        rows = sqlite3.connect(tmp_path / "killed" / "journal.sqlite").execute("SELECT stage, key FROM done").fetchall()
        assert len(rows) == len(set(rows)) > 300

        # Recorded answers alone, without the journal: the same bytes, and the endpoint is not asked.
        (tmp_path / "replayed").mkdir()
        shutil.copy(tmp_path / "killed" / "teacher.sqlite", tmp_path / "replayed")
        before = len(flaky.requests)
        assert await run(tmp_path / "replayed", url, mode="replay") == 0
        assert (tmp_path / "replayed" / "out.json").read_bytes() == quiet
        assert len(flaky.requests) == before
