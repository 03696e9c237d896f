"""Adaptive batch filling over random reward streams: what must hold for every one of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_rollouts import CONFIG, ENVIRONMENTS, Sampler, Tables

from astra_jax.base.settings import SettingError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.rollouts import Rollouts
from astra_jax.rollout.buffer import GroupBuffer
from astra_jax.rollout.episode import Episode, EpisodeConfig
from astra_jax.rollout.records import Group
from astra_jax.rollout.scheduler import GroupScheduler
from astra_jax.rollout.sessions import Masked
from synthesis.core.reward import Reward


def episode(value: float) -> Episode:
    score = Reward(value=value, recall=value, precision=value, solved=0, needed=1, calls=1)
    return Episode("e", [1, 2], 1, [0, 1], [0.0, -1.0], [0, 0], [], score, 1, "answered", [])


def group(index: int, rewards: list[float], update: int = 0) -> Group:
    return Group(index=index, environment_id="e", update=update, episodes=[episode(r) for r in rewards])


class Stream:
    """Groups with given rewards; those of one batch finish in a random order."""

    def __init__(self, seed: int, valid_probability: float) -> None:
        self.seed, self.probability = seed, valid_probability
        self.index = self.update = self.under_way = self.most = 0
        self.order = random.Random(seed)

    def __call__(self):
        index, self.index = self.index, self.index + 1
        return self.sample(index)

    async def sample(self, index: int) -> Group:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(self.order.randrange(5)):
            await asyncio.sleep(0)
        self.under_way -= 1
        valid = random.Random(f"{self.seed}/{index}").random() < self.probability
        return group(index, [0.0, 1.0] if valid else [0.5, 0.5], self.update)


async def fill(buffer: GroupBuffer, sample, **options) -> bool:
    scheduler = GroupScheduler(buffer, sample, in_order=True, **options)
    scheduler.sample_until(buffer.update + 1)
    try:
        return await scheduler.ready()
    finally:
        await scheduler.close()


def run_updates(seed, probability, size, max_age, oversample, concurrent, updates, order_seed=0):
    stream = Stream(seed, probability)
    stream.order = random.Random(order_seed)
    buffer = GroupBuffer(size, min_reward_std=0.01, max_age=max_age)
    batches, counts = [], []

    async def loop():
        scheduler = GroupScheduler(buffer, stream, in_order=True, oversample=oversample, concurrent=concurrent)
        for update in range(updates):
            stream.update = update
            for _ in range(5):  # nothing is sampled before the weights are there
                await asyncio.sleep(0)
            assert stream.under_way == 0
            scheduler.sample_until(update + 1)
            assert await scheduler.ready()
            batches.append(buffer.take())
            counts.append(buffer.counts)
            scheduler.begin(update + 1)
        counts.append(buffer.counts)  # of those that are too old for a next update
        await scheduler.close()

    asyncio.run(loop())
    return stream, buffer, batches, counts


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    probability=st.sampled_from([0.1, 0.3, 0.8, 1.0]),
    size=st.integers(1, 9),
    max_age=st.integers(0, 2),
    oversample=st.sampled_from([1.0, 1.25, 3.0]),
    concurrent=st.integers(1, 20),
)
def test_every_stream_gives_full_fresh_batches(seed, probability, size, max_age, oversample, concurrent):
    stream, buffer, batches, counts = run_updates(seed, probability, size, max_age, oversample, concurrent, updates=5)
    trained = [g.index for batch in batches for g in batch]
    assert all(len(batch) == size for batch in batches), "never a short batch"
    assert all(g.deviation > 0.01 for batch in batches for g in batch), "only valid groups train"
    assert len(set(trained)) == len(trained), "a group trains at most once"
    assert all(0 <= update - g.update <= max_age for update, batch in enumerate(batches) for g in batch), "age bound"
    assert trained == sorted(trained), "oldest first"
    assert stream.most <= concurrent
    # Nothing is lost: every sampled group was trained, wasted, expired, or still waits.
    valid = sum(c.valid for c in counts)
    assert valid == len(trained) + sum(c.expired for c in counts) + len(buffer.groups)
    assert sum(c.sampled for c in counts) == stream.index
    for c in counts:
        assert c.wasted_episodes == 2 * (c.sampled - c.valid)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), order_seed=st.integers(1, 10**6))
def test_batches_do_not_depend_on_the_order_of_completion(seed, order_seed):
    arguments = (seed, 0.4, 4, 1, 1.5, 8, 3)
    _, _, first, _ = run_updates(*arguments)
    _, _, second, _ = run_updates(*arguments, order_seed=order_seed)
    assert [[g.index for g in batch] for batch in first] == [[g.index for g in batch] for batch in second]


def test_surplus_trains_one_update_late_or_is_dropped():
    for max_age, expected in ((1, [0, 0]), (0, [1, 1])):
        buffer = GroupBuffer(2, min_reward_std=0.0, max_age=max_age)
        buffer.begin(0)
        for index in range(4):
            buffer.add(group(index, [0.0, 1.0], update=0))
        buffer.take()
        buffer.begin(1)
        assert buffer.counts.expired == (0 if max_age else 2)
        for index in range(4, 6):
            buffer.add(group(index, [0.0, 1.0], update=1))
        assert [g.update for g in buffer.take()] == expected


def test_gives_up_at_max_groups_and_keeps_what_it_has():
    buffer = GroupBuffer(3, min_reward_std=0.01, max_age=1)
    buffer.begin(0)
    stream = Stream(0, 0.0)
    assert not asyncio.run(fill(buffer, stream, oversample=1.25, concurrent=4, max_groups=10))
    assert stream.index == 10 == buffer.counts.sampled
    with pytest.raises(ValueError, match="keep sampling"):
        buffer.take()


class Slow(Sampler):
    """One episode waits until one of another group is asked for; counts what is under way."""

    def __init__(self, tokenizer, slow: str, until: str) -> None:
        super().__init__(tokenizer)
        self.slow, self.until, self.come = slow, until, asyncio.Event()
        self.under_way = self.most = 0

    async def generate(self, token_ids, sampling, *, session=""):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if session.startswith(self.until):
            self.come.set()
        if session == self.slow:
            await self.come.wait()
        completion = await super().generate(token_ids, sampling, session=session)
        self.under_way -= 1
        return completion


async def test_who_comes_behind_a_slow_episode_takes_the_room_that_its_group_leaves(chat_tokenizer) -> None:
    """No more episodes are under way than `concurrent_groups` have, and the batch is the one that it would be."""
    config = dataclasses.replace(CONFIG, batch_size=4, concurrent_groups=2)
    assert (config.episodes_at_once, config.groups_at_once) == (6, 4)
    batches = []
    for policy in (Slow(chat_tokenizer, "group0.1", until="group3"), Slow(chat_tokenizer, "", until="none")):
        rollouts = Rollouts(policy, Tables(), ENVIRONMENTS, chat_tokenizer, config)
        await asyncio.wait_for(rollouts.fill(0), timeout=60)
        batch = rollouts.take()
        assert batch is not None and 1 < policy.most <= 6
        batches.append([(one.index, [episode.token_ids for episode in one.episodes]) for one in batch.groups])
    assert batches[0] == batches[1]


def test_twice_as_many_groups_are_begun_but_no_more_than_two_batches() -> None:
    for concurrent, size, begun in ((4, 16, 8), (64, 256, 128), (256, 256, 512), (300, 256, 512), (1_024, 256, 1_024)):
        assert GRPOConfig(concurrent_groups=concurrent, batch_size=size).groups_at_once == begun


def test_a_limit_is_there_unless_another_is_given():
    assert GRPOConfig(batch_size=4).most_groups == 64
    assert GRPOConfig(batch_size=4, max_groups_per_step=7).most_groups == 7


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_group_is_left_out_for_its_true_reason_whatever_the_scale_of_rewards(scale: float) -> None:
    buffer = GroupBuffer(2, min_reward_std=0.01 * scale, max_age=1)
    for rewards in ([], [1.0], [0.3, 0.3, 0.3], [0.5, 0.501], [0.5, 0.508], [0.0, 1.0]):
        buffer.add(group(len(rewards), [reward * scale for reward in rewards]))
    assert (buffer.counts.unscored, buffer.counts.equal, buffer.counts.within_delta, buffer.counts.valid) == (
        2,
        1,
        2,
        1,
    )
    assert buffer.counts.largest_deviation == pytest.approx(0.004 * scale)
    assert buffer.summary == (
        "6 groups sampled, 1 valid, 1 of equal rewards, 2 with a reward deviation up to min_reward_std "
        f"(largest {0.004 * scale:.3g}, min_reward_std {0.01 * scale:g}), 2 with fewer than two scored episodes"
    )


def test_a_delta_that_no_group_could_exceed_is_refused() -> None:
    for reward, delta in (("f1:0.001", 0.01), ("f1", 0.5), ("f1:0.3,format:-0.3", 0.3)):
        with pytest.raises(SettingError, match=r"min_reward_std is .*; use a number below .* no batch could be filled"):
            GRPOConfig(min_reward_std=delta, episode=EpisodeConfig(reward=reward))
    GRPOConfig(min_reward_std=5.0, episode=EpisodeConfig(reward="f1:1000"))
    GRPOConfig(min_reward_std=1e-4, episode=EpisodeConfig(reward="f1:0.001"))


def test_masked_episodes_are_counted_by_reason_and_survive_a_checkpoint() -> None:
    buffer = GroupBuffer(2, min_reward_std=0.01, max_age=1)
    gone, broken = Masked("request_failed", "the server is away"), Masked("reward_failed", "score raised KeyError")
    buffer.add(msgspec.structs.replace(group(0, [0.0, 1.0]), masked=[gone, broken]))
    before = buffer.copy()
    buffer.add(msgspec.structs.replace(group(1, [1.0]), masked=[gone, Masked("request_failed", "another one")]))
    assert before.counts.masked == {"request_failed": 1, "reward_failed": 1}
    other = GroupBuffer(2, min_reward_std=0.01, max_age=1)
    other.load(json.loads(json.dumps(buffer.state())))
    assert other.counts == buffer.counts and other.counts.masked_share == 4 / 7
    metrics = other.counts.metrics()
    assert metrics["masked_request_failed"] == 3 and metrics["masked_sandbox_failed"] == 0
    assert other.counts.why_masked == "3 request_failed (the server is away); 1 reward_failed (score raised KeyError)"


def test_failure_of_one_group_stops_the_others():
    async def run():
        async def sample():
            raise RuntimeError("sandbox is gone")

        buffer = GroupBuffer(3, min_reward_std=0.01, max_age=1)
        buffer.begin(0)
        with pytest.raises(RuntimeError, match="sandbox is gone"):
            await fill(buffer, sample, oversample=2, concurrent=8)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


NEVER = 10**9


def filled_by(deadline: float | None, after: list[int], *, size: int, concurrent: int, valid=lambda i: True):
    """Fill a batch from groups that end once `after` others have, the rest at once.

    Returns what entered, the counts, in which order groups ended, and how many never did.
    """

    async def run():
        started, ended = [], []
        another = asyncio.Condition()

        async def sample() -> Group:
            index = len(started)
            started.append(index)
            wanted = after[index] if index < len(after) else 0
            async with another:
                await another.wait_for(lambda: len(ended) >= wanted)
                ended.append(index)
                another.notify_all()
            return group(index, [0.0, 1.0] if valid(index) else [0.5, 0.5])

        buffer = GroupBuffer(size, min_reward_std=0.01, max_age=1)
        buffer.begin(0)
        options = {"oversample": 1.5, "concurrent": concurrent, "deadline_seconds": deadline}
        assert await fill(buffer, sample, **options)
        assert len(asyncio.all_tasks()) == 1, "nothing goes on"
        return [one.index for one in buffer.groups], buffer.counts, ended, len(started) - len(ended)

    return asyncio.run(run())


def test_a_slow_group_holds_up_the_batch_until_the_deadline():
    entered, counts, ended, _ = filled_by(None, [0, 5], size=4, concurrent=6)
    assert entered == list(range(6)) and ended[:6] == [0, 2, 3, 4, 5, 1] and counts.cancelled == 0
    entered, counts, ended, cut = filled_by(0.2, [0, NEVER], size=4, concurrent=6)
    assert 1 not in entered and len(entered) >= 4
    assert counts.cancelled == cut == 1 and counts.sampled == len(entered)


def test_at_the_deadline_slow_groups_are_replaced():
    """All that run are stuck: without new ones the batch would never be full."""
    entered, counts, ended, cut = filled_by(0.2, [NEVER] * 3, size=2, concurrent=16)
    assert entered[:2] == [3, 4] and counts.cancelled == cut == 3
    entered, counts, ended, cut = filled_by(0.2, [NEVER] * 3, size=2, concurrent=3)
    assert entered[:2] == [3, 4] and counts.cancelled == cut == 3, "as many as may be under way are stuck"
    # What is valid is found among the new ones too.
    entered, counts, _, _ = filled_by(0.2, [NEVER] * 3, size=2, concurrent=16, valid=lambda i: i % 2 == 0)
    assert set(entered) >= {4, 6} and counts.wasted_episodes > 0


def test_a_deadline_that_is_not_reached_changes_nothing():
    after = [3, 0, 2, 0, 1]
    assert filled_by(600.0, after, size=3, concurrent=4)[0] == filled_by(None, after, size=3, concurrent=4)[0]


def test_state_round_trip():
    buffer = GroupBuffer(1, min_reward_std=0.0, max_age=1)
    buffer.begin(0)
    buffer.add(group(0, [0.0, 1.0]))
    buffer.add(group(1, [0.0, 0.3]))
    again = GroupBuffer(1, min_reward_std=0.0, max_age=1)
    again.load(json.loads(json.dumps(buffer.state())))
    assert again.groups == buffer.groups and again.counts == buffer.counts


def test_a_checkpoint_has_what_training_computes_with_in_few_bytes():
    rng = np.random.default_rng(0)
    drawn = (np.arange(6000) % 300 > 200).tolist()
    logprobs = [-float(rng.random()) if one else 0.0 for one in drawn]
    versions = [7 if one and at < 4000 else 8 * one for at, one in enumerate(drawn)]
    ids = rng.integers(0, 151_000, len(drawn)).tolist()
    long = msgspec.structs.replace(
        episode(1.0), token_ids=ids, loss_mask=[*map(int, drawn)], logprobs=logprobs, versions=versions
    )
    buffer, again = (GroupBuffer(1, min_reward_std=0.0, max_age=1) for _ in range(2))
    buffer.groups = [Group(3, "e", 7, [long, episode(0.0)])]
    state = json.dumps(buffer.state())
    assert len(state) < 9 * len(drawn)
    again.load(json.loads(state))
    rounded = msgspec.structs.replace(long, logprobs=np.asarray(logprobs, np.float32).tolist())
    assert again.groups == [Group(3, "e", 7, [rounded, episode(0.0)])]


@pytest.mark.parametrize("waiting", [2, 1])
async def test_a_checkpoint_of_version_0_1_resumes(chat_tokenizer, waiting: int) -> None:
    """With a batch that was full and not trained on, or with a group of surplus."""
    groups = msgspec.to_builtins([group(index, [0.0, 1.0]) for index in range(waiting)])
    for one in groups:
        for each in one["episodes"]:
            each["versions"] = [0]  # of its one turn
    filling = {"filled": True, "seconds": 1.0, "rollout": {}, "counts": {}} if waiting == 2 else None
    state = {"buffer": {"groups": groups, "counts": {}}, "next_index": 9, "update": 0, "filling": filling}
    rollouts, update = Rollouts(Sampler(chat_tokenizer), Tables(), ENVIRONMENTS, chat_tokenizer, CONFIG), 2 - waiting
    rollouts.load(state)
    await rollouts.set_version(update)
    await rollouts.fill(update)
    batch = rollouts.take()
    await rollouts.close()
    first, second = batch.groups
    assert [first, second][:waiting] == [group(index, [0.0, 1.0]) for index in range(waiting)]
    assert waiting == 2 or second.index >= 9
