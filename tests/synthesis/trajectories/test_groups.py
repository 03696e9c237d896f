"""Tasks over several servers: groups and their tools' names, calls on the right server, records and figures."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import pytest
from trajectories_world import context

from astra_jax.base.errors import InputError
from sandbox import SandboxConfig, SandboxPool
from synthesis.astra_format.sft import import_record, to_record
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.openai_messages import estimated_tokens
from synthesis.core.records import (
    CodeExecution,
    EmulatedExecution,
    Task,
    TaskScores,
    ToolCall,
    ToolChain,
    ToolOrigin,
    ToolServer,
    ToolSpec,
    Trajectory,
)
from synthesis.core.stages import Journal, Rejected
from synthesis.offline.intents import FactIntent, JointIntent, understand
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.prompts import Prompts
from synthesis.servers.collect import default_sources
from synthesis.servers.mcp_client import McpConnections
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import Failures
from synthesis.trajectories.groups import crosses, group_id, group_of, grouped, is_group
from synthesis.trajectories.pipeline import synthesize
from synthesis.trajectories.tasks import TaskSeed, repeated_tasks, write_task
from synthesis.trajectories.teacher_answers import ChainTask, ServerTask

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}


def server(id: str, *tools: str, says: str = "", **fields) -> ToolServer:
    """One whose tools return the server's id."""
    code = "\n".join(f"def {name}(item):\n    return '{id}: {name} ' + item\n" for name in tools)
    specs = [ToolSpec(name, says or f"What {id} knows of {name}.", SCHEMA) for name in tools]
    given = {"domain": id, "execution": CodeExecution(code), **fields}
    return ToolServer(id, id.title(), f"All of {id}.", language="en", tools=specs, **given)


SHOP, BANK = server("shop", "search", "price", license="MIT"), server("bank", "search", "rate", domain="money")
GROUP = group_of([SHOP, BANK], license="CC0-1.0")
TASK = Task(
    "t", GROUP.id, "en", "server", "original", "?", ["price", "rate"], TaskScores(5, 5, 5), servers=GROUP.servers
)


def test_a_tool_keeps_its_name_unless_another_server_has_it():
    assert [tool.name for tool in GROUP.tools] == ["shop_search", "price", "bank_search", "rate"]
    assert GROUP.id == "shop+bank" and GROUP.servers == ["shop", "bank"] and GROUP.domain == "money + shop"
    assert GROUP.origin("bank_search") == ToolOrigin("bank", "search") and GROUP.origin("price") == ToolOrigin(
        "shop", "price"
    )
    assert GROUP.origin("nothing") == ToolOrigin(GROUP.id, "nothing") and SHOP.servers == ["shop"]
    assert is_group(GROUP) and not is_group(SHOP)
    assert GROUP.license == "MIT AND CC0-1.0" and group_of([SHOP, BANK]).license == ""  # one does not say
    # The new name may be taken, or too long.
    taken = group_of([server("a", "x", "b_x"), server("b", "x")])
    assert [tool.name for tool in taken.tools] == ["a_x", "b_x", "b_x_2"]
    assert taken.origin("b_x") == ToolOrigin("a", "b_x") and taken.origin("b_x_2") == ToolOrigin("b", "x")
    long = group_of([server("s" * 60 + str(n), "y" * 20) for n in range(3)])
    names = [tool.name for tool in long.tools]
    assert len(set(names)) == 3 and all(len(name) <= 64 for name in names)
    ids = [group_id(["m" * 130, end]) for end in "ab"]
    assert len(set(ids)) == 2 and all(len(one) < 140 for one in ids)


def test_what_needs_one_server_alone_is_no_task_of_a_group():
    assert crosses(GROUP, ["price", "bank_search"]) and not crosses(GROUP, ["price", "shop_search"])
    assert not crosses(GROUP, []) and crosses(SHOP, ["price"])


def test_groups_are_of_servers_that_speak_of_the_same_and_more_change_none():
    every = [
        server(f"{topic}{n}", f"{topic}_{n}_one", f"{topic}_{n}_two", says=f"About {topic} and {topic} things alone.")
        for topic in ("river", "music", "stock")
        for n in range(3)
    ]
    config = TrajectoriesConfig(groups=8, group_sizes=(2,))
    few, more = grouped(every, config, 0), grouped(every, dataclasses.replace(config, groups=12), 0)
    assert len(few) == 8 and more[:8] == few
    assert 8 < len(more) == len({frozenset(one.servers) for one in more})
    assert grouped(every, config, 0) == few != grouped(every, config, 1)
    alike = sum(len({id[:-1] for id in one.servers}) == 1 for one in few)
    assert alike >= 6  # by chance it would be a quarter
    assert {len(one.servers) for one in grouped(every, dataclasses.replace(config, group_sizes=(2, 3)), 0)} == {2, 3}
    small = grouped(every, dataclasses.replace(config, max_tools=3), 0)
    assert small == []  # no two have room in one request
    tokens = 2 * estimated_tokens([], every[0].tools)
    assert grouped(every, dataclasses.replace(config, max_tokens=4 * tokens), 0)
    assert grouped(every, dataclasses.replace(config, max_tokens=tokens), 0) == []  # documents take half of them
    chinese = [msgspec.structs.replace(one, language="zh") for one in every[:2]]
    assert {one.language for one in grouped([*every, *chinese], config, 0)} == {"en", "zh"}


async def test_each_call_is_run_where_its_tool_is(tmp_path):
    """Two servers in the sandbox with a tool of one name, and a running one."""
    source = next(one for one in default_sources() if one.id == "mcp_time")
    clock_tool = ToolSpec("convert_time", "Converts a time.", {"type": "object", "properties": {}, "required": []})
    properties = {name: {"type": "string"} for name in ("source_timezone", "time", "target_timezone")}
    clock_tool = msgspec.structs.replace(clock_tool, parameters={"type": "object", "properties": properties})
    clock = ToolServer("mcp_time", "Time", "Time.", "time", "en", [clock_tool], source.execution)
    group = group_of([SHOP, BANK, clock])
    servers = {one.id: one for one in (SHOP, BANK, clock, group)}
    asked = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    calls = [
        ToolCall("1", "shop_search", {"item": "tea"}), ToolCall("2", "bank_search", {"item": "tea"}),
        ToolCall("3", "rate", {"item": "EUR"}), ToolCall("4", "convert_time", asked),
        ToolCall("5", "search", {"item": "tea"}),
    ]  # fmt: skip
    async with SandboxPool(SandboxConfig()) as pool, McpConnections(cwd=tmp_path) as connections:
        made = context(sandbox=pool, connections=connections)
        session = made.executor.session(group, TASK, Failures(rate=0.0), servers)
        results = await session.call_all(calls)
    assert [one.content for one in results[:3]] == [
        '"shop: search tea"', '"bank: search tea"', '"bank: rate EUR"',
    ]  # fmt: skip
    assert "21:00" in results[3].content and [one.ok for one in results] == [True] * 4 + [False]
    assert results[4].error == "unknown_tool"


class Emulator:
    """Answers for a tool; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list = []

    async def ask(self, answer, variables, *, language, seed):
        self.asked.append(variables)
        return answer("", '{"found": 1}', False)


async def test_the_emulator_is_told_of_the_tools_own_server_and_all_calls():
    parts = [msgspec.structs.replace(one, execution=EmulatedExecution()) for one in (SHOP, BANK)]
    group, teacher = group_of(parts), Emulator()
    session = context(teacher).executor.session(group, TASK, Failures(rate=0.0), {one.id: one for one in parts})
    await session.call_all([ToolCall("1", "shop_search", {"item": "tea"})])
    await session.call_all([ToolCall("2", "bank_search", {"item": "tea"})])
    assert [one["server"].id for one in teacher.asked] == ["shop", "bank"]
    assert teacher.asked[1]["tool"].name == "bank_search" and len(teacher.asked[1]["history"]) == 1


class OneServerFirst:
    """Needs tools of one server until it is told not to."""

    def __init__(self) -> None:
        self.feedback: list[str] = []

    async def ask(self, answer, variables, *, language, seed):
        assert answer is ServerTask
        self.feedback.append(variables.get("feedback", ""))
        tools = ["price", "rate"] if self.feedback[-1] else ["price", "shop_search"]
        return ServerTask("", tools, "Tell me what tea costs at the store, and the exchange of the euro.")


async def test_a_task_that_needs_one_server_is_asked_for_again():
    teacher = OneServerFirst()
    seed = TaskSeed("t", GROUP.id, "en", [], 2)
    (task,) = await write_task(seed, context(teacher), {GROUP.id: GROUP})
    assert task.tools == ["price", "rate"] and task.servers == ["shop", "bank"] and task.server_id == "shop+bank"
    assert len(teacher.feedback) == 2 and "of one server; take tools of two" in teacher.feedback[1]
    teacher.feedback = [""]
    with pytest.raises(Rejected, match="of one server"):
        await write_task(seed, context(OneServerFirst(), attempts=1), {GROUP.id: GROUP})
    # Of one server nothing changes.
    (alone,) = await write_task(TaskSeed("t", "shop", "en", [], 2), context(_Shop()), {"shop": SHOP})
    assert alone.servers is msgspec.UNSET and b"servers" not in msgspec.json.encode(alone)


class _Shop:
    async def ask(self, answer, variables, *, language, seed):
        return ServerTask("", ["price", "search"], "Tell me what tea costs at the store, and find me some green tea.")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_prompts_say_which_tools_are_whose(language):
    shown = {"server": GROUP, "chain": ["price", "rate"], "feedback": ""}
    text = Prompts().render(ChainTask, shown, language)
    assert ("- shop: shop_search price\n" if language == "en" else "- shop： shop_search price\n") in text
    alone = Prompts().render(ChainTask, {"server": SHOP, "chain": ["price"], "feedback": ""}, language)
    assert "shop:" not in alone and "shop：" not in alone and "\n\n\n" not in alone


def test_tasks_of_overlapping_groups_are_compared():
    other = msgspec.structs.replace(TASK, id="u", server_id="shop+bank+mail", servers=["shop", "bank", "mail"])
    alone = msgspec.structs.replace(TASK, id="v", server_id="shop", servers=msgspec.UNSET)
    assert set(repeated_tasks([TASK, other, alone], 0.8)) == {"u"}


CONFIG = TrajectoriesConfig(
    trajectories=40, mcp_share=0.1, min_tools=2, proposals=3, walks=20, behaviours={}, several_servers=0.6, groups=24,
    fact_servers=("countries", "cities", "airports", "http", "timezones"), emulated_servers=("cities",),
    server_weights={"mcp_time": 3.0},
)  # fmt: skip


async def made(folder, config):
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(folder / "journal.sqlite") as journal:
            return await synthesize(
                config, executor=Executor(OfflineTeacher(), pool), journal=journal, out_dir=folder / "out",
                workdir=folder, seed=3,
            )  # fmt: skip


async def test_a_run_over_several_servers(tmp_path):
    """Offline: chains of facts that cross, and what a running server and the facts are asked for together."""
    summary = await made(tmp_path / "several", CONFIG)
    out = tmp_path / "several" / "out"
    servers = {one.id: one for one in read_dataset(out / "servers", ToolServer)}
    tasks, kept = read_dataset(out / "tasks", Task), read_dataset(out / "trajectories", Trajectory)
    groups = [one for one in servers.values() if is_group(one)]
    assert len(groups) == summary.statistics["servers"]["groups"] > 20
    assert all(set(one.servers) <= set(servers) for one in groups)
    over = [one for one in kept if one.servers]
    assert 0.4 < len(over) / len(kept) < 0.8
    used = Counter()
    for one in over:
        group = servers[one.server_id]
        assert one.servers == group.servers and one.tools == group.tools and len(one.servers) > 1
        assert crosses(group, one.needs)
        called = {call.name for message in one.messages for call in message.tool_calls}
        assert set(one.needs) <= called and crosses(group, called)
        used.update(servers[group.origin(name).server_id].execution.__class__.__name__ for name in called)
    assert used["CodeExecution"] and used["StdioExecution"] and used["EmulatedExecution"]
    crossing = [one for one in read_dataset(out / "chains", ToolChain) if is_group(servers[one.server_id])]
    assert crossing and all(crosses(servers[one.server_id], one.tools) for one in crossing)
    assert {task.mode for task in tasks if task.servers} == {"chain", "server"}
    card = read_card(out / "trajectories")["statistics"]
    counted = Counter(len({servers[o.server_id].origin(tool).server_id for tool in o.needs}) for o in kept)
    assert card["shares_over_servers"] == {str(n): round(counted[n] / len(kept), 4) for n in sorted(counted)}
    assert card["servers"] == len({id for one in kept for id in servers[one.server_id].servers})
    assert card["execution_shares_of_calls"].get("mixed", 0.0) == 0.0 < card["execution_shares"]["mixed"]
    for name, kind in (("tasks", Task), ("trajectories", Trajectory)):
        for one in read_dataset(out / name, kind):
            assert msgspec.json.decode(msgspec.json.encode(one), type=kind) == one
    released, _ = import_record(msgspec.json.encode(to_record(over[0], server=servers[over[0].server_id])), row=0)
    assert released.servers == over[0].servers and released.server_id == over[0].server_id
    # Tasks that are about one server are what they are without the others.
    await made(tmp_path / "one", dataclasses.replace(CONFIG, several_servers=0.0))
    before = {one.id: one for one in read_dataset(tmp_path / "one" / "out" / "tasks", Task)}
    same = [one for one in tasks if not one.servers and one.id in before]
    assert same and all(before[one.id] == one for one in same)


async def test_a_run_of_one_server_cannot_be_over_several(tmp_path):
    config = dataclasses.replace(
        CONFIG, sources=(), fact_servers=("countries",), languages={"en": 1.0}, emulated_servers=()
    )
    with pytest.raises(InputError, match="several_servers is 0.6, and no two of 1 servers"):
        await made(tmp_path, config)


def test_two_requests_of_one_message_are_read_as_both():
    text = "What time is it in Asia/Tokyo when it is 12:00 in UTC? Besides that: Tell me the capital of Norway."
    intent = understand(text, "en")
    assert isinstance(intent, JointIntent) and intent.tools == ["convert_time", "capital_of_country"]
    assert intent.terminals() == [0, 1] and intent.truth() is None and isinstance(intent.part(1)[0], FactIntent)
    assert intent.arguments(1, {}) == {"country": "Norway"} and "Norway" in intent.phrase(1, {}, "en")
    both = understand("Tell me the capital of Norway. Besides that: Tell me the capital of Peru.", "en")
    assert both.truth() == {0: "Oslo", 1: "Lima"} and both.read(1, '{"capital":"Lima"}') == "Lima"
    with pytest.raises(ValueError):
        understand("Tell me the capital of Norway. Besides that: Sing.", "en")
