"""An OpenEnv server as environments: each seed is one, whose question is what `reset` shows.

    async with openenv_environments("http://localhost:8000", 100) as environments:
        ...

Speaks the protocol of `openenv` 0.10 (BSD-3-Clause; `openenv-core` is its older name): a WebSocket is a session, with
`reset`, `step` and their observations as JSON; `/schema` says what an action is. The package itself, whose dependencies
exclude the `mcp` that this project has, runs where the server runs. A server with MCP tools offers those; any other has
one tool, `step`, whose arguments are the action. An episode is worth the sum of its steps' rewards.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiohttp

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from synthesis.core.environment import Environment, EnvironmentSession, PlayedEpisode, ToolAnswer, ToolsUnavailable
from synthesis.core.records import Message, ToolSpec
from synthesis.core.schemas import Unmappable, object_schema
from synthesis.servers.mcp_answers import is_error, result_text
from synthesis.servers.normalize import fix_names

_log = logging.getLogger(__name__)

_SECONDS: Final = 120.0
"""For one answer."""
_PATIENCE: Final = 1_800.0
"""Seconds that an episode waits for a server whose sessions are all in use."""
_PAUSE: Final = 0.5
_MOST_BYTES: Final = 16 << 20
"""Maximum size of an answer."""
_OF_MCP: Final = {"Action", "CallToolAction", "ListToolsAction"}
"""Titles of the action schema of a server that has MCP tools."""
_STEP: Final = "step"


class OpenEnvEnvironment:
    """A seed of a server. See `Environment`."""

    def __init__(self, server: _Server, seed: int, shown: str, tools: Sequence[ToolSpec]) -> None:
        self.id, self.subject, self.answer, self.kind = f"openenv-{seed}", server.url, None, "openenv"
        self.prompt: Sequence[Message] = [Message("user", shown)]
        self.tools = tools
        self._server, self._seed = server, seed

    async def begin(self) -> EnvironmentSession:
        """Return a session of the server, reset to the seed; waits while it has no room."""
        session, observation = await self._server.session(self._seed)
        shown = text_of(observation)
        if shown != self.prompt[-1].content:
            await session.close()
            raise ToolsUnavailable(
                f"{self._server.url}: reset(seed={self._seed}) shows something else than before: {shown[:80]!r}; "
                "episodes of one seed must begin alike"
            )
        return session


class _Server:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self._http = url.rstrip("/"), http
        self.by_mcp = False
        self.originals: dict[str, str] = {}
        """The names that tools are offered under → the server's own."""

    async def schema(self) -> dict[str, Any]:
        """Return the schema of an action. Raises `ToolsUnavailable`."""
        try:
            async with self._http.get(f"{self.url}/schema", timeout=aiohttp.ClientTimeout(_SECONDS)) as answer:
                answer.raise_for_status()
                found = json.loads(await answer.content.read(_MOST_BYTES))["action"]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise ToolsUnavailable(f"{self.url}/schema: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(found, dict):
            raise ToolsUnavailable(f"{self.url}/schema has no object `action`")
        self.by_mcp = found.get("title") in _OF_MCP
        return found

    async def session(self, seed: int) -> tuple[_OpenEnvSession, Any]:
        """Open a connection, reset it to a seed, and return it with the observation. Raises `ToolsUnavailable`."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE
        while True:
            try:
                socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=_MOST_BYTES)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ToolsUnavailable(f"{self.url}/ws: {type(error).__name__}: {first_line(error)}") from error
            session = _OpenEnvSession(self, socket)
            try:
                return session, await session.reset(seed)
            except _Full:
                await session.close()
                if asyncio.get_running_loop().time() > deadline:
                    raise ToolsUnavailable(f"{self.url} had no room for {_PATIENCE:g} s") from None
                await asyncio.sleep(_PAUSE)
            except BaseException:
                await session.close()
                raise


class _Full(Exception):
    """The server has as many sessions as it takes."""


class _Refused(Exception):
    """The server says that the action is none."""


class _OpenEnvSession:
    def __init__(self, server: _Server, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._server, self._socket = server, socket
        self._total, self._done = 0.0, False

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer. Raises `ToolsUnavailable`, `_Full`, `_Refused`."""
        try:
            await self._socket.send_json(message)
            answer = json.loads(await self._socket.receive_str(timeout=_SECONDS))
            kind, data = answer["type"], answer["data"]
        except (aiohttp.ClientError, OSError, TimeoutError, TypeError, ValueError, KeyError) as error:
            raise ToolsUnavailable(f"{self._server.url}: {type(error).__name__}: {first_line(error)}") from error
        if kind != "error" and isinstance(data, dict):
            return data
        code = data.get("code") if isinstance(data, dict) else None
        said = str(data.get("message") if isinstance(data, dict) else data)
        if code == "CAPACITY_REACHED":
            raise _Full
        if code == "VALIDATION_ERROR":
            raise _Refused(said)
        raise ToolsUnavailable(f"{self._server.url}: {code}: {said:.200}")

    async def reset(self, seed: int) -> Any:
        """Return the first observation. Raises `ToolsUnavailable`, `_Full`."""
        try:
            return (await self.ask({"type": "reset", "data": {"seed": seed}})).get("observation")
        except _Refused as error:
            raise ToolsUnavailable(f"{self._server.url}: reset was refused: {error}") from error

    async def step(self, action: Mapping[str, Any]) -> Any:
        """Return the observation after an action; its reward is added up. Raises `_Refused`."""
        data = await self.ask({"type": "step", "data": action})
        reward = data.get("reward")
        if not (reward is None or isinstance(reward, int | float)):
            raise ToolsUnavailable(f"{self._server.url}: a step's reward is {reward!r:.80}")
        self._total += float(reward or 0.0)
        self._done = bool(data.get("done"))
        return data.get("observation")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        if self._done:
            return ToolAnswer("the episode is over", ok=False)
        action: dict[str, Any] = dict(arguments)
        if self._server.by_mcp:
            action = {"type": "call_tool", "tool_name": self._server.originals.get(tool, tool), "arguments": action}
        try:
            observation = await self.step(action)
        except _Refused as error:
            return ToolAnswer(str(error), ok=False)
        if not self._server.by_mcp:
            return ToolAnswer(text_of(observation))
        failure = observation.get("error") if isinstance(observation, dict) else "no observation"
        if failure:
            return ToolAnswer(str(failure.get("message", failure) if isinstance(failure, dict) else failure), ok=False)
        return _of_mcp(observation.get("result"))

    async def score(self, episode: PlayedEpisode) -> float:
        """Return the sum of the rewards of all steps."""
        return self._total

    async def close(self) -> None:
        with suppress(aiohttp.ClientError, OSError):
            await self._socket.send_json({"type": "close"})
        await self._socket.close()


def text_of(observation: Any) -> str:
    """An observation as a model reads it: its one text, where it has one text and nothing else; else JSON. What the
    base class of all observations has (`metadata`) is left out where there is more."""
    if not isinstance(observation, dict):
        return "" if observation is None else json.dumps(observation, ensure_ascii=False)
    own = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
    shown = {name: value for name, value in own.items() if value not in (None, "", [], {})}
    shown = shown or dict(observation.get("metadata") or {})
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _of_mcp(result: Any) -> ToolAnswer:
    """Return an MCP tool's answer, as the server passes it on."""
    if not (isinstance(result, dict) and isinstance(result.get("content"), list)):
        return ToolAnswer(json.dumps(result, ensure_ascii=False))
    text = result_text(result) or json.dumps(result.get("data"), ensure_ascii=False)
    return ToolAnswer(text, ok=not is_error(result))


@asynccontextmanager
async def openenv_environments(url: str, count: int, *, first: int = 0) -> AsyncIterator[list[Environment]]:
    """Seeds of a running server.

    Args:
        count: number of seeds.
        first: the lowest seed.

    Raises:
        InputError: no OpenEnv server is there, or its actions have no schema that calls could be checked by, or `reset`
            shows nothing.
    """
    async with aiohttp.ClientSession() as http:
        server = _Server(url, http)
        try:
            action = await server.schema()
            session, observation = await server.session(first)
            try:
                tools = await _tools(server, session, action)
                later = range(first + 1, first + count)
                shown = [text_of(observation), *[text_of(await session.reset(seed)) for seed in later]]
            finally:
                await session.close()
        except (ToolsUnavailable, _Refused, _Full) as error:
            raise InputError(f"openenv:{url}: {error}; start the server, and give the address it answers at") from error
        if "" in shown:
            raise InputError(
                f"openenv:{url}: reset(seed={first + shown.index('')}) shows nothing that a model could begin with"
            )
        yield [OpenEnvEnvironment(server, seed, text, tools) for seed, text in enumerate(shown, start=first)]


async def _tools(server: _Server, session: _OpenEnvSession, action: Mapping[str, Any]) -> list[ToolSpec]:
    """Raises `InputError`: there are none that could be called."""
    if not server.by_mcp:
        properties = {name: one for name, one in dict(action.get("properties", {})).items() if name != "metadata"}
        about = str(action.get("description") or "").strip()
        listed = [{"name": _STEP, "description": about, "input_schema": {**action, "properties": properties}}]
    else:
        observation = await session.step({"type": "list_tools"})
        listed = observation.get("tools", []) if isinstance(observation, dict) else []
    found: list[ToolSpec] = []
    problems: list[str] = []
    originals = [str(one.get("name") or "") if isinstance(one, dict) else "" for one in listed]
    for one, name, fixed in zip(listed, originals, fix_names(originals), strict=True):
        try:
            if fixed is None:
                raise Unmappable("bad_name", "the name is missing, has no usable character, or is used twice")
            about = str(one.get("description") or "Acts in the environment.")
            found.append(ToolSpec(fixed, about, object_schema(one.get("input_schema"))))
            server.originals[fixed] = name
        except Unmappable as problem:
            problems.append(f"{name or 'a tool without a name'}: {problem.detail}")
    if not found:
        if problems:
            raise InputError(f"openenv:{server.url}: its actions have no schema to check calls by: {problems[0]}")
        raise InputError(f"openenv:{server.url} lists no tools")
    if problems:
        _log.warning("openenv:%s: left out %d of %d tools: %s", server.url, len(problems), len(listed), problems[0])
    return found
