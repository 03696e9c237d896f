"""The agent loop, the same wherever a model acts: it speaks, its calls are carried out, it hears what came of them.

Training speaks in token ids (`rollout/episode.py`), evaluation of any OpenAI-compatible endpoint in messages
(`evaluation/chat.py`); what is called is a sandbox's tools or a benchmark's own simulators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

from synthesis.core.chat_format import MalformedCall
from synthesis.core.records import ToolCall

Finish = Literal["answered", "turn_limit", "token_limit", "voided"]
"""Why a loop ended: the model made no call; it made its last turn; it had no tokens left; infrastructure failed."""

Call = ToolCall | MalformedCall


class Speaker(Protocol):
    """A model in a conversation of its own."""

    async def say(self) -> Sequence[Call] | None:
        """The next turn's calls, none where it answers; None where the turn was cut off by a limit."""
        ...

    def hear(self, outputs: Sequence[str]) -> bool:
        """Take the outputs of the turn's calls, in their order; False where no room is left for them."""
        ...


async def converse(
    speaker: Speaker, act: Callable[[int, Sequence[Call]], Awaitable[Sequence[str] | None]], *, max_turns: int
) -> Finish:
    """Let a model act until it makes no more calls, or a limit ends it.

    Calls of the last turn are carried out like all others, though the model never hears what came of them.

    Args:
        act: carries out the calls of a turn (counted from 0); an output for each, or None when infrastructure failed.
        max_turns: of the model, >= 1.
    """
    for turn in range(max_turns):
        calls = await speaker.say()
        if calls is None:
            return "token_limit"
        if not calls:
            return "answered"
        outputs = await act(turn, calls)
        if outputs is None:
            return "voided"
        if turn + 1 < max_turns and not speaker.hear(outputs):
            return "token_limit"
    return "turn_limit"
