"""Messages of a conversation, in OpenAI's chat-completions format: a part of the records in `records.py`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool in a message.

    Formats write its fields by name. A new field must be UNSET by default, as `Message.loss_weight` is: then stored
    records without it stay the same.
    """

    id: str
    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message. `reasoning` is the thinking text (OpenAI-compatible servers call it `reasoning_content`)."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    name: str = ""
    loss_weight: float | msgspec.UnsetType = msgspec.UNSET
    """`weight`, where that is not 1; not there otherwise."""

    @property
    def weight(self) -> float:
        """Weight of the tokens of an assistant's turn in the loss of SFT; 0: the turn is context and is not trained."""
        return 1.0 if self.loss_weight is msgspec.UNSET else self.loss_weight

    def weighed(self, weight: float) -> Message:
        """Return the message with this weight."""
        return msgspec.structs.replace(self, loss_weight=msgspec.UNSET if weight == 1 else weight)
