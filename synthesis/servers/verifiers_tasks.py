"""The tasks of a verifiers taskset as environments: its prompts, its tool servers, its rewards.

    async with verifiers_environments("my-taskset", 100) as environments:
        ...

verifiers (MIT, the extra `verifiers`) drives an agent through an endpoint that it intercepts, and scores the trace that
it finds there. Here the policy is driven by our own rollouts, in token ids: verifiers sets a task up and starts its
tool servers, our calls go there, and the finished conversation becomes the trace that its rewards are asked about. The
interface is that of verifiers 0.4 (`verifiers.v1`): a `Taskset` of `Task` with `toolsets`, `@reward` and judges. What
has a program of its own for an episode (an `Env`), wants a container, or a simulated user, is refused by name.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line
from synthesis.core.environment import Environment, EnvironmentSession, PlayedEpisode, ToolAnswer, ToolsUnavailable
from synthesis.core.own_objects import check_ids
from synthesis.core.records import HttpExecution, Message, ToolSpec
from synthesis.servers.mcp_client import McpConnection, ServerUnavailable
from synthesis.servers.mcp_environment import ServedTools, served_tools, tool_answer

_INSTALL = "pip install 'astra-jax[verifiers]'"
_SECONDS = 120.0
"""For a tool server's answer."""
_AT_ONCE = 64
"""Episodes that have tool servers of their own; others wait."""
_STOPS = {"answered": "agent_completed", "turn_limit": "max_turns", "token_limit": "max_total_tokens"}
"""Names of an episode's end in verifiers."""


class VerifiersEnvironment:
    """A task of a taskset. See `Environment`."""

    def __init__(self, task: Any, tools: Sequence[ToolSpec], taskset: _Taskset) -> None:
        self.subject, self.tools, self.answer = task, tools, None
        self.id, self.kind = f"{taskset.name}-{task.data.id or task.data.name or task.data.idx}", taskset.name
        self.prompt = _prompt(task.data, self.id)
        self._taskset = taskset

    async def begin(self) -> EnvironmentSession:
        """Set up the task, and start its tool servers."""
        return await self._taskset.session(self.subject)


class _Taskset:
    """A taskset with what its episodes share: tool servers of all tasks, and the server that has their state."""

    def __init__(self, name: str, vf: ModuleType, shared: Mapping[str, Any], interception: Any) -> None:
        self.name = name
        self.tools: ServedTools | None = None
        self._vf, self._shared, self._interception = vf, shared, interception
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def session(self, task: Any) -> _VerifiersSession:
        vf = self._vf
        from verifiers.v1.rollout import Rollout, RolloutTimeouts
        from verifiers.v1.session import RolloutLimits

        harness, limits = _waiting_harness(vf), task.data.timeout
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gate)
            rollout = Rollout(
                task=task,
                agent_config=vf.AgentConfig(runtime=vf.SubprocessConfig()),
                harness=harness,
                ctx=vf.ModelContext(model="policy", client=vf.EvalClientConfig()),
                runtime_config=vf.SubprocessConfig(),
                timeouts=RolloutTimeouts(setup=limits.setup, finalize=limits.finalize, scoring=limits.scoring),
                limits=RolloutLimits(),
                shared_tools=dict(self._shared),
                interception=self._interception,
            )
            stack.push_async_callback(rollout.abort)
            if not await rollout.open():
                raise ToolsUnavailable(f"{self.name}: {first_line(rollout.failure or Exception('it did not open'))}")
            reached = await stack.enter_async_context(AsyncExitStack())  # given up before what it reaches is
            folder = reached.enter_context(TemporaryDirectory(prefix="verifiers-", ignore_cleanup_errors=True))
            connections: dict[str, McpConnection] = {}
            try:
                for name, url in harness.urls.items():
                    connection = McpConnection(
                        HttpExecution(url), cwd=Path(folder), timeout_seconds=_SECONDS, reopens=False
                    )
                    connections[name] = await reached.enter_async_context(connection)
                if self.tools is None:
                    self.tools = await served_tools(connections, prefixed=True) if connections else _NO_TOOLS
            except ServerUnavailable as error:
                raise ToolsUnavailable(str(error)) from error
            return _VerifiersSession(vf, rollout, connections, self.tools, reached, stack.pop_all())


_NO_TOOLS = ServedTools([], {}, {})


class _VerifiersSession:
    def __init__(
        self,
        vf: ModuleType,
        rollout: Any,
        connections: Mapping[str, McpConnection],
        tools: ServedTools,
        reached: AsyncExitStack,
        stack: AsyncExitStack,
    ) -> None:
        self._vf, self._rollout, self._connections = vf, rollout, connections
        self._tools, self._reached, self._stack = tools, reached, stack

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        server, name = self._tools.places[tool]
        return await tool_answer(self._connections[server], name, arguments)

    async def score(self, episode: PlayedEpisode) -> float:
        """Return the weighted sum of the task's rewards.

        Raises:
            ToolsUnavailable: one of them failed.
        """
        trace = self._rollout.trace
        _write(self._vf, trace, episode, self._tools)
        trace.stop(_STOPS[episode.finish])
        await self._reached.aclose()
        await self._rollout.close()
        if not trace.ok or trace.is_timeout:
            said = trace.last_error.message if trace.last_error else trace.stop_condition
            raise ToolsUnavailable(f"verifiers could not score it: {said}")
        return float(trace.reward)

    async def close(self) -> None:
        await self._stack.aclose()


def _waiting_harness(vf: ModuleType) -> Any:
    """Return a harness that starts no agent: it notes where the tools are."""

    class Waiting(vf.Harness[vf.HarnessConfig]):  # type: ignore[name-defined, misc]  # the base is imported late
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False
        urls: Mapping[str, str] = {}

        async def session(self, *given: Any, **named: Any) -> Any:
            found = await super().session(*given, **named)
            self.urls = dict(found.mcp_urls)
            return found

        async def launch(self, *given: Any, **named: Any) -> Any:
            raise AssertionError("the policy is not verifiers' to start")

    return Waiting(vf.HarnessConfig())


def _write(vf: ModuleType, trace: Any, episode: PlayedEpisode, tools: ServedTools) -> None:
    """Write the conversation into a trace, turn by turn, as verifiers does when it has intercepted it."""
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.types import AssistantMessage, Response, SystemMessage, ToolCall, ToolMessage, UserMessage
    from verifiers.v1.types import Tool as OfferedTool

    offered = [
        OfferedTool(name=one.name, description=one.description, parameters=one.parameters) for one in tools.specs
    ]
    said: list[Any] = []
    begun = len(_prompt(trace.task.data, "the task"))
    for place, message in enumerate(episode.messages):
        if message.role == "assistant":
            calls = [
                ToolCall(id=one.id, name=one.name, arguments=json.dumps(one.arguments)) for one in message.tool_calls
            ]
            typed = AssistantMessage(
                content=message.content or None, reasoning_content=message.reasoning or None, tool_calls=calls or None
            )
            if place >= begun:
                reason = "tool_calls" if calls else "stop"
                response = Response(
                    id=f"turn_{place}", created=int(time.time()), model="policy", message=typed, finish_reason=reason
                )
                prepare_turn(trace, list(said), offered).commit(response)
            said.append(typed)
        elif message.role == "tool":
            said.append(ToolMessage(tool_call_id=message.tool_call_id, content=message.content, name=message.name))
        else:
            kind = SystemMessage if message.role == "system" else UserMessage
            said.append(kind(content=message.content))
    if episode.messages[-1].role != "assistant":  # results of the last turn, which nobody answered
        prepare_turn(trace, said, offered).commit_prompt()


def _prompt(data: Any, id: str) -> list[Message]:
    """Raises `InputError`: the task begins with anything but text."""
    found = [Message("system", data.system_prompt)] if data.system_prompt is not None else []
    if isinstance(data.prompt, str):
        return [*found, Message("user", data.prompt)]
    for one in data.prompt or []:
        if not isinstance(one.content, str) or one.role not in ("system", "user", "assistant"):
            raise InputError(f"environment {id}: its prompt has more than text, which policies here do not take")
        found.append(Message(one.role, one.content))
    if not any(one.role == "user" for one in found):
        raise InputError(f"environment {id}: it has no prompt: a simulated user would start it, which is not supported")
    return found


@asynccontextmanager
async def verifiers_environments(id: str, count: int, *, first: int = 0) -> AsyncIterator[list[Environment]]:
    """Tasks of an installed taskset, in its order.

    Args:
        id: of the taskset's package, as for `vf-eval`; its module is imported, which runs it.
        count: at most so many.
        first: how many of the taskset are left out before them.

    Raises:
        InputError: verifiers or the taskset is not installed, or the taskset wants what there is not here.
    """
    vf, loaders = _verifiers()
    try:
        taskset = loaders.load_taskset(loaders.taskset_config_type(id)(id=id))
        kind = loaders.environment_class(id)
        tasks = list(itertools.islice(iter(taskset), first, first + count))
    except Exception as error:  # whatever a stranger's package raises
        raise InputError(f"verifiers:{id}: {type(error).__name__}: {first_line(error)}") from error
    if kind is not vf.SingleAgentEnv:
        raise InputError(f"verifiers:{id} runs its episodes by {kind.__name__}; only plain tasksets are played here")
    if not tasks:
        raise InputError(f"verifiers:{id} has no tasks{f' after the first {first}' if first else ''}")
    if type(tasks[0]).NEEDS_CONTAINER:
        raise InputError(f"verifiers:{id}: its tasks need a container; episodes here run as processes of this machine")
    from verifiers.v1.interception import InterceptionServer
    from verifiers.v1.mcp import serve_shared

    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(serve_shared(taskset.toolsets(taskset.config)))
        secrets = tuple(one.state_secret for one in shared.values() if one.state_secret)
        interception = await stack.enter_async_context(InterceptionServer(state_service_secrets=secrets))
        one_of = _Taskset(id, vf, shared, interception)
        try:
            session = await one_of.session(tasks[0])
        except ToolsUnavailable as error:
            raise InputError(f"verifiers:{id} cannot be started: {error}") from error
        await session.close()
        assert one_of.tools is not None, "listed by the first session"
        made: list[Environment] = [VerifiersEnvironment(task, one_of.tools.specs, one_of) for task in tasks]
        check_ids(made, f"verifiers:{id}")
        yield made


def _verifiers() -> tuple[ModuleType, ModuleType]:
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise InputError(f"verifiers:… needs verifiers 0.4 ({error}); {_INSTALL}") from error
    return vf, loaders
