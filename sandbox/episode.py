"""Episodes: calls that see each other's changes, for example a shopping basket that fills up, or a file edited twice.

    episode = SandboxEpisode(pool, code)
    await episode.call("add", {"item": "apple"})
    result = await episode.call("show", {})

A successful call is committed; a failed call leaves no changes, however far it ran. No process keeps the state: each
call runs in a fresh process, which first repeats the committed calls. They are deterministic, so it reaches the same
state, and their results are compared to check this. So an episode survives its worker, can continue on any other, and
costs nothing while it waits. Its untrusted code does not need permission to fork. The price: a call takes as long as
all committed calls together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from sandbox.interface import Sandbox
from sandbox.outcomes import CallResult
from sandbox.protocol import digest
from sandbox.request import PastCall


class SandboxEpisode:
    """Sequence of calls of one module. Each call sees the state that the committed calls before it left.

    Args:
        sandbox: sandbox to run the calls in.
        code: source of the module.
        seed: seed of all randomness that the code can see, from the module's first line to the episode's end.
        now: time at which the episode starts, Unix seconds; None for `sandbox.determinism.EPOCH`.
    """

    def __init__(self, sandbox: Sandbox, code: str, *, seed: int = 0, now: int | None = None) -> None:
        self._sandbox = sandbox
        self._code = code
        self._seed = seed
        self._now = now
        self._turn = asyncio.Lock()
        self.history: list[PastCall] = []

    async def call(self, function: str, arguments: Mapping[str, Any]) -> CallResult:
        """Make the next call. Concurrent calls run one after another.

        Returns:
            Result as of `SandboxPool.call`. `diverged`: the committed calls gave other results when they were repeated,
            so the code is not deterministic.
        """
        async with self._turn:
            result = await self._sandbox.call(
                self._code, function, arguments, seed=self._seed, now=self._now, history=self.history
            )
            if result.ok:
                spent = max(0.0, result.cpu_seconds - sum(past.cpu_seconds for past in self.history))
                known = digest(json.dumps(result.value))
                self.history.append(PastCall(function, dict(arguments), known, spent))
            return result
