"""What a card says of trajectories, and the arithmetic that ties its numbers to each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from synthesis.datasets import read_card, write_dataset
from synthesis.records import (
    AxisScore,
    CodeExecution,
    EmulatedExecution,
    Message,
    StdioExecution,
    ToolCall,
    ToolServer,
    ToolSpec,
    Trajectory,
)
from synthesis.trajectories.reward import AXES
from synthesis.trajectories.statistics import rows, trajectory_statistics

TOOLS = [ToolSpec(name, "?", {"type": "object", "properties": {}}) for name in ("one", "two", "three")]
SERVERS = {
    name: ToolServer(name, name, "?", name, "en", TOOLS, execution)
    for name, execution in (
        ("code", CodeExecution("")),
        ("mcp", StdioExecution(["server"])),
        ("emulated", EmulatedExecution()),
    )
}


def trajectory(
    server: str, turns: list[list[str]], *, status: float, failures: int = 0, system: bool = False
) -> Trajectory:
    """One whose turns call the tools of these names."""
    messages = [Message("system", "?")] if system else []
    messages.append(Message("user", "?"))
    for number, names in enumerate(turns):
        calls = [ToolCall(f"call_{number}_{index}", name, {}) for index, name in enumerate(names)]
        messages.append(Message("assistant", "", "?", calls))
        messages += [Message("tool", "?", tool_call_id=call.id, name=call.name) for call in calls]
    messages.append(Message("assistant", "!"))
    scores = {axis: AxisScore(1.0, "?") for axis in AXES} | {"tool_call_status": AxisScore(status, "?")}
    reward = sum(score.score for score in scores.values()) / 7
    return Trajectory("t", "t", server, server, "en", TOOLS[:2], messages, failures, scores, reward)


TRAJECTORIES = [
    trajectory("code", [["one"]], status=1.0),
    trajectory("code", [["one", "two"], ["one"]], status=0.66, failures=1),
    trajectory("mcp", [["one", "two", "one"]] * 2, status=0.33, failures=2, system=True),
    trajectory("emulated", [], status=1.0),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return trajectory_statistics(TRAJECTORIES, SERVERS)


def test_the_numbers_are_tied_as_in_the_paper(found) -> None:
    """580,983 / 54,885 = 10.59 messages; 41.8 % of them are 4.42 calls; 18.9 % are one user's and one system's."""
    count, messages, calls = (
        found["conversations"],
        found["messages_per_conversation"],
        found["tool_calls_per_conversation"],
    )
    assert messages["mean"] == pytest.approx(found["messages"] / count, abs=1e-3)
    assert found["role_shares"]["tool"] * messages["mean"] == pytest.approx(calls["mean"], abs=1e-3)
    asked = found["role_shares"]["user"] + found["role_shares"]["system"]
    assert asked * messages["mean"] == pytest.approx((4 + 1) / 4, abs=1e-3)
    assert sum(found["role_shares"].values()) == pytest.approx(1, abs=1e-3)
    assert found["tool_calls"] == 10 == sum(int(n) * times for n, times in calls["histogram"].items())
    assert found["messages"] == 24 == sum(int(n) * times for n, times in messages["histogram"].items())
    assert calls["share_with_1_to_5"] == 0.5 and calls["share_with_calls"] == 0.75
    assert found["injected_failure_rate"] * found["tool_calls"] == pytest.approx(found["injected_failures"]) == 3


def test_every_histogram_counts_every_conversation(found) -> None:
    described = [found[name] for name in ("messages_per_conversation", "tool_calls_per_conversation", "reward")]
    for one in (*described, found["tools_per_conversation"], *found["axes"].values()):
        assert sum(one["histogram"].values()) == 4
    assert found["axes"]["tool_call_status"] == {"mean": 0.7475, "histogram": {"0.3": 1, "0.7": 1, "1.0": 2}}
    assert found["tools_per_conversation"] == {"mean": 2, "histogram": {"2": 4}}
    assert found["reward"]["histogram"] == {"0.9": 1, "0.95": 1, "1.0": 2}
    assert found["reward"]["least"] <= found["reward_mean"] <= 1 and found["reward"]["median"] == 0.9757


def test_functions_and_where_they_run(found) -> None:
    assert found["unique_functions"] == 4  # a name of two servers is two functions
    assert found["functions_offered"] == 6 and found["servers"] == 3 and found["parallel_turns"] == 3
    assert found["execution_shares"] == {"code": 0.5, "emulated": 0.25, "mcp": 0.25}
    assert found["execution_shares_of_calls"] == {"code": 0.4, "emulated": 0.0, "mcp": 0.6}
    assert found["share_with_injected_failures"] == 0.5


def test_a_card_has_the_same_table(tmp_path, found) -> None:
    """It sorts by name, and JSON knows no order."""
    write_dataset(tmp_path / "data", Trajectory, TRAJECTORIES, card={"statistics": found})
    table = rows(read_card(tmp_path / "data")["statistics"])
    assert table == rows(found) == rows(json.loads(json.dumps(found, sort_keys=True)))
    assert table["messages"] == "24; a conversation 6.00"
    assert table["tool calls a conversation"] == "2.50; 50.0% have 1 to 5, 75.0% at least one"
    assert table["tool / assistant / user+system"] == "41.7% / 37.5% / 20.8%"
    assert table["tools real / emulated"].startswith("75.0% / 25.0% of the conversations (code 50.0%, ")


def test_there_may_be_none() -> None:
    assert rows(trajectory_statistics([], {})) == {"conversations": "0"}
