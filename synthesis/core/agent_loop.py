"""The agent loop, the same wherever a model acts: it acts, its calls are executed, and it observes the results.

Synthesis asks a teacher for each turn (`trajectories/interact.py`). Training's policy acts in token ids
(`astra_jax/rollout/episode.py`), an OpenAI-compatible endpoint in messages (`astra_jax/evaluation/endpoint_agent.py`).
Calls go to MCP servers, a sandbox's tools or a benchmark's simulators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

from synthesis.core.chat_format import Call

Finish = Literal["answered", "turn_limit", "token_limit", "masked"]
"""Why a loop ended: the model made no call; it made its last turn; it had no tokens left; infrastructure failed.

A new reason also needs a name in `servers/verifiers_tasks.py` and a metric in `episode_stats`."""

Execute = Callable[[int, Sequence[Call]], Awaitable[Sequence[str] | None]]
"""Carries out the calls of a turn (counted from 0); an output for each, or None when infrastructure failed."""


class Agent(Protocol):
    """A model in a conversation of its own. What may not begin at all (a prompt that is too long) is refused before."""

    async def act(self) -> Sequence[Call] | None:
        """Return the next turn's calls, none if it answers; None if a limit cut the turn off."""
        ...

    async def observe(self, outputs: Sequence[str]) -> bool:
        """Take the outputs of the turn's calls, in their order; False where no room is left for them."""
        ...


async def run_agent(agent: Agent, execute: Execute, *, max_turns: int) -> Finish:
    """Let a model act until it makes no more calls, or a limit ends it.

    Calls of the last turn are carried out like all others, though the model never observes what came of them.

    Args:
        max_turns: of the model, >= 1.
    """
    for turn in range(max_turns):
        calls = await agent.act()
        if calls is None:
            return "token_limit"
        if not calls:
            return "answered"
        outputs = await execute(turn, calls)
        if outputs is None:
            return "masked"
        if turn + 1 < max_turns and not await agent.observe(outputs):
            return "token_limit"
    return "turn_limit"
