"""The functions of the trajectory pipeline's stages, `(record, context) -> records`, and their context."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synthesis.core.records import Language, Task, ToolChain, ToolServer, Trajectory
from synthesis.core.stages import Rejected, rng_for
from synthesis.pipeline.executors import Resources
from synthesis.pipeline.teacher import Teacher
from synthesis.servers.collect import ServerDocument, ServerSource, collect
from synthesis.servers.mcp_client import McpConnections
from synthesis.trajectories import tool_graph
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import ToolExecutor
from synthesis.trajectories.interact import AgentRun, interact
from synthesis.trajectories.judge import judge
from synthesis.trajectories.personas import Persona
from synthesis.trajectories.tasks import TaskSeed, augment, score, write_task

_log = logging.getLogger(__name__)

Servers = Mapping[str, ToolServer]
"""By id."""


@dataclass(frozen=True)
class TrajectoryContext:
    """What every stage is given. `extra` is what a rule-based teacher may use beside the prompt."""

    config: TrajectoriesConfig
    seed: int
    teacher: Teacher
    connections: McpConnections
    executor: ToolExecutor
    operators: Mapping[str, tool_graph.Operator]
    extra: Mapping[str, Any]


@asynccontextmanager
async def open_context(
    resources: Resources, *, config: TrajectoriesConfig, workdir: Path, seed: int
) -> AsyncIterator[TrajectoryContext]:
    """The context of one process.

    Args:
        workdir: MCP servers run in `mcp` below it; those of Ray's workers in a folder for each worker, so that no two
            write to the same.
    """
    cwd = workdir / ("mcp" if resources.worker is None else f"mcp-{resources.worker}")
    extra = {"partition": config.partition}
    operators = tool_graph.make_operators(config.operators, config.votes, extra)
    async with McpConnections(cwd=cwd, timeout_seconds=config.mcp_timeout_seconds) as connections:
        executor = ToolExecutor(
            sandbox=resources.sandbox, connections=connections, teacher=resources.teacher, seed=seed
        )
        yield TrajectoryContext(config, seed, resources.teacher, connections, executor, operators, extra)


async def collected(source: ServerSource, context: TrajectoryContext) -> list[ServerDocument]:
    """See `collect.collect`."""
    try:
        return await collect(source, context.connections)
    except Rejected as rejection:
        _log.warning("left out server %s: %s", source.id, rejection.detail)
        raise


async def proposed(item: tuple[ToolServer, int], context: TrajectoryContext) -> list[tool_graph.Proposals]:
    """See `tool_graph.propose`; the second of the item is which of the server's proposals it is."""
    server, repeat = item
    count = context.config.pairs
    return await tool_graph.propose(server, repeat, count=count, teacher=context.teacher, seed=context.seed)


async def verified(chain: ToolChain, context: TrajectoryContext, servers: Servers) -> list[ToolChain]:
    """See `tool_graph.verify`."""
    server = servers[chain.server_id]
    return await tool_graph.verify(chain, server, context.operators, teacher=context.teacher, seed=context.seed)


async def written(one: TaskSeed, context: TrajectoryContext, servers: Servers) -> list[Task]:
    """See `tasks.write_task`."""
    server = servers[one.server_id]
    return await write_task(one, server, teacher=context.teacher, seed=context.seed, extra=context.extra)


async def varied(
    task: Task, context: TrajectoryContext, servers: Servers, personas: Mapping[Language, Sequence[str | Persona]]
) -> list[Task]:
    """A variation of the task in a mode and with a persona that are drawn; see `tasks.augment`."""
    rng = rng_for(context.seed, "variation", task.id)
    mode, persona = rng.choice(context.config.augmentations), rng.choice(personas[task.language])
    server = servers[task.server_id]
    return await augment(
        task, mode, server, persona=persona, teacher=context.teacher, seed=context.seed, extra=context.extra
    )


async def rated(task: Task, context: TrajectoryContext, servers: Servers) -> list[Task]:
    """See `tasks.score`."""
    server, thresholds = servers[task.server_id], context.config.thresholds
    return await score(task, server, teacher=context.teacher, seed=context.seed, thresholds=thresholds)


async def interacted(task: Task, context: TrajectoryContext, servers: Servers) -> list[AgentRun]:
    """See `interact.interact`."""
    config = context.config
    return await interact(
        task,
        servers[task.server_id],
        teacher=context.teacher,
        executor=context.executor,
        failures=config.failures,
        max_turns=config.max_turns,
        max_tokens=config.max_tokens,
        system_prompt=config.system_prompt,
        seed=context.seed,
    )


async def judged(run: AgentRun, context: TrajectoryContext, servers: Servers) -> list[Trajectory]:
    """See `judge.judge`."""
    config = context.config
    return await judge(
        run,
        servers[run.task.server_id],
        teacher=context.teacher,
        threshold=config.reward_threshold,
        final_answer_threshold=config.final_answer_threshold,
        seed=context.seed,
    )
