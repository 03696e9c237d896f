"""The trajectory pipeline end to end: real MCP servers, the sandbox, the emulator, injected failures, resume."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections import Counter, defaultdict

import msgspec
import pytest
from trajectories_world import context

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.chat_format import AssistantTurn
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.openai_messages import read_reply
from synthesis.core.records import (
    EmulatedExecution,
    StdioExecution,
    Task,
    TaskScores,
    ToolChain,
    ToolServer,
    Trajectory,
)
from synthesis.core.stages import Journal, Rejected, rng_for
from synthesis.offline import plans, templates
from synthesis.offline.facts.servers import fact_servers
from synthesis.offline.intents import FactIntent, understand
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.languages import language_of
from synthesis.pipeline.partition import Partition
from synthesis.pipeline.pipeline_run import PipelineRun
from synthesis.servers.collect import ServerSource, collect, default_sources
from synthesis.servers.mcp_client import McpConnections
from synthesis.servers.normalize import normalize
from synthesis.trajectories.context import open_context
from synthesis.trajectories.execution import FAILURES, Failures
from synthesis.trajectories.interact import interact
from synthesis.trajectories.judge import AXES, judge
from synthesis.trajectories.pipeline import TrajectoriesConfig, synthesize
from synthesis.trajectories.tasks import repeated_tasks
from synthesis.trajectories.teacher_answers import EmulatedResult

MISSING = ServerSource("gone", "Gone", "Not there.", "test", "en", StdioExecution(["no-such-mcp-server"]))
CONFIG = TrajectoriesConfig(
    trajectories=60,
    sources=(*default_sources(), MISSING),
    mcp_share=0.25,
    min_tools=2,
    fact_servers=("countries", "elements", "colors", "numbers"),
    emulated_servers=("colors",),
    proposals=4,
    walks=30,
    partition=Partition("astra", 0.3, 0.2),
    behaviours={},
)
COUNTRIES = fact_servers("en")[0]


async def run(folder, *, teacher=None, config=CONFIG, seed=3):
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(folder / "journal.sqlite") as journal:
            return await synthesize(
                config,
                executor=Executor(teacher or OfflineTeacher(), pool),
                journal=journal,
                out_dir=folder / "out",
                workdir=folder,
                seed=seed,
            )


class CountingTeacher(OfflineTeacher):
    """Counts requests; fails like a killed process after `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit, self.count = limit, 0

    async def ask(self, answer, variables, *, language, seed):
        self.count += 1
        if self.limit is not None and self.count > self.limit:
            raise RuntimeError("killed")
        return await super().ask(answer, variables, language=language, seed=seed)

    async def act(self, messages, tools, *, language, seed, sent=()):
        self.count += 1
        if self.limit is not None and self.count > self.limit:
            raise RuntimeError("killed")
        return await super().act(messages, tools, language=language, seed=seed)


async def test_a_stage_names_every_setting_that_it_reads(tmp_path, monkeypatch):
    """Of what it reads and does not name, a change would be accepted and ignored where a journal is there."""
    plain, named, read = PipelineRun.stage, defaultdict(set), defaultdict(set)

    class Watched:
        def __init__(self, config, stage):
            self._config, self._stage = config, stage

        def __getattr__(self, name):
            read[self._stage].add(name)
            return getattr(self._config, name)

    async def stage(self, name, function, inputs, *, label, fingerprint_of, legacy_defaults=None, **options):
        async def watched(item, context):
            return await function(item, dataclasses.replace(context, config=Watched(context.config, label)))

        named[label] |= {*fingerprint_of, *(legacy_defaults or ())}
        options |= {"fingerprint_of": fingerprint_of, "legacy_defaults": legacy_defaults or {}}
        return await plain(self, name, watched, inputs, label=label, **options)

    monkeypatch.setattr(PipelineRun, "stage", stage)
    config = dataclasses.replace(
        CONFIG, trajectories=30, sources=(), mcp_share=0.0, fact_servers=("countries", "colors"), policies=1.0,
        behaviours={"dialogue": 0.4, "missing_parameter": 0.1, "done": 0.1},
    )  # fmt: skip
    await run(tmp_path, config=config)
    assert {label: names - named[label] for label, names in read.items() if names - named[label]} == {}
    assert read["run agents"] >= {"attempts", "failures"}
    assert read["write conversations"] >= {"policies", "informative_joins", "partition"}
    assert len(named) == 10


async def test_a_setting_that_a_stage_came_to_name_keeps_journals_that_had_none_of_it(tmp_path):
    async def nothing(item, context):
        return []

    executor = Executor(OfflineTeacher(), None)
    async with open_context(executor, config=CONFIG, workdir=tmp_path, seed=0) as context:
        with Journal(tmp_path / "journal.sqlite") as journal:
            for setting, legacy, count in ((0.0, {}, 1), (0.0, {"policies": 0.0}, 1), (0.5, {"policies": 0.0}, 2)):
                config = dataclasses.replace(CONFIG, policies=setting)
                pipeline = PipelineRun(executor, context, journal, tmp_path, config=config, concurrency=1, seed=0)
                made = dict(key=str, out=Task, label="a stage", fingerprint_of=("attempts",), legacy_defaults=legacy)
                await pipeline.stage("stage", nothing, ["input"], **made)
                stages = {
                    row[0] for row in sqlite3.connect(tmp_path / "journal.sqlite").execute("SELECT stage FROM done")
                }
                assert len(stages) == count


async def test_a_run_makes_all_datasets_and_its_resumption_the_same_bytes(tmp_path):
    quiet = CountingTeacher()
    summary = await run(tmp_path / "quiet", teacher=quiet)
    killed = tmp_path / "killed"
    for limit in (100, 500, 300):
        teacher = CountingTeacher(limit)
        with pytest.raises(RuntimeError, match="killed"):
            await run(killed, teacher=teacher)
    last = CountingTeacher()
    resumed = await run(killed, teacher=last)
    assert resumed.digests == summary.digests
    assert last.count < quiet.count - 400  # what was finished is not asked again
    again = CountingTeacher()
    assert (await run(killed, teacher=again)).digests == summary.digests and again.count == 0
    check(summary)


def check(summary):
    out = summary.datasets["trajectories"].parent
    servers = {server.id: server for server in read_dataset(out / "servers", ToolServer)}
    chains, tasks = read_dataset(out / "chains", ToolChain), read_dataset(out / "tasks", Task)
    trajectories = read_dataset(out / "trajectories", Trajectory)
    names = ("countries", "elements", "colors", "numbers", "mcp_time", "mcp_git")
    assert set(servers) == {name + suffix for name in names for suffix in ("", "_zh")}
    assert len(trajectories) == 60 and {len(chain.tools) for chain in chains} == {1, 2, 3}
    assert {task.mode for task in tasks} == {"chain", "server"} and {task.language for task in tasks} == {"en", "zh"}
    assert {task.augmentation for task in tasks} == {"original", "diverse", "complicate", "persona"}
    # A server that does not start is one counted line; the rest goes on.
    assert summary.rejected["collect"] == {"mcp_server_unavailable": 1}
    assert "no-such-mcp-server" in summary.details["collect"]["mcp_server_unavailable"]
    assert summary.rejected["normalize"] == {"changes_state": 10}
    used = {type(servers[one.server_id].execution).__name__ for one in trajectories}
    assert used == {"CodeExecution", "StdioExecution", "EmulatedExecution"}
    assert {graph.name for graph in (out / "graphs").iterdir()} == {f"{name}.graphml" for name in servers}
    card = read_card(out / "trajectories")
    figures = card["statistics"]
    assert figures["role_shares"]["tool"] == pytest.approx(
        figures["tool_calls_per_conversation"]["mean"] * 60 / figures["messages"], abs=1e-3
    )
    assert 0.1 < figures["all_runs"]["injected_failure_rate"] < 0.3
    assert figures["all_runs"]["judge_failures"] == 0 and set(figures["execution_shares_of_servers"]) == {
        "code", "emulated", "mcp",
    }  # fmt: skip
    assert set(figures["injected_failures_by_kind"]) == set(FAILURES)
    assert sum(figures["injected_failures_by_kind"].values()) == figures["injected_failures"]
    assert figures["tokens_per_conversation"]["mean"] > 500
    failed = [one for one in trajectories if one.failures or one.errors]
    assert figures["share_with_failures"] == pytest.approx(len(failed) / 60, abs=1e-4)
    for one in trajectories:
        well_formed(one)
        held_out(one)


def well_formed(one: Trajectory) -> None:
    """Every call has its result right after its turn; ids are unique; arguments come from the conversation."""
    messages = one.messages
    assert [messages[0].role, messages[-1].role] == ["user", "assistant"] and not messages[-1].tool_calls
    seen, ids = messages[0].content, []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            assert message.reasoning
            results = messages[index + 1 : index + 1 + len(message.tool_calls)]
            assert [result.tool_call_id for result in results] == [call.id for call in message.tool_calls]
            ids += [call.id for call in message.tool_calls]
            for call in message.tool_calls:
                assert call.name in {tool.name for tool in one.tools}
                values = [value for key, value in call.arguments.items() if key not in ("branch_type", "max_count")]
                assert all(str(value) in seen for value in values), (call, seen)
        seen += message.content
    assert len(set(ids)) == len(ids) > 0
    assert language_of(messages[-1].content) == one.language
    assert one.reward >= CONFIG.reward_threshold and set(AXES) - set(one.scores) <= {"response_conditioned_planning"}
    failed = [m for m in messages if m.role == "tool" and m.content in FAILURES.values()]
    assert len(failed) == one.injected_failures == len(one.failures)
    ok = one.scores["tool_call_status"].score * len(ids)
    assert ok == pytest.approx(len(ids) - len(one.failures) - len(one.errors))


def held_out(one: Trajectory) -> None:
    intent = understand(one.messages[0].content, one.language)
    if isinstance(intent, FactIntent):
        assert CONFIG.partition.split(plans.entities(intent.plan), plans.signature(intent.plan)) == "train"


def test_a_config_is_checked():
    with pytest.raises(ValueError, match="trajectories is 0"):
        TrajectoriesConfig(trajectories=0)
    with pytest.raises(ValueError, match=r"Failures.kinds\[0\] is 'boredom'"):
        TrajectoriesConfig(failures=Failures(kinds=("boredom",)))


# ---------------------------------------------------------------------------------------------------------------------
# Failure injection and execution


def test_a_fifth_of_the_calls_fails_evenly_by_kind_and_repeatably():
    drawn = [Failures().draw(0, f"task-{index // 4}", f"call_{index % 4}") for index in range(5_000)]
    kinds = Counter(kind for kind in drawn if kind)
    assert sum(kinds.values()) / 5_000 == pytest.approx(0.2, abs=0.02)
    assert set(kinds) == set(FAILURES) and all(200 < count < 300 for count in kinds.values())
    assert drawn == [Failures().draw(0, f"task-{index // 4}", f"call_{index % 4}") for index in range(5_000)]
    assert not any(Failures(rate=0).draw(0, "t", f"call_{index}") for index in range(100))


def task(question: str, server: ToolServer, tools: list[str]) -> Task:
    return Task("t", server.id, server.language, "chain", "original", question, tools, TaskScores(5, 5, 5))


async def test_every_template_is_answered_by_the_real_servers(tmp_path):
    """Written, read back, followed by the agent on the running servers, and found right by the judges."""
    teacher = OfflineTeacher()
    async with McpConnections(cwd=tmp_path) as connections, SandboxPool(SandboxConfig()) as pool:
        given = context(
            teacher, sandbox=pool, connections=connections, failures=Failures(rate=0), max_turns=6,
            reward_threshold=0.99, final_answer_threshold=1.0,
        )  # fmt: skip
        for source in default_sources():
            server = normalize((await collect(source, given))[0], min_tools=2).server
            for template in templates.usable([tool.name for tool in server.tools]):
                rng = rng_for(0, template.id)
                slots = templates.draw_slots(template, rng, lambda _: True)
                for wording in template.wordings[server.language]:
                    question = wording.format_map(slots)
                    assert templates.match(question, server.language) == (template, slots)
                    servers = {server.id: server}
                    (done,) = await interact(task(question, server, template.chain), given, servers)
                    assert all(call.ok for call in done.calls), done.messages
                    assert len(done.calls) == len(template.steps), done.messages
                    (kept,) = await judge(done, given, servers)
                    assert kept.reward == 1.0


class Agent:
    """Plays turns; asked for more, it repeats the last one."""

    def __init__(self, *turns: AssistantTurn, emulated: str = "") -> None:
        self.turns, self.emulated, self.seen = list(turns), emulated, []

    async def ask(self, answer, variables, *, language, seed):
        assert answer is EmulatedResult
        self.seen.append([(one["call"].name, one["result"]) for one in variables["history"]])
        return EmulatedResult("", self.emulated, False)

    async def act(self, messages, tools, *, language, seed, sent=()):
        return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]


def calling(*calls: tuple[str, object]) -> AssistantTurn:
    texts = [text if isinstance(text, str) else json.dumps(text) for _, text in calls]
    functions = [{"name": name, "arguments": text} for (name, _), text in zip(calls, texts, strict=True)]
    return read_reply({"tool_calls": [{"id": "x", "function": function} for function in functions]})


async def play(agent: Agent, tmp_path, *, server=COUNTRIES, max_turns=4, rate=0.0, system_prompt=""):
    async with McpConnections(cwd=tmp_path) as connections, SandboxPool(SandboxConfig()) as pool:
        given = context(
            agent, sandbox=pool, connections=connections, failures=Failures(rate=rate), max_turns=max_turns,
            system_prompt=system_prompt,
        )  # fmt: skip
        asked = task("What is the capital of Japan?", server, ["capital_of_country"])
        (done,) = await interact(asked, given, {server.id: server})
        return done


async def test_results_and_errors_as_the_agent_sees_them(tmp_path):
    agent = Agent(
        calling(
            ("capital_of_country", {"country": "Japan"}),
            ("capital_of_country", {"country": "Narnia"}),
            ("capital_of_country", {"land": "Japan"}),
            ("fly_to_moon", {}),
        ),
        AssistantTurn("done", "Tokyo."),
    )
    done = await play(agent, tmp_path, system_prompt="Be brief.")
    assert [message.role for message in done.messages] == ["system", "user", "assistant", *["tool"] * 4, "assistant"]
    contents = [message.content for message in done.messages if message.role == "tool"]
    assert contents[0] == '{"capital":"Tokyo"}' and "unknown country: 'Narnia'" in contents[1]
    assert contents[2] == """{"error":"unknown argument 'land'; known arguments: country"}"""
    assert contents[3] == """{"error":"there is no tool named 'fly_to_moon'"}"""
    assert [call.ok for call in done.calls] == [True, False, False, False]
    assert [call.error for call in done.calls] == ["", "tool_error", "invalid_arguments", "unknown_tool"]
    assert [call.call_id for call in done.calls] == ["call_1", "call_2", "call_3", "call_4"]


async def test_an_injected_failure_hides_the_result(tmp_path):
    done = await play(
        Agent(calling(("capital_of_country", {"country": "Japan"})), AssistantTurn("", "?")), tmp_path, rate=1
    )
    assert done.calls[0].injected in FAILURES and done.messages[2].content == FAILURES[done.calls[0].injected]


async def test_the_emulator_sees_earlier_calls_but_not_those_of_the_same_turn(tmp_path):
    server = msgspec.structs.replace(COUNTRIES, execution=EmulatedExecution())
    one, two = ("capital_of_country", {"country": "Japan"}), ("area_of_country", {"country": "Japan"})
    agent = Agent(calling(one, two), calling(one), AssistantTurn("", "ok"), emulated='{"x":  1}')
    done = await play(agent, tmp_path, server=server)
    assert agent.seen == [[], [], [("capital_of_country", '{"x":1}'), ("area_of_country", '{"x":1}')]]
    assert all(call.ok for call in done.calls)
    with pytest.raises(Rejected, match="emulator_failed.*not JSON"):
        await play(Agent(calling(one), emulated="Tokyo, I think"), tmp_path, server=server)


async def test_emulated_results_may_have_foreign_names_and_no_foreign_sentences(tmp_path):
    server = msgspec.structs.replace(COUNTRIES, execution=EmulatedExecution())
    one = ("capital_of_country", {"country": "Japan"})
    names = '{"mayor":"Katarzyna Nowak","seat":"ul. Długa 5, Łódź","twins":["São Paulo","Freiburg im Breisgau"]}'
    done = await play(Agent(calling(one), AssistantTurn("", "ok"), emulated=names), tmp_path, server=server)
    assert done.messages[2].content == names and done.calls[0].ok
    wrong = '{"city":"Tokyo","note":"Nie znaleziono żadnej rezerwacji."}'
    with pytest.raises(Rejected, match="emulator_failed.*has text in Polish, not in English: 'Nie znaleziono"):
        await play(Agent(calling(one), emulated=wrong), tmp_path, server=server)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (calling(("capital_of_country", {"country": "Japan"})), "turn_limit"),
        (calling(("capital_of_country", "{country: Japan}")), "malformed_call"),
        (calling(("capital_of_country", "[1]")), "malformed_call"),
        (AssistantTurn("hm", "  "), "empty_answer"),
    ],
)
async def test_runs_that_end_nowhere_are_rejected(tmp_path, turn, reason):
    with pytest.raises(Rejected) as rejection:
        await play(Agent(turn), tmp_path)
    assert rejection.value.reason == reason


async def test_the_offline_agent_retries_and_then_reports(tmp_path):
    """With every call failing it tries three times and says so; the judges give no points for the answer."""

    class NeverCareless(OfflineTeacher):
        async def ask(self, answer, variables, *, language, seed):
            return await super().ask(answer, variables, language=language, seed=11)

        async def act(self, messages, tools, *, language, seed, sent=()):
            return await super().act(messages, tools, language=language, seed=11)

    done = await play(NeverCareless(), tmp_path, rate=1, max_turns=9)
    assert len(done.calls) == 3 and "could not find" in done.messages[-1].content
    with pytest.raises(Rejected, match="no_result: t: none of 3 calls succeeded"):
        await judge(done, context(reward_threshold=0.5), {COUNTRIES.id: COUNTRIES})


def test_near_duplicates_are_the_same_words():
    one = task("What is  the capital of Japan?", COUNTRIES, [])
    same, other = (
        msgspec.structs.replace(one, id=i, question=q)
        for i, q in (("b", "what is the Capital of Japan"), ("c", "What is the capital of Chad?"))
    )
    assert list(repeated_tasks([one, same, other], 0.8)) == ["b"]
