"""What is drawn is verified, once, and nothing else; more tasks change no earlier draw."""

from __future__ import annotations

import msgspec
import pytest
from trajectories_world import context

from astra_jax.base.errors import InputError
from synthesis.core.records import EmulatedExecution, StdioExecution, ToolServer, ToolSpec
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.task_sampler import TaskSampler, sample_tasks, servers_without_tasks, wanted_tasks
from synthesis.trajectories.teacher_answers import BackTranslatedChain, BackTranslatedQuery, ChainVote
from synthesis.trajectories.tool_graph import back_translation, chain_id, chains_of, vote

TOOLS = [ToolSpec(f"tool_{letter}", f"The tool {letter}.", {"type": "object", "properties": {}}) for letter in "abcdef"]
SERVERS = [
    ToolServer(f"{language}{n}", "T", "A server.", "d", language, TOOLS, EmulatedExecution())
    for language in ("en", "zh")
    for n in range(3)
]
WALKS = {tuple(f"tool_{x}" for x in walk): 1.0 for walk in ("a", "b", "c", "ab", "bc", "cd", "de", "abc", "bcd", "def")}
CHAINS = [chain for server in SERVERS for chain in chains_of(server, WALKS)]
BY_ID = {chain.id: chain for chain in CHAINS}


class Verifier:
    """Passes what it is told to; counts what it was asked."""

    def __init__(self, passes) -> None:
        self.passes, self.asked = passes, []

    async def __call__(self, chains):
        self.asked += [chain.id for chain in chains]
        return [chain for chain in chains if self.passes(chain)]


async def drawn(count, passes, *, seed=0, **config):
    verifier = Verifier(passes)
    sampler = TaskSampler(TrajectoriesConfig(**{"behaviours": {}, **config}), SERVERS, CHAINS, seed)
    seeds, chains = await sample_tasks(sampler, count, BY_ID, verifier)
    return seeds, chains, verifier.asked


def short(chain):
    return len(chain.tools) < 3


async def test_only_what_is_drawn_is_verified_and_each_once():
    seeds, chains, asked = await drawn(8, lambda chain: True)
    used = {chain_id(one.server_id, one.chain) for one in seeds if one.chain}
    assert len(seeds) == 8 and set(asked) == used == {chain.id for chain in chains}
    assert len(asked) == len(set(asked)) < len(CHAINS) / 6
    seeds, chains, asked = await drawn(200, short, server_tasks=0.0)
    assert len(asked) == len(set(asked)) and {len(one.chain) for one in seeds} == {1, 2} and len(seeds) == 200
    order = [chain.id for chain in CHAINS]
    assert [chain.id for chain in chains] == sorted((chain.id for chain in chains), key=order.index)


async def test_a_task_whose_chain_fails_draws_again_until_one_passes():
    """A server of which nothing passes gives its tasks to the others; the last draw of all may be the one."""
    seeds, _, asked = await drawn(60, lambda chain: chain.server_id != "en0", server_tasks=0.0)
    assert len(seeds) == 60 and {one.server_id for one in seeds} == {one.id for one in SERVERS} - {"en0"}
    only = CHAINS[7].id
    seeds, chains, asked = await drawn(5, lambda chain: chain.id == only, server_tasks=0.0, languages={"en": 1.0})
    assert {chain_id(one.server_id, one.chain) for one in seeds} == {only} and len(seeds) == 5
    assert [one.id for one in seeds] == [f"task-0-{index:06d}" for index in range(5)] and len(asked) == 30


async def test_tasks_without_a_chain_need_no_verdict():
    seeds, chains, asked = await drawn(20, lambda chain: False, server_tasks=1.0)
    assert len(seeds) == 20 and not asked and not chains and all(one.tool_count and not one.chain for one in seeds)
    some, _, _ = await drawn(40, lambda chain: False, server_tasks=0.5)
    assert 0 < len(some) < 40 and not any(one.chain for one in some)  # the others have nothing to be about
    with pytest.raises(InputError, match="no chain passed verification; allow more walks or fewer operators"):
        await drawn(4, lambda chain: False, server_tasks=0.0)
    with pytest.raises(InputError, match="no server has a chain"):
        TaskSampler(TrajectoriesConfig(), SERVERS, [], 0)


async def test_more_tasks_change_no_earlier_one():
    few, _, asked = await drawn(30, short)
    many, _, more = await drawn(45, short)
    assert many[:30] == few and set(asked) <= set(more)
    assert (await drawn(30, short, seed=1))[0] != few


def test_how_many_tasks_are_wanted():
    assert wanted_tasks(TrajectoriesConfig(trajectories=100, oversample_ratio=0.3, augmented=0.5, behaviours={})) == 87
    # What has no variation makes one record, not one and a half.
    assert wanted_tasks(TrajectoriesConfig(trajectories=100, oversample_ratio=0.3, behaviours={"done": 1.0})) == 130


class Answers:
    """Answers each request alike; counts them."""

    def __init__(self, valid: bool) -> None:
        self.valid, self.count = valid, 0

    async def ask(self, answer, variables, *, language, seed):
        self.count += 1
        return {
            ChainVote: ChainVote("r", "q", self.valid),
            BackTranslatedQuery: BackTranslatedQuery("", "q", True),
            BackTranslatedChain: BackTranslatedChain("", BY_ID["en0:tool_a>tool_b"].tools if self.valid else []),
        }[answer]


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize(("votes", "needed"), [(1, 1), (2, 2), (3, 2), (5, 3)])
async def test_what_is_decided_is_not_asked_for(valid, votes, needed):
    chain = BY_ID["en0:tool_a>tool_b"]
    needed -= votes == 2 and not valid  # one no of two is no majority
    teacher = Answers(valid)
    assert (await vote(chain, context(teacher, votes=votes), SERVERS[0])).valid is valid and teacher.count == needed
    teacher = Answers(valid)
    verdict = await back_translation(chain, context(teacher, votes=votes), SERVERS[0])
    assert verdict.valid is valid and teacher.count == 2 * needed
    assert msgspec.json.encode(verdict)


async def test_parts_of_a_split_server_have_its_weight_and_unknown_names_are_printed(capsys):
    config = TrajectoriesConfig(server_weights={"api": 5.0, "api.2": 7.0, "en": 3.0})
    assert [config.weight_of(name) for name in ("api", "api.1", "api.2", "api.1.1", "en0")] == [5.0, 5.0, 7.0, 1.0, 1.0]
    seeds, _, _ = await drawn(60, short, server_weights={"en0": 1e6, "enn": 2.0}, languages={"en": 1.0})
    assert {one.server_id for one in seeds} == {"en0"}
    said = capsys.readouterr().err
    assert "--config.server_weights names enn: no tasks can be about a server of that id; there are en0, en1" in said


def running(id, language="en"):
    return ToolServer(id, "T", "A server.", "d", language, TOOLS, StdioExecution(["server"]))


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        ({}, {}),
        ({"languages": {"en": 1.0}}, {"zh0": "other_language", "zh1": "other_language", "zh2": "other_language"}),
        ({"languages": {"zh": 1.0, "de": 0.1}}, {}),  # German users use the English servers
        ({"mcp_share": 0.0}, {"own": "share_of_tasks_is_0"}),
        ({"mcp_share": 1.0}, {f"en{n}": "share_of_tasks_is_0" for n in range(3)}),  # no Chinese one runs
        ({"mcp_share": 1.0, "several_servers": 0.5}, {}),
    ],
)
def test_servers_that_no_task_can_be_about_are_known_before_the_teacher_is_asked(config, left_out):
    found = servers_without_tasks(TrajectoriesConfig(**config), [*SERVERS, running("own")])
    assert {id: reason for id, (reason, _) in found.items()} == left_out


def test_behaviours_that_no_server_is_there_for_are_ordinary_tasks():
    config = TrajectoriesConfig(behaviours={"confirmation": 0.5, "irrelevant_tools": 0.4, "done": 0.1})
    sampler = TaskSampler(config, SERVERS[:1], CHAINS, 0)  # one server, and no to-do server
    assert sampler.impossible == {"confirmation", "irrelevant_tools"}
    subjects = [next(sampler.candidates(index), None) for index in range(60)]
    assert {one.behaviour or "" for one in subjects if one} == {"", "done"} and None not in subjects
