"""The loop of all agents: what ends it, and what becomes of the calls of its last turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from synthesis.core.agent_loop import run_agent
from synthesis.core.chat_format import Call, MalformedCall
from synthesis.core.records import ToolCall

ONE, BROKEN = ToolCall("a", "f", {}), MalformedCall("{", "no JSON")


class Planned:
    """Makes the calls of a plan, with room for so many observations."""

    def __init__(self, *plan: Sequence[Call] | None, room: int = 99) -> None:
        self.plan, self.room = list(plan), room
        self.observed: list[list[str]] = []

    async def act(self) -> Sequence[Call] | None:
        return self.plan.pop(0)

    async def observe(self, outputs: Sequence[str]) -> bool:
        self.observed.append(list(outputs))
        return len(self.observed) <= self.room


@pytest.mark.parametrize(
    ("agent", "finish", "executed", "observed"),
    [
        (Planned([]), "answered", [], []),
        (Planned([ONE, BROKEN], []), "answered", [2], [["0", "1"]]),
        (Planned(None), "token_limit", [], []),
        (Planned([ONE], None), "token_limit", [1], [["0"]]),
        (Planned([ONE], [ONE], room=0), "token_limit", [1], [["0"]]),
        # Those of the last turn are carried out, and nobody observes what came of them.
        (Planned([ONE], [ONE], [ONE, ONE]), "turn_limit", [1, 1, 2], [["0"], ["0"]]),
        (Planned([ONE], [ONE], [ONE], room=2), "turn_limit", [1, 1, 1], [["0"], ["0"]]),
    ],
)
async def test_what_ends_a_loop(agent, finish, executed, observed):
    done: list[int] = []

    async def execute(turn: int, calls: Sequence[Call]) -> list[str]:
        assert turn == len(done)
        done.append(len(calls))
        return [str(i) for i in range(len(calls))]

    assert await run_agent(agent, execute, max_turns=3) == finish
    assert (done, agent.observed) == (executed, observed)


async def test_a_failure_of_the_infrastructure_ends_it():
    async def execute(turn: int, calls: Sequence[Call]) -> None:
        return None

    agent = Planned([ONE], [])
    assert await run_agent(agent, execute, max_turns=3) == "masked" and agent.observed == []
