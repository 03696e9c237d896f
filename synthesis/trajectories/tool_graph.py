"""Tool graph and chains (paper, section 2.1.2): proposals → transition graph → weighted walks → verified chains."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import networkx as nx

from astra_jax.base.settings import SettingError
from synthesis.core.records import ToolChain, ToolServer, Verdict
from synthesis.core.stages import Rejected
from synthesis.pipeline.context import no_check
from synthesis.trajectories.teacher_answers import (
    BackTranslatedChain,
    BackTranslatedQuery,
    ChainVote,
    ProposedTask,
    TaskChainProposals,
)

if TYPE_CHECKING:
    from synthesis.trajectories.context import Servers, TrajectoryContext


class Proposals(msgspec.Struct, frozen=True):
    """Tasks and chains of one answer of the teacher."""

    server_id: str
    pairs: list[ProposedTask]


async def propose(item: tuple[ToolServer, int], context: TrajectoryContext) -> list[Proposals]:
    """Ask the teacher once for tasks of a server; the item's number distinguishes requests, which give frequencies.

    Raises:
        Rejected: `teacher_failed`.
    """
    server, repeat = item
    variables = {"server": server, "count": context.config.pairs}
    key = ("propose", server.id, repeat)
    context = context.route(f"{server.id} {repeat}")
    answer = await context.ask(TaskChainProposals, variables, language=server.language, key=key, check=no_check)
    return [Proposals(server.id, answer.pairs)]


def transition_graph(tools: Iterable[str], chains: Iterable[Sequence[str]]) -> nx.DiGraph:
    """Return the directed graph whose edge weight counts how often one tool came right after another.

    Nodes are all tools of the server; `count` is how often each was proposed. A name that is not a tool splits its
    chain: its neighbours do not become adjacent. Edges from a tool to itself are not counted.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(tools, count=0)
    for chain in chains:
        before: str | None = None
        for name in chain:
            if name not in graph:
                before = None
                continue
            graph.nodes[name]["count"] += 1
            if before is not None and before != name:
                weight = graph.get_edge_data(before, name, {"weight": 0})["weight"]
                graph.add_edge(before, name, weight=weight + 1)
            before = name
    return graph


def unknown_tools(tools: Iterable[str], chains: Iterable[Sequence[str]]) -> Counter[str]:
    """Count the names in the chains that are not tools."""
    known = set(tools)
    return Counter(name for chain in chains for name in chain if name not in known)


def random_walks(
    graph: nx.DiGraph,
    walks: int,
    *,
    min_length: int,
    max_length: int,
    acyclic: bool,
    rng: random.Random,
) -> dict[tuple[str, ...], float]:
    """Sample different walks; return each with the product of its transition probabilities.

    A walk starts at a tool sampled by count and follows edges sampled by weight, up to a length sampled from
    [min_length, max_length]. A walk that ends early counts if it is long enough. With `min_length` 1 every tool is also
    a chain by itself, isolated tools included.

    Args:
        walks: number of sampled walks; duplicates are dropped.
        acyclic: never visit a tool twice.
    """
    if not 1 <= min_length <= max_length:
        raise SettingError(f"min_length {min_length}, max_length {max_length}: need 1 <= min_length <= max_length")
    found: dict[tuple[str, ...], float] = {}
    if min_length == 1:
        found = {(name,): 1.0 for name in graph.nodes}
    starts = [name for name in graph.nodes if graph.out_degree(name) > 0]
    if not starts:
        return found
    counts = [graph.nodes[name]["count"] for name in starts]
    for _ in range(walks):
        length = rng.randint(max(2, min_length), max(2, max_length)) if max_length > 1 else 1
        walk, weight = [rng.choices(starts, counts)[0]], 1.0
        while len(walk) < length:
            following = {
                name: data["weight"]
                for name, data in graph[walk[-1]].items()
                if name != walk[-1] and not (acyclic and name in walk)
            }
            if not following:
                break
            step = rng.choices(list(following), list(following.values()))[0]
            weight *= following[step] / graph.out_degree(walk[-1], weight="weight")
            walk.append(step)
        if min_length <= len(walk) <= max_length:
            found.setdefault(tuple(walk), weight)
    return found


def chains_of(server: ToolServer, walks: Mapping[tuple[str, ...], float]) -> list[ToolChain]:
    """Return the walks as records that are not yet verified."""
    return [ToolChain(chain_id(server.id, walk), server.id, list(walk), weight, {}) for walk, weight in walks.items()]


def chain_id(server_id: str, tools: Sequence[str]) -> str:
    """Return the id of a chain of a server."""
    return f"{server_id}:{'>'.join(tools)}"


def write_graphml(graph: nx.DiGraph, path: Path) -> None:
    """Write the graph as GraphML, which Gephi, yEd and networkx read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nx.write_graphml(graph, path)


# ---------------------------------------------------------------------------------------------------------------------
# Verification operators: `(chain, context, server) -> Verdict`; a chain must pass all that the config names.

Operator = Callable[[ToolChain, "TrajectoryContext", ToolServer], Awaitable[Verdict]]


async def vote(chain: ToolChain, context: TrajectoryContext, server: ToolServer) -> Verdict:
    """Vote on whether one sensible task needs this chain; valid if more votes say yes than no.

    A failed vote does not count. Votes that can no longer change the result are skipped.
    """
    ballots: Counter[bool] = Counter()
    reasons: dict[bool, str] = {}
    votes = context.config.votes
    variables = {"server": server, "chain": chain.tools, **context.extra}
    asked = 0
    for index in range(votes):
        ahead, left = ballots[True] - ballots[False], votes - index
        if ahead > left or -ahead >= left:
            break
        asked += 1
        key = ("vote", chain.id, index)
        try:
            answer = await context.ask(ChainVote, variables, language=server.language, key=key, check=no_check)
        except Rejected as rejection:
            reasons.setdefault(False, rejection.detail)
            continue
        ballots[answer.valid] += 1
        reasons.setdefault(answer.valid, answer.reason)
    valid = ballots[True] > ballots[False]
    return Verdict(valid, f"{ballots[True]} of {asked} votes: {reasons.get(valid, 'no valid vote')}")


async def back_translation(chain: ToolChain, context: TrajectoryContext, server: ToolServer) -> Verdict:
    """Translate chain → query → chain: valid if, in most tries, the query needs the same chain, in the same order.

    Tries that can no longer change the result are skipped.
    """
    passed, made, reason = 0, 0, ""
    tries = context.config.votes
    given = {"server": server, "chain": chain.tools, **context.extra}
    for index in range(tries):
        if 2 * passed > tries or 2 * (passed + tries - index) <= tries:
            break
        made += 1
        asked: dict[str, Any] = {"language": server.language, "key": ("back_translation", chain.id, index)}
        try:
            there = await context.ask(BackTranslatedQuery, given, **asked, check=no_check)
            if not there.meaningful:
                reason = reason or there.reason
                continue
            query = {"server": server, "query": there.query}
            back = await context.ask(BackTranslatedChain, query, **asked, check=no_check)
        except Rejected as rejection:
            reason = reason or rejection.detail
            continue
        if back.chain == chain.tools:
            passed += 1
        else:
            reason = reason or f"the query {there.query!r} led back to {'>'.join(back.chain)}"
    valid = 2 * passed > tries
    return Verdict(valid, f"{passed} of {made} came back" if valid else reason)


OPERATORS: dict[str, Operator] = {"vote": vote, "back_translation": back_translation}
"""Verification operators by their names in a config (`config.OPERATORS`). To add a check, add an entry to both."""


async def verify(chain: ToolChain, context: TrajectoryContext, servers: Servers) -> list[ToolChain]:
    """Return the chain with its verdicts; the config's operators run in order, up to the first that rejects it.

    Raises:
        Rejected: `chain_failed_<operator>`.
    """
    verdicts: dict[str, Verdict] = {}
    for name in context.config.operators:
        verdicts[name] = await OPERATORS[name](chain, context, servers[chain.server_id])
        if not verdicts[name].valid:
            failed = msgspec.structs.replace(chain, verdicts=verdicts)
            raise Rejected(f"chain_failed_{name}", f"{chain.id}: {verdicts[name].reason}", failed)
    return [msgspec.structs.replace(chain, verdicts=verdicts)]
