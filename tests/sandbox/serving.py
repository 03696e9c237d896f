"""A pool behind HTTP, for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from sandbox import SandboxPool
from sandbox.service import SandboxService, SandboxServiceConfig


@contextlib.asynccontextmanager
async def serving(pool: SandboxPool, **options) -> AsyncIterator[tuple[SandboxService, str]]:
    service = SandboxService(pool, SandboxServiceConfig(port=0, **options))
    await service.start()
    try:
        yield service, f"http://127.0.0.1:{service.port}"
    finally:
        await service.stop()
