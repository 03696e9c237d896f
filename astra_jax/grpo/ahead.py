"""Batches of asynchronous GRPO, whose rollouts continue across updates (`rollout/stream.py`).

Batches depend on when each group ended, so a resumed run cannot recompute them, unlike a strictly online run.
`rollouts/` therefore records the episodes finished under each weight version, and the groups of each update. A run that
resumes from a checkpoint takes those batches, update by update, as long as its weights are bit-identical. Then it
continues with the groups that were running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from astra_jax.base.progress import log_above_progress
from astra_jax.base.typed import convert_to
from astra_jax.grpo.journal import BatchJournal
from astra_jax.grpo.rollouts import FillReport, GroupBatch, Rollouts
from astra_jax.rollout.filling import Group, GroupBuffer
from astra_jax.rollout.stream import GroupStream, StaleGroup


class AsyncRollouts(Rollouts):
    """Rollouts that continue across updates, up to `async_steps` batches ahead; otherwise as `Rollouts`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sampler.too_old = self._buffer.too_old
        self._stream: GroupStream | None = None  # set once no recorded batch is left to repeat
        self._journal: BatchJournal | None = None
        self._digests: dict[int, str] = {}  # of the weights, by version
        self._open: set[int] = set()  # groups started, and neither in the buffer nor dropped
        self._batch: GroupBatch | None = None  # returned by `take`
        self._since = time.perf_counter()
        self._told: Callable[[int], None] = lambda missing: None

    async def follow(self, version: int, weights: str = "") -> None:
        """See `Rollouts.follow`; episodes that finish from now on are recorded under this version."""
        await super().follow(version, weights)
        before, journals = self._journal, self._journals
        if journals is not None:

            def opened() -> BatchJournal:
                if self._stream is not None:  # discard later versions' records of an earlier process
                    journals.forget(since=version)
                journal = before
                if journal is None:
                    for earlier, digest in sorted(self._digests.items()):
                        if earlier < version:
                            journal = journals.open(update=earlier, version=earlier, weights=digest, before=journal)
                return journals.open(update=version, version=version, weights=weights, before=journal)

            self._journal = await asyncio.to_thread(opened)
        oldest = version - self.config.async_steps
        self._digests = {of: one for of, one in self._digests.items() if of >= oldest} | {version: weights}
        self._sampler.follow(version, self._journal)
        if before is not None:
            await before.close()
        if self._stream is not None:
            self._stream.follow(version)

    async def fill(self, update: int, on_group: Callable[[int], None] = lambda missing: None) -> None:
        """Wait until there is a batch, or `max_groups_per_step` were sampled since the last one."""
        self._update, self._told = update, on_group
        if self._batch is not None:  # not taken, since the run was stopping
            return
        if self._stream is None:
            if self._buffer.update != update:
                self._begin(update)
            if (batch := self._trained()) is not None:
                self._batch = batch
                return
            self._stream = self._started()
        if not await self._stream.ready():
            self._check_masked(self._buffer.counts, is_whole=True)
            if self._journal is not None:
                given_up = self._report(False, time.perf_counter() - self._since, self._journal)
                await self._journal.keep_batch(self._taken([], given_up))
            return
        self._check_masked(self._buffer.counts, is_whole=True)
        if self._buffer.counts.masked:
            log_above_progress(self._masked_line(self._buffer.counts))
        now = time.perf_counter()
        filling = self._report(True, now - self._since, self._journal)
        groups = self._buffer.take()
        filling.counts |= self._buffer.metrics(groups, update)
        self._since, self._batch = now, GroupBatch(groups, filling)
        taken = self._taken(groups, filling)
        self._begin(update + 1)
        self._stream.taken()
        if self._journal is not None:
            await self._journal.keep_batch(taken)

    def take(self) -> GroupBatch | None:
        """Return the batch and remove it; None if there is none."""
        batch, self._batch = self._batch, None
        return batch

    def _begin(self, update: int) -> None:
        """Reset the counts of groups for this update."""
        self._buffer.begin(update)
        self._sampler.count_anew()
        if self._journal is not None:
            self._journal.count_anew()
        self._entered, self._ended = [], []

    def _trained(self) -> GroupBatch | None:
        """Return the batch that an earlier process trained this update on with the same weights. None if there was
        none, it was given up, or it is incomplete."""
        journal = self._journal
        if journal is None or (taken := journal.batch) is None:
            return None
        self._buffer.groups += journal.take_entered({group.index for group in self._buffer.groups})
        waiting = {group.index: group for group in self._buffer.groups}
        self._entered = [waiting[index] for index, _, _, _ in taken.entered if index in waiting]
        self._ended = list(taken.ended)
        begun = {*self._open, *self._sampler.again, *range(self._sampler.next_index, taken.next_index)}
        self._open, self._sampler.next_index = set(), max(self._sampler.next_index, taken.next_index)
        self._sampler.again = sorted(begun - waiting.keys() - {*taken.ended})
        if not taken.trained:  # groups sampled without success are not sampled again
            self._buffer.lengths = taken.lengths
            return None
        if not waiting.keys() >= {*taken.trained}:
            journal.taken.dropped += 1
            return None
        groups = [waiting[index] for index in taken.trained]
        trained = {*taken.trained}
        self._buffer.groups = [group for group in self._buffer.groups if group.index not in trained]
        self._buffer.lengths = taken.lengths
        self._begin(self._update + 1)
        return GroupBatch(groups, convert_to(taken.filling, FillReport))

    def _started(self) -> GroupStream:
        self._since = time.perf_counter()
        config = self.config
        return GroupStream(
            self._buffer,
            self._next,
            version=self._version,
            async_steps=config.async_steps,
            last=config.steps,
            concurrent=config.concurrent_groups,
            max_groups=config.most_groups,
            on_group=self._on_group,
        )

    async def _next(self) -> Group:
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
        self._told(self._buffer.missing)
        self._tell()
        self._check_masked(self._buffer.counts, is_whole=False)

    async def close(self) -> None:
        """Cancel the running groups; their finished episodes are kept."""
        if self._stream is not None:
            await self._stream.close()
        if self._journal is not None:
            await self._journal.close()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, at any time; running groups are saved by number."""
        buffer: GroupBuffer = self._buffer.copy()
        if self._batch is not None:
            buffer.give_back(self._batch.groups)
        return {
            "buffer": buffer.state(),
            "next_index": self._sampler.next_index,
            "update": self._buffer.update,
            "filling": None,
            "open": sorted({*self._open, *self._sampler.again}),
            "entered": [group.index for group in self._entered],
            "ended": list(self._ended),
            "digests": [[version, digest] for version, digest in sorted(self._digests.items())],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Rollouts.load`."""
        super().load({**state, "filling": None})
        self._buffer.update = state["update"]
        self._sampler.again = list(state.get("open", ()))
        entered = {*state.get("entered", ())}  # missing in earlier checkpoints
        self._entered = [group for group in self._buffer.groups if group.index in entered]
        self._ended = list(state.get("ended", ()))
        self._digests = {version: digest for version, digest in state.get("digests", ())}
