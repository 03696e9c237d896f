"""What a card says of trajectories, and the arithmetic that ties its numbers to each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from synthesis.core.datasets import read_card, write_dataset
from synthesis.core.openai_messages import estimated_tokens
from synthesis.core.records import (
    AxisScore,
    CallError,
    CodeExecution,
    EmulatedExecution,
    InjectedFailure,
    Message,
    StdioExecution,
    Task,
    TaskScores,
    ToolCall,
    ToolServer,
    ToolSpec,
    Trajectory,
)
from synthesis.trajectories.judge import AXES
from synthesis.trajectories.runs import AgentRun, CallStatus
from synthesis.trajectories.statistics import run_statistics, table_rows, trajectory_statistics

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
    server: str, turns: list[list[str]], *, status: float, failures: int = 0, system: bool = False,
    kinds: Sequence[str] = (), errors: Sequence[str] = (),
) -> Trajectory:  # fmt: skip
    """One whose turns call the tools of these names.

    Args:
        failures: how many were injected; `kinds` those of which the record has the kind.
    """
    messages = [Message("system", "?")] if system else []
    messages.append(Message("user", "?"))
    for number, names in enumerate(turns):
        calls = [ToolCall(f"call_{number}_{index}", name, {}) for index, name in enumerate(names)]
        messages.append(Message("assistant", "", "?", calls))
        messages += [Message("tool", "?", tool_call_id=call.id, name=call.name) for call in calls]
    messages.append(Message("assistant", "!"))
    scores = {axis: AxisScore(1.0, "?") for axis in AXES} | {"tool_call_status": AxisScore(status, "?")}
    reward = sum(score.score for score in scores.values()) / 7
    return Trajectory(
        "t", "t", server, server, "en", TOOLS[:2], messages, failures, scores, reward,
        [InjectedFailure("call_0_0", kind) for kind in kinds], [CallError("call_0_1", kind) for kind in errors],
    )  # fmt: skip


TRAJECTORIES = [
    trajectory("code", [["one"]], status=1.0),
    trajectory("code", [["one", "two"], ["one"]], status=0.66, failures=1, kinds=["timeout"]),
    trajectory(
        "mcp",
        [["one", "two", "one"]] * 2,
        status=0.33,
        failures=2,
        system=True,
        kinds=["empty"],
        errors=["tool_error", "invalid_arguments", "tool_error"],
    ),  # fmt: skip
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
    status = {"mean": 0.7475, "judged": 4, "histogram": {"0.3": 1, "0.7": 1, "1.0": 2}}
    assert found["axes"]["tool_call_status"] == status
    assert found["tools_per_conversation"] == {"mean": 2, "histogram": {"2": 4}}
    assert found["reward"]["histogram"] == {"0.9": 1, "0.95": 1, "1.0": 2}
    assert found["reward"]["least"] <= found["reward_mean"] <= 1 and found["reward"]["median"] == 0.9757


def test_functions_and_where_they_run(found) -> None:
    assert found["unique_functions"] == 4  # a name of two servers is two functions
    assert found["functions_offered"] == 6 and found["servers"] == 3 and found["parallel_turns"] == 3
    assert found["execution_shares"] == {"code": 0.5, "emulated": 0.25, "mcp": 0.25}
    assert found["execution_shares_of_calls"] == {"code": 0.4, "emulated": 0.0, "mcp": 0.6}
    thirds = {"code": 0.3333, "emulated": 0.3333, "mcp": 0.3333}
    assert found["execution_shares_of_servers"] == thirds
    assert table_rows(found)["servers real / emulated"].startswith("66.7% / 33.3% (code 33.3%, ")


def test_failures_by_kind(found) -> None:
    """Of a record of before, which has their number only, the kind is not known."""
    assert found["injected_failures_by_kind"] == {"empty": 1, "timeout": 1, "unrecorded": 1}
    assert found["injected_failures"] == 3 and found["share_with_injected_failures"] == 0.5
    assert found["real_failures_by_kind"] == {"invalid_arguments": 1, "tool_error": 2}
    assert found["real_failures"] == 3 and found["real_failure_rate"] == 0.3
    assert found["share_with_real_failures"] == 0.25 and found["share_with_failures"] == 0.5
    table = table_rows(found)
    assert table["injected failures"] == "3; 30.0% of the calls (empty 33.3%, timeout 33.3%, unrecorded 33.3%)"
    assert table["real failures"] == "3; 30.0% of the calls (tool_error 66.7%, invalid_arguments 33.3%)"
    assert table["with a failed call"] == "50.0% of the conversations"


def test_tokens_are_those_of_messages_and_documents(found) -> None:
    tokens = [estimated_tokens(one.messages, one.tools) for one in TRAJECTORIES]
    assert found["tokens_per_conversation"] == {
        "mean": pytest.approx(sum(tokens) / 4, abs=0.1), "median": sorted(tokens)[1] / 2 + sorted(tokens)[2] / 2,
        "histogram": {"0": 4},
    }  # fmt: skip
    long = msgspec.structs.replace(TRAJECTORIES[0], messages=[Message("user", "首" * 3_000)])
    assert trajectory_statistics([long], SERVERS)["tokens_per_conversation"]["histogram"] == {"3": 1}


def test_of_all_runs() -> None:
    task = Task("t", "code", "en", "chain", "original", "?", [], TaskScores(5, 5, 5))
    calls = [CallStatus("1", True), CallStatus("2", False, "empty"), CallStatus("3", False, error="crash")]
    assert run_statistics([AgentRun(task, [], calls), AgentRun(task, [], calls[:1])], 1) == {
        "runs": 2, "calls": 4, "injected_failure_rate": 0.25, "injected_failures": {"empty": 1},
        "real_failure_rate": 0.25, "real_failures": {"crash": 1}, "judge_failures": 1, "judge_failure_rate": 0.5,
    }  # fmt: skip
    assert run_statistics([], 0)["judge_failure_rate"] == 0.0


def test_a_card_of_before_has_the_table_as_far_as_it_goes(found) -> None:
    of_failures = ("injected_failures_by_kind", "real_failure", "share_with_failures", "share_with_real")
    new = (*of_failures, "tokens_per", "execution_shares_of_servers")
    old = {name: value for name, value in found.items() if not name.startswith(new)}
    missing = {"tokens a conversation, estimated", "servers real / emulated", "real failures", "with a failed call"}
    assert table_rows(found).keys() - table_rows(old).keys() == missing
    assert table_rows(old)["injected failures"] == "3; 30.0% of the calls"


def test_a_card_has_the_same_table(tmp_path, found) -> None:
    """It sorts by name, and JSON knows no order."""
    write_dataset(tmp_path / "data", Trajectory, TRAJECTORIES, card={"statistics": found})
    table = table_rows(read_card(tmp_path / "data")["statistics"])
    assert table == table_rows(found) == table_rows(json.loads(json.dumps(found, sort_keys=True)))
    assert table["messages"] == "24; a conversation 6.00"
    assert table["tool calls a conversation"] == "2.50; 50.0% have 1 to 5, 75.0% at least one"
    assert table["tool / assistant / user+system"] == "41.7% / 37.5% / 20.8%"
    assert table["tools real / emulated"].startswith("75.0% / 25.0% of the conversations (code 50.0%, ")


def test_there_may_be_none() -> None:
    assert table_rows(trajectory_statistics([], {})) == {"conversations": "0"}
