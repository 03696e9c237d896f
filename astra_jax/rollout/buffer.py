"""Buffer of valid groups, and the counts of all sampled ones (adaptive batch filling, paper §3.1).

A group is valid if the standard deviation of its rewards exceeds `min_reward_std`. With equal rewards every advantage
is zero, and the group would only dilute the batch. Valid groups beyond a batch wait for the next update.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from astra_jax.base.typed import convert_to
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import Group, PackedGroup, pack_group, unpack_group
from astra_jax.rollout.sessions import MASK_REASONS, Masked


class FillCounts(msgspec.Struct, rename={"unscored": "voided"}):  # as in checkpoints of earlier versions
    """Counts of sampled groups and episodes since `GroupBuffer.begin`; `unscored` counts groups with fewer than two
    scored episodes.

    Attributes:
        sampled, valid: finished groups, and the valid ones among them.
        equal: groups whose rewards are all equal.
        within_delta: groups whose rewards differ by at most delta.
        largest_deviation: of the rewards of a group in `within_delta`.
        wasted_episodes, sampled_episodes: scored episodes of finished groups: of invalid groups, and of all.
        masked: episodes without a score in finished groups, by reason.
        examples: the first message for each reason.
        expired: valid groups that became too old before training.
        cancelled: unfinished groups: running when the deadline had passed and the batch was full, or already too old.
    """

    sampled: int = 0
    valid: int = 0
    unscored: int = 0
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
        """Return the share of masked episodes among all episodes of finished groups."""
        return self.masked_episodes / max(1, self.sampled_episodes + self.masked_episodes)

    def mask(self, episodes: Sequence[Masked]) -> None:
        """Count episodes without a score."""
        for reason, count in Counter(one.reason for one in episodes).items():
            self.masked[reason] = self.masked.get(reason, 0) + count
        for one in episodes:
            self.examples.setdefault(one.reason, one.message)

    @property
    def why_masked(self) -> str:
        """Return the reasons, most frequent first, each with its number of episodes and a message."""
        by_count = sorted(self.masked.items(), key=lambda item: -item[1])
        return "; ".join(f"{count} {reason} ({self.examples.get(reason, ''):.300})" for reason, count in by_count)

    @property
    def wasted_share(self) -> float:
        return self.wasted_episodes / self.sampled_episodes if self.sampled_episodes else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the counts and shares by metric name."""
        return {
            "groups_sampled": self.sampled,
            "groups_equal": self.equal,
            "groups_below_min_std": self.within_delta,
            "groups_unscored": self.unscored,
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
    """Episode and token counts since the run started: trained episodes, and all ended ones. These include
    partial ones of groups that became too old, but not those of groups cancelled at the deadline."""

    trained: int = 0
    trained_tokens: int = 0
    drawn: int = 0
    drawn_tokens: int = 0

    @property
    def bias(self) -> float:
        """Return the mean length of trained over that of sampled episodes; below 1, short episodes are preferred."""
        if not self.trained_tokens or not self.drawn_tokens:
            return 1.0
        return self.trained_tokens / self.trained / (self.drawn_tokens / self.drawn)


class GroupBuffer:
    """Buffer of valid groups that wait for training."""

    def __init__(self, size: int, *, min_reward_std: float, max_age: int) -> None:
        """
        Args:
            size: groups in a batch, n.
            min_reward_std: a group is valid when Std(reward) is above it; >= 0.
            max_age: a group trains at most this many updates after the one it was sampled in; 0 drops all surplus.
        """
        if size < 1:
            raise ValueError(f"batch_size is {size}; a batch needs at least 1 group")
        if min_reward_std < 0 or max_age < 0:
            raise ValueError(
                f"min_reward_std ({min_reward_std}) and max_off_policy_steps ({max_age}) must not be negative"
            )
        self.size, self.min_reward_std, self.max_age = size, min_reward_std, max_age
        self.groups: list[Group] = []
        self.counts, self.lengths = FillCounts(), Lengths()
        self.update = 0

    @property
    def missing(self) -> int:
        """Number of valid groups that the batch still needs."""
        return max(0, self.size - len(self.groups))

    def begin(self, update: int) -> None:
        """Start filling for `update`. Groups that are now too old are removed and counted."""
        self.update = update
        kept = [group for group in self.groups if not self.too_old(group.update)]
        self.counts = FillCounts(expired=len(self.groups) - len(kept))
        self.groups = kept

    def too_old(self, update: int) -> bool:
        """Return whether tokens sampled by that update's weights are too old for training."""
        return self.update - update > self.max_age

    @property
    def summary(self) -> str:
        """Group counts since `begin`, with the reasons for exclusion."""
        counts = self.counts
        parts = [f"{counts.sampled} groups sampled", f"{counts.valid} valid", f"{counts.equal} of equal rewards"]
        if counts.within_delta:
            deviation = f"{counts.largest_deviation:.3g}"
            parts.append(
                f"{counts.within_delta} with a reward deviation up to min_reward_std (largest {deviation}, "
                f"min_reward_std {self.min_reward_std:g})"
            )
        if counts.unscored:
            parts.append(f"{counts.unscored} with fewer than two scored episodes")
        if counts.expired:
            parts.append(f"{counts.expired} valid ones too old")
        if counts.cancelled:
            parts.append(f"{counts.cancelled} cancelled, too old or past deadline_seconds")
        return ", ".join(parts)

    def add(self, group: Group) -> bool:
        """Count a sampled group, and keep it if it is valid and recent enough. Return whether it is valid."""
        deviation = group.deviation
        valid = deviation > self.min_reward_std
        self.counts.sampled += 1
        self.counts.sampled_episodes += len(group.episodes)
        self.counts.mask(group.masked)
        self.lengths.drawn += len(group.episodes)
        self.lengths.drawn_tokens += group.sampled_tokens
        if valid:
            self.counts.valid += 1
            if self.too_old(group.update):
                self.counts.expired += 1
            else:
                self.groups.append(group)
        else:
            self.counts.wasted_episodes += len(group.episodes)
            if len(group.episodes) < 2:
                self.counts.unscored += 1
            elif deviation > 0:
                self.counts.within_delta += 1
                self.counts.largest_deviation = max(self.counts.largest_deviation, deviation)
            else:
                self.counts.equal += 1
        return valid

    def count_cancelled(self, episodes: int, tokens: int) -> None:
        """Count a group that will not finish, and the tokens it sampled."""
        self.counts.cancelled += 1
        self.lengths.drawn += episodes
        self.lengths.drawn_tokens += tokens

    def take(self) -> list[Group]:
        """Remove and return the batch: exactly `size` groups, the oldest first, ties in order of arrival.

        Masked episodes are removed from the groups (`counts` has them), since a batch read from a journal has none
        either.

        Raises:
            ValueError: there are fewer than `size` valid groups. A short batch is never trained on.
        """
        if self.missing:
            raise ValueError(f"the buffer holds {len(self.groups)} valid groups of {self.size}; keep sampling")
        self.groups.sort(key=lambda group: group.update)
        batch, self.groups = self.groups[: self.size], self.groups[self.size :]
        self.lengths.trained += sum(len(group.episodes) for group in batch)
        self.lengths.trained_tokens += sum(group.sampled_tokens for group in batch)
        return [msgspec.structs.replace(group, masked=[]) for group in batch]

    def give_back(self, batch: Sequence[Group]) -> None:
        """Put a batch from `take` back that will not be trained on."""
        self.groups = [*batch, *self.groups]
        self.lengths.trained -= sum(len(group.episodes) for group in batch)
        self.lengths.trained_tokens -= sum(group.sampled_tokens for group in batch)

    def metrics(self, batch: Sequence[Group], update: int) -> dict[str, float]:
        """Return the counts since `begin`, the surplus, the batch's mean age in updates, and `Lengths.bias`."""
        return {
            **self.counts.metrics(),
            "surplus": len(self.groups),
            "mean_age": sum(update - group.update for group in batch) / len(batch),
            "length_bias": self.lengths.bias,
        }

    def copy(self) -> GroupBuffer:
        """Return a copy that shares the groups themselves."""
        other = GroupBuffer(self.size, min_reward_std=self.min_reward_std, max_age=self.max_age)
        other.groups, other.counts = list(self.groups), self.counts.copy()
        other.update, other.lengths = self.update, msgspec.structs.replace(self.lengths)
        return other

    def state(self) -> dict[str, Any]:
        """Return the waiting groups and the counts as JSON values for a checkpoint. Logprobs are rounded to float32,
        the dtype of training."""
        groups = [pack_group(group) for group in self.groups]
        return msgspec.to_builtins({"groups": groups, "counts": self.counts, "lengths": self.lengths})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`, also of version 0.1, whose episodes are JSON."""
        self.groups = [_group(one) for one in state["groups"]]
        self.counts = convert_to(state["counts"], FillCounts)
        self.lengths = convert_to(state.get("lengths", {}), Lengths)


def _group(value: Mapping[str, Any]) -> Group:
    """Parse a group of a `GroupBuffer.state`."""
    if all("spans" in episode for episode in value["episodes"]):
        return unpack_group(convert_to(value, PackedGroup))
    group = convert_to(value, Group)
    return msgspec.structs.replace(group, episodes=[_of_tokens(one, group.update) for one in group.episodes])


def _of_tokens(episode: Episode, update: int) -> Episode:
    """Return the episode with a version per token; version 0.1 has one per turn, all equal to the group's update."""
    if len(episode.versions) == len(episode.token_ids):
        return episode
    return msgspec.structs.replace(episode, versions=[update * sampled for sampled in episode.loss_mask])
