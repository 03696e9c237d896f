"""Batches for GRPO: sample groups, keep the valid ones, and report on the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import msgspec

from astra_jax.base.errors import UserError
from astra_jax.base.progress import log_above_progress
from astra_jax.base.typed import convert_to, decode_msgpack
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.exhaustion import Exhaustion
from astra_jax.grpo.groups import GroupSampler
from astra_jax.grpo.journal import BatchJournal, BatchManifest, Journals
from astra_jax.rollout.episode import episode_stats
from astra_jax.rollout.filling import FillCounts, Group, GroupBuffer, fill
from astra_jax.rollout.packed import Packed, packed, unpacked
from astra_jax.rollout.sampler import Sampler
from astra_jax.run.hosts import broadcast_from_host0
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.environment import AnyEnvironment

_FEWEST_MASKED = 4
"""Fewest masked episodes that stop a run; in a batch of four episodes a single one would be a quarter."""


class MaskedShareError(UserError):
    """More than `max_masked_share` of a batch's sampled episodes have no score. The message counts the reasons."""


class FillReport(msgspec.Struct):
    """Report on the rollouts of one batch.

    Attributes:
        filled: whether there is a batch; otherwise `max_groups_per_step` were sampled without one.
        seconds: from the first group's start to the last one's end, over all processes involved.
        rollout: means over all scored episodes; valid groups alone would give biased means.
        counts: of groups and episodes.
    """

    filled: bool
    seconds: float
    rollout: dict[str, float]
    counts: dict[str, float]


class GroupBatch(msgspec.Struct):
    """`batch_size` valid groups and their fill report."""

    groups: list[Group]
    filling: FillReport


@dataclass(frozen=True)
class _Snapshot:
    """State between two batches."""

    buffer: GroupBuffer
    next_index: int
    update: int
    filling: FillReport | None


class Rollouts:
    """Samples groups into a buffer and takes batches out of it.

    Between two batches, `state` is all that a resumed run needs. While a batch is filled, `state` is the state before
    it.
    """

    def __init__(
        self,
        policy: Sampler,
        sandbox: Sandbox | None,
        environments: Sequence[AnyEnvironment],
        tokenizer: ChatTokenizer,
        config: GRPOConfig,
        journals: Journals | None = None,
    ) -> None:
        """
        Args:
            journals: store a batch in progress, for a later process.
        """
        self.config, self._journals = config, journals
        self._buffer = GroupBuffer(config.batch_size, min_reward_std=config.min_reward_std, max_age=config.most_age)
        self._sampler = GroupSampler(
            policy,
            sandbox,
            environments,
            tokenizer,
            config.episode,
            group_size=config.group_size,
            seed=config.seed,
            order=config.order,
            at_once=config.episodes_at_once,
        )
        self._update = self._version = 0
        self._weights = ""
        self._filling: FillReport | None = None
        self._before: _Snapshot | None = None
        self._entered: list[Group] = []  # groups that entered for this update
        self._ended: list[int] = []

    async def follow(self, version: int, weights: str = "") -> None:
        """Note the version of the weights that the policy is about to load.

        Args:
            weights: their digest, see `BatchKey`.
        """
        self._version, self._weights = version, weights

    async def fill(self, update: int, on_group: Callable[[int], None] = lambda missing: None) -> None:
        """Sample until there is a batch, or `max_groups_per_step` are reached. Return at once if there is a batch
        already.

        Args:
            update: the update that will train on it, from the policy's current weights.
            on_group: called after each group with the number of missing groups.
        """
        if self._filling is not None:
            return
        self._before = self._resting()
        self._update = update
        self._buffer.begin(update)
        journal: BatchJournal | None = None
        if self._journals is not None:
            opened = partial(self._journals.open, update=update, version=self._version, weights=self._weights)
            journal = await asyncio.to_thread(opened, next_index=self._sampler.next_index)
        self._sampler.begin(self._version, journal)
        self._entered = []
        started = time.perf_counter()

        def told(group: Group, valid: bool) -> None:
            if valid:
                self._entered.append(group)
            on_group(self._buffer.missing)
            self._tell()
            self._check_masked(self._buffer.counts, is_whole=False)

        try:
            report = None if journal is None else self._repeated(journal)
            if report is None:
                filled = await fill(
                    self._buffer,
                    self._sampler,
                    oversample=self.config.oversample,
                    concurrent=self.config.groups_at_once,
                    max_groups=self.config.most_groups,
                    deadline_seconds=self.config.deadline_seconds,
                    on_group=told,
                )
                self._check_masked(self._buffer.counts, is_whole=True)
                seconds = time.perf_counter() - started + (0.0 if journal is None else journal.seconds)
                report = self._report(filled, seconds, journal)
                if journal is not None:
                    trained = self._buffer.copy().take() if filled else []
                    await journal.keep_batch(self._taken(trained, report))
        finally:
            if journal is not None:
                await journal.close()
        self._filling, self._before = report, None

    def _repeated(self, journal: BatchJournal) -> FillReport | None:
        """Restore a batch that an earlier process filled into the buffer, and return its report. None if it was not
        filled or is incomplete. Groups of a batch that was given up are restored too, and not sampled again."""
        if (taken := journal.batch) is None:
            return None
        if not journal.has_entered:
            journal.taken.dropped += 1
            return None
        self._entered = journal.take_entered()
        self._buffer.groups += self._entered
        self._buffer.lengths, self._sampler.next_index = taken.lengths, taken.next_index
        if not taken.trained:
            return None
        self._buffer.counts = taken.counts
        report = convert_to(taken.filling, FillReport)
        return msgspec.structs.replace(report, counts=report.counts | journal.counts())

    def _taken(self, trained: Sequence[Group], filling: FillReport) -> BatchManifest:
        """Return the journal's record of a batch with these groups."""
        return BatchManifest(
            next_index=self._sampler.next_index,
            entered=[(one.index, one.environment_id, one.update, len(one.episodes)) for one in self._entered],
            trained=[group.index for group in trained],
            ended=list(self._ended),
            filling=msgspec.to_builtins(filling),
            lengths=msgspec.structs.replace(self._buffer.lengths),
            counts=self._buffer.counts.copy(),
        )

    def _check_masked(self, counts: FillCounts, *, is_whole: bool) -> None:
        """Stop a run with too many masked episodes, since the remaining ones are not a fair sample of the policy.

        Args:
            is_whole: sampling for this batch is finished. Before that, the share is checked only after a batch's number
                of episodes.

        Raises:
            MaskedShareError: the share is above `max_masked_share`.
        """
        config, episodes = self.config, counts.sampled_episodes + counts.masked_episodes
        whole = is_whole or episodes >= config.batch_size * config.group_size
        if not whole or counts.masked_episodes < _FEWEST_MASKED or counts.masked_share <= config.max_masked_share:
            return
        raise MaskedShareError(
            f"update {self._update}: {counts.masked_episodes} of {episodes} sampled episodes are masked, "
            f"more than max_masked_share ({config.max_masked_share:g}): {counts.why_masked}. Remove the cause and run "
            "the same command again, or raise --config.grpo.max_masked_share"
        )

    def _tell(self) -> None:
        """Print a line while there is no valid group, each time the number of sampled groups has doubled."""
        counts = self._buffer.counts
        doubled, left = divmod(counts.sampled, self.config.batch_size)
        if not counts.valid and not left and doubled.bit_count() == 1:
            what = f"update {self._update}: {self._buffer.summary}"
            log_above_progress(f"{what}; at most {self.config.most_groups} are sampled")

    def _report(self, filled: bool, seconds: float, journal: BatchJournal | None) -> FillReport:
        sampler = self._sampler
        return FillReport(
            filled=filled,
            seconds=seconds,
            rollout=episode_stats(sampler.finished),
            counts={
                "episodes": len(sampler.finished),
                "cancelled_episodes": sampler.cancelled,
                **({} if journal is None else journal.counts()),
            },
        )

    def take(self) -> GroupBatch | None:
        """Return the batch and remove it from the buffer; None if it could not be filled."""
        filling, self._filling = self._filling, None
        assert filling is not None, "fill first"
        if not filling.filled:
            return None
        if self._buffer.counts.masked:
            log_above_progress(self._masked_line(self._buffer.counts))
        groups = self._buffer.take()
        filling.counts |= self._buffer.metrics(groups, self._update)
        return GroupBatch(groups, filling)

    def _masked_line(self, counts: FillCounts) -> str:
        episodes = counts.sampled_episodes + counts.masked_episodes
        return f"update {self._update}: {counts.masked_episodes} of {episodes} episodes are masked: {counts.why_masked}"

    async def close(self) -> None:
        """Do nothing: nothing runs between two batches."""

    def exhaustion(self) -> Exhaustion:
        """Return a report on the groups sampled for a batch that was not filled."""
        counts, summary = self._buffer.counts.copy(), self._buffer.summary
        return Exhaustion(self._update, self._sampler.groups, counts, summary, self.config)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        resting = self._before or self._resting()
        return {
            "buffer": resting.buffer.state(),
            "next_index": resting.next_index,
            "update": resting.update,
            "filling": msgspec.to_builtins(resting.filling),
        }

    def _resting(self) -> _Snapshot:
        return _Snapshot(self._buffer.copy(), self._sampler.next_index, self._update, self._filling)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._buffer.load(state["buffer"])
        self._sampler.next_index, self._update = state["next_index"], state["update"]
        filling = convert_to(state["filling"], FillReport | None)
        self._filling = filling if filling is not None and filling.filled else None  # otherwise filling is repeated


def on_every_host(batch: GroupBatch | None) -> GroupBatch | None:
    """Return the first host's batch on every host; all hosts must call it."""
    if jax.process_count() == 1:
        return batch
    sent = None if batch is None else _Sent(batch.filling, [_bare(group) for group in batch.groups])
    found = decode_msgpack(broadcast_from_host0(msgspec.msgpack.encode(sent)), _Sent | None)
    return None if found is None else GroupBatch([_whole(*one) for one in found.groups], found.filling)


class _Sent(msgspec.Struct):
    filling: FillReport
    groups: list[tuple[Group, list[Packed]]]


def _bare(group: Group) -> tuple[Group, list[Packed]]:
    return msgspec.structs.replace(group, episodes=[]), [packed(one) for one in group.episodes]


def _whole(group: Group, episodes: list[Packed]) -> Group:
    return msgspec.structs.replace(group, episodes=[unpacked(one) for one in episodes])
