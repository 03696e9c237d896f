"""What the dataset cards say: the paper's table of SFT statistics for our own output, and what the paper lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from synthesis.core.records import (
    CodeExecution,
    EmulatedExecution,
    GroupExecution,
    HttpExecution,
    StdioExecution,
    Task,
    ToolChain,
    ToolServer,
    Trajectory,
)
from synthesis.trajectories.interact import estimated_tokens
from synthesis.trajectories.judge import AXES
from synthesis.trajectories.runs import AgentRun
from synthesis.trajectories.tasks import TaskSeed
from synthesis.trajectories.tool_graph import chain_id

_KINDS = {
    CodeExecution: "code", StdioExecution: "mcp", HttpExecution: "mcp", EmulatedExecution: "emulated",
    GroupExecution: "mixed",
}  # fmt: skip


def histogram(values: Collection[object]) -> dict[str, int]:
    """Value → how often, in the order of the values."""
    counts = Counter(values)
    return {str(value): counts[value] for value in sorted(counts)}  # type: ignore[type-var]


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def server_statistics(every: Sequence[ToolServer]) -> dict[str, Any]:
    """Of the servers; of their groups only how many."""
    servers = [server for server in every if not isinstance(server.execution, GroupExecution)]
    return {
        **({"groups": len(every) - len(servers)} if len(servers) < len(every) else {}),
        "servers": len(servers),
        "tools": sum(len(server.tools) for server in servers),
        "domains": len({server.domain for server in servers}),
        "execution": histogram([_KINDS[type(server.execution)] for server in servers]),
        "languages": histogram([server.language for server in servers]),
    }


def chain_statistics(chains: Sequence[ToolChain], candidates: int, seeds: Sequence[TaskSeed]) -> dict[str, Any]:
    """Of the verified chains.

    Args:
        candidates: how many could have been drawn.
        seeds: of the tasks that they were drawn for.
    """
    return {
        "lengths": histogram([len(chain.tools) for chain in chains]),
        "candidates": candidates,
        "used": len({chain_id(one.server_id, one.chain) for one in seeds if one.chain}),
    }


def task_statistics(tasks: Sequence[Task], servers: Mapping[str, ToolServer]) -> dict[str, Any]:
    return {
        **_over_servers([(servers[task.server_id], task.tools) for task in tasks]),
        "modes": histogram([task.mode for task in tasks]),
        "augmentations": histogram([task.augmentation for task in tasks]),
        "languages": histogram([task.language for task in tasks]),
        "tools_per_task": histogram([len(task.tools) for task in tasks]),
        **_conducts(tasks),
    }


def _over_servers(needs: Sequence[tuple[ToolServer, Sequence[str]]]) -> dict[str, Any]:
    """The shares of tasks by how many servers the tools that they need are of; not there where no server is a group."""
    if not any(isinstance(server.execution, GroupExecution) for server, _ in needs):
        return {}
    counts = Counter(max(1, len({server.origin(tool).server_id for tool in tools})) for server, tools in needs)
    return {"shares_over_servers": {str(count): share(counts[count], len(needs)) for count in sorted(counts)}}


def _kind(server: ToolServer, servers: Mapping[str, ToolServer]) -> str:
    """Who answers calls of its tools: `mixed`, where those of a group are answered in several ways."""
    kinds = {_KINDS[type(servers[id].execution)] for id in server.servers or [server.id]}
    return kinds.pop() if len(kinds) == 1 else _KINDS[GroupExecution]


def _conducts(records: Sequence[Task] | Sequence[Trajectory]) -> dict[str, Any]:
    """How many teach what beside calling tools; not there where none does."""
    found = [one.dialogue.conduct for one in records if one.dialogue]
    return {"conducts": histogram(found)} if found else {}


def _turns(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """How often the user speaks; not there where each does once."""
    found = [sum(message.role == "user" for message in one.messages) for one in trajectories]
    return {"user_turns_per_conversation": histogram(found)} if max(found, default=1) > 1 else {}


def whose_faults(rejected: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The conversations that were lost for their simulated user, by reason, and how many for the agent.

    Args:
        rejected: stage → reason → how many.
    """
    of_user, of_agent = Counter[str](), 0
    for stage in ("interact", "user", "judge"):
        for reason, count in rejected.get(stage, {}).items():
            if reason.startswith("user_"):
                of_user[reason] += count
            elif reason not in ("judge_failed", "emulator_failed", "transient_failure", "bad_schema"):
                of_agent += count
    return {"user": dict(sorted(of_user.items())), "agent": of_agent}


def trajectory_statistics(trajectories: Sequence[Trajectory], servers: Mapping[str, ToolServer]) -> dict[str, Any]:
    """The paper's table A.1.1 (left column), and what it lacks. Shares are between 0 and 1.

    A failed call is one into which a failure was injected, or one that failed by itself (a real failure). Tokens are
    `interact.estimated_tokens` of the messages and the tool documents; their histogram is of thousands.

    Args:
        servers: by id; those of all trajectories, and of their groups, else `KeyError`.
    """
    count = len(trajectories)
    messages = [message for one in trajectories for message in one.messages]
    calls = [sum(len(message.tool_calls) for message in one.messages) for one in trajectories]
    roles = Counter(message.role for message in messages)
    executions = Counter(_kind(servers[one.server_id], servers) for one in trajectories)
    called = [
        servers[one.server_id].origin(call.name) for one in trajectories for m in one.messages for call in m.tool_calls
    ]
    offered = {servers[one.server_id].origin(tool.name) for one in trajectories for tool in one.tools}
    executed = Counter(dict.fromkeys(executions, 0))
    executed.update(_KINDS[type(servers[origin.server_id].execution)] for origin in called)
    used = {id for one in trajectories for id in servers[one.server_id].servers}
    servers_used = Counter(_KINDS[type(servers[id].execution)] for id in used)
    injected, real = _injected_by_kind(trajectories), Counter(e.kind for one in trajectories for e in one.errors)
    tokens = [estimated_tokens(one.messages, one.tools) for one in trajectories]
    rewards = [one.reward for one in trajectories if one.reward is not None]
    scores = {axis: [one.scores[axis].score for one in trajectories if axis in one.scores] for axis in AXES}
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
        "unique_functions": len(set(called)),
        "functions_offered": len(offered),
        "servers": len(used),
        **_over_servers([(servers[one.server_id], one.needs or []) for one in trajectories]),
        "domains": histogram([one.domain for one in trajectories]),
        "languages": histogram([one.language for one in trajectories]),
        **_conducts(trajectories),
        **_turns(trajectories),
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
        "reward_mean": round(fmean(rewards), 4) if rewards else 0.0,
        "reward": {
            "median": round(median(rewards), 4) if rewards else 0.0,
            "least": round(min(rewards, default=0.0), 4),
            # To the nearest twentieth: a threshold leaves rewards too close for tenths.
            "histogram": histogram([round(round(20 * reward) / 20, 2) for reward in rewards]),
        },
        "axes": {
            axis: {
                "mean": round(fmean(given), 4) if given else 0.0,
                "judged": len(given),
                "histogram": histogram([round(score, 1) for score in given]),
            }
            for axis, given in scores.items()
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

    count = statistics["conversations"]

    def ranked(shares: Mapping[str, float], most: int = 4, of: int = 0) -> str:
        whole = float(of) or sum(shares.values())
        first = sorted(shares.items(), key=lambda one: (-one[1], one[0]))[:most]  # a card sorts by name
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
    domains = {domain for every in statistics["domains"] for domain in every.split(" + ")}  # of a group several
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
        "servers / domains": f"{statistics['servers']:,} / {len(domains):,}",
        **(
            {"over 1 / 2 / 3 … servers": " / ".join(f"{part:.1%}" for part in over.values())}
            if (over := statistics.get("shares_over_servers"))
            else {}
        ),
        "top domains": ranked(statistics["domains"]),
        "languages": ranked(statistics["languages"]),
        **(
            {"beside calling tools": ranked(conducts, most=8, of=count)}
            if (conducts := statistics.get("conducts"))
            else {}
        ),
        "tools real / emulated": f"{1 - execution.get('emulated', 0):.1%} / {execution.get('emulated', 0):.1%} "
        f"of the conversations ({ranked(execution)})",
        **more,
        "mean reward": f"{statistics['reward_mean']:.3f}",
    }
