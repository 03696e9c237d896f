"""What the dataset cards say: the paper's table of SFT statistics for our own output, and what the paper lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from synthesis.records import (
    CodeExecution,
    EmulatedExecution,
    HttpExecution,
    StdioExecution,
    Task,
    ToolChain,
    ToolServer,
    Trajectory,
)
from synthesis.trajectories.reward import AXES

_KINDS = {CodeExecution: "code", StdioExecution: "mcp", HttpExecution: "mcp", EmulatedExecution: "emulated"}


def histogram(values: Collection[object]) -> dict[str, int]:
    """Value → how often, in the order of the values."""
    counts = Counter(values)
    return {str(value): counts[value] for value in sorted(counts)}  # type: ignore[type-var]


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def server_statistics(servers: Sequence[ToolServer]) -> dict[str, Any]:
    return {
        "servers": len(servers),
        "tools": sum(len(server.tools) for server in servers),
        "domains": len({server.domain for server in servers}),
        "execution": histogram([_KINDS[type(server.execution)] for server in servers]),
        "languages": histogram([server.language for server in servers]),
    }


def chain_statistics(chains: Sequence[ToolChain]) -> dict[str, Any]:
    return {"lengths": histogram([len(chain.tools) for chain in chains])}


def task_statistics(tasks: Sequence[Task]) -> dict[str, Any]:
    return {
        "modes": histogram([task.mode for task in tasks]),
        "augmentations": histogram([task.augmentation for task in tasks]),
        "languages": histogram([task.language for task in tasks]),
        "tools_per_task": histogram([len(task.tools) for task in tasks]),
    }


def trajectory_statistics(trajectories: Sequence[Trajectory], servers: Mapping[str, ToolServer]) -> dict[str, Any]:
    """The paper's table A.1.1 (left column), and rates of our own. Shares are between 0 and 1."""
    count = len(trajectories)
    messages = [message for one in trajectories for message in one.messages]
    calls = [sum(len(message.tool_calls) for message in one.messages) for one in trajectories]
    roles = Counter(message.role for message in messages)
    executions = Counter(_KINDS[type(servers[one.server_id].execution)] for one in trajectories)
    return {
        "conversations": count,
        "messages": len(messages),
        "messages_per_conversation": {
            "mean": round(fmean([len(one.messages) for one in trajectories]), 3) if count else 0.0,
            "histogram": histogram([len(one.messages) for one in trajectories]),
        },
        "tool_calls_per_conversation": {
            "mean": round(fmean(calls), 3) if count else 0.0,
            "histogram": histogram(calls),
            "share_with_1_to_5": share(sum(1 <= n <= 5 for n in calls), count),
            "share_with_calls": share(sum(n > 0 for n in calls), count),
        },
        "parallel_turns": sum(len(message.tool_calls) > 1 for message in messages),
        "role_shares": {role: share(roles[role], len(messages)) for role in sorted(roles)},
        "unique_functions": len(
            {(one.server_id, call.name) for one in trajectories for m in one.messages for call in m.tool_calls}
        ),
        "servers": len({one.server_id for one in trajectories}),
        "domains": histogram([one.domain for one in trajectories]),
        "languages": histogram([one.language for one in trajectories]),
        "execution_shares": {kind: share(executions[kind], count) for kind in sorted(executions)},
        "injected_failures": sum(one.injected_failures for one in trajectories),
        "injected_failure_rate": share(sum(one.injected_failures for one in trajectories), sum(calls)),
        "reward_mean": round(fmean([one.reward for one in trajectories]), 4) if count else 0.0,
        "axes": {
            axis: {
                "mean": round(fmean([one.scores[axis].score for one in trajectories]), 4) if count else 0.0,
                "histogram": histogram([round(one.scores[axis].score, 1) for one in trajectories]),
            }
            for axis in AXES
        },
    }
