"""What a stage of the main job took, where it was stopped and gone on with."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.quickstart import PROFILES
from launch.quickstart.ledger import Ledger
from launch.quickstart.stages import Quickstart

SECONDS = 0.2


def test_a_stage_that_was_stopped_counts_with_all_of_its_starts(tmp_path: Path) -> None:
    """It counted with the last alone: a run that was gone on with seemed as fast as what was left of it."""
    ended: list[BaseException] = [KeyboardInterrupt(), OSError("a full disk")]

    async def stage() -> dict[str, Any]:
        await asyncio.sleep(SECONDS)
        if ended:
            raise ended.pop()
        return {"loss": 1.0}

    async def start(ledger: Ledger) -> None:
        run = Quickstart(PROFILES["ci"](), tmp_path, ledger)
        run.stages = {"quick": stage}
        await run.run(contextlib.nullcontext(SimpleNamespace(tier="A", layers={})))  # type: ignore[arg-type]

    for expected in (OSError, KeyboardInterrupt, None):
        ledger = Ledger(tmp_path, {"profile": "ci"})
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            asyncio.run(start(ledger))
        found = ledger.results()
        ledger.close()
        assert bool(found) == (expected is None), "no stage that was stopped is taken for one that is finished"
    assert found["quick"]["seconds"] >= 3 * SECONDS and found["quick"]["loss"] == 1.0
    assert [path.name for path in (tmp_path / "stages").iterdir()] == ["quick.json"]
