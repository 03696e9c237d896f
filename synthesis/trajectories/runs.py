"""A finished run: what is judged, of the user first and then of the agent."""

from __future__ import annotations

from typing import Literal

import msgspec

from synthesis.core.records import Message, Task

Ending = Literal["said", "silent", "limit"]
"""A last word was said, and the agent's turn after it; none was; the user had no turn left."""


class CallStatus(msgspec.Struct, frozen=True):
    """What really became of a call; see `execution.ToolResult`. `repairs`: see `Trajectory.repaired`."""

    call_id: str
    ok: bool
    injected: str = ""
    error: str = ""
    repairs: list[str] | msgspec.UnsetType = msgspec.UNSET


class AgentRun(msgspec.Struct, frozen=True):
    """A finished run, not judged yet."""

    task: Task
    messages: list[Message]
    calls: list[CallStatus]
    ended: Ending | msgspec.UnsetType = msgspec.UNSET
    """How its simulated user ended it; not there where it has none."""
