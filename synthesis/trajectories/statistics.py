"""What the dataset cards say: the paper's table of SFT statistics for our own output, and what the paper lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from synthesis.core.records import (
    CodeExecution,
    EmulatedExecution,
    HttpExecution,
    StdioExecution,
    Task,
    ToolChain,
    ToolServer,
    Trajectory,
)
from synthesis.trajectories.interact import AgentRun, estimated_tokens
from synthesis.trajectories.judge import AXES

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
    """The paper's table A.1.1 (left column), and what it lacks. Shares are between 0 and 1.

    A failed call is one into which a failure was injected, or one that failed by itself (a real failure). Tokens are
    `interact.estimated_tokens` of the messages and the tool documents; their histogram is of thousands.

    Args:
        servers: by id; those of all trajectories, else `KeyError`.
    """
    count = len(trajectories)
    messages = [message for one in trajectories for message in one.messages]
    calls = [sum(len(message.tool_calls) for message in one.messages) for one in trajectories]
    roles = Counter(message.role for message in messages)
    kinds = [_KINDS[type(servers[one.server_id].execution)] for one in trajectories]
    executions, executed = Counter(kinds), Counter[str]()
    for kind, n in zip(kinds, calls, strict=True):
        executed[kind] += n
    servers_used = Counter(_KINDS[type(servers[id].execution)] for id in {one.server_id for one in trajectories})
    injected, real = _injected_by_kind(trajectories), Counter(e.kind for one in trajectories for e in one.errors)
    tokens = [estimated_tokens(one.messages, one.tools) for one in trajectories]
    rewards = [one.reward for one in trajectories]
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
        "tool_calls": sum(calls),
        "tools_per_conversation": {
            "mean": round(fmean([len(one.tools) for one in trajectories]), 3) if count else 0.0,
            "histogram": histogram([len(one.tools) for one in trajectories]),
        },
        "parallel_turns": sum(len(message.tool_calls) > 1 for message in messages),
        "role_shares": {role: share(roles[role], len(messages)) for role in sorted(roles)},
        "unique_functions": len(
            {(one.server_id, call.name) for one in trajectories for m in one.messages for call in m.tool_calls}
        ),
        "functions_offered": len({(one.server_id, tool.name) for one in trajectories for tool in one.tools}),
        "servers": len({one.server_id for one in trajectories}),
        "domains": histogram([one.domain for one in trajectories]),
        "languages": histogram([one.language for one in trajectories]),
        "execution_shares": {kind: share(executions[kind], count) for kind in sorted(executions)},
        "execution_shares_of_calls": {kind: share(executed[kind], sum(calls)) for kind in sorted(executed)},
        "execution_shares_of_servers": {
            kind: share(servers_used[kind], servers_used.total()) for kind in sorted(servers_used)
        },
        "injected_failures": injected.total(),
        "injected_failures_by_kind": dict(sorted(injected.items())),
        "injected_failure_rate": share(injected.total(), sum(calls)),
        "share_with_injected_failures": share(sum(one.injected_failures > 0 for one in trajectories), count),
        "real_failures": real.total(),
        "real_failures_by_kind": dict(sorted(real.items())),
        "real_failure_rate": share(real.total(), sum(calls)),
        "share_with_real_failures": share(sum(bool(one.errors) for one in trajectories), count),
        "share_with_failures": share(sum(bool(one.injected_failures or one.errors) for one in trajectories), count),
        "tokens_per_conversation": {
            "mean": round(fmean(tokens), 1) if count else 0.0,
            "median": median(tokens) if count else 0.0,
            "histogram": histogram([round(n / 1_000) for n in tokens]),
        },
        "reward_mean": round(fmean(rewards), 4) if count else 0.0,
        "reward": {
            "median": round(median(rewards), 4) if count else 0.0,
            "least": round(min(rewards, default=0.0), 4),
            # To the nearest twentieth: a threshold leaves rewards too close for tenths.
            "histogram": histogram([round(round(20 * reward) / 20, 2) for reward in rewards]),
        },
        "axes": {
            axis: {
                "mean": round(fmean([one.scores[axis].score for one in trajectories]), 4) if count else 0.0,
                "histogram": histogram([round(one.scores[axis].score, 1) for one in trajectories]),
            }
            for axis in AXES
        },
    }


def run_statistics(runs: Sequence[AgentRun], judge_failures: int) -> dict[str, Any]:
    """Of all agent runs that were judged, also those that were not kept.

    Args:
        judge_failures: how many runs had no valid judgement.
    """
    calls = [call for run in runs for call in run.calls]
    injected = Counter(call.injected for call in calls if call.injected)
    real = Counter(call.error for call in calls if call.error)
    return {
        "runs": len(runs),
        "calls": len(calls),
        "injected_failure_rate": share(injected.total(), len(calls)),
        "injected_failures": dict(sorted(injected.items())),
        "real_failure_rate": share(real.total(), len(calls)),
        "real_failures": dict(sorted(real.items())),
        "judge_failures": judge_failures,
        "judge_failure_rate": share(judge_failures, len(runs)),
    }


def _injected_by_kind(trajectories: Sequence[Trajectory]) -> Counter[str]:
    """Kind → how often; `unrecorded` where a record of an older version has only the number."""
    kinds = Counter(failure.kind for one in trajectories for failure in one.failures)
    kinds["unrecorded"] += sum(one.injected_failures - len(one.failures) for one in trajectories)
    return +kinds


def table_rows(statistics: Mapping[str, Any]) -> dict[str, str]:
    """The paper's table (A.1.1, left column) of `trajectory_statistics`, also as a card has them: name → text."""
    if not statistics["conversations"]:
        return {"conversations": "0"}

    def ranked(of: Mapping[str, float], most: int = 4) -> str:
        whole = sum(of.values())
        first = sorted(of.items(), key=lambda one: (-one[1], one[0]))[:most]  # a card sorts by name
        return ", ".join(f"{name} {part / whole:.1%}" for name, part in first)

    def failures(which: str) -> dict[str, str]:
        if f"{which}_failures" not in statistics:
            return {}
        kinds = statistics.get(f"{which}_failures_by_kind")
        text = f"{statistics[f'{which}_failures']:,}; {statistics[f'{which}_failure_rate']:.1%} of the calls"
        return {f"{which} failures": f"{text} ({ranked(kinds)})" if kinds else text}

    more: dict[str, str] = {}
    if tokens := statistics.get("tokens_per_conversation"):  # cards of older versions do not have all
        more["tokens a conversation, estimated"] = f"{tokens['mean']:,.0f}; median {tokens['median']:,.0f}"
    if of_servers := statistics.get("execution_shares_of_servers"):
        emulated = of_servers.get("emulated", 0)
        more["servers real / emulated"] = f"{1 - emulated:.1%} / {emulated:.1%} ({ranked(of_servers)})"
    more |= failures("injected") | failures("real")
    if (failed := statistics.get("share_with_failures")) is not None:
        more["with a failed call"] = f"{failed:.1%} of the conversations"
    roles, calls = statistics["role_shares"], statistics["tool_calls_per_conversation"]
    execution = statistics["execution_shares"]
    asked = sum(part for role, part in roles.items() if role in ("user", "system"))
    return {
        "conversations": f"{statistics['conversations']:,}",
        "messages": f"{statistics['messages']:,}; a conversation {statistics['messages_per_conversation']['mean']:.2f}",
        "tool calls a conversation": f"{calls['mean']:.2f}; {calls['share_with_1_to_5']:.1%} have 1 to 5, "
        f"{calls['share_with_calls']:.1%} at least one",
        "tool / assistant / user+system": " / ".join(
            f"{part:.1%}" for part in (roles.get("tool", 0), roles.get("assistant", 0), asked)
        ),
        "turns with parallel calls": f"{statistics['parallel_turns']:,}",
        "unique functions called": f"{statistics['unique_functions']:,}",
        "servers / domains": f"{statistics['servers']:,} / {len(statistics['domains']):,}",
        "top domains": ranked(statistics["domains"]),
        "languages": ranked(statistics["languages"]),
        "tools real / emulated": f"{1 - execution.get('emulated', 0):.1%} / {execution.get('emulated', 0):.1%} "
        f"of the conversations ({ranked(execution)})",
        **more,
        "mean reward": f"{statistics['reward_mean']:.3f}",
    }
