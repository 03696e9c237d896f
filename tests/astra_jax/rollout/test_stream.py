"""Groups under way across updates, over random lengths, rewards, deaths and syncs: what must hold for all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astra_jax.rollout.buffer import FillCounts, GroupBuffer
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import Group
from astra_jax.rollout.scheduler import GroupScheduler, StaleGroup
from synthesis.core.reward import Reward

DELTA = 0.01


def episode(value: float, versions: list[int]) -> Episode:
    n = len(versions)
    score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
    return Episode("e", [1] * (n + 1), 1, [0] + [1] * n, [-1.0] * (n + 1), [0, *versions], [], score, 1, "answered", [])


@dataclass
class Emulated:
    """A policy whose tokens each take a moment, and whose groups have random lengths, rewards and deaths.

    Args:
        long: share of the episodes that are ten times as long as others.
        gives_up: groups end when they are too old; else they go on to their end.
    """

    seed: int
    valid: float = 0.5
    dead: float = 0.1
    long: float = 0.2
    gives_up: bool = True
    version: int = 0
    started: int = 0
    most: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    async def __call__(self) -> Group:
        index, self.started = self.started, self.started + 1
        self.most = max(self.most, self.started - len(self.ended))
        draws = random.Random(f"{self.seed}/{index}")
        lengths = [draws.randint(1, 4) * (10 if draws.random() < self.long else 1) for _ in range(2)]
        self.lengths += lengths
        rewards = [0.0, 1.0] if draws.random() < self.valid else [0.5, 0.5]
        alive = [value for value in zip(rewards, lengths, strict=True) if draws.random() >= self.dead]
        drawn: list[list[int]] = [[] for _ in alive]
        for step in range(max(lengths)):
            await asyncio.sleep(0)
            for (_, length), versions in zip(alive, drawn, strict=True):
                if step < length:
                    versions.append(self.version)
            oldest = min((versions[0] for versions in drawn if versions), default=self.version)
            if self.gives_up and self.too_old(oldest):
                self.ended[index] = "given up"
                raise StaleGroup(len(drawn), sum(map(len, drawn)))
        self.ended[index] = "whole"
        oldest = min((min(versions) for versions in drawn), default=self.version)
        return Group(index, "e", oldest, [episode(v, d) for (v, _), d in zip(alive, drawn, strict=True)])

    def too_old(self, version: int) -> bool:
        return False


@dataclass
class Run:
    batches: list[list[Group]]
    counts: list[FillCounts]
    metrics: list[dict[str, float]]
    waiting: list[Group]
    under_way: int


def trained(policy: Emulated, *, k: int, size: int, updates: int, concurrent: int, longest_update: int = 60) -> Run:
    """A trainer that takes batches, and has the policy's weights updated some time later."""
    buffer = GroupBuffer(size, min_reward_std=DELTA, max_age=k)
    policy.too_old = buffer.too_old
    run, pauses = Run([], [], [], [], 0), random.Random(policy.seed)

    async def loop() -> None:
        scheduler = GroupScheduler(buffer, policy, in_order=False, concurrent=concurrent)
        scheduler.sample_until(min(k + 1, updates))
        for update in range(updates):
            assert await scheduler.ready()
            run.batches.append(buffer.take())
            run.counts.append(buffer.counts)
            run.metrics.append(buffer.metrics(run.batches[-1], update))
            scheduler.begin(update + 1)
            for _ in range(pauses.randrange(longest_update)):  # of training
                await asyncio.sleep(0)
            policy.version = update + 1
            scheduler.sample_until(min(update + 1 + k + 1, updates))
        for _ in range(200):
            await asyncio.sleep(0)
        run.counts.append(buffer.counts)
        run.waiting, run.under_way = list(buffer.groups), policy.started - len(policy.ended)
        await scheduler.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(loop())
    return run


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 4),
    size=st.integers(1, 5),
    valid=st.sampled_from([0.2, 0.6, 1.0]),
    dead=st.sampled_from([0.0, 0.3]),
    concurrent=st.integers(1, 12),
    gives_up=st.booleans(),
)
def test_no_group_is_trained_twice_and_none_is_lost(seed, k, size, valid, dead, concurrent, gives_up) -> None:
    policy = Emulated(seed, valid=valid, dead=dead, gives_up=gives_up)
    run = trained(policy, k=k, size=size, updates=6, concurrent=concurrent)
    groups = [(update, group) for update, batch in enumerate(run.batches) for group in batch]
    assert all(len(batch) == size for batch in run.batches), "never a short batch"
    assert all(group.deviation > DELTA for _, group in groups), "only groups worth training on"
    assert max(Counter(group.index for _, group in groups).values()) == 1
    for update, group in groups:
        versions = {version for one in group.episodes for version in one.sampled_by}
        assert group.update == min(versions) and max(versions) <= update and update - min(versions) <= k
    total = Counter()
    for counts in run.counts:
        total.update({name: getattr(counts, name) for name in ("sampled", "valid", "expired", "cancelled")})
    # Every group that was started was trained on, or had equal rewards, or was dropped and counted, or is there.
    assert total["valid"] == len(groups) + total["expired"] + len(run.waiting)
    assert total["sampled"] + total["cancelled"] + run.under_way == policy.started
    assert total["cancelled"] == sum(how == "given up" for how in policy.ended.values())
    assert gives_up or total["cancelled"] == 0


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), size=st.integers(1, 4))
def test_no_more_is_sampled_ahead_than_can_be_trained_on(seed, k, size) -> None:
    """Where all groups are worth it, and no one is slow, none is in vain, and k batches are ahead when one is taken."""
    policy = Emulated(seed, valid=1.0, dead=0.0, long=0.0)
    run = trained(policy, k=k, size=size, updates=8, concurrent=100)
    assert policy.started == 8 * size and not run.waiting and run.under_way == 0
    assert all(counts.expired == counts.cancelled == 0 for counts in run.counts)
    assert sum(metrics["mean_age"] for metrics in run.metrics) / 8 >= k / 2


def test_what_long_episodes_lose_is_measured() -> None:
    """Dropped for their age they are trained on less than they are sampled; with more patience they are not."""
    bias = []
    for k in (1, 8):
        policy = Emulated(0, valid=1.0, dead=0.0, long=0.15)
        run = trained(policy, k=k, size=4, updates=60, concurrent=24, longest_update=20)
        bias.append(run.metrics[-1]["length_bias"])
    assert bias[0] < 0.85 and 0.95 < bias[1] < 1.05, bias


async def test_a_group_that_fails_ends_the_run() -> None:
    async def sample() -> Group:
        raise RuntimeError("sandbox is gone")

    buffer = GroupBuffer(2, min_reward_std=DELTA, max_age=1)
    scheduler = GroupScheduler(buffer, sample, in_order=False, concurrent=4)
    scheduler.sample_until(2)
    with pytest.raises(RuntimeError, match="sandbox is gone"):
        await scheduler.ready()
    await scheduler.close()


async def test_a_batch_that_never_comes_is_given_up() -> None:
    policy = Emulated(0, valid=0.0)
    buffer = GroupBuffer(2, min_reward_std=DELTA, max_age=1)
    scheduler = GroupScheduler(buffer, policy, in_order=False, concurrent=4, max_groups=7)
    scheduler.sample_until(2)
    assert not await scheduler.ready() and policy.started == 7 == buffer.counts.sampled
    await scheduler.close()


async def test_the_limit_of_groups_is_of_one_batch() -> None:
    policy = Emulated(0, valid=1.0, dead=0.0, long=0.0)
    buffer = GroupBuffer(2, min_reward_std=DELTA, max_age=1)
    scheduler = GroupScheduler(buffer, policy, in_order=False, concurrent=4, max_groups=3)
    for update in range(4):
        policy.version = update
        scheduler.sample_until(update + 1)
        assert await scheduler.ready() and len(buffer.take()) == 2
        scheduler.begin(update + 1)
    await scheduler.close()


def test_as_many_groups_run_as_the_share_of_valid_ones_asks_for() -> None:
    """A quarter is worth training on: more than the missing ones run at once, so that a batch takes fewer rounds."""
    policy = Emulated(0, valid=0.25, dead=0.0, long=0.0)
    trained(policy, k=1, size=4, updates=3, concurrent=100)
    assert policy.most > 2 * 4
