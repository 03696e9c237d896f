"""Objects of one's own as environments: tools from methods, a copy for each episode, refusals that name what lacks."""

from __future__ import annotations

import threading
from typing import Literal

import pytest

from synthesis.core.environment import ToolAnswer, ToolsUnavailable, fingerprint
from synthesis.core.own_objects import OwnEnvironment, own_environments
from synthesis.core.refusals import InputError
from synthesis.core.rewards import played
from synthesis.core.tool_schemas import argument_error, check_schema


class Shelf:
    """An environment with state."""

    system = "Be brief."
    question = "Put two bolts on the shelf."
    answer = 2
    closed = 0

    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str, count: int = 1, *, where: Literal["left", "right"] = "left") -> int:
        """Put an item on the shelf."""
        if count < 1:
            raise ValueError("a count is at least 1\nsecond line")
        self.items += [item] * count
        return len(self.items)

    async def look(self, depth: int | None = None, tags: list[str] = ()) -> dict:  # noqa: B006
        """What is on the shelf."""
        return {"items": self.items}

    def thread(self) -> set:
        """Something that is no JSON value."""
        return threading.current_thread()

    def _hidden(self) -> None: ...

    def score(self, episode) -> float:
        return len(self.items) / 2

    def close(self) -> None:
        type(self).closed += 1


async def test_public_methods_are_tools() -> None:
    shelf = OwnEnvironment(Shelf())
    assert [one.role for one in shelf.prompt] == ["system", "user"] and shelf.answer.value == 2
    assert [tool.name for tool in shelf.tools] == ["put", "look", "thread"]
    put, look, _ = shelf.tools
    assert put.description == "Put an item on the shelf." and put.parameters["required"] == ["item"]
    assert put.parameters["properties"]["where"] == {"type": "string", "enum": ["left", "right"]}
    assert look.parameters["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    for tool in shelf.tools:
        check_schema(tool.parameters)
    assert argument_error(put.parameters, {"item": "bolt", "where": "up"})
    assert not argument_error(look.parameters, {"depth": None})


async def test_each_episode_has_a_copy_of_its_own() -> None:
    environment = OwnEnvironment(Shelf())
    one, other = await environment.begin(), await environment.begin()
    assert await one.call("put", {"item": "bolt"}) == ToolAnswer("1")
    assert await one.call("put", {"item": "bolt"}) == ToolAnswer("2")
    assert await one.call("look", {}) == ToolAnswer('{"items":["bolt","bolt"]}')
    assert await other.call("look", {}) == ToolAnswer('{"items":[]}')
    assert await one.call("put", {"item": "x", "count": 0}) == ToolAnswer("ValueError: a count is at least 1", ok=False)
    with pytest.raises(ToolsUnavailable, match="thread returned a .*no JSON value"):
        await one.call("thread", {})
    episode = played(environment, environment.prompt, [], "answered")
    assert isinstance(episode.environment, Shelf)
    assert (await one.score(episode), await other.score(episode)) == (1.0, 0.0)
    before = Shelf.closed
    await one.close()
    assert Shelf.closed == before + 1 and environment.subject.items == []


def variant(**changes) -> type:
    return type("Variant", (Shelf,), changes)


def undocumented(self): ...


def star(self, *items: str):
    """Many."""


def unannotated(self, item):
    """One."""


def odd(self, item: threading.Lock):
    """One."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": ""}, "Variant: give it `question`"),
        ({"score": None}, r"Variant: give it `score\(self, episode\)`"),
        ({"tool": undocumented}, "tool has no docstring"),
        ({"tool": star}, "leave out \\*"),
        ({"tool": unannotated}, "tool: item is annotated with nothing; use str, int"),
        ({"tool": odd}, "tool: item is annotated with"),
        ({"lock": threading.Lock(), "__deepcopy__": lambda self, memo: 1 / 0}, "cannot be copied.*ZeroDivisionError"),
    ],
)
def test_what_is_none_is_refused(changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        OwnEnvironment(variant(**changes)())


def test_a_name_may_stand_for_one_for_several_or_for_what_makes_them() -> None:
    def several():
        return (variant(question=f"Put {n} bolts there.")() for n in range(3))

    assert len(own_environments(several, "m:several")) == 3
    assert len(own_environments(Shelf, "m:Shelf")) == len(own_environments(Shelf(), "m:shelf")) == 1
    ready = own_environments(Shelf(), "m:shelf")
    assert own_environments(ready, "m:ready") == ready  # what is an environment already stays as it is
    with pytest.raises(InputError, match="holds no environments"):
        own_environments([], "m:none")
    with pytest.raises(InputError, match="two environments have the id"):
        own_environments([Shelf(), Shelf()], "m:twice")
    with pytest.raises(InputError, match="environment int: give it `question`"):
        own_environments(7, "m:seven")


def test_a_run_that_goes_on_knows_another_environment() -> None:
    one, same, other = OwnEnvironment(Shelf()), OwnEnvironment(Shelf()), OwnEnvironment(variant(question="Else?")())
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
