"""Environments that servers play: MCP servers, an OpenEnv server, a verifiers taskset."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from astra_jax.base.errors import InputError
from synthesis.core.environment import CallRecord, PlayedEpisode, ToolAnswer, ToolsUnavailable
from synthesis.core.records import Message, ToolCall, ToolSpec
from synthesis.core.rewards import played
from synthesis.servers import openenv_server
from synthesis.servers.mcp_environment import mcp_environments, read_tasks
from synthesis.servers.openenv_server import openenv_environments, text_of
from synthesis.servers.verifiers_tasks import verifiers_environments

SERVER = textwrap.dedent(
    """
    import os, sys
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    server, seen = MCPServer("small"), []
    reads = "reads" in sys.argv

    @server.tool(annotations=ToolAnnotations(read_only_hint=True) if reads else None)
    def remember(word: str) -> str:
        "Remember a word, and say all so far."
        if word == "die":
            os._exit(1)
        seen.append(word)
        return " ".join([*seen, os.path.basename(os.getcwd())[:4]])

    server.run()
    """
)


def finished(environment, said: str, calls: tuple[CallRecord, ...] = ()) -> PlayedEpisode:
    return played(environment, [*environment.prompt, Message("assistant", said)], calls, "answered")


# --------------------------------------------------------------------------------------------------------- MCP servers


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SERVER)
    servers = {name: {"command": "python", "args": [str(tmp_path / "small.py"), name]} for name in ("reads", "changes")}
    tasks = [{"question": "Which word?", "answer": "sesame"}, {"question": "How many?", "answer": 2, "id": "second"}]
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps({"mcpServers": servers, "system": "Be brief.", "tasks": tasks}))
    return file


async def test_tasks_over_mcp_servers(task_file: Path) -> None:
    async with mcp_environments(task_file) as environments:
        first, second = environments
        assert (first.id, second.id) == ("tasks-0", "second")
        assert [one.content for one in first.prompt] == ["Be brief.", "Which word?"]
        assert [tool.name for tool in first.tools] == ["reads_remember", "changes_remember"]
        assert first.tools[0].parameters["required"] == ["word"]
        one, other = await asyncio.gather(first.begin(), second.begin())
        # A server that only reads is everybody's; any other is each episode's own, in a folder of its own.
        assert await one.call("reads_remember", {"word": "a"}) == ToolAnswer("a mcp-")
        assert await other.call("reads_remember", {"word": "b"}) == ToolAnswer("a b mcp-")
        assert await one.call("changes_remember", {"word": "a"}) == ToolAnswer("a mcp-")
        assert await other.call("changes_remember", {"word": "b"}) == ToolAnswer("b mcp-")
        assert await one.score(finished(first, "It is sesame.")) == 1.0
        assert await one.score(finished(first, "No idea.")) == await other.score(finished(second, "12")) == 0.0
        assert await one.score(finished(first, "It is not sesame.")) == 0.0
        assert await other.score(finished(second, "1, 2, 3")) == 0.0
        with pytest.raises(ToolsUnavailable, match="connection broke twice|went away|not running"):
            await other.call("changes_remember", {"word": "die"})
        await asyncio.gather(one.close(), other.close())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "is not a file of"),
        ({"mcpServers": {}, "tasks": [{"question": "?", "answer": 1}]}, "has no mcpServers"),
        ({"mcpServers": {"a": {"url": "x"}}, "tasks": []}, "has no tasks"),
        ({"mcpServers": {"a": {"url": "x"}}, "tasks": [{"question": "?"}]}, "task 0 has no `answer`"),
        ({"mcpServers": {"a": {"url": "x"}}, "tasks": [{"question": "?", "answr": 1}]}, "answr"),
        (
            {"mcpServers": {"a": {"url": "x"}}, "tasks": [{"question": "?", "answer": 1, "language": "sw"}]},
            "task 0 has language 'sw'; the languages in which answers are read are ar, de",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=message):
        read_tasks(file)


async def test_a_server_that_does_not_start_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    servers = {"a": {"command": "no-such-command-at-all"}}
    file.write_text(json.dumps({"mcpServers": servers, "tasks": [{"question": "?", "answer": 1}]}))
    with pytest.raises(InputError, match="no-such-command-at-all.*the command is not found"):
        async with mcp_environments(file):
            pass


# ------------------------------------------------------------------------------------------------------ OpenEnv servers


class Emulated:
    """The protocol, with whatever a test makes of it; each connection has its own count."""

    def __init__(self, *, mcp: bool = False, room: int = 9) -> None:
        self.mcp, self.room, self.open, self.refused = mcp, room, 0, 0
        action = {"title": "CallToolAction" if mcp else "GuessAction", "type": "object", "description": "Guess.",
                  "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["number"],
                  "additionalProperties": False}  # fmt: skip
        self.schema = {"action": action, "observation": {}, "state": {}}
        self.shows = lambda seed: f"Guess the number of seed {seed}."

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/schema", lambda request: asyncio.sleep(0, web.json_response(self.schema)))
        app.router.add_get("/ws", self.session)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"

    async def __aexit__(self, *error: object) -> None:
        await self.runner.cleanup()

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.room:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            return socket
        self.open += 1
        seed = 0
        try:
            async for message in socket:
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    break
                if asked["type"] == "reset":
                    seed = asked["data"]["seed"]
                    answer = {"observation": {"text": self.shows(seed), "metadata": {}}, "reward": None, "done": False}
                    await socket.send_json({"type": "observation", "data": answer})
                    continue
                await socket.send_json(self.stepped(asked["data"], seed))
        finally:
            self.open -= 1
        return socket

    def stepped(self, action: dict[str, Any], seed: int) -> dict[str, Any]:
        if action.get("type") == "list_tools":
            schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
            guess = {"name": "game.guess", "description": "Guess a number.", "input_schema": schema}
            tools = [guess, {"name": "broken", "input_schema": {"$ref": "#/nowhere"}}, "no tool"]
            return {"type": "observation", "data": {"observation": {"tools": tools}, "reward": None, "done": False}}
        assert action.get("tool_name", "game.guess") == "game.guess"
        number = action["arguments"]["number"] if self.mcp else action["number"]
        if number < 0:
            kind = "VALIDATION_ERROR" if number == -1 else "EXECUTION_ERROR"
            return {"type": "error", "data": {"code": kind, "message": "below zero"}}
        right = number == seed
        observation: dict[str, Any] = {"text": "right" if right else "wrong", "metadata": {}}
        if self.mcp:
            content = {"content": [{"type": "text", "text": observation["text"]}], "is_error": number > 100}
            observation = {"tool_name": "guess", "result": content, "error": None}
        reward = 0.75 if right else 0.125
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": right}}


@pytest.mark.parametrize("mcp", [False, True])
async def test_seeds_of_an_openenv_server(mcp: bool) -> None:
    async with Emulated(mcp=mcp) as url, openenv_environments(url, 3) as environments:
        assert [one.id for one in environments] == ["openenv-0", "openenv-1", "openenv-2"]
        last = environments[2]
        assert last.prompt[0].content == "Guess the number of seed 2."
        [tool] = last.tools
        assert tool.name == ("game_guess" if mcp else "step") and list(tool.parameters["properties"]) == ["number"]
        session = await last.begin()
        assert await session.call(tool.name, {"number": 7}) == ToolAnswer("wrong")
        assert await session.call(tool.name, {"number": -1}) == ToolAnswer("below zero", ok=False)
        if mcp:
            assert await session.call(tool.name, {"number": 101}) == ToolAnswer("wrong", ok=False)
        assert await session.call(tool.name, {"number": 2}) == ToolAnswer("right")
        assert await session.call(tool.name, {"number": 2}) == ToolAnswer("the episode is over", ok=False)
        assert await session.score(finished(last, "2")) == (1.0 if mcp else 0.875)
        await session.close()
        broken = await last.begin()
        with pytest.raises(ToolsUnavailable, match="EXECUTION_ERROR: below zero"):
            await broken.call(tool.name, {"number": -2})
        await broken.close()


async def test_seeds_that_follow_others() -> None:
    """Held-out seeds of the server that is trained on."""
    async with Emulated() as url, openenv_environments(url, 2, first=3) as environments:
        assert [one.id for one in environments] == ["openenv-3", "openenv-4"]
        assert environments[0].prompt[0].content == "Guess the number of seed 3."
        session = await environments[1].begin()
        assert await session.call("step", {"number": 4}) == ToolAnswer("right")
        await session.close()


async def test_episodes_wait_for_room(monkeypatch) -> None:
    monkeypatch.setattr(openenv_server, "_PAUSE", 0.01)
    server = Emulated(room=1)
    async with server as url, openenv_environments(url, 1) as [environment]:
        session = await environment.begin()
        waiting = asyncio.ensure_future(environment.begin())
        while server.refused < 2:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await session.close()
        second = await waiting
        assert await second.call("step", {"number": 0}) == ToolAnswer("right")
        monkeypatch.setattr(openenv_server, "_PATIENCE", 0.0)
        with pytest.raises(ToolsUnavailable, match="had no room"):
            await environment.begin()
        await second.close()


async def test_servers_that_cannot_be_trained_on_are_refused() -> None:
    async def opened(server: Emulated) -> None:
        async with server as url, openenv_environments(url, 2) as environments:
            server.shows = lambda seed: "Something else."
            await environments[0].begin()

    silent, odd, other = Emulated(), Emulated(), Emulated()
    silent.shows = lambda seed: ""
    with pytest.raises(InputError, match=r"reset\(seed=0\) shows nothing"):
        await opened(silent)
    odd.schema["action"]["properties"]["number"] = {"$ref": "#/nowhere"}
    with pytest.raises(InputError, match="no schema to check calls by"):
        await opened(odd)
    with pytest.raises(ToolsUnavailable, match="shows something else than before"):
        await opened(other)
    for schema in ({}, {"action": 7}, []):
        bad = Emulated()
        bad.schema = schema
        with pytest.raises(InputError, match="/schema"):
            await opened(bad)
    with pytest.raises(InputError, match="start the server"):
        async with openenv_environments("http://127.0.0.1:9", 1):
            pass


def test_an_observation_is_its_text_or_json() -> None:
    assert text_of({"text": "Hello", "metadata": {"x": 1}, "extra": None}) == "Hello"
    assert text_of({"metadata": {"message": "Ready"}, "done": False}) == "Ready"
    assert text_of({"board": [1, 2], "legal": ["a"]}) == '{"board": [1, 2], "legal": ["a"]}'
    assert text_of({}) == text_of(None) == ""


OPENENV = textwrap.dedent(
    """
    import sys
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class GuessAction(Action):
        number: int

    class GuessObservation(Observation):
        text: str = ""

    class Guess(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.seed, self._state = 0, State()

        def reset(self, seed=None, episode_id=None, **given):
            self.seed, self._state = seed or 0, State(episode_id=episode_id)
            return GuessObservation(text=f"Guess the number of seed {self.seed}.")

        def step(self, action, timeout_s=None, **given):
            self._state.step_count += 1
            if action.number < 0:
                raise ValueError("below zero")
            right = action.number == self.seed
            return GuessObservation(text="right" if right else "wrong", reward=0.75 if right else 0.125, done=right)

        @property
        def state(self):
            return self._state

    if "mcp" in sys.argv:
        from fastmcp import FastMCP
        from openenv.core.env_server.mcp_environment import MCPEnvironment
        from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

        class Served(MCPEnvironment):
            SUPPORTS_CONCURRENT_SESSIONS = True

            def __init__(self):
                server = FastMCP("served")

                @server.tool
                def guess(number: int) -> dict:
                    "Guess a number."
                    if number < 0:
                        raise ValueError("below zero")
                    return {"right": number == self.seed}

                super().__init__(server)
                self.seed, self._state = 0, State()

            def reset(self, seed=None, episode_id=None, **given):
                self.seed = seed or 0
                return Observation(metadata={"message": f"Guess the number of seed {self.seed}."})

            def _step_impl(self, action, timeout_s=None, **given):
                raise NotImplementedError

            async def step_async(self, action, timeout_s=None, **given):
                observation = await super().step_async(action, timeout_s=timeout_s, **given)
                if isinstance(action, CallToolAction):
                    observation.done = action.arguments.get("number") == self.seed
                    observation.reward = 0.75 if observation.done else 0.0
                return observation

            @property
            def state(self):
                return self._state

        app = create_fastapi_app(Served, CallToolAction, CallToolObservation, max_concurrent_envs=2)
    else:
        app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["actions", "mcp"])
async def test_a_real_openenv_server(tmp_path: Path, free_port: int, kind: str) -> None:
    python = os.environ.get("ASTRA_OPENENV")
    if not python:
        pytest.skip("ASTRA_OPENENV names no interpreter of an environment with openenv, which cannot be in this one")
    (tmp_path / "server.py").write_text(OPENENV)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    url = f"http://127.0.0.1:{free_port}"
    command = [python, str(tmp_path / "server.py"), str(free_port), kind]
    with subprocess.Popen(command, env=environment) as server:
        try:
            await asyncio.to_thread(_answering, f"{url}/health")
            async with openenv_environments(url, 2) as environments:
                session = await environments[1].begin()
                [tool] = environments[1].tools
                assert environments[1].prompt[0].content == "Guess the number of seed 1."
                assert list(tool.parameters["properties"]) == ["number"]
                wrong = await session.call(tool.name, {"number": 7})
                right = await session.call(tool.name, {"number": 1})
                if kind == "mcp":
                    assert tool == ToolSpec("guess", "Guess a number.", tool.parameters)
                    assert [json.loads(one.text) for one in (wrong, right)] == [{"right": False}, {"right": True}]
                    assert await session.score(finished(environments[1], "1")) == 0.75
                    other = await environments[1].begin()
                    failed = await other.call("guess", {"number": -1})
                    assert not failed.ok and "below zero" in failed.text
                    await other.close()
                else:
                    assert (wrong, right) == (ToolAnswer("wrong"), ToolAnswer("right"))
                    assert await session.score(finished(environments[1], "1")) == 0.875
                await session.close()
        finally:
            server.terminate()


def _answering(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# --------------------------------------------------------------------------------------------------- verifiers tasksets

TASKSET = textwrap.dedent(
    """
    import verifiers.v1 as vf

    __all__ = ["Stock"]

    class Notes(vf.State):
        asked: list[str] = []

    class Desk(vf.Toolset[vf.ToolsetConfig, Notes]):
        @vf.tool
        def stock_of(self, item: str) -> str:
            "How many pieces of an item are in the warehouse."
            self.state.asked = [*self.state.asked, item]
            return str({"bolts": 40, "nuts": 7}[item])

    class Item(vf.TaskData):
        item: str
        pieces: int

    class StockTask(vf.Task[Item, Notes]):
        @classmethod
        def toolsets(cls, config):
            return [Desk(vf.ToolsetConfig())]

        @vf.reward(weight=0.25)
        async def shown(self, trace) -> float:
            return float(len(trace.tool_messages) == 1)

        @vf.reward(weight=0.5)
        async def right(self, trace) -> float:
            return float(str(self.data.pieces) in trace.last_reply)

        @vf.reward(weight=0.25)
        async def looked(self, trace) -> float:
            assert "boom" not in trace.last_reply
            called = [one.name for message in trace.assistant_messages for one in message.tool_calls or []]
            return float(trace.state.asked == [self.data.item] and called == ["desk_stock_of"])

    class Stock(vf.Taskset[StockTask]):
        def load(self):
            for item, pieces in (("bolts", 40), ("nuts", 7), ("screws", 0)):
                yield StockTask(Item(prompt=f"How many {item}?", system_prompt="Be brief.", item=item, pieces=pieces))

    if __name__ == "__main__":
        Desk.run()
    """
)


@pytest.mark.slow
async def test_a_verifiers_taskset(tmp_path: Path, monkeypatch) -> None:
    """Its tool server, its state, its weights; and what it cannot score is masked."""
    pytest.importorskip(
        "verifiers.v1", reason="verifiers (the extra `verifiers`) takes other versions of openai and mcp"
    )
    (tmp_path / "small_stock.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with verifiers_environments("small-stock", 2) as environments:
        bolts, nuts = environments
        assert [one.content for one in bolts.prompt] == ["Be brief.", "How many bolts?"]
        assert [tool.name for tool in bolts.tools] == ["desk_stock_of"]
        one, other = await asyncio.gather(bolts.begin(), nuts.begin())
        assert await one.call("desk_stock_of", {"item": "bolts"}) == ToolAnswer("40")
        failed = await other.call("desk_stock_of", {"item": "none"})
        assert not failed.ok and "none" in failed.text

        def conversation(environment, item: str, shown: str, *said: str) -> PlayedEpisode:
            made = ToolCall("call_0_0", "desk_stock_of", {"item": item})
            messages = [
                *environment.prompt,
                Message("assistant", "", reasoning="I look.", tool_calls=[made]),
                Message("tool", shown, tool_call_id="call_0_0", name="desk_stock_of"),
                *(Message("assistant", one) for one in said),
            ]
            return played(environment, messages, [], "answered" if said else "turn_limit")

        assert await one.score(conversation(bolts, "bolts", "40", "There are 40.")) == 1.0
        assert await other.score(conversation(nuts, "none", failed.text)) == 0.25  # the last result is seen too
        await asyncio.gather(one.close(), other.close())
        third = await bolts.begin()
        with pytest.raises(ToolsUnavailable, match="verifiers could not score it"):
            await third.score(finished(bolts, "boom"))
        await third.close()


@pytest.mark.slow
async def test_tasksets_that_cannot_be_played_are_refused(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers (its extra) takes other versions of openai and mcp")
    monkeypatch.syspath_prepend(tmp_path)
    of_one_task = """
import verifiers.v1 as vf
__all__ = ["Some", *({names!r})]
class One(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = {container}
class Some(vf.Taskset[One]):
    def load(self):
        yield from [One(vf.TaskData(prompt={prompt}))] * {count}
class OwnLoop(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents): ...
"""
    plain = {"names": [], "container": False, "prompt": "'Hello?'", "count": 1}
    picture = "[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'data:,x'}}]}]"
    cases = {
        "looping": ({"names": ["OwnLoop"]}, "runs its episodes by OwnLoop; only plain tasksets"),
        "boxed": ({"container": True}, "its tasks need a container"),
        "empty": ({"count": 0}, "has no tasks"),
        "seeing": ({"prompt": picture}, "its prompt has more than text"),
        "silent": ({"prompt": "None"}, "no prompt"),
    }
    for name, (changes, message) in cases.items():
        (tmp_path / f"{name}_tasks.py").write_text(of_one_task.format(**plain | changes))
        with pytest.raises(InputError, match=message):
            async with verifiers_environments(f"{name}-tasks", 1):
                pass


async def test_what_verifiers_does_not_have_is_refused() -> None:
    missing = "needs verifiers 0.4" if not _has_verifiers() else "no_such_taskset"
    with pytest.raises(InputError, match=missing):
        async with verifiers_environments("no-such-taskset", 1):
            pass


def _has_verifiers() -> bool:
    import importlib.util

    return importlib.util.find_spec("verifiers") is not None
