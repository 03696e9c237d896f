"""A finished run, before it is judged: first its user, then its agent."""

from __future__ import annotations

from enum import Enum

import msgspec

from synthesis.core.records import Message, Task


class Ending(Enum):
    """End of a run by the simulated user; journals have the values."""

    USER_CLOSED = "said"
    """With a last message, which the agent answered."""
    USER_LEFT = "silent"
    """Without a last message."""
    TURN_LIMIT = "limit"
    """The user had no turn left."""


class CallStatus(msgspec.Struct, frozen=True):
    """Real outcome of a call; see `execution.ToolResult`. `repairs`: see `Trajectory.repaired`."""

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
    """End of the run by the simulated user; unset if there is no user."""
