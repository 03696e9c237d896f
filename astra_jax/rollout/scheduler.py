"""Scheduler of rollouts: a task that samples groups into a buffer, at the trainer's pace or ahead of it.

Consumes: groups, from `sample`.
Waits for: a running group, when no further group is needed for the updates before `sample_until`.
Unblocked by: `sample_until`, when there are new weights, and `begin`, when a batch was taken.

With weights of version v and k = `max_off_policy_steps`, a group that starts now can be used by updates v to v + k. So
waiting groups and expected valid groups among the running ones never exceed what those updates take. A group that
becomes too old is dropped and counted. So that long groups are not overtaken forever, the oldest waiting groups train
first (`GroupBuffer.take`), and episodes of the oldest running groups start first (`GroupSampler`).

Strictly online, k is 0: sampling stops when a batch is full, and starts again with the next weights. Groups then enter
the buffer in the order of their start (`in_order`), so that a batch depends on the seed alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from astra_jax.rollout.buffer import GroupBuffer
from astra_jax.rollout.records import Group

_LEAST_VALID_SHARE = 0.125
"""Least share of valid groups that is expected; limits how many start at once after bad luck or on hard environments.
"""


def groups_started_at_once(concurrent: int, size: int) -> int:
    """Return how many groups may have started that have not entered the buffer, if groups enter in order.

    A group ends with its slowest episode, and enters after the groups started before it. Meanwhile, episodes of groups
    started later use the free capacity. So twice as many groups are started as `concurrent`, up to two batches. The
    limit exists because the share of valid groups is uncertain at first, and excess groups are surplus.

    Simulated for 14B with batches of 256 and 64 concurrent groups, this saves 9, 21 and 28 % of the time with 2, 8
    and 16 servers. (`python -m benchmarks.rl_simulation --async_steps=0 --concurrent_groups=64`.)

    Args:
        concurrent: groups whose episodes run at once.
        size: groups in a batch.
    """
    return max(concurrent, 2 * min(concurrent, size))


class StaleGroup(Exception):
    """Raised by a running group that is too old for training.

    Attributes:
        episodes, tokens: sampled so far.
    """

    def __init__(self, episodes: int, tokens: int) -> None:
        super().__init__(f"{episodes} episodes with {tokens} sampled tokens")
        self.episodes, self.tokens = episodes, tokens


class GroupScheduler:
    """Task that samples groups into a buffer until it is closed.

    Args:
        buffer: its `update` is the next one that a batch is taken for.
        sample: starts the next group, which may raise `StaleGroup`.
        in_order: groups enter the buffer in the order of their start, and a batch is ready when all started groups
            have entered; those beyond the batch are surplus. The number started next depends only on earlier groups,
            so the batch does not depend on timing. Else groups enter as they finish, and others continue meanwhile.
        concurrent: most groups started but not entered.
        oversample: factor on the number of running groups. Above 1 it trades surplus for less waiting at the end of a
            batch.
        max_groups: give up on a batch after this many groups since the previous one; None never gives up.
        deadline_seconds: with `in_order`, from `sample_until` on. Later, groups enter as they finish, and groups
            running at the deadline are replaced by new ones. When the batch is full, running groups are cancelled and
            counted. The batch then depends on timing, and slow groups are less likely to be in it.
        on_group: called with each finished group and whether it is valid.
    """

    def __init__(
        self,
        buffer: GroupBuffer,
        sample: Callable[[], Coroutine[Any, Any, Group]],
        *,
        in_order: bool,
        concurrent: int,
        oversample: float = 1.0,
        max_groups: int | None = None,
        deadline_seconds: float | None = None,
        on_group: Callable[[Group, bool], None] = lambda group, valid: None,
    ) -> None:
        self._buffer, self._sample, self._on_group = buffer, sample, on_group
        self._in_order, self._concurrent, self._oversample = in_order, concurrent, oversample
        self._max_groups, self._deadline_seconds = max_groups, deadline_seconds
        self._until = 0
        self._started = 0  # since the previous batch
        self._running: list[asyncio.Task[Group]] = []
        self._late: set[asyncio.Task[Group]] | None = None  # running since before the deadline, once that has passed
        self._timer: asyncio.TimerHandle | None = None
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="group scheduler")
        self._task.add_done_callback(lambda _: self._news.set())

    def sample_until(self, update: int) -> None:
        """Sample groups for the updates before this one. The weights for it are loaded, or about to be."""
        self._until = update
        if self._deadline_seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._deadline_seconds, self._pass_deadline)
        self._wake.set()

    async def ready(self) -> bool:
        """Wait for a batch. Return False if `max_groups` were sampled since the previous batch without filling one.

        Raises:
            Exception: the error of a group; sampling has stopped.
        """
        while True:
            if self._task.done():
                self._task.result()
            is_full = not self._buffer.missing
            if (is_full or self._has_given_up) and not (self._running and (self._in_order or not is_full)):
                return is_full
            self._news.clear()
            await self._news.wait()

    def begin(self, update: int) -> None:
        """Count groups for this update, after the batch of the previous one was taken."""
        self._buffer.begin(update)
        self._started, self._late = 0, None
        if self._timer is not None:
            self._timer.cancel()
        self._wake.set()

    async def close(self) -> None:
        """Cancel the running groups."""
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _has_given_up(self) -> bool:
        return self._max_groups is not None and self._started >= self._max_groups and self._buffer.missing > 0

    @property
    def _wanted(self) -> int:
        """Number of groups that should be running. Groups that passed the deadline do not count, so that they can be
        replaced."""
        if self._has_given_up:
            return 0
        needed = self._buffer.size * (self._until - self._buffer.update) - len(self._buffer.groups)
        share = max(self._buffer.counts.valid_share, _LEAST_VALID_SHARE)
        return len(self._late or ()) + min(self._concurrent, math.ceil(max(0, needed) / share * self._oversample))

    @property
    def _waits_for_first(self) -> bool:
        return self._in_order and self._late is None

    async def _run(self) -> None:
        try:
            while True:
                while self._enter_next():
                    if self._waits_for_first:
                        self._start_wanted()
                self._start_wanted()
                if self._late is not None and not self._buffer.missing:
                    self._buffer.counts.cancelled += len(self._running)
                    self._late.clear()
                    await self._cancel_running()
                self._news.set()
                await self._wake.wait()
                self._wake.clear()
        finally:
            await self._cancel_running()

    def _start_wanted(self) -> None:
        while len(self._running) < self._wanted:
            task = asyncio.ensure_future(self._sample())
            task.add_done_callback(lambda _: self._wake.set())
            self._running.append(task)
            self._started += 1

    def _enter_next(self) -> bool:
        """Add a finished group to the buffer. Return False if there is none, or if the first one is to be waited for.

        Raises:
            Exception: the error of the group.
        """
        candidates = self._running[:1] if self._waits_for_first else self._running
        task = next((task for task in candidates if task.done()), None)
        if task is None:
            return False
        self._running.remove(task)
        if self._late is not None:
            self._late.discard(task)
        try:
            group = task.result()
        except StaleGroup as dropped:
            self._buffer.count_cancelled(dropped.episodes, dropped.tokens)
        else:
            self._on_group(group, self._buffer.add(group))
        return True

    def _pass_deadline(self) -> None:
        self._late = set(self._running)
        self._wake.set()

    async def _cancel_running(self) -> None:
        running, self._running = self._running, []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
