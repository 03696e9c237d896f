"""Leases of an endpoint's limits, in one process and on a clock of its own: never too much in sum, whoever dies."""

from __future__ import annotations

import asyncio
import random
import selectors
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from synthesis.core.endpoint_limits import TokenEstimate
from synthesis.core.rate_limits import STAGE, BudgetSpent, Usage
from synthesis.core.recording import Recording
from synthesis.core.stages import Stopped
from synthesis.pipeline.slot_pool import SlotPool
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

pytest.importorskip("ray")

from synthesis.pipeline import ray_endpoint, ray_leases  # noqa: E402
from synthesis.pipeline.ray_endpoint import EndpointActor  # noqa: E402
from synthesis.pipeline.ray_leases import EndpointLine, LeasedLimits  # noqa: E402

COST = Usage(25, 15)
"""Of each request."""
MOST = Usage(100, 200)
LATENCY = 0.002
"""Of a message, seconds."""


class Leaping(selectors.DefaultSelector):
    """Waits for nothing: the time that it should wait has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += 0.0 if timeout is None else timeout
        assert timeout is not None and self.now < 36_000, "somebody waits for ever"
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.leaping = Leaping()
        super().__init__(self.leaping)

    def time(self) -> float:
        return self.leaping.now


def played(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(work)


class Remote:
    """An actor as it is called: each method has `remote`, which takes a moment both ways."""

    def __init__(self, actor: EndpointActor) -> None:
        self.actor, self.cut = actor, asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def called(*given: Any) -> Any:
            await self._travel()
            answer = getattr(self.actor, name)(*given)
            answer = await answer if isinstance(answer, Awaitable) else answer
            await self._travel()
            return answer

        return type("Method", (), {"remote": staticmethod(called)})

    async def _travel(self) -> None:
        await asyncio.sleep(LATENCY)
        if self.cut.is_set():
            await asyncio.Event().wait()


@dataclass
class Seen:
    """By the endpoint, of all workers."""

    flying: int = 0
    most: int = 0
    begun: list[float] = field(default_factory=list)
    booked: int = 0
    """Tokens of requests that came to an end."""


class Asking:
    """A worker."""

    def __init__(self, name: str, actor: EndpointActor, seen: Seen) -> None:
        self.name, self.actor, self.seen = name, actor, seen
        self.remote = Remote(actor)
        self.tasks: list[asyncio.Task[None]] = []
        self.flying = 0
        self.finished = 0

    async def open(self) -> Asking:
        self.line = EndpointLine(self.remote, self.actor.plan(), self.name)
        self.line.teacher()
        (self.limits,) = self.line._doors
        return self

    async def ask(self, seconds: float) -> None:
        limits: LeasedLimits = self.limits
        async with limits.slot():
            permit = await limits.reserve(TokenEstimate("kind", 100, lambda: MOST, "stage"))
            used = None
            try:
                await limits.take(permit)
                self._fly(1)
                self.seen.begun.append(self.line.now())
                await asyncio.sleep(seconds)
                self._fly(-1)
                used = COST
                self.seen.booked += COST.tokens
            finally:
                limits.settle(permit, used, answered=used is not None)
        self.finished += 1

    def _fly(self, one: int) -> None:
        self.flying += one
        self.seen.flying += one
        self.seen.most = max(self.seen.most, self.seen.flying)

    async def die(self) -> None:
        """As a process does: nothing more is said."""
        self.remote.cut.set()
        for task in [*self.tasks, *self.line._tasks]:
            task.cancel()
        self.seen.flying -= self.flying
        self.flying = 0
        await asyncio.sleep(0.1)
        await self.actor.lost(self.name)


def teacher(path: Path | None, **config: Any) -> OpenAITeacher:
    recording = None if path is None else Recording(path)
    return OpenAITeacher(
        OpenAITeacherConfig("http://10.0.0.1/v1", "m", max_tokens=50, **config), recording, "record" if path else "off"
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 5), st.integers(1, 7), st.sampled_from([None, 60, 600]), st.sampled_from([None, 2_000, 20_000]),
    st.sampled_from([None, 1_000]), st.integers(0, 10_000),
)  # fmt: skip
def test_limits_hold_in_sum_whoever_dies(
    workers: int, slots: int, requests: int | None, tokens: int | None, budget: int | None, seed: int
) -> None:
    rng, seen = random.Random(seed), Seen()
    config = {"concurrency": slots, "requests_per_minute": requests, "tokens_per_minute": tokens}

    async def run() -> None:
        actor = EndpointActor(lambda: teacher(None, token_budget=budget, **config))
        crew = [await Asking(str(number), actor, seen).open() for number in range(workers)]
        for worker in crew:
            for _ in range(rng.randrange(1, 30)):
                worker.tasks.append(asyncio.create_task(worker.ask(rng.choice([0.05, 0.4, 3.0]))))
        dying = [one for one in crew[1:] if rng.random() < 0.4]
        for worker in dying:
            await asyncio.sleep(rng.random())
            await worker.die()
        ends = [one for worker in crew if worker not in dying for one in worker.tasks]
        ended = await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), 3_000)
        refused = [one for one in ended if one is not None]
        assert all(isinstance(one, BudgetSpent) for one in refused) and (budget is not None or not refused)
        for worker in crew:
            if worker not in dying:
                await worker.line.close()
        # Nobody holds anything any more, and all is booked: the lost ones by what they can have cost.
        (spent,) = (await actor.costs()).values()
        if not dying:
            assert actor._pools[0].free == slots or all(one.short is False for one in actor._pools[0]._holders.values())
            assert spent.tokens == seen.booked
        assert spent.tokens >= seen.booked
        if budget is not None:  # a first request of unknown length may cost more than is left, alone
            lost = spent.tokens - seen.booked
            assert spent.tokens <= budget + COST.tokens + lost
            assert seen.booked >= budget - COST.tokens - lost or not refused
        await actor.close()

    played(run())
    assert seen.most <= slots
    for limit, each in ((requests, 1), (tokens, COST.tokens)):
        if limit is not None:
            holds = max(1.0, limit / 60)
            for first, begun in enumerate(seen.begun):
                count = sum(begun <= other < begun + 60 for other in seen.begun[first:])
                # A request may leave the bucket in debt by what it is more than the bucket holds.
                assert count * each <= limit + holds + max(0.0, each - holds) + 50, (limit, count)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9), st.lists(st.tuples(st.integers(0, 3), st.sampled_from("wgld"), st.integers(0, 9)), max_size=60)
)
def test_slots_are_never_more_than_there_are(size: int, moves: list[tuple[int, str, int]]) -> None:
    pool = SlotPool(size)
    for who, what, number in moves:
        name = str(who)
        match what:
            case "w":
                pool.want(name, number)
            case "g":
                pool.give_back(name, min(number, pool.held(name)))
            case "l":
                pool.lose(name)
            case "d":
                pool.deal()
        assert sum(pool.held(str(one)) for one in range(4)) + pool.free == size and pool.free >= 0
        for one, most in pool.recalls().items():
            assert 0 <= most <= pool.held(one)
    with pytest.raises(ValueError, match="gives back 99 slots"):
        pool.give_back("0", 99)


def test_who_comes_later_gets_its_share_and_what_is_unused_goes_back() -> None:
    seen = Seen()

    async def run() -> None:
        actor = EndpointActor(lambda: teacher(None, concurrency=8))
        first, second = [await Asking(name, actor, seen).open() for name in ("first", "second")]
        first.tasks = [asyncio.create_task(first.ask(1.0)) for _ in range(60)]
        await asyncio.sleep(0.5)
        assert first.limits.slots.held == 8
        second.tasks = [asyncio.create_task(second.ask(1.0)) for _ in range(8)]
        await asyncio.sleep(2.0)
        assert (first.limits.slots.held, second.limits.slots.held) == (4, 4)
        await asyncio.gather(*second.tasks)
        await asyncio.sleep(1.5)
        assert (first.limits.slots.held, second.limits.slots.held) == (8, 0)
        await asyncio.gather(*first.tasks)
        assert seen.most == 8 and asyncio.get_running_loop().time() < 13
        await actor.close()

    played(run())


def test_answers_are_on_the_disk_before_a_result_is_and_are_found_by_all(tmp_path: Path) -> None:
    async def run() -> None:
        actor = EndpointActor(lambda: teacher(tmp_path / "teacher.sqlite"))
        one, other = [(await Asking(name, actor, Seen()).open()).line for name in ("one", "other")]
        assert await one.known(b"a") is None
        one.keep(b"a", "yes")
        one.keep(b"b", "", "no answer")
        await one.flushed()
        with sqlite3.connect(tmp_path / "teacher.sqlite") as db:
            assert db.execute("SELECT count(*) FROM answers").fetchone() == (2,)
        assert await asyncio.gather(other.known(b"a"), other.known(b"b"), other.known(b"a")) == [
            ("yes", ""), ("", "no answer"), ("yes", ""),
        ]  # fmt: skip
        await actor.close()

    played(run())


def test_a_wish_to_be_left_alone_is_everybodys(tmp_path: Path) -> None:
    async def run() -> None:
        actor = EndpointActor(lambda: teacher(None))
        one, other = [await Asking(name, actor, Seen()).open() for name in ("one", "other")]
        await asyncio.sleep(0.1)
        one.limits.pause(30.0)
        await asyncio.sleep(0.1)
        assert 29 < other.limits.paused() <= 30 and 29 < one.limits.paused() <= 30
        await actor.close()

    played(run())


def test_a_worker_out_of_reach_begins_nothing_and_one_taken_for_dead_is_told() -> None:
    seen = Seen()

    async def run() -> None:
        actor = EndpointActor(lambda: teacher(None, concurrency=2))
        cut, lost = [await Asking(name, actor, seen).open() for name in ("cut", "lost")]
        await cut.ask(0.1)
        cut.remote.cut.set()
        await asyncio.sleep(ray_endpoint.LEASE_SECONDS + 0.1)
        begun = asyncio.create_task(cut.ask(0.1))
        await asyncio.sleep(60)
        assert not begun.done() and len(seen.begun) == 1
        await lost.ask(0.1)
        await actor.lost("lost")
        with pytest.raises(Stopped, match="taken for dead"):
            await asyncio.sleep(ray_endpoint.HEARD_SECONDS + 1)
            await lost.ask(0.1)
        begun.cancel()
        await actor.close()

    played(run())


@pytest.mark.parametrize(
    ("url", "own"),
    [("http://127.0.0.1:1/v1", True), ("http://localhost/v1", True), ("http://[::1]/v1", True), ("http://h/v1", False)],
)
def test_addresses_of_the_machine_itself(url: str, own: bool) -> None:
    loopback: Callable[[str], bool] = ray_leases._loopback
    assert loopback(url) is own and STAGE.get() == ""
