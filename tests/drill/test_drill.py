"""The drill: GRPO on two hosts, with servers, sandboxes and a synthesis job that are killed, stopped, hung, cut off,
filled up and told to end, at random by a seed; what is left on disk is whole."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os

import pytest
from drill_checks import figures, problems
from drill_faults import HOSTS, KINDS, OF_VLLM, SANDBOXES, SERVERS, SYNTHESIS, Planned, planned
from drill_run import drill
from vllm_world import require_vllm

SECONDS = float(os.environ.get("ASTRA_DRILL_SECONDS", "0"))
SEED = int(os.environ.get("ASTRA_DRILL_SEED", "0"))
REAL = os.environ.get("ASTRA_DRILL_REAL") == "1"
"""The servers are vLLM, and the synthesis is on Ray."""


def test_a_plan_is_its_seeds() -> None:
    plan = planned(7, 1200.0, (1.0, 8.0))
    assert plan == planned(7, 1200.0, (1.0, 8.0)) != planned(8, 1200.0, (1.0, 8.0))
    assert {fault.part for fault in plan} >= {*HOSTS, *SERVERS, *SANDBOXES, SYNTHESIS}
    assert len({fault.kind for fault in plan}) == 10 and max(fault.at for fault in plan) < 1200


@pytest.mark.slow
def test_a_short_drill_loses_nothing(tmp_path) -> None:
    plan = [
        Planned(3.0, SYNTHESIS, "kill", 0.0),
        Planned(6.0, "server-0", "kill", 0.0),
        Planned(7.0, "sandbox-1", "refused", 3.0),
        Planned(12.0, "host-1", "kill", 0.0),
        Planned(22.0, "server-1", "old", 0.0),
        Planned(24.0, "server-0", "silent", 4.0),
    ]
    restarts = run(tmp_path / "drill", 1, plan, records=200)
    assert all(restarts[part] for part in (SYNTHESIS, *SERVERS, *HOSTS)), f"what is over cannot fail: {restarts}"


@pytest.mark.slow
@pytest.mark.skipif(not SECONDS, reason="a long drill: ASTRA_DRILL_SECONDS=1200, and a seed in ASTRA_DRILL_SEED")
def test_a_long_drill_loses_nothing(tmp_path) -> None:
    if REAL:
        require_vllm()
        pytest.importorskip("ray")
    faulthandler.cancel_dump_traceback_later()  # it is longer than any test of CI's
    plan = planned(SEED, SECONDS, (4.0, 20.0), OF_VLLM if REAL else KINDS)
    run(tmp_path / "drill", SEED, plan, records=round((3 if REAL else 10) * SECONDS), real=REAL)


def run(folder, seed: int, plan: list[Planned], *, records: int, real: bool = False) -> dict[str, int]:
    async def whole():
        found = await drill(folder, seed, plan, records=records, fast=True, real=real)
        return found, await problems(found, fast=True)

    found, wrong = asyncio.run(whole())
    shown = figures(found)
    (folder / "report.json").write_text(json.dumps(shown | {"problems": wrong}, indent=1))
    print(json.dumps(shown, indent=1))
    assert not wrong, "\n".join([*wrong, f"all of it is in {folder}"])
    return found.restarts
