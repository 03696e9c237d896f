"""Context that the stages of environment synthesis share while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from synthesis.environments.config import EnvironmentsConfig
from synthesis.pipeline.context import Context
from synthesis.pipeline.executors import Executor

TOOLS_AT_ONCE = 16


@dataclass(frozen=True)
class EnvironmentContext(Context[EnvironmentsConfig]):
    """Context passed to every stage of a run.

    Attributes:
            proofs: held while one tool is called. A pool keeps an open slot for each tool in use. With more tools than
            slots every call would open one, which costs several times the call.
    """

    proofs: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOOLS_AT_ONCE))


@asynccontextmanager
async def open_context(
    executor: Executor, *, config: EnvironmentsConfig, seed: int
) -> AsyncIterator[EnvironmentContext]:
    """The context of a run's stages."""
    proofs = asyncio.Semaphore(executor.records_at_once(TOOLS_AT_ONCE))
    async with executor:
        yield EnvironmentContext(config, executor.teacher, executor.sandbox, seed, executor.embedder, proofs)
