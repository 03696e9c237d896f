"""Adaptive batch filling (paper §3.1): sample until n groups are worth training on; surplus waits for the next update.

A group is valid when the standard deviation of its rewards exceeds delta: in a group of equal rewards every advantage
is zero, and it would only thin the batch out.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from astra_jax.rollout.episode import Episode
from astra_jax.rollout.packed import CompactEpisode, compact, expanded
from astra_jax.rollout.sessions import MASK_REASONS, Masked
from synthesis.core.typed import convert_to


def begun_at_once(concurrent: int, size: int) -> int:
    """How many groups `fill` may have begun that have not entered, where as many episodes are under way at once as
    `concurrent` groups have.

    A group ends with its slowest episode, and enters behind those begun before it; meanwhile the room that the others
    leave is for episodes of groups begun later. Twice as many are begun, so, but no more for that than two batches: the
    share of valid groups is little known when the first have entered, and what is begun in vain is surplus. (14B,
    batches of 256, the episodes of 64 groups at once: 2, 8 and 16 simulated servers take 9, 21 and 28 % less time for a
    batch so. `python -m benchmarks.rl_simulation --async_steps=0 --concurrent_groups=64`.)

    Args:
        size: groups in a batch.
    """
    return max(concurrent, 2 * min(concurrent, size))


def group_deviation(rewards: Sequence[float]) -> float:
    """Population standard deviation of a group's rewards; exactly 0 when they are equal (rounding would say 1e-17)."""
    values = np.asarray(rewards, dtype=np.float64)
    return float(values.std()) if values.size and values.min() < values.max() else 0.0


class Group(msgspec.Struct, frozen=True):
    """The episodes of one prompt.

    Attributes:
        update: whose weights sampled their oldest token.
        episodes: the scored ones.
        masked: why each of the others has no score.
    """

    index: int
    environment_id: str
    update: int
    episodes: list[Episode]
    masked: list[Masked] = []

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @property
    def deviation(self) -> float:
        return group_deviation(self.rewards)


class _Waiting(msgspec.Struct, frozen=True):
    """A group in a checkpoint. (8,192 episodes of 30,000 tokens that wait, as lists of numbers, are 7.6 GB of JSON.)"""

    index: int
    environment_id: str
    update: int
    episodes: list[CompactEpisode]


class FillCounts(msgspec.Struct):
    """What happened to groups since `GroupBuffer.begin`.

    Attributes:
        sampled, valid: groups that finished, and those of them that are worth training on.
        voided: groups with fewer than two scored episodes.
        equal: groups whose rewards are all the same number.
        within_delta: groups whose rewards differ, by no more than delta.
        largest_deviation: of the rewards of a group in `within_delta`.
        wasted_episodes, sampled_episodes: scored ones of groups that finished: of those not valid, and of all.
        masked: episodes without a score, of groups that finished, by reason.
        examples: the first message of each of those reasons.
        expired: valid groups that left untrained, too old.
        cancelled: groups that did not finish: still under way when the deadline had passed and the batch was full, or
            already too old to be trained on.
    """

    sampled: int = 0
    valid: int = 0
    voided: int = 0
    wasted_episodes: int = 0
    sampled_episodes: int = 0
    expired: int = 0
    cancelled: int = 0
    equal: int = 0
    within_delta: int = 0
    largest_deviation: float = 0.0
    masked: dict[str, int] = {}
    examples: dict[str, str] = {}

    @property
    def valid_share(self) -> float:
        return self.valid / self.sampled if self.sampled else 1.0

    @property
    def masked_episodes(self) -> int:
        return sum(self.masked.values())

    @property
    def masked_share(self) -> float:
        """Masked episodes over all episodes of groups that finished."""
        return self.masked_episodes / max(1, self.sampled_episodes + self.masked_episodes)

    def mask(self, episodes: Sequence[Masked]) -> None:
        """Count episodes without a score."""
        for reason, count in Counter(one.reason for one in episodes).items():
            self.masked[reason] = self.masked.get(reason, 0) + count
        for one in episodes:
            self.examples.setdefault(one.reason, one.message)

    @property
    def why_masked(self) -> str:
        """The reasons, the most frequent first, each with its number of episodes and a message."""
        by_count = sorted(self.masked.items(), key=lambda item: -item[1])
        return "; ".join(f"{count} {reason} ({self.examples.get(reason, ''):.300})" for reason, count in by_count)

    @property
    def wasted_share(self) -> float:
        return self.wasted_episodes / self.sampled_episodes if self.sampled_episodes else 0.0

    def metrics(self) -> dict[str, float]:
        """By name."""
        return {
            "groups_sampled": self.sampled,
            "groups_equal": self.equal,
            "groups_within_delta": self.within_delta,
            "groups_voided": self.voided,
            "groups_expired": self.expired,
            "groups_cancelled": self.cancelled,
            "valid_share": self.valid_share,
            "wasted_share": self.wasted_share,
            "masked_episodes": self.masked_episodes,
            "masked_share": self.masked_share,
            **{f"masked_{reason}": self.masked.get(reason, 0) for reason in MASK_REASONS},
        }

    def copy(self) -> FillCounts:
        return copy.deepcopy(self)


class Lengths(msgspec.Struct):
    """Episodes and their sampled tokens since the run began: those that were trained on, and all that ended, those of
    cancelled groups as far as they had come."""

    trained: int = 0
    trained_tokens: int = 0
    drawn: int = 0
    drawn_tokens: int = 0

    @property
    def bias(self) -> float:
        """Mean length of what is trained on over that of what is sampled: below 1 short episodes are preferred."""
        if not self.trained_tokens or not self.drawn_tokens:
            return 1.0
        return self.trained_tokens / self.trained / (self.drawn_tokens / self.drawn)


class GroupBuffer:
    """Valid groups that wait to be trained on."""

    def __init__(self, size: int, *, delta: float, max_age: int) -> None:
        """
        Args:
            size: groups in a batch, n.
            delta: a group is valid when Std(reward) > delta; >= 0.
            max_age: a group trains at most this many updates after the one it was sampled in; 0 drops all surplus.
        """
        if size < 1:
            raise ValueError(f"batch_size is {size}; a batch needs at least 1 group")
        if delta < 0 or max_age < 0:
            raise ValueError(f"delta ({delta}) and surplus_max_age ({max_age}) must not be negative")
        self.size, self.delta, self.max_age = size, delta, max_age
        self.groups: list[Group] = []
        self.counts, self.lengths = FillCounts(), Lengths()
        self.update = 0

    @property
    def missing(self) -> int:
        """How many more valid groups the batch needs."""
        return max(0, self.size - len(self.groups))

    def begin(self, update: int) -> None:
        """Start filling for `update`: groups that are too old by now leave, counted."""
        self.update = update
        kept = [group for group in self.groups if not self.too_old(group.update)]
        self.counts = FillCounts(expired=len(self.groups) - len(kept))
        self.groups = kept

    def too_old(self, update: int) -> bool:
        """Whether what that update's weights drew can be trained on no more."""
        return self.update - update > self.max_age

    @property
    def summary(self) -> str:
        """The numbers of groups since `begin`, with the reasons for which groups are not trained on."""
        counts = self.counts
        parts = [f"{counts.sampled} groups sampled", f"{counts.valid} valid", f"{counts.equal} of equal rewards"]
        if counts.within_delta:
            deviation = f"{counts.largest_deviation:.3g}"
            parts.append(
                f"{counts.within_delta} with a reward deviation up to delta (largest {deviation}, delta {self.delta:g})"
            )
        if counts.voided:
            parts.append(f"{counts.voided} with fewer than two scored episodes")
        if counts.expired:
            parts.append(f"{counts.expired} valid ones too old")
        if counts.cancelled:
            parts.append(f"{counts.cancelled} cancelled, too old or past deadline_seconds")
        return ", ".join(parts)

    def add(self, group: Group) -> bool:
        """Count a sampled group and keep it if it is valid and not too old; returns whether it is valid."""
        deviation = group.deviation
        valid = deviation > self.delta
        self.counts.sampled += 1
        self.counts.sampled_episodes += len(group.episodes)
        self.counts.mask(group.masked)
        self.lengths.drawn += len(group.episodes)
        self.lengths.drawn_tokens += _tokens(group)
        if valid:
            self.counts.valid += 1
            if self.too_old(group.update):
                self.counts.expired += 1
            else:
                self.groups.append(group)
        else:
            self.counts.wasted_episodes += len(group.episodes)
            if len(group.episodes) < 2:
                self.counts.voided += 1
            elif deviation > 0:
                self.counts.within_delta += 1
                self.counts.largest_deviation = max(self.counts.largest_deviation, deviation)
            else:
                self.counts.equal += 1
        return valid

    def give_up(self, episodes: int, tokens: int) -> None:
        """Count a group that will not finish, and what it had sampled."""
        self.counts.cancelled += 1
        self.lengths.drawn += episodes
        self.lengths.drawn_tokens += tokens

    def take(self) -> list[Group]:
        """The batch: exactly `size` groups, the oldest first, of equals those that came first; the rest stays.

        Masked episodes are in `counts` and no more in the groups: a process that takes a batch from a journal has none.

        Raises:
            ValueError: fewer than `size` valid groups are here: a short batch is never trained on.
        """
        if self.missing:
            raise ValueError(f"the buffer holds {len(self.groups)} valid groups of {self.size}; keep sampling")
        self.groups.sort(key=lambda group: group.update)
        batch, self.groups = self.groups[: self.size], self.groups[self.size :]
        self.lengths.trained += sum(len(group.episodes) for group in batch)
        self.lengths.trained_tokens += sum(map(_tokens, batch))
        return [msgspec.structs.replace(group, masked=[]) for group in batch]

    def give_back(self, batch: Sequence[Group]) -> None:
        """Of a batch that was taken and is not trained on."""
        self.groups = [*batch, *self.groups]
        self.lengths.trained -= sum(len(group.episodes) for group in batch)
        self.lengths.trained_tokens -= sum(map(_tokens, batch))

    def metrics(self, batch: Sequence[Group], update: int) -> dict[str, float]:
        """How filling went: counts since `begin`, what waits now, the batch's mean age in updates, `Lengths.bias`."""
        return {
            **self.counts.metrics(),
            "surplus": len(self.groups),
            "mean_age": sum(update - group.update for group in batch) / len(batch),
            "length_bias": self.lengths.bias,
        }

    def copy(self) -> GroupBuffer:
        """As it is now; the groups themselves are shared."""
        other = GroupBuffer(self.size, delta=self.delta, max_age=self.max_age)
        other.groups, other.counts = list(self.groups), self.counts.copy()
        other.update, other.lengths = self.update, msgspec.structs.replace(self.lengths)
        return other

    def state(self) -> dict[str, Any]:
        """The waiting groups and the counts as JSON values, for a checkpoint; logprobs are rounded to float32, which is
        what training computes with."""
        groups = [
            _Waiting(group.index, group.environment_id, group.update, [compact(one) for one in group.episodes])
            for group in self.groups
        ]
        return msgspec.to_builtins({"groups": groups, "counts": self.counts, "lengths": self.lengths})

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, of this version or of one before, which had episodes as JSON."""
        self.groups = [_group(one) for one in state["groups"]]
        self.counts = convert_to(state["counts"], FillCounts)
        self.lengths = convert_to(state.get("lengths", {}), Lengths)


def _tokens(group: Group) -> int:
    return sum(sum(episode.loss_mask) for episode in group.episodes)


def _group(value: Mapping[str, Any]) -> Group:
    """A group of a `GroupBuffer.state`."""
    if not all("spans" in episode for episode in value["episodes"]):
        return _of_tokens(convert_to(value, Group))
    one = convert_to(value, _Waiting)
    return Group(one.index, one.environment_id, one.update, [expanded(episode) for episode in one.episodes])


def _of_tokens(group: Group) -> Group:
    """The group with its tokens' versions; early checkpoints have each turn's, all of which are the group's."""

    def versions(episode: Episode) -> list[int]:
        if len(episode.versions) == len(episode.token_ids):
            return episode.versions
        return [group.update * drawn for drawn in episode.loss_mask]

    episodes = [msgspec.structs.replace(episode, versions=versions(episode)) for episode in group.episodes]
    return msgspec.structs.replace(group, episodes=episodes)


async def fill(
    buffer: GroupBuffer,
    sample: Callable[[], Awaitable[Group]],
    *,
    oversample: float,
    concurrent: int,
    max_groups: int | None = None,
    deadline_seconds: float | None = None,
    on_group: Callable[[Group, bool], None] = lambda group, valid: None,
) -> bool:
    """Sample groups concurrently until the buffer holds a batch.

    Groups enter the buffer in the order in which they were started, and how many are started next depends only on the
    groups before: the batch is the same whatever the order in which they finish. A group that is under way when the
    batch is full runs to its end and is surplus.

    So the slowest group holds up all others, until the deadline. From then on they enter in the order in which they
    finish, those that were under way at the deadline are replaced by new ones, and what is under way when the batch is
    full is cancelled and counted. The batch then depends on time, and slow groups are less likely to be in it.

    Args:
        sample: starts the next group.
        oversample: groups under way = missing / share of valid groups so far x this; above 1 trades surplus for fewer
            waits at the end of a batch.
        concurrent: upper bound of groups under way: begun and not entered; those that were at the deadline come on top,
            or nothing could replace them where there are as many.
        max_groups: give up after this many groups; None never gives up.
        deadline_seconds: from now; None is never.
        on_group: told of each group and whether it was valid.

    Returns:
        True when a batch is there; False when `max_groups` were sampled and it is not.
    """
    clock = asyncio.get_running_loop().time
    deadline = math.inf if deadline_seconds is None else clock() + deadline_seconds
    running: list[asyncio.Task[Group]] = []
    late: set[asyncio.Task[Group]] | None = None  # of those running, the ones that were at the deadline
    started = 0

    def wanted() -> int:
        # The floor keeps a run of bad luck (or a hard curriculum) from asking for an unbounded number at once.
        share = max(buffer.counts.valid_share, 0.125)
        return len(late or ()) + min(concurrent, math.ceil(buffer.missing / share * oversample))

    try:
        while True:
            if late is None and clock() >= deadline:
                late = set(running)
            # In order; and once it is late, whoever is done, before others are started in their place.
            first = running[:1] if late is None else running
            task = next((task for task in first if task.done()), None)
            if late is None or task is None:
                while buffer.missing and len(running) < wanted() and (max_groups is None or started < max_groups):
                    running.append(asyncio.ensure_future(sample()))
                    started += 1
            if not running:
                return not buffer.missing
            if task is None and late is not None and not buffer.missing:
                buffer.counts.cancelled += len(running)
                return True
            if task is None:
                left = None if late is not None or deadline == math.inf else deadline - clock()
                awaited = running[:1] if late is None else running
                await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                continue
            running.remove(task)
            if late is not None:
                late.discard(task)
            group = task.result()
            on_group(group, buffer.add(group))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
