"""A GRPO run in simulated time: the trainer's own classes fill batches and place requests, and durations are modelled.

`GroupScheduler`, `GroupBuffer` and the `Router` of rollout servers are the product's. They run on an event loop whose
clock jumps to the next event (`in_simulated_time`). The model of durations:

- A server decodes all its sequences at once: a token of each in the time of reading its weights and their caches.
- It reads prompts that are not cached first, and decodes nothing meanwhile.
- A sync pauses decoding. The caches of running requests are computed from scratch.
- Tools wait for a sandbox. An update, and publishing its weights, take the given time.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
import random
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from astra_jax.rollout.buffer import GroupBuffer
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import Group
from astra_jax.rollout.scheduler import GroupScheduler, StaleGroup, groups_started_at_once
from astra_jax.rollout.vllm.routing import Router
from synthesis.core.reward import Reward

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Selector that never waits: the clock advances instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing is to happen any more, and the simulation has not ended")
        self.now += max(0.0, timeout)
        return []


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def in_simulated_time(work: Coroutine[Any, Any, T]) -> T:
    """Run it on a clock of its own, which begins at 0 and on which only sleeping takes time."""
    with asyncio.Runner(loop_factory=_SimulatedLoop) as runner:
        return runner.run(work)


def now() -> float:
    """Simulated seconds."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class ServerSpeed:
    """Speed of a server.

    Attributes:
        token_seconds: seconds of a step, which samples a token of each sequence, by (sequences, tokens in their
            caches).
        prefill_seconds: seconds for an uncached token of a prompt.
        cache_tokens: capacity of its cache, in tokens.
        requests: maximum concurrent requests.
        read_seconds: seconds of a sync during which it samples; `load_seconds`: during which it is paused.
        recomputes: a sync recomputes the caches of running sequences, as in vLLM.
    """

    token_seconds: Callable[[int, float], float]
    prefill_seconds: float
    cache_tokens: int
    requests: int = 256
    read_seconds: float = 0.0
    load_seconds: float = 0.0
    recomputes: bool = True

    def most_sequences(self, context: float) -> int:
        """Return how many sequences of this length fit."""
        return max(1, min(self.requests, int(self.cache_tokens / max(1.0, context))))

    def most_tokens_per_second(self, context: float) -> float:
        """With as many sequences of this length as there is room for."""
        sequences = self.most_sequences(context)
        return sequences / self.token_seconds(sequences, sequences * context)


class SimulatedServer:
    """One server. Progress is counted in tokens sampled by each sequence, so that an event costs log(n)."""

    def __init__(self, name: str, speed: ServerSpeed) -> None:
        self.name, self.speed, self.version, self.cleared = name, speed, 0, 0
        self.groups: set[tuple[int, str]] = set()  # whose prompts are cached, since which clearing
        self.settled = asyncio.Event()
        self.settled.set()
        self.busy_seconds = 0.0
        self._drawn, self._at, self._stalled_until = 0.0, 0.0, 0.0
        self._sequences: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap, by where each ends
        self._cache = 0.0  # tokens of those
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def draw(self, context: int, uncached: int, tokens: int) -> None:
        """Sample this many tokens of a sequence of `context` tokens, `uncached` of which must be prefilled."""
        self._advance()
        self._stall(uncached * self.speed.prefill_seconds)
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sequences, (self._drawn + tokens, next(self._numbers), done))
        self._cache += context
        self._schedule()
        try:
            await done
        finally:
            self._advance()
            if not done.done() or done.cancelled():
                self._sequences = [one for one in self._sequences if one[2] is not done]
                heapq.heapify(self._sequences)
            self._cache = max(0.0, self._cache - context - tokens) if self._sequences else 0.0
            self._schedule()

    async def sync(self, version: int) -> None:
        """Load new weights; running sequences continue afterwards, and new ones wait."""
        self.settled.clear()
        await asyncio.sleep(self.speed.read_seconds)
        self._advance()
        self._stall(self.speed.load_seconds)
        self._schedule()
        await asyncio.sleep(max(0.0, self._stalled_until - now()))
        self._advance()
        self.version, self.cleared = version, self.cleared + 1
        self.groups.clear()
        if self.speed.recomputes:
            self._stall(self._cache * self.speed.prefill_seconds)
        self._schedule()
        self.settled.set()

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, now()) + seconds

    @property
    def _token_seconds(self) -> float:
        return self.speed.token_seconds(len(self._sequences), self._cache)

    def _advance(self) -> None:
        """Count the tokens sampled since the last event."""
        here = now()
        if self._sequences:
            drawing = max(0.0, here - max(self._at, self._stalled_until))
            tokens = drawing / self._token_seconds
            self._drawn += tokens
            self._cache += tokens * len(self._sequences)
            self.busy_seconds += here - self._at
        self._at = here

    def _schedule(self) -> None:
        """Wake up when the next sequence is done."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sequences:
            left = max(0.0, self._sequences[0][0] - self._drawn) * self._token_seconds
            self._timer = asyncio.get_running_loop().call_at(max(now(), self._stalled_until) + left, self._ended)

    def _ended(self) -> None:
        self._timer = None
        self._advance()
        while self._sequences and self._sequences[0][0] <= self._drawn + 1e-6:
            *_, done = heapq.heappop(self._sequences)
            if not done.done():
                done.set_result(None)
        self._schedule()


@dataclass(frozen=True)
class SimulatedTurn:
    """Sampled tokens of a turn, with the duration and output length of its tool; a last turn has no call."""

    tokens: int
    tool_seconds: float
    tool_tokens: int


@dataclass(frozen=True)
class SimulatedWork:
    """Distribution of episodes.

    Attributes:
        episode: samples the turns of an episode.
        prompt: mean tokens of a group's prompt.
        most: maximum tokens of a turn.
        valid_share: share of groups whose rewards differ; None: the groups whose episodes differ in their turns.
    """

    episode: Callable[[random.Random], list[SimulatedTurn]]
    prompt: int
    most: int
    valid_share: float | None
    group_size: int
    batch_size: int


@dataclass(frozen=True)
class SimulatedRun:
    """Settings of the run, and other durations.

    Attributes:
        update_seconds: seconds of an update, by the batch's tokens (prompts, sampled, of tools).
        sandboxes: maximum concurrent calls.
    """

    work: SimulatedWork
    servers: list[ServerSpeed]
    update_seconds: Callable[[int], float]
    publish_seconds: float
    sandboxes: int
    async_steps: int = 0
    updates: int = 6
    concurrent_groups: int = 1024
    oversample: float = 1.25
    surplus_max_age: int = 1
    slack: float = 0.125
    seed: int = 0


@dataclass
class SimulatedStep:
    """Seconds of one update's parts, and what its batch was like. `bound`: of the rollouts alone, see `lower_bound`."""

    step: float
    wait: float
    update: float
    publish: float
    sync: float
    age: float
    bound: float
    sampled: int
    expired: int
    cancelled: int


@dataclass
class Outcome:
    """Result of a simulated run. `steps` excludes the first ones, in which fewer groups were ahead than later."""

    steps: list[SimulatedStep]
    stayed: float
    busy: float
    length_bias: float
    drawn_tokens: int
    calls: int
    call_seconds: float
    seconds: float
    requests: int

    def mean(self, name: str) -> float:
        """Return the mean over the steps."""
        return sum(float(getattr(one, name)) for one in self.steps) / len(self.steps)


@dataclass
class _Drawn:
    """State of a group: the bottleneck of its longest episode, its sampled and read tokens."""

    longest: float = 0.0
    tokens: int = 0
    read: int = 0
    contexts: list[int] = field(default_factory=list)


_Home = tuple[SimulatedServer, int, int]
"""Server with an episode's cached prefix, number of cache clearings at that time, and the prefix's length."""


class Simulation:
    """One run; `run` it in simulated time."""

    def __init__(self, run: SimulatedRun) -> None:
        self.run_settings, self.work = run, run.work
        age = run.async_steps or run.surplus_max_age
        self.buffer = GroupBuffer(run.work.batch_size, min_reward_std=0.01, max_age=age)
        speed = run.servers[0]
        self.router = Router(capacity=speed.cache_tokens, requests=speed.requests, slack=run.slack)
        self.servers = {f"s{i:03}": SimulatedServer(f"s{i:03}", one) for i, one in enumerate(run.servers)}
        self.sandboxes = asyncio.Semaphore(run.sandboxes)
        self.room = asyncio.Semaphore(run.concurrent_groups * run.work.group_size)
        self.started = self.drawn_tokens = self.calls = 0
        self.call_seconds = 0.0
        self.groups: dict[int, _Drawn] = {}

    async def _turn(
        self, session: str, context: int, uncached: Callable[[SimulatedServer], int], tokens: int
    ) -> tuple[SimulatedServer, int]:
        """Place a request and sample it. Return its server, and the version that sampled its first token."""
        ready = asyncio.Event()
        place = self.router.ask(session, context, self.work.most, ready.set)
        drawn: int | None = None
        try:
            if not place.server:
                await ready.wait()
            server = self.servers[place.server]
            await server.settled.wait()  # as the policy has new requests wait for a sync
            version = server.version
            await server.draw(context, uncached(server), tokens)
            drawn = tokens
            return server, version
        finally:
            self.router.leave(place, drawn)

    async def _episode(
        self, index: int, number: int, turns: list[SimulatedTurn], prompt: int, seen: _Drawn, oldest: list[int]
    ) -> int:
        """Run an episode. Return its sampled tokens."""
        session, context, drawn = f"group{index}.{number}", prompt, 0
        home: _Home | None = None
        alone, speed = 0.0, self.run_settings.servers[0]
        try:
            for turn in turns:

                def uncached(server: SimulatedServer, context: int = context, home: _Home | None = home) -> int:
                    if home is not None and home[:2] == (server, server.cleared):
                        return context - home[2]
                    known = (server.cleared, str(index)) in server.groups
                    server.groups.add((server.cleared, str(index)))
                    return context - prompt if known else context

                server, version = await self._turn(session, context, uncached, turn.tokens)
                oldest.append(version)
                context, drawn = context + turn.tokens, drawn + turn.tokens
                home = server, server.cleared, context
                self.drawn_tokens += turn.tokens
                seen.tokens += turn.tokens
                alone += turn.tokens * speed.token_seconds(1, context) + turn.tool_seconds
                if self.buffer.too_old(min(oldest)) and self.run_settings.async_steps:
                    raise _NoLonger
                if turn.tool_seconds or turn.tool_tokens:
                    async with self.sandboxes:
                        await asyncio.sleep(turn.tool_seconds)
                    self.calls += 1
                    self.call_seconds += turn.tool_seconds
                    context += turn.tool_tokens
                    seen.read += turn.tool_tokens
            seen.longest = max(seen.longest, alone)
            seen.contexts.append(context)
            return drawn
        finally:
            self.router.release(session)

    async def _let_in(self, *given: Any) -> int:
        async with self.room:
            return await self._episode(*given)

    async def _group(self, index: int) -> Group:
        seed, size, share = self.run_settings.seed, self.work.group_size, self.work.valid_share
        draws = random.Random(f"{seed}/{index}")
        luck, prompt = draws.random(), max(1, int(self.work.prompt * draws.uniform(0.5, 1.5)))
        played = [self.work.episode(random.Random(f"{seed}/{index}/{number}")) for number in range(size)]
        valid = len(set(map(len, played))) > 1 if share is None else luck < share
        seen = self.groups.setdefault(index, _Drawn(read=prompt))
        oldest: list[int] = []
        running = [
            asyncio.ensure_future(self._let_in(index, number, turns, prompt, seen, oldest))
            for number, turns in enumerate(played)
        ]
        try:
            drawn = await asyncio.gather(*running)
        except _NoLonger:
            raise StaleGroup(size, seen.tokens) from None
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        rewards = [float(valid and n == 0) for n in range(size)]
        episodes = [_episode(*one) for one in zip(rewards, drawn, seen.contexts, strict=True)]
        return Group(index, "e", min(oldest), episodes)

    def _next(self) -> Coroutine[Any, Any, Group]:
        index, self.started = self.started, self.started + 1
        return self._group(index)

    async def run(self) -> Outcome:
        """As `astra_jax.grpo.train` does it."""
        run, steps = self.run_settings, []
        for name, server in self.servers.items():
            self.router.open(name, server.speed.cache_tokens)
        entered: list[int] = []
        concurrent, oversample = run.concurrent_groups, 1.0
        if not run.async_steps:
            concurrent, oversample = groups_started_at_once(concurrent, run.work.batch_size), run.oversample
        scheduler = GroupScheduler(
            self.buffer, self._next, in_order=not run.async_steps, concurrent=concurrent, oversample=oversample,
            on_group=lambda group, _: entered.append(group.index),
        )  # fmt: skip
        for update in range(run.updates):
            started = now()
            if not run.async_steps or not update:
                scheduler.sample_until(update + run.async_steps + 1)
            assert await scheduler.ready()
            waited = now() - started
            groups = self.buffer.take()
            counts = self.buffer.counts
            age = sum(update - group.update for group in groups) / len(groups)
            bound = self.lower_bound([] if run.async_steps else entered)
            entered.clear()
            scheduler.begin(update + 1)
            tokens = sum(one.token_ids[0] for group in groups for one in group.episodes)
            begun = now()
            await asyncio.sleep(run.update_seconds(tokens))
            updated = now()
            await asyncio.sleep(run.publish_seconds)
            published = now()
            if run.async_steps:
                scheduler.sample_until(update + 1 + run.async_steps + 1)
            await asyncio.gather(*(server.sync(update + 1) for server in self.servers.values()))
            seconds = {"step": now() - started, "wait": waited, "update": updated - begun}
            seconds |= {"publish": published - updated, "sync": now() - published}
            lost = {"sampled": counts.sampled, "expired": counts.expired, "cancelled": counts.cancelled}
            steps.append(SimulatedStep(**seconds, age=age, bound=bound, **lost))
        ended = now()
        await scheduler.close()
        busy = sum(server.busy_seconds for server in self.servers.values()) / (len(self.servers) * ended)
        placed = max(1, self.router.stayed + self.router.moved)
        return Outcome(
            steps[1 + run.async_steps :], self.router.stayed / placed, busy, self.buffer.lengths.bias,
            self.drawn_tokens, self.calls, self.call_seconds, ended, self.router.placed,
        )  # fmt: skip

    def lower_bound(self, indices: list[int]) -> float:
        """Seconds that these groups take at least: all of the fleet at its fastest, and the longest episode alone."""
        if not indices:
            return 0.0
        groups = [self.groups[index] for index in indices]
        contexts = [one for group in groups for one in group.contexts]
        half = sum(contexts) / len(contexts) / 2
        rate = sum(speed.most_tokens_per_second(half) for speed in self.run_settings.servers)
        reading = sum(1 / max(1e-12, speed.prefill_seconds) for speed in self.run_settings.servers)
        work = sum(group.tokens for group in groups) / rate + sum(group.read for group in groups) / reading
        return max(work, max(group.longest for group in groups))


class _NoLonger(Exception):
    """The tokens of a group are too old."""


def _episode(reward: float, drawn: int, context: int) -> Episode:
    """Return an episode with these numbers of sampled and of all tokens; each number is one entry, not one for each
    token."""
    score = Reward(value=reward, recall=reward, precision=reward, solved=0, needed=1, calls=1)
    return Episode("e", [context], 0, [drawn], [0.0], [0], [], score, 1, "answered", [])


def simulated(run: SimulatedRun) -> Outcome:
    """Return the result of a run."""

    async def whole() -> Outcome:
        return await Simulation(run).run()

    gc.disable()  # thousands of tasks, none of which is garbage before it ends
    try:
        return in_simulated_time(whole())
    finally:
        gc.enable()


def bound_of(outcome: Outcome, run: SimulatedRun) -> str:
    """Return the bottleneck: rollout, sandbox, sync or update.

    Strictly online nothing runs in parallel, so it is the part that takes most of a step. Otherwise it is rollouts if
    the trainer waits for them for more than a twentieth of a step, or the sandbox if its processes are busier than the
    servers. Else it is the update or the sync.
    """
    wait, update = outcome.mean("wait"), outcome.mean("update")
    sync = outcome.mean("publish") + outcome.mean("sync")
    calls = outcome.call_seconds / (run.sandboxes * outcome.seconds)
    rollout = "sandbox" if calls > outcome.busy else "rollout"
    if wait > (0.05 * outcome.mean("step") if run.async_steps else max(update, sync)):
        return rollout
    return "sync" if sync > update else "update"


def lognormal(draws: random.Random, mean: float, sigma: float) -> float:
    """Return a sample with this mean."""
    return draws.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
