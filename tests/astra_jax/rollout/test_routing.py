"""Where requests go, over random lengths, fleets and orders of events: what must hold for all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astra_jax.rollout.vllm.routing import Placement, Router

SLACK = 0.125


class Fleet:
    """Servers that draw what they are told, and a router that does not know how much."""

    def __init__(self, rooms: Sequence[int], *, requests: int = 1000) -> None:
        self.router = Router(capacity=1000, requests=requests, slack=SLACK)
        self.rooms = {f"s{i}": room for i, room in enumerate(rooms)}
        self.open: set[str] = set()
        self.flying: list[Placement] = []
        self.waiting: list[Placement] = []
        for name, room in self.rooms.items():
            self.start(name, room)

    def start(self, name: str, room: int | None) -> None:
        self.open.add(name)
        self.router.open(name, room)

    def stop(self, name: str) -> None:
        self.open.discard(name)
        self.router.close(name)

    def ask(self, session: str, prompt: int, most: int, avoid: Sequence[str] = ()) -> Placement:
        asked: list[Placement] = []

        def ready() -> None:
            if asked:  # else it has its place at once
                self.waiting.remove(asked[0])
                self.flying.append(asked[0])

        one = self.router.ask(session, prompt, most, ready, avoid)
        asked.append(one)
        (self.flying if one.server else self.waiting).append(one)
        return one

    def end(self, one: Placement, drawn: int | None) -> None:
        (self.flying if one.server else self.waiting).remove(one)
        self.router.leave(one, drawn)

    def at(self, name: str) -> list[Placement]:
        return [one for one in self.flying if one.server == name]


def share(fleet: Fleet, name: str) -> float:
    load = fleet.router.load(name)
    return load.held / load.capacity


def test_tokens_are_balanced_and_not_requests() -> None:
    """One episode of 800 tokens weighs what sixteen of 50 do."""
    fleet = Fleet([10_000, 10_000])
    sizes = [800, *[50] * 16, 800, *[50] * 16]
    for i, size in enumerate(sizes):
        fleet.ask(f"alone{i}", size, 1)
    held = [sum(one.prompt for one in fleet.at(name)) for name in fleet.rooms]
    assert sum(held) == sum(sizes) and abs(held[0] - held[1]) <= 50
    assert len({len(fleet.at(name)) for name in fleet.rooms}) == 2 or len(fleet.at("s0")) == 17


def test_a_larger_server_gets_more() -> None:
    fleet = Fleet([1_000, 3_000])
    for i in range(30):
        fleet.ask(f"alone{i}", 99, 1)
    assert [len(fleet.at(name)) for name in fleet.rooms] == pytest.approx([7.5, 22.5], abs=1)


def test_later_turns_stay_and_mates_go_to_their_group() -> None:
    fleet = Fleet([10_000] * 4)
    turns = [fleet.ask(f"group{g}.{i}", 100, 1) for g in range(8) for i in range(4)]
    places = {one.session: one.server for one in turns}
    for g in range(8):
        assert len({places[f"group{g}.{i}"] for i in range(4)}) == 1
    assert [len(fleet.at(name)) for name in fleet.rooms] == [8] * 4
    assert fleet.router.load("s0").held == 2 * (100 + 4 * 1)  # a group's prompt is there once
    for one in random.Random(0).sample(turns, len(turns)):
        fleet.end(one, 1)
        assert fleet.ask(one.session, 150, 1).server == places[one.session]
    assert fleet.router.moved == 0 and fleet.router.stayed == len(turns)


def test_a_group_that_would_unbalance_the_fleet_is_split() -> None:
    """Its eight episodes of half a server's room, of which slack is an eighth."""
    fleet = Fleet([10_000] * 4)
    for i in range(8):
        fleet.ask(f"group.{i}", 100, 600)
    assert [len(fleet.at(name)) for name in fleet.rooms] == [2] * 4


def test_what_does_not_fit_waits_and_the_oldest_episode_is_next() -> None:
    fleet = Fleet([1_000])
    first, second = fleet.ask("a", 400, 1), fleet.ask("b", 400, 1)
    young, small = fleet.ask("c", 700, 1), fleet.ask("d", 10, 1)
    assert first.server and second.server and not young.server and not small.server
    fleet.end(second, 1)
    old = fleet.ask("b", 500, 1)  # its next turn: the episode began before
    assert old.server and not young.server and not small.server  # small is not let in before the large
    fleet.end(first, 1)
    fleet.end(old, 1)
    assert young.server and small.server


def test_an_empty_server_takes_what_is_larger_than_its_room() -> None:
    fleet = Fleet([100])
    large, after = fleet.ask("a", 500, 1), fleet.ask("b", 10, 1)
    assert large.server and not after.server
    fleet.end(large, 1)
    assert after.server


def test_requests_are_bounded_too() -> None:
    fleet = Fleet([10_000], requests=2)
    asked = [fleet.ask("", 1, 1) for _ in range(3)]
    assert [bool(one.server) for one in asked] == [True, True, False]
    fleet.end(asked[2], None)  # nobody wants it any more
    fleet.end(asked[0], 1)
    assert fleet.router.waiting == 0 and fleet.router.load("s0").requests == 1


def test_a_turn_waits_for_its_own_server_but_not_for_one_that_is_much_fuller() -> None:
    fleet = Fleet([1_000, 1_000])
    mine = fleet.ask("a", 400, 1)
    others = [fleet.ask(f"o{i}", 450, 1) for i in range(2)]  # s1, and the rest of s0
    assert [one.server for one in (mine, *others)] == ["s0", "s1", "s0"]
    full = fleet.ask("f", 500, 1)
    assert full.server == "s1"
    fleet.end(mine, 1)
    late = fleet.ask("l", 100, 1)  # takes what is left of s0
    assert late.server == "s0"
    again = fleet.ask("a", 500, 1)
    assert not again.server  # both are full, and s0 has its prefix
    fleet.end(full, 1)
    assert again.server == "s1" and fleet.router.moved == 1  # s1 is far emptier now


def test_a_server_that_joins_takes_over_what_waits_and_one_that_leaves_gives_it_back() -> None:
    fleet = Fleet([1_000])
    turns = [fleet.ask(f"a{i}", 400, 1) for i in range(6)]
    assert [bool(one.server) for one in turns] == [True] * 2 + [False] * 4
    fleet.start("s1", 1_000)
    assert [one.server for one in turns] == ["s0", "s0", "s1", "s1", "", ""]
    fleet.stop("s0")
    fleet.end(turns[0], 1)
    assert not turns[4].server
    fleet.end(turns[2], 1)
    assert turns[4].server == "s1"
    again = fleet.ask("a0", 500, 1)  # its server is closed
    fleet.end(turns[3], 1)
    assert again.server == "s1"  # before turns[5], which began later
    fleet.end(turns[1], 1)
    fleet.router.forget("s0")
    assert fleet.router.load("s0").requests == 0


def test_a_server_that_failed_a_request_is_avoided_while_there_is_another() -> None:
    fleet = Fleet([1_000, 1_000])
    one = fleet.ask("a", 100, 1)
    fleet.end(one, None)
    other = fleet.ask("a", 100, 1, avoid=[one.server or "s0"])
    assert other.server == "s1"
    fleet.stop("s1")
    fleet.end(other, None)
    assert fleet.ask("a", 100, 1, avoid=["s0"]).server == "s0"


def test_allowances_follow_what_is_drawn() -> None:
    """All that may be drawn at first; then what those in flight come to in the mean, and never more than they may."""
    router = Router(capacity=10**9, requests=10**6, slack=SLACK)
    router.open("s")
    assert router.allowance(4_000) == 4_000
    lengths = [100] * 9 + [1_000]
    for _ in range(400):
        for drawn in lengths:
            router.leave(router.ask("", 1, 4_000, lambda: None), drawn)
    long = sum(n * n for n in lengths) / sum(lengths)
    assert long <= router.allowance(4_000) <= 1.1 * long + 20 and router.allowance(50) == 50
    for _ in range(1_024):
        router.leave(router.ask("", 1, 4_000, lambda: None), 10)
    assert router.allowance(4_000) <= 4_000**2 / (4_000 + 10_240) + 11  # what was before is forgotten


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), servers=st.integers(1, 5), episodes=st.integers(1, 60))
def test_whatever_comes(seed: int, servers: int, episodes: int) -> None:
    """Nothing is lost or placed twice, room is kept, prefixes are followed within the slack, all ends."""
    draws = random.Random(seed)
    few = draws.random() < 0.5
    fleet = Fleet([draws.choice((500, 1_000, 4_000)) for _ in range(servers)], requests=3 if few else 1_000)
    router, names = fleet.router, list(fleet.rooms)
    turns = {f"g{i // 4}.{i % 4}": draws.randint(1, 4) for i in range(episodes)}
    prompts = {session: 20 + 20 * (len(session) % 3) for session in turns}
    largest = 0.0

    def checked() -> None:
        for name in names:
            load, here = router.load(name), fleet.at(name)
            assert load.requests == len(here) and load.held >= 0 and (load.held == 0) == (not here)
            assert len(here) <= 1 or load.held <= load.capacity
        assert router.waiting == len(fleet.waiting) and all(not one.server for one in fleet.waiting)
        assert len({id(one) for one in (*fleet.flying, *fleet.waiting)}) == len(fleet.flying) + len(fleet.waiting)
        idle = [name for name in fleet.open if not fleet.at(name)]
        assert not (idle and router.load(idle[0]).waiting)

    def ask(session: str) -> None:
        nonlocal largest
        before = {name: share(fleet, name) for name in fleet.open}
        nobody_waits = not fleet.waiting and not few  # else the least loaded may be full by its requests
        home = places.get(session)
        one = fleet.ask(session, prompts[session], draws.choice((5, 60)))
        largest = max(largest, (prompts[session] + 60) / min(fleet.rooms.values()))
        if one.server and nobody_waits and home in before:
            if before[home] <= min(before.values()) + SLACK:
                assert one.server == home
            else:
                assert share(fleet, one.server) <= min(before.values()) + largest
        if one.server and not few:
            assert before[one.server] <= min(before.values()) + SLACK + largest

    places: dict[str, str] = {}
    ready = list(turns)
    for _ in range(10_000):
        if not ready and not fleet.flying and not fleet.waiting:
            break
        event = draws.random()
        if ready and event < 0.5:
            ask(ready.pop(draws.randrange(len(ready))))
        elif fleet.flying and event < 0.9:
            one = draws.choice(fleet.flying)
            session, places[one.session] = one.session, one.server
            fleet.end(one, draws.choice((None, draws.randint(1, 60))))
            turns[session] -= 1
            prompts[session] += 30
            if turns[session]:
                ready.append(session)
            else:
                router.release(session)
        elif event < 0.95 and len(fleet.open) > 1:
            fleet.stop(draws.choice(sorted(fleet.open)))
        elif closed := sorted(set(names) - fleet.open):
            name = draws.choice(closed)
            fleet.start(name, fleet.rooms[name])
        checked()
    assert not fleet.flying and not fleet.waiting and not ready


@pytest.mark.parametrize("seed", [3597, 4124, 7827, 10518])
def test_no_server_is_idle_while_a_request_waits_for_it(seed: int) -> None:
    """Orders of events, one in thousands, in which who was first went to wait at another server, and the next who
    waits for whoever has room came after those who wait here."""
    draws = random.Random(seed)
    names = "abcd"[: draws.randint(2, 4)]
    router = Router(capacity=100, requests=draws.choice((1, 2, 3)), slack=draws.choice((0.05, 0.125, 0.5)))
    for name in names:
        router.open(name)
    live: list[Placement] = []
    for _ in range(100):
        event = draws.random()
        if event < 0.5:
            session, avoid = (
                f"g{draws.randint(0, 4)}.{draws.randint(0, 3)}",
                [n for n in names if draws.random() < 0.15],
            )
            live.append(router.ask(session, draws.randint(1, 80), draws.randint(1, 60), lambda: None, avoid))
        elif event < 0.86 and live:
            router.leave(live.pop(draws.randrange(len(live))), draws.randint(1, 40))
        elif event < 0.93:
            router.close(draws.choice(names))
        else:
            router.open(draws.choice(names), draws.choice((30, 60, 200)))
        loads = [router.load(name) for name in names]
        assert not any(load.waiting and not load.requests for load in loads)
