"""Interaction: failures by call, limits, and servers that hang, die or say too much."""

from __future__ import annotations

import json
import sys
import textwrap

import msgspec
import pytest
from trajectories_world import context

from synthesis.core.chat_format import AssistantTurn, Call
from synthesis.core.openai_messages import estimated_tokens, read_reply
from synthesis.core.records import (
    CallError,
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
    decode,
    encode,
)
from synthesis.core.stages import Journal, Rejected, run_stage
from synthesis.core.tool_results import MAX_CHARACTERS
from synthesis.offline.facts.servers import fact_servers
from synthesis.servers.mcp_client import McpConnections
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import FAILURES, Failures, ToolExecutor
from synthesis.trajectories.interact import interact
from synthesis.trajectories.judge import judge
from synthesis.trajectories.runs import AgentRun, CallStatus
from synthesis.trajectories.teacher_answers import EmulatedResult

COUNTRIES = fact_servers("en", ("countries",))[0]
EMULATED = msgspec.structs.replace(COUNTRIES, execution=EmulatedExecution())


class Agent:
    """Plays turns, one for each assistant message so far; asked for more, it repeats the last one."""

    def __init__(self, *turns: AssistantTurn, emulated: str = "{}") -> None:
        self.turns, self.emulated = turns, emulated

    async def ask(self, answer, variables, *, language, seed):
        assert answer is EmulatedResult
        return EmulatedResult("", self.emulated, False)

    async def act(self, messages, tools, *, language, seed, sent=()):
        turn = sum(message.role == "assistant" for message in messages)
        return self.turns[min(turn, len(self.turns) - 1)]


def written_call(name: str, arguments: str) -> Call:
    """A call as a model behind an endpoint writes it."""
    [call] = read_reply({"tool_calls": [{"id": "x", "function": {"name": name, "arguments": arguments}}]}).calls
    return call


def calling(*names: str, arguments: str = '{"country": "Japan"}', reasoning: str = "") -> AssistantTurn:
    return AssistantTurn(reasoning, "", [written_call(name, arguments) for name in names])


DONE = AssistantTurn("I have it.", "Tokyo.")


async def play(agent, connections, server=EMULATED, *, failures=None, executor=None, **limits):
    limits.setdefault("max_turns", 4)
    given = context(agent, connections=connections, executor=executor, failures=failures or Failures(rate=0), **limits)
    task = Task("t", server.id, "en", "chain", "original", "Which?", [], TaskScores(5, 5, 5))
    return await interact(task, given, {server.id: server})


# ---------------------------------------------------------------------------------------------------------------------
# Failures


async def test_failures_are_recorded_by_call(tmp_path):
    """Which call, which kind; with kinds of one's own choice; the same in every run."""
    agent = Agent(calling(*["capital_of_country"] * 20, reasoning="All at once."), DONE)
    failures = Failures(rate=0.5, kinds=("timeout", "rate_limit"))
    async with McpConnections(cwd=tmp_path) as connections:
        (done,) = await play(agent, connections, failures=failures)
        assert (done,) == tuple(await play(agent, connections, failures=failures))
    drawn = {call.call_id: call.injected for call in done.calls if call.injected}
    assert set(drawn.values()) == {"timeout", "rate_limit"} and 3 < len(drawn) < 17
    assert done.messages[1].reasoning == "All at once." and len(done.messages[1].tool_calls) == 20
    results = {message.tool_call_id: message.content for message in done.messages if message.role == "tool"}
    assert {id for id, content in results.items() if content in FAILURES.values()} == set(drawn)


async def test_a_trajectory_says_which_calls_failed():
    calls = [("call_1", "timeout"), ("call_2", ""), ("call_3", ""), ("call_4", "")]
    one, two = ("largest_neighbor_of_country", {"country": "Nepal"}), ("capital_of_country", {"country": "China"})
    messages = [Message("user", "What is the capital of the largest neighbour of Nepal?")]
    results = (
        FAILURES["timeout"],
        '{"largest_neighbor": "China"}',
        '{"error": "cpu_timeout"}',
        '{"capital": "Beijing"}',
    )
    for (id, _), call, result in zip(calls, (one, one, two, two), results, strict=True):
        messages += [Message("assistant", "", "So.", [ToolCall(id, *call)]), Message("tool", result, "", [], id)]
    statuses = [CallStatus(id, not kind, kind) for id, kind in calls]
    statuses[2] = CallStatus("call_3", False, error="cpu_timeout")
    messages.append(Message("assistant", "The answer is Beijing.", "I have it."))
    named = ["largest_neighbor_of_country", "capital_of_country"]
    task = Task("t", COUNTRIES.id, "en", "chain", "original", messages[0].content, named, TaskScores(5, 5, 5))
    run = AgentRun(task, messages, statuses)
    (kept,) = await judge(run, context(reward_threshold=0.5, final_answer_threshold=0.5), {COUNTRIES.id: COUNTRIES})
    assert kept.failures == [InjectedFailure("call_1", "timeout")] and kept.injected_failures == 1
    assert kept.errors == [CallError("call_3", "cpu_timeout")]
    # Records of before have no such fields.
    old = json.loads(encode(kept))
    del old["failures"], old["errors"], old["needs"]
    before = msgspec.structs.replace(kept, failures=[], errors=[], needs=None)
    assert decode(json.dumps(old).encode(), Trajectory) == before


# ---------------------------------------------------------------------------------------------------------------------
# Limits


def test_tokens_are_estimated():
    english, chinese = Message("user", "x" * 400), Message("user", "首" * 100)
    frame = estimated_tokens([Message("user", "")])
    assert abs(estimated_tokens([english]) - frame - 100) <= 1 and abs(estimated_tokens([chinese]) - frame - 100) <= 1
    assert estimated_tokens([], COUNTRIES.tools) > 50 * len(COUNTRIES.tools)


async def test_a_run_over_its_tokens_is_rejected(tmp_path):
    agent = Agent(calling("capital_of_country"), DONE, emulated=json.dumps("x" * 3_000))
    documents = estimated_tokens([], COUNTRIES.tools)
    async with McpConnections(cwd=tmp_path) as connections:
        assert await play(agent, connections, max_tokens=documents + 1_000)
        with pytest.raises(Rejected, match="token_limit: t: about .* at turn 2"):
            await play(agent, connections, max_tokens=documents + 500)
        with pytest.raises(Rejected, match="token_limit.* at turn 1"):
            await play(agent, connections, max_tokens=documents)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        TrajectoriesConfig(max_tokens=0)


async def test_calls_of_the_last_turn_are_carried_out_like_all_others(tmp_path):
    """As in rollouts and evaluation; a run that ends so is rejected, since it has no answer."""

    class Counting(Agent):
        emulations = 0

        async def ask(self, answer, variables, *, language, seed):
            self.emulations += answer is EmulatedResult
            return await super().ask(answer, variables, language=language, seed=seed)

    agent = Counting(calling("capital_of_country"))
    async with McpConnections(cwd=tmp_path) as connections:
        with pytest.raises(Rejected, match="turn_limit: t: no answer after 3 turns"):
            await play(agent, connections, max_turns=3)
    assert agent.emulations == 3


@pytest.mark.parametrize("arguments", ['{"country": NaN}', '{"country": "\\ud800"}', '{"a":' * 5_000, "nothing"])
async def test_arguments_that_no_record_could_hold_are_malformed(tmp_path, arguments):
    async with McpConnections(cwd=tmp_path) as connections:
        with pytest.raises(Rejected, match="malformed_call"):
            await play(Agent(calling("capital_of_country", arguments=arguments), DONE), connections)


async def test_what_the_emulator_answers_keeps_its_digits(tmp_path):
    async with McpConnections(cwd=tmp_path) as connections:
        agent = Agent(calling("capital_of_country"), DONE, emulated='{"price": 10.00, "release": 1.10}')
        (done,) = await play(agent, connections)
    assert [one.content for one in done.messages if one.role == "tool"] == ['{"price":10.00,"release":1.10}']


@pytest.mark.parametrize("emulated", ["Tokyo, I think", "[" * 100_000, "9" * 5_000, "NaN", "1e999"])
async def test_the_emulator_must_answer_json(tmp_path, emulated):
    async with McpConnections(cwd=tmp_path) as connections:
        with pytest.raises(Rejected, match="emulator_failed"):
            await play(Agent(calling("capital_of_country"), DONE, emulated=emulated), connections)


async def test_a_lone_surrogate_can_be_written_down(tmp_path):
    async with McpConnections(cwd=tmp_path) as connections:
        (done,) = await play(Agent(calling("capital_of_country"), DONE, emulated='"\\ud83d"'), connections)
    assert decode(encode(done), AgentRun) == done and done.messages[2].content == '"?"'


async def test_a_schema_that_cannot_be_checked_rejects_the_run(tmp_path):
    odd = {"type": "object", "properties": {"country": {"type": "string", "$ref": "#/nowhere"}}}
    server = msgspec.structs.replace(EMULATED, tools=[ToolSpec("capital_of_country", "The capital of it.", odd)])
    async with McpConnections(cwd=tmp_path) as connections:
        with pytest.raises(Rejected, match="bad_schema: .*capital_of_country"):
            await play(Agent(calling("capital_of_country"), DONE), connections, server)


# ---------------------------------------------------------------------------------------------------------------------
# Servers that misbehave

SERVER = textwrap.dedent(
    """
    import asyncio, os
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    NAMES = ("ok", "hang", "die", "die_once", "huge", "deep")

    async def list_tools(context, parameters):
        kept = {"input_schema": {"type": "object"}, "annotations": ToolAnnotations(read_only_hint=True)}
        tools = [Tool(name=n, description="A tool.", **kept) for n in NAMES]
        return ListToolsResult(tools=tools)

    async def call_tool(context, parameters):
        name = parameters.name
        if name == "hang":
            await asyncio.sleep(3600)
        if name == "die" or (name == "die_once" and not os.path.exists("died")):
            open("died", "w").close()
            os._exit(3)
        text = {"huge": "x" * 12_000_000, "deep": "[" * 100_000}.get(name, '{"fine":  1}')
        return CallToolResult(content=[TextContent(text=text)])

    async def main():
        server = Server("odd", on_list_tools=list_tools, on_call_tool=call_tool)
        async with stdio_server() as streams:
            await server.run(*streams, server.create_initialization_options())

    asyncio.run(main())
    """
)


@pytest.mark.parametrize(
    ("tool", "content", "rejected"),
    [
        ("huge", "x" * MAX_CHARACTERS + f"... [truncated, {12_000_000 - MAX_CHARACTERS} more characters]", ""),
        ("deep", "[" * MAX_CHARACTERS + f"... [truncated, {100_000 - MAX_CHARACTERS} more characters]", ""),
        ("die_once", '{"fine":1}', ""),
        ("die", "", "the connection broke twice"),
        ("hang", "", "hang did not answer in 6 s"),
    ],
)
async def test_a_server_that_hangs_dies_or_shouts_never_stops_the_stage(tmp_path, tool, content, rejected):
    """The runs before and after the bad one end as if nothing had happened: the server is started again."""
    (tmp_path / "server.py").write_text(SERVER)
    execution = StdioExecution([sys.executable, str(tmp_path / "server.py")])
    tools = [ToolSpec(name, "A tool.", {"type": "object", "properties": {}}) for name in ("ok", tool)]
    server = ToolServer("odd", "Odd", "It is odd.", "test", "en", tools, execution)
    with Journal(tmp_path / "journal.sqlite") as journal:
        async with McpConnections(cwd=tmp_path / "work", timeout_seconds=6.0) as connections:
            executor = ToolExecutor(sandbox=None, connections=connections, teacher=Agent(DONE), seed=0)

            async def one(name):
                agent = Agent(calling(name.strip(), arguments="{}"), DONE)
                return await play(agent, connections, server, executor=executor)

            result = await run_stage(
                "interact",
                one,
                ["ok", tool, "ok "],
                key=str,
                out=AgentRun,
                journal=journal,
                concurrency=1,
                retries=int(tool != "hang"),  # which takes its six seconds each time
                backoff_seconds=0.01,
            )
    runs = [[message.content for message in run.messages if message.role == "tool"] for run in result.outputs]
    assert runs[0] == runs[-1] == ['{"fine":1}']
    if rejected:
        assert result.rejected == {"transient_failure": 1} and len(runs) == 2
        assert rejected in result.details["transient_failure"]
    else:
        assert runs[1] == [content] and not result.rejected
