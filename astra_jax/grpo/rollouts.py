"""Batches for GRPO: sample groups, keep the valid ones, report on the others, and repeat them in a resumed run.

Consumes: versions of the weights, from `set_version`, before the sampler loads them.
Waits for: `fill` waits until there is a batch, or `max_groups_per_step` were sampled without one.
Unblocked by: strictly online, `fill`: nothing is sampled between two batches. With `async_rollouts`, `set_version`:
groups continue across updates, up to `max_off_policy_steps` batches ahead (`rollout/scheduler.py`).

The journal (`journal.py`) has the episodes finished under each version of the weights, and the groups of each update. A
run that resumes from a checkpoint takes those batches, update by update, as long as its weights are bit-identical. Then
it continues with the groups that were running: finished episodes are taken from the journal, others start again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
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
from astra_jax.rollout.buffer import FillCounts, GroupBuffer
from astra_jax.rollout.episode import episode_stats
from astra_jax.rollout.records import Group, PackedGroup, pack_group, unpack_group
from astra_jax.rollout.sampler import Sampler
from astra_jax.rollout.scheduler import GroupScheduler, StaleGroup
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
        seconds: strictly online, from the first group's start to the last one's end, over all processes involved; with
            `async_rollouts`, since the previous batch.
        rollout: means over all scored episodes; valid groups alone would give biased means.
        counts: of groups and episodes.
    """

    seconds: float
    rollout: dict[str, float]
    counts: dict[str, float]


class GroupBatch(msgspec.Struct):
    """`batch_size` valid groups and their fill report."""

    groups: list[Group]
    filling: FillReport


class Rollouts:
    """Samples groups into a buffer and takes batches out of it, on the first host.

    `state` is all that a resumed run needs, at any time.

    Args:
        journals: store finished episodes and batches, for a later process.
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
        self.config, self._journals = config, journals
        most_age = config.max_off_policy_steps
        self._buffer = GroupBuffer(config.batch_size, min_reward_std=config.min_reward_std, max_age=most_age)
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
        self._sampler.too_old = self._buffer.too_old
        self._scheduler: GroupScheduler | None = None  # set once no recorded batch is left to repeat
        self._journal: BatchJournal | None = None
        self._version = 0
        self._digests: dict[int, str] = {}  # of the weights, by version
        self._open: set[int] = set()  # groups started that neither entered the buffer nor ended
        self._entered: list[Group] = []  # since the previous batch
        self._ended: list[int] = []  # since the previous batch: groups that did not enter
        self._batch: GroupBatch | None = None  # returned by `take`
        self._before: dict[str, Any] | None = None  # strictly online: the state before the batch that is being filled
        self._since = time.perf_counter()
        self._on_missing: Callable[[int], None] = lambda missing: None

    async def set_version(self, version: int, weights: str = "") -> None:
        """Note the version of the weights that the sampler is about to load. Episodes that finish from now on are
        recorded under this version.

        Args:
            weights: their digest, see `BatchKey`.
        """
        previous, oldest = self._journal, version - self.config.steps_ahead
        if self._journals is not None:
            self._journal = await asyncio.to_thread(self._open_journal, self._journals, version, weights)
        self._digests = {of: one for of, one in self._digests.items() if of >= oldest} | {version: weights}
        self._version = version
        self._sampler.set_version(version, self._journal)
        if previous is not None:
            await previous.close()
        if self._scheduler is not None and self.config.steps_ahead:
            self._scheduler.sample_until(self._last_update)

    def _open_journal(self, journals: Journals, version: int, weights: str) -> BatchJournal:
        if self._scheduler is not None:  # discard later versions' records of an earlier process
            journals.forget(since=version)
        journal = self._journal
        if journal is None:
            for earlier, digest in sorted(self._digests.items()):
                if earlier < version:
                    journal = journals.open(earlier, digest, journal)
        return journals.open(version, weights, journal)

    @property
    def _last_update(self) -> int:
        """The update before which the current weights may sample."""
        return min(self._version + self.config.steps_ahead + 1, self.config.steps)

    async def fill(self, update: int, on_missing: Callable[[int], None] = lambda missing: None) -> None:
        """Wait until there is a batch, or `max_groups_per_step` were sampled since the previous one. Return at once if
        there is a batch already.

        Args:
            update: the update that will train on it.
            on_missing: called after each group with the number of missing groups.

        Raises:
            MaskedShareError: too many episodes have no score.
        """
        if self._batch is not None:  # not taken, since the run was stopping
            return
        self._on_missing = on_missing
        if not self.config.steps_ahead:
            self._before, self._since = self._snapshot(), time.perf_counter()
        if self._buffer.update != update:  # the state is of version 0.1, or has a batch that was not taken
            self._begin(update)
        if self._scheduler is None:
            self._batch = await self._journaled_batch()
        if self._batch is None:
            self._scheduler = self._scheduler or self._start_scheduler()
            self._scheduler.sample_until(self._last_update)
            await self._finish_batch(update, is_full=await self._scheduler.ready())
        self._before = None

    async def _finish_batch(self, update: int, *, is_full: bool) -> None:
        """Take the batch out of the buffer and record it, or that it was given up."""
        self._check_masked(is_whole=True)
        if not self.config.steps_ahead:  # groups cancelled at the deadline
            self._ended += sorted(self._open)
            self._open.clear()
        report, groups = self._report(), list[Group]()
        if is_full:
            if self._buffer.counts.masked:
                log_above_progress(self._masked_line(self._buffer.counts))
            groups = self._buffer.take()
            report.counts |= self._buffer.metrics(groups, update)
            self._batch = GroupBatch(groups, report)
        manifest = BatchManifest(
            next_index=self._sampler.next_index,
            entered=[(one.index, one.update, len(one.episodes)) for one in self._entered],
            trained=[group.index for group in groups],
            ended=list(self._ended),
            filling=msgspec.to_builtins(report),
            lengths=msgspec.structs.replace(self._buffer.lengths),
        )
        journal = self._journal
        if is_full:
            self._begin(update + 1)
        if journal is not None:
            await journal.keep_batch(manifest)

    def _start_scheduler(self) -> GroupScheduler:
        self._since, config = time.perf_counter(), self.config
        if self._journal is not None and self._journal.available:
            log_above_progress(
                f"update {self._buffer.update}: {self._journal.available} episodes that an earlier process finished "
                "are reused; unfinished ones start again"
            )
        return GroupScheduler(
            self._buffer,
            self._next_group,
            in_order=not config.steps_ahead,
            concurrent=config.groups_at_once,
            oversample=1.0 if config.steps_ahead else config.oversample,
            max_groups=config.most_groups,
            deadline_seconds=config.deadline_seconds,
            on_group=self._on_group,
        )

    async def _next_group(self) -> Group:
        index = self._sampler.upcoming
        self._open.add(index)
        try:
            return await self._sampler()
        except StaleGroup:
            self._open.discard(index)
            self._ended.append(index)
            raise

    def _on_group(self, group: Group, valid: bool) -> None:
        self._open.discard(group.index)
        if self._buffer.groups and self._buffer.groups[-1] is group:
            self._entered.append(group)
        else:
            self._ended.append(group.index)
        self._on_missing(self._buffer.missing)
        self._print_progress()
        self._check_masked(is_whole=False)

    def _begin(self, update: int) -> None:
        """Count groups for this update from now on."""
        if self._scheduler is None:
            self._buffer.begin(update)
        else:
            self._scheduler.begin(update)
        self._since = time.perf_counter()
        self._sampler.reset_counts()
        if self._journal is not None:
            self._journal.reset_counts()
            self._journal.discard({*self._ended})
        self._entered, self._ended = [], []

    async def _journaled_batch(self) -> GroupBatch | None:
        """Return the batch that an earlier process trained this update on with the same weights. None if there was
        none, it was given up, or an episode is missing. Groups of a batch that was given up are not sampled again."""
        if self._journal is None or (record := self._journal.batch) is None:
            return None
        waiting = {group.index for group in self._buffer.groups}
        entered = await asyncio.to_thread(self._journal.take_entered, waiting)
        if entered is None:
            self._journal.stats.dropped += 1
            return None
        self._buffer.groups += entered
        groups = {group.index: group for group in self._buffer.groups}
        self._entered = [groups[index] for index, _, _ in record.entered]
        self._ended = list(record.ended)
        started = {*self._open, *self._sampler.again, *range(self._sampler.next_index, record.next_index)}
        self._open, self._sampler.next_index = set(), max(self._sampler.next_index, record.next_index)
        self._sampler.again = sorted(started - groups.keys() - {*record.ended})
        self._buffer.lengths = record.lengths
        if not record.trained:
            self._buffer.counts = FillCounts()
            return None
        if not groups.keys() >= {*record.trained}:
            self._journal.stats.dropped += 1
            return None
        trained = [groups.pop(index) for index in record.trained]
        self._buffer.groups = list(groups.values())
        report = convert_to(record.filling, FillReport)
        report.counts |= self._journal.counts()
        self._begin(self._buffer.update + 1)
        return GroupBatch(trained, report)

    def _check_masked(self, *, is_whole: bool) -> None:
        """Stop a run with too many masked episodes, since the remaining ones are not a fair sample of the policy.

        Args:
            is_whole: sampling for this batch is finished. Before that, the share is checked only after a batch's number
                of episodes.

        Raises:
            MaskedShareError: the share is above `max_masked_share`.
        """
        config, counts = self.config, self._buffer.counts
        episodes = counts.sampled_episodes + counts.masked_episodes
        whole = is_whole or episodes >= config.batch_size * config.group_size
        if not whole or counts.masked_episodes < _FEWEST_MASKED or counts.masked_share <= config.max_masked_share:
            return
        raise MaskedShareError(
            f"update {self._buffer.update}: {counts.masked_episodes} of {episodes} sampled episodes are masked, "
            f"more than max_masked_share ({config.max_masked_share:g}): {counts.why_masked}. Remove the cause and run "
            "the same command again, or raise --config.grpo.max_masked_share"
        )

    def _print_progress(self) -> None:
        """Print a line while there is no valid group, each time the number of sampled groups has doubled."""
        counts = self._buffer.counts
        doubled, left = divmod(counts.sampled, self.config.batch_size)
        if not counts.valid and not left and doubled.bit_count() == 1:
            what = f"update {self._buffer.update}: {self._buffer.summary}"
            log_above_progress(f"{what}; at most {self.config.most_groups} are sampled")

    def _masked_line(self, counts: FillCounts) -> str:
        episodes = counts.sampled_episodes + counts.masked_episodes
        what = f"{counts.masked_episodes} of {episodes} episodes are masked: {counts.why_masked}"
        return f"update {self._buffer.update}: {what}"

    def _report(self) -> FillReport:
        sampler, journal = self._sampler, self._journal
        return FillReport(
            seconds=time.perf_counter() - self._since + (0.0 if journal is None else journal.seconds),
            rollout=episode_stats(sampler.finished),
            counts={
                "episodes": len(sampler.finished),
                "cancelled_episodes": sampler.cancelled,
                **({} if journal is None else journal.counts()),
            },
        )

    def take(self) -> GroupBatch | None:
        """Return the batch and remove it; None if it could not be filled."""
        batch, self._batch = self._batch, None
        return batch

    async def close(self) -> int:
        """Cancel the running groups, whose finished episodes are kept. Return how many episodes were unfinished."""
        unfinished = self._sampler.unfinished
        if self._scheduler is not None:
            await self._scheduler.close()
        if self._journal is not None:
            await self._journal.close()
        return unfinished

    def exhaustion(self) -> Exhaustion:
        """Return a report on the groups sampled for a batch that was not filled."""
        counts, summary = self._buffer.counts.copy(), self._buffer.summary
        return Exhaustion(self._buffer.update, self._sampler.groups, counts, summary, self.config)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values; running groups are saved by number.

        While a strictly online batch is filled, this is the state before it. The resumed run starts all of its groups
        again, from the journal and with the same seeds, and masked episodes are tried again.
        """
        now = self._before or self._snapshot()
        return {**now, "buffer": now["buffer"].state()}

    def _snapshot(self) -> dict[str, Any]:
        buffer = self._buffer.copy()
        if self._batch is not None:
            buffer.give_back(self._batch.groups)
        return {
            "buffer": buffer,
            "next_index": self._sampler.next_index,
            "update": buffer.update,
            "open": sorted({*self._open, *self._sampler.again}),
            "entered": [group.index for group in self._entered],
            "ended": list(self._ended),
            "digests": [[version, digest] for version, digest in sorted(self._digests.items())],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Those of version 0.1 have no `open`, `entered`, `ended` and `digests`."""
        self._buffer.load(state["buffer"])
        self._buffer.update, self._sampler.next_index = state["update"], state["next_index"]
        self._sampler.again = list(state.get("open", ()))
        entered = {*state.get("entered", ())}
        self._entered = [group for group in self._buffer.groups if group.index in entered]
        self._ended = list(state.get("ended", ()))
        self._digests = {version: digest for version, digest in state.get("digests", ())}


def on_every_host(batch: GroupBatch | None) -> GroupBatch | None:
    """Return the first host's batch on every host; all hosts must call it."""
    if jax.process_count() == 1:
        return batch
    sent = None if batch is None else (batch.filling, [pack_group(group) for group in batch.groups])
    received = broadcast_from_host0(msgspec.msgpack.encode(sent))
    found = decode_msgpack(received, tuple[FillReport, list[PackedGroup]] | None)
    return None if found is None else GroupBatch([unpack_group(group) for group in found[1]], found[0])
