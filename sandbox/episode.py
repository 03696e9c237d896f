"""Calls that see each other's changes: a shopping basket that fills up, a file that is edited twice.

    episode = SandboxEpisode(pool, code)
    await episode.call("add", {"item": "apple"})
    result = await episode.call("show", {})

A call that succeeds is committed; one that fails leaves nothing behind, however far it came. The state is not kept in a
process: each call runs in a fresh one, as ever, which first repeats the committed calls. They are deterministic, so it
arrives at the same state, and their results are compared to make sure. So an episode outlives its worker, may go on
on any other, costs nothing while it waits, and its untrusted code is never allowed what keeping it alive would take, to
fork. The price is that a call takes as long as all committed calls together.
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
    """A sequence of calls of one module, each of which sees the state that the committed ones before it left.

    Args:
        sandbox: where the calls run.
        code: source of the module.
        seed: of everything random that the code can see, from the module's first line to the episode's end.
        now: the moment at which the episode begins, Unix seconds; None for `sandbox.determinism.EPOCH`.
    """

    def __init__(self, sandbox: Sandbox, code: str, *, seed: int = 0, now: int | None = None) -> None:
        self._sandbox = sandbox
        self._code = code
        self._seed = seed
        self._now = now
        self._turn = asyncio.Lock()
        self.history: list[PastCall] = []

    async def call(self, function: str, arguments: Mapping[str, Any]) -> CallResult:
        """The next call; calls made at once wait for each other in turn.

        Returns:
            As `SandboxPool.call`. With `diverged` the committed calls gave other results when they were repeated: the
            code is not deterministic.
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
