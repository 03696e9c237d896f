"""The batches of asynchronous GRPO: rollouts go on across updates (`rollout/stream.py`).

What was trained on depends on when which group ended, so a run that goes on cannot find it again as a strictly online
one does. It is written down: `rollouts/` has what was finished while the policy had each version's weights, and which
groups each update was trained on. A process that goes on from a checkpoint takes those batches, update by update, as
long as its weights are to the bit what they were; then it goes on with what was under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from astra_jax.grpo.journal import BatchJournal
from astra_jax.grpo.rollouts import FillReport, GroupBatch, Rollouts
from astra_jax.rollout.filling import Group, GroupBuffer
from astra_jax.rollout.stream import GroupStream, TooOld
from synthesis.core.progress import say_beside_bars
from synthesis.core.typed import convert_to


class AsyncRollouts(Rollouts):
    """Groups under way across updates, up to `async_steps` batches ahead; else as `Rollouts`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sampler.too_old = self._buffer.too_old
        self._stream: GroupStream | None = None  # once nothing is to be repeated
        self._journal: BatchJournal | None = None
        self._digests: dict[int, str] = {}  # of the weights, by version
        self._open: set[int] = set()  # groups that are begun, and not in the buffer or dropped
        self._batch: GroupBatch | None = None  # that `take` gives
        self._since = time.perf_counter()
        self._told: Callable[[int], None] = lambda missing: None

    async def follow(self, version: int, weights: str = "") -> None:
        """See `Rollouts.follow`; what is finished from now on is of this version."""
        await super().follow(version, weights)
        before, journals = self._journal, self._journals
        if journals is not None:

            def opened() -> BatchJournal:
                if self._stream is not None:  # what another life of this run has of later versions is not this one's
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
        if self._batch is not None:  # it was not taken: the run was to stop
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
            say_beside_bars(self._masked_line(self._buffer.counts))
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
        """The batch, which leaves; None when there is none."""
        batch, self._batch = self._batch, None
        return batch

    def _begin(self, update: int) -> None:
        """Count what becomes of groups for this update."""
        self._buffer.begin(update)
        self._sampler.count_anew()
        if self._journal is not None:
            self._journal.count_anew()
        self._entered, self._ended = [], []

    def _trained(self) -> GroupBatch | None:
        """What an earlier process trained this update on, by the same weights; None: it did not, or gave up, or not all
        of it is there."""
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
        if not taken.trained:  # what was sampled in vain is not sampled again
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
        except TooOld:
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
        """Cancel what is under way; what is finished of it is kept."""
        if self._stream is not None:
            await self._stream.close()
        if self._journal is not None:
            await self._journal.close()

    def state(self) -> dict[str, Any]:
        """As JSON values, at any time; of what is under way, its numbers."""
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
        entered = {*state.get("entered", ())}  # checkpoints of before do not say it
        self._entered = [group for group in self._buffer.groups if group.index in entered]
        self._ended = list(state.get("ended", ()))
        self._digests = {version: digest for version, digest in state.get("digests", ())}
