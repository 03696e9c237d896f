"""The page of an environment with a world: its rows, its checks, what a call changes."""

from __future__ import annotations

import json
from pathlib import Path

from state_world import PAID, bank
from viewing import send, serving

from synthesis.core.datasets import write_dataset
from synthesis.core.records import ToolEnvironment
from synthesis.environments.statistics import statistics_of


def test_a_world_is_shown_as_it_is_and_each_call_begins_anew(tmp_path: Path) -> None:
    environments = [bank(), bank(id="other", domain="club")]
    card = {"statistics": statistics_of(environments)}
    write_dataset(tmp_path / "environments", ToolEnvironment, environments, card=card)
    body = json.dumps({"environment": "bank", "tool": "transfer", "arguments": PAID}).encode()
    with serving(tmp_path / "environments") as port:
        status, _, text = send(port, "GET", "/environment/bank")
        answers = [
            json.loads(send(port, "POST", "/call", body, {"Content-Type": "application/json"})[2]) for _ in range(2)
        ]
        _, _, shown = send(port, "GET", "/card")
    assert status == 200 and "a state of its world" in text and "Tools of the world" in text
    for expected in ("A71", "balance (open)", "def check(before, after)", "def broken", "transfers T1"):
        assert expected in text, expected
    for answer in answers:
        assert answer["value"] == {"transfer": "T1"}, "the call before it is not seen"
        assert "changed accounts A13, accounts A71, transfers T1" in answer["note"] and answer["solves"] == []
    assert "worlds" in shown and "club" in shown
