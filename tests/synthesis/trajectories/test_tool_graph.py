"""The transition graph, the walks on it, and the verification operators."""

from __future__ import annotations

import random
import resource
from collections import Counter

import networkx as nx
import pytest
from processor_time import at_most
from trajectories_world import context

from synthesis.core.records import ToolChain, Verdict
from synthesis.core.stages import Rejected
from synthesis.offline.facts.servers import fact_servers
from synthesis.trajectories.config import OPERATORS as NAMES
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.teacher_answers import BackTranslatedChain, BackTranslatedQuery, ChainVote
from synthesis.trajectories.tool_graph import (
    OPERATORS,
    back_translation,
    chains_of,
    propose,
    random_walks,
    transition_graph,
    unknown_tools,
    verify,
    vote,
    write_graphml,
)

COUNTRIES = fact_servers("en", ("countries",))[0]
SERVERS = {COUNTRIES.id: COUNTRIES}


def test_weights_are_frequencies_and_unknown_names_break_chains():
    graph = transition_graph("abcd", ["ab", "abc", "a?c", "cc", "b"])
    assert dict(graph.edges) == {("a", "b"): {"weight": 2}, ("b", "c"): {"weight": 1}}  # no a→c, no c→c
    assert dict(graph.nodes(data="count")) == {"a": 3, "b": 3, "c": 4, "d": 0}


def test_walks_follow_the_weights_within_the_lengths():
    graph = transition_graph("abcx", ["abca"] + ["ab"] * 2 + ["ac"])
    walks = random_walks(graph, 500, min_length=2, max_length=3, acyclic=True, rng=random.Random(0))
    assert set(walks) == {
        ("a", "b"),
        ("a", "b", "c"),
        ("a", "c"),
        ("b", "c"),
        ("b", "c", "a"),
        ("c", "a"),
        ("c", "a", "b"),
        ("a", "c"),
    }
    assert walks["a", "b"] == pytest.approx(3 / 4) and walks["c", "a", "b"] == pytest.approx(3 / 4)
    cyclic = random_walks(graph, 500, min_length=4, max_length=4, acyclic=False, rng=random.Random(0))
    assert cyclic and all(len(walk) == 4 for walk in cyclic)
    assert all(one != two for walk in cyclic for one, two in zip(walk, walk[1:], strict=False))
    assert ("a", "b", "c", "a") in cyclic


def test_steps_are_drawn_by_weight():
    graph = transition_graph("abc", ["ab"] * 9 + ["ac"])
    ends = Counter(
        walk[1]
        for seed in range(400)
        for walk in random_walks(graph, 1, min_length=2, max_length=2, acyclic=True, rng=random.Random(seed))
    )
    assert 0.84 < ends["b"] / 400 < 0.96


def test_isolated_tools_are_chains_of_their_own_only_if_length_one_is_allowed():
    graph = transition_graph("ab", [])
    bounds = {"acyclic": True, "rng": random.Random(0)}
    assert random_walks(graph, 9, min_length=1, max_length=3, **bounds) == {("a",): 1.0, ("b",): 1.0}
    assert random_walks(graph, 9, min_length=2, max_length=3, **bounds) == {}
    with pytest.raises(ValueError, match="min_length 3, max_length 2"):
        random_walks(graph, 9, min_length=3, max_length=2, **bounds)


def test_graphs_are_written_as_graphml(tmp_path):
    write_graphml(transition_graph("ab", ["ab", "ab"]), tmp_path / "g" / "x.graphml")
    assert nx.read_graphml(tmp_path / "g" / "x.graphml").edges["a", "b"]["weight"] == 2


async def test_proposals_of_the_offline_teacher_use_known_tools_and_depend_on_the_repeat():
    one, two, again = [(await propose((COUNTRIES, repeat), context(seed=1, pairs=5)))[0] for repeat in (0, 1, 0)]
    assert one == again != two and len(one.pairs) == 5
    assert {name for pair in one.pairs for name in pair.chain} <= {tool.name for tool in COUNTRIES.tools}


class Scripted:
    """Answers each type with the next of its answers."""

    def __init__(self, **answers):
        self.answers = {name: iter(values) for name, values in answers.items()}

    async def ask(self, answer, variables, *, language, seed):
        return next(self.answers[answer.__name__])


CHAIN = ToolChain("c", COUNTRIES.id, ["largest_neighbor_of_country", "capital_of_country"], 1.0, {})


async def test_a_vote_needs_more_yes_than_no():
    yes, no = ChainVote("fits", "q", True), ChainVote("odd", "", False)
    assert (await vote(CHAIN, context(Scripted(ChainVote=[yes, no, yes])), COUNTRIES)).valid
    tie = await vote(CHAIN, context(Scripted(ChainVote=[yes, no]), votes=2), COUNTRIES)
    assert tie == Verdict(False, "1 of 2 votes: odd")


async def test_back_translation_needs_the_same_order():
    there = BackTranslatedQuery("", "q", True)
    same, swapped = BackTranslatedChain("", CHAIN.tools), BackTranslatedChain("", CHAIN.tools[::-1])
    scripted = Scripted(BackTranslatedQuery=[there] * 3, BackTranslatedChain=[same, swapped, same])
    assert (await back_translation(CHAIN, context(scripted), COUNTRIES)).valid
    scripted = Scripted(BackTranslatedQuery=[there] * 3, BackTranslatedChain=[same, swapped, swapped])
    assert "led back to capital_of_country>" in (await back_translation(CHAIN, context(scripted), COUNTRIES)).reason


async def test_only_sensible_chains_pass_all_operators():
    (kept,) = await verify(CHAIN, context(), SERVERS)
    assert list(kept.verdicts) == ["vote", "back_translation"] and all(v.valid for v in kept.verdicts.values())
    (odd,) = chains_of(COUNTRIES, {("capital_of_country", "area_of_country"): 1.0})
    with pytest.raises(Rejected, match="chain_failed_vote.*area_of_country needs no value of capital_of_country"):
        await verify(odd, context(), SERVERS)


# ---------------------------------------------------------------------------------------------------------------------
# Operators by name


def test_unknown_tools_are_counted():
    assert unknown_tools("ab", ["ab", "a?b", "??"]) == {"?": 3}


async def test_the_config_says_which_operators_run_in_which_order(monkeypatch):
    """A new check is one more entry; the first that says no ends it."""
    asked = []

    def named(name, valid):
        async def judge(chain, context, server):
            asked.append(name)
            return Verdict(valid, name)

        return judge

    monkeypatch.setattr("synthesis.trajectories.config.OPERATORS", (*NAMES, "yes", "no"))
    monkeypatch.setitem(OPERATORS, "yes", named("yes", True))
    monkeypatch.setitem(OPERATORS, "no", named("no", False))
    order = ("yes", "no", "back_translation")
    with pytest.raises(Rejected, match="chain_failed_no: c: no"):
        await verify(CHAIN, context(operators=order), SERVERS)
    assert asked == ["yes", "no"]
    (kept,) = await verify(CHAIN, context(operators=()), SERVERS)
    assert kept == CHAIN


def test_operators_are_checked():
    assert tuple(OPERATORS) == NAMES
    with pytest.raises(ValueError, match=r"operators\[1\] is 'guess'; use one of vote, back_translation"):
        TrajectoriesConfig(operators=("vote", "guess"))
    with pytest.raises(ValueError, match="operators: 'vote' is listed twice"):
        TrajectoriesConfig(operators=("vote", "vote"))


# ---------------------------------------------------------------------------------------------------------------------
# Scale


@pytest.mark.nightly
@pytest.mark.parametrize(("servers", "tools"), [(1_585, 12), (1, 500)])
def test_a_hundred_thousand_proposals(tmp_path, servers, tools):
    """The paper's number of servers, and one with all: at most 30 s of CPU and 1 GiB."""
    rng = random.Random(0)
    names = [f"tool_{index}" for index in range(tools)]
    before, walks = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    with at_most(30):
        for server in range(servers):
            chains = (rng.choices([*names, "unknown"], k=rng.randint(2, 5)) for _ in range(100_000 // servers))
            graph = transition_graph(names, chains)
            assert "unknown" not in graph
            write_graphml(graph, tmp_path / f"{server}.graphml")
            walks += len(random_walks(graph, 60, min_length=2, max_length=5, acyclic=True, rng=rng))
    assert walks > 50 * servers
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
