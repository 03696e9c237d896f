"""Context that the stages of trajectory synthesis share while they run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from synthesis.core.records import ToolServer
from synthesis.core.stages import rng_for
from synthesis.pipeline.context import Context, Key
from synthesis.pipeline.executors import Executor
from synthesis.servers.mcp_client import McpConnections
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import ToolExecutor

Servers = Mapping[str, ToolServer]
"""Servers by id; bound to the stages that need them."""


@dataclass(frozen=True)
class TrajectoryContext(Context[TrajectoriesConfig]):
    """Context passed to every stage of a run."""

    connections: McpConnections = field(kw_only=True)
    executor: ToolExecutor = field(kw_only=True)

    @property
    def extra(self) -> dict[str, Any]:
        """Return variables for a rule-based teacher beside the prompt: entities, structures and joins to avoid."""
        return {"partition": self.config.partition, "informative_joins": self.config.informative_joins}

    def request_seed(self, answer: type[msgspec.Struct], key: Key, attempt: int) -> int:
        """Return a request's seed; that of the first attempt depends on the key alone, so old recordings stay valid."""
        parts = key if isinstance(key, tuple) else (key,)
        return rng_for(self.seed, *parts, *([attempt] if attempt else [])).getrandbits(31)


@asynccontextmanager
async def open_context(
    executor: Executor, *, config: TrajectoriesConfig, workdir: Path, seed: int
) -> AsyncIterator[TrajectoryContext]:
    """The context of a run's stages.

    Args:
        workdir: packaged MCP servers run in `mcp` below it, the user's in the current folder.
    """
    teacher, sandbox, seconds = executor.teacher, executor.sandbox, config.mcp_timeout_seconds
    async with (
        executor,
        McpConnections(cwd=workdir / "mcp", own_cwd=Path.cwd(), timeout_seconds=seconds) as connections,
    ):
        tools = ToolExecutor(sandbox=sandbox, connections=connections, teacher=teacher, seed=seed)
        yield TrajectoryContext(
            config, teacher, sandbox, seed, executor.embedder, connections=connections, executor=tools
        )
