"""Statistics on the dataset cards: the paper's table of SFT statistics for our output, and further numbers."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from synthesis.core.openai_messages import estimated_tokens
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
from synthesis.trajectories.judge import AXES
from synthesis.trajectories.runs import AgentRun
from synthesis.trajectories.tasks import TaskSeed
from synthesis.trajectories.tool_graph import chain_id

_KINDS = {
    CodeExecution: "code", StdioExecution: "mcp", HttpExecution: "mcp", EmulatedExecution: "emulated",
    GroupExecution: "mixed",
}  # fmt: skip


def histogram(values: Iterable[object]) -> dict[str, int]:
    """Return value → count, in the order of the values."""
    return _ordered(Counter(values))


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def server_statistics(every: Sequence[ToolServer]) -> dict[str, Any]:
    """Return statistics of the servers; groups are only counted."""
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
    """Return statistics of the verified chains.

    Args:
        candidates: number of chains that could be sampled.
        seeds: of the tasks for which they were sampled.
    """
    return {
        "lengths": histogram([len(chain.tools) for chain in chains]),
        "candidates": candidates,
        "used": len({chain_id(one.server_id, one.chain) for one in seeds if one.chain}),
    }


def task_statistics(tasks: Iterable[Task], servers: Mapping[str, ToolServer]) -> dict[str, Any]:
    """Return statistics of the tasks, each read once."""
    over, modes, augmentations, languages, tools, behaviours = (Counter[Any]() for _ in range(6))
    for task in tasks:
        over[_servers_of(servers[task.server_id], task.tools)] += 1
        modes[task.mode] += 1
        augmentations[task.augmentation] += 1
        languages[task.language] += 1
        tools[len(task.tools)] += 1
        if task.dialogue:
            behaviours[task.dialogue.behaviour] += 1
    return {
        **_over_servers(over),
        "modes": _ordered(modes),
        "augmentations": _ordered(augmentations),
        "languages": _ordered(languages),
        "tools_per_task": _ordered(tools),
        **({"behaviours": _ordered(behaviours)} if behaviours else {}),
    }


def _ordered(counts: Mapping[Any, int]) -> dict[str, int]:
    """Return the counts in the order of `histogram`."""
    return {str(value): counts[value] for value in sorted(counts)}


def _servers_of(server: ToolServer, tools: Iterable[str]) -> tuple[int, bool]:
    """Return the number of servers that the tools belong to, and whether a group offers them."""
    return max(1, len({server.origin(tool).server_id for tool in tools})), isinstance(server.execution, GroupExecution)


def _over_servers(needs: Mapping[tuple[int, bool], int]) -> dict[str, Any]:
    """Return the shares of tasks by the number of servers that their tools belong to; empty if no server is a group.

    Args:
        needs: number of tasks for each result of `_servers_of`.
    """
    if not any(of_group for _, of_group in needs):
        return {}
    counts: Counter[int] = Counter()
    for (count, _), tasks in needs.items():
        counts[count] += tasks
    return {"shares_over_servers": {str(count): share(counts[count], counts.total()) for count in sorted(counts)}}


def _kind(server: ToolServer, servers: Mapping[str, ToolServer]) -> str:
    """Return who answers calls of the server's tools: `mixed` if the members of a group differ."""
    kinds = {_KINDS[type(servers[id].execution)] for id in server.servers or [server.id]}
    return kinds.pop() if len(kinds) == 1 else _KINDS[GroupExecution]


def whose_faults(rejected: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the conversations lost to faults of the simulated user, by reason, and the number lost to the agent.

    Args:
        rejected: stage → reason → count.
    """
    of_user, of_agent = Counter[str](), 0
    for stage in ("interact", "user", "judge"):
        for reason, count in rejected.get(stage, {}).items():
            if reason.startswith("user_"):
                of_user[reason] += count
            elif not reason.startswith(("emulator_", "judge_")) and reason not in ("transient_failure", "bad_schema"):
                of_agent += count
    return {"user": dict(sorted(of_user.items())), "agent": of_agent}


def trajectory_statistics(trajectories: Iterable[Trajectory], servers: Mapping[str, ToolServer]) -> dict[str, Any]:
    """Return the paper's table A.1.1 (left column) and further numbers. Shares are between 0 and 1.

    A failed call is one into which a failure was injected, or one that failed by itself (a real failure). Tokens are
    `openai_messages.estimated_tokens` of the messages and the tool documents; their histogram is of thousands.

    Each trajectory is read once. Memory holds its tokens, reward and scores (80 bytes), and totals over calls.

    Args:
        servers: by id; a missing server of a trajectory or of its group raises `KeyError`.
    """
    (messages, calls, tools, turns, roles, executions, called, domains, languages, behaviours, injected, real, over) = (
        Counter[Any]() for _ in range(13)
    )
    repaired = Counter[str]()
    offered: set[Any] = set()
    used: set[str] = set()
    count = parallel = with_injected = with_real = with_any = 0
    tokens, rewards = array("q"), array("d")
    scores = {axis: array("d") for axis in AXES}
    for one in trajectories:
        server = servers[one.server_id]
        count += 1
        messages[len(one.messages)] += 1
        calls[sum(len(message.tool_calls) for message in one.messages)] += 1
        tools[len(one.tools)] += 1
        turns[sum(message.role == "user" for message in one.messages)] += 1
        roles.update(message.role for message in one.messages)
        parallel += sum(len(message.tool_calls) > 1 for message in one.messages)
        executions[_kind(server, servers)] += 1
        called.update(server.origin(call.name) for message in one.messages for call in message.tool_calls)
        offered.update(server.origin(tool.name) for tool in one.tools)
        used.update(server.servers)
        over[_servers_of(server, one.needs or [])] += 1
        domains[one.domain] += 1
        languages[one.language] += 1
        if one.dialogue:
            behaviours[one.dialogue.behaviour] += 1
        injected.update(failure.kind for failure in one.failures)
        # A record of an older version has only the number.
        injected["unrecorded"] += one.injected_failures - len(one.failures)
        real.update(error.kind for error in one.errors)
        repaired.update(repair for repairs in (one.repaired or {}).values() for repair in repairs)
        with_injected += one.injected_failures > 0
        with_real += bool(one.errors)
        with_any += bool(one.injected_failures or one.errors)
        tokens.append(estimated_tokens(one.messages, one.tools))
        if one.reward is not None:
            rewards.append(one.reward)
        for axis in AXES:
            if axis in one.scores:
                scores[axis].append(one.scores[axis].score)
    injected = +injected
    executed = Counter(dict.fromkeys(executions, 0))
    for origin, times in called.items():
        executed[_KINDS[type(servers[origin.server_id].execution)]] += times
    servers_used = Counter(_KINDS[type(servers[id].execution)] for id in used)
    every_message, every_call = roles.total(), called.total()
    return {
        "conversations": count,
        "messages": every_message,
        "messages_per_conversation": {"mean": _mean(messages), "histogram": _ordered(messages)},
        "tool_calls_per_conversation": {
            "mean": _mean(calls),
            "histogram": _ordered(calls),
            "share_with_1_to_5": share(sum(calls[n] for n in range(1, 6)), count),
            "share_with_calls": share(count - calls[0], count),
        },
        "tool_calls": every_call,
        "tools_per_conversation": {"mean": _mean(tools), "histogram": _ordered(tools)},
        "parallel_turns": parallel,
        "role_shares": {role: share(roles[role], every_message) for role in sorted(roles)},
        "unique_functions": len(called),
        "functions_offered": len(offered),
        "servers": len(used),
        **_over_servers(over),
        "domains": _ordered(domains),
        "languages": _ordered(languages),
        **({"behaviours": _ordered(behaviours)} if behaviours else {}),
        # Not there where each user speaks once.
        **({"user_turns_per_conversation": _ordered(turns)} if max(turns, default=1) > 1 else {}),
        "execution_shares": {kind: share(executions[kind], count) for kind in sorted(executions)},
        "execution_shares_of_calls": {kind: share(executed[kind], every_call) for kind in sorted(executed)},
        "execution_shares_of_servers": {
            kind: share(servers_used[kind], servers_used.total()) for kind in sorted(servers_used)
        },
        "injected_failures": injected.total(),
        "injected_failures_by_kind": dict(sorted(injected.items())),
        "injected_failure_rate": share(injected.total(), every_call),
        "share_with_injected_failures": share(with_injected, count),
        "real_failures": real.total(),
        "real_failures_by_kind": dict(sorted(real.items())),
        "real_failure_rate": share(real.total(), every_call),
        "share_with_real_failures": share(with_real, count),
        "share_with_failures": share(with_any, count),
        # Not there where every call was stored as its model wrote it.
        **({"repaired_calls_by_kind": _ordered(repaired)} if repaired else {}),
        "tokens_per_conversation": {
            "mean": round(fmean(tokens), 1) if count else 0.0,
            "median": median(tokens) if count else 0.0,
            "histogram": histogram(round(n / 1_000) for n in tokens),
        },
        "reward_mean": round(fmean(rewards), 4) if rewards else 0.0,
        "reward": {
            "median": round(median(rewards), 4) if rewards else 0.0,
            "least": round(min(rewards, default=0.0), 4),
            # To the nearest twentieth: a threshold leaves rewards too close for tenths.
            "histogram": histogram(round(round(20 * reward) / 20, 2) for reward in rewards),
        },
        "axes": {
            axis: {
                "mean": round(fmean(given), 4) if given else 0.0,
                "judged": len(given),
                "histogram": histogram(round(score, 1) for score in given),
            }
            for axis, given in scores.items()
        },
    }


def _mean(counts: Mapping[int, int]) -> float:
    """Return the mean of counted values; 0 if there are none."""
    total = sum(counts.values())
    return round(sum(value * times for value, times in counts.items()) / total, 3) if total else 0.0


def run_statistics(runs: Iterable[AgentRun], judge_failures: int) -> dict[str, Any]:
    """Return statistics of all judged agent runs, rejected ones included; each is read once.

    Args:
        judge_failures: number of runs without a valid judgement.
    """
    injected, real = Counter[str](), Counter[str]()
    count = calls = 0
    for run in runs:
        count += 1
        calls += len(run.calls)
        injected.update(call.injected for call in run.calls if call.injected)
        real.update(call.error for call in run.calls if call.error)
    return {
        "runs": count,
        "calls": calls,
        "injected_failure_rate": share(injected.total(), calls),
        "injected_failures": dict(sorted(injected.items())),
        "real_failure_rate": share(real.total(), calls),
        "real_failures": dict(sorted(real.items())),
        "judge_failures": judge_failures,
        "judge_failure_rate": share(judge_failures, count),
    }


def table_rows(statistics: Mapping[str, Any]) -> dict[str, str]:
    """Return the paper's table (A.1.1, left column) of `trajectory_statistics`, also from a card: name → text."""
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
    if repaired := statistics.get("repaired_calls_by_kind"):
        more["repairs of calls"] = ", ".join(f"{name} {times:,}" for name, times in repaired.items())
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
            {"beside calling tools": ranked(behaviours, most=8, of=count)}
            if (behaviours := statistics.get("behaviours"))
            else {}
        ),
        "tools real / emulated": f"{1 - execution.get('emulated', 0):.1%} / {execution.get('emulated', 0):.1%} "
        f"of the conversations ({ranked(execution)})",
        **more,
        "mean reward": f"{statistics['reward_mean']:.3f}",
    }
