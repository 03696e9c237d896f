"""Run stored tool code again, each different call once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from sandbox.interface import Sandbox
from sandbox.outcomes import CallResult
from synthesis.audit.text_claims import canonical

_AT_ONCE: Final = 16


class ReplayUnavailable(Exception):
    """A call could not run for a reason of the machine."""


class Runner:
    """Runs calls in a sandbox. Equal calls of equal code run once.

    Args:
        sandbox: open sandbox.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._results: dict[tuple[str, str, str], asyncio.Task[CallResult]] = {}
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def call(self, code: str, function: str, arguments: Mapping[str, Any]) -> CallResult:
        """Return the result of a call.

        Raises:
            ReplayUnavailable: the machine ended it, not the code.
        """
        key = code, function, canonical(arguments)
        if key not in self._results:
            self._results[key] = asyncio.ensure_future(self._run(code, function, arguments))
        result = await self._results[key]
        if result.is_infrastructure:
            raise ReplayUnavailable(f"{function}: {result.error}")
        return result

    async def _run(self, code: str, function: str, arguments: Mapping[str, Any]) -> CallResult:
        async with self._free:
            return await self._sandbox.call(code, function, arguments)
