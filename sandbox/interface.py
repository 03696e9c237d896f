"""Interface of a sandbox to its callers, in this process or behind HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sandbox.outcomes import CallResult
from sandbox.request import PastCall


class Sandbox(Protocol):
    """An open sandbox: `sandbox.SandboxPool`, `sandbox.remote.RemotePool` or `sandbox.fleet.SandboxFleet`.

    Attributes:
        tier: isolation in force where the calls run, "A" to "D".
        layers: each layer's state by name.
    """

    @property
    def tier(self) -> str:
        """Isolation in force where the calls run."""
        ...

    @property
    def layers(self) -> dict[str, str]:
        """State of each layer by name."""
        ...

    async def call(
        self,
        code: str,
        function: str,
        arguments: Mapping[str, Any],
        *,
        seed: int = 0,
        now: int | None = None,
        history: Sequence[PastCall] = (),
    ) -> CallResult:
        """Call one function of an untrusted module; see `sandbox.SandboxPool.call`."""
        ...
