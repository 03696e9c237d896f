"""Asynchronous batch filling, ahead of the trainer: groups run across updates, and enter the buffer as they finish.

A group started now has tokens of the sampler's version v, and can be used by updates v to v + k. So waiting groups and
expected valid groups among the running ones never exceed what those updates take. A group that becomes too old is
dropped and counted. The oldest waiting groups train first, so that long ones are not overtaken forever.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from astra_jax.rollout.filling import Group, GroupBuffer


class StaleGroup(Exception):
    """Raised by a running group that is too old for training.

    Attributes:
        episodes, tokens: sampled so far.
    """

    def __init__(self, episodes: int, tokens: int) -> None:
        super().__init__(f"{episodes} episodes with {tokens} sampled tokens")
        self.episodes, self.tokens = episodes, tokens


class GroupStream:
    """Task that samples groups into a buffer until it is closed.

    Args:
        buffer: its `update` is the next one that a batch is taken for.
        sample: starts the next group, which may raise `StaleGroup`.
        async_steps: k.
        last: the number of updates in the run.
        concurrent: most groups running at once.
        max_groups: give up on a batch after this many groups since the previous one; None never gives up.
        on_group: called with each finished group and whether it is valid.

    Attributes:
        version: number of updates in the sampler's weights; at most `buffer.update`.
    """

    def __init__(
        self,
        buffer: GroupBuffer,
        sample: Callable[[], Coroutine[Any, Any, Group]],
        *,
        version: int,
        async_steps: int,
        last: int,
        concurrent: int,
        max_groups: int | None = None,
        on_group: Callable[[Group, bool], None] = lambda group, valid: None,
    ) -> None:
        self.version = version
        self._buffer, self._sample, self._on_group = buffer, sample, on_group
        self._async_steps, self._last = async_steps, last
        self._concurrent, self._max_groups = concurrent, max_groups
        self._running: list[asyncio.Task[Group]] = []
        self._started = 0  # since the last batch
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="groups under way")
        self._task.add_done_callback(lambda _: self._news.set())

    async def ready(self) -> bool:
        """Wait for a batch. Return False if `max_groups` were sampled since the previous batch without filling one.

        Raises:
            Exception: the error of a group; sampling has stopped.
        """
        self._wake.set()
        while self._buffer.missing:
            if self._task.done():
                self._task.result()
            if self._given_up and not self._running:
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def taken(self) -> None:
        """Note that a batch has left the buffer, and start the next one."""
        self._started = 0
        self._wake.set()

    def follow(self, version: int) -> None:
        """Note the version of the sampler's weights."""
        self.version = version
        self._wake.set()

    async def close(self) -> None:
        """Cancel the running groups."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _given_up(self) -> bool:
        return self._max_groups is not None and self._started >= self._max_groups and self._buffer.missing > 0

    @property
    def _wanted(self) -> int:
        """Number of groups that should be running."""
        if self._given_up:
            return 0
        until = min(self.version + self._async_steps + 1, self._last)
        room = self._buffer.size * (until - self._buffer.update) - len(self._buffer.groups)
        share = max(self._buffer.counts.valid_share, 0.125)  # see `filling.fill`
        return min(self._concurrent, math.ceil(max(0, room) / share))

    async def _run(self) -> None:
        try:
            while True:
                while len(self._running) < self._wanted:
                    task = asyncio.ensure_future(self._sample())
                    task.add_done_callback(lambda _: self._wake.set())
                    self._running.append(task)
                    self._started += 1
                self._news.set()
                await self._wake.wait()
                self._wake.clear()
                for task in [task for task in self._running if task.done()]:
                    self._running.remove(task)
                    self._ended(task)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Group]) -> None:
        try:
            group = task.result()
        except StaleGroup as dropped:
            self._buffer.give_up(dropped.episodes, dropped.tokens)
            return
        self._on_group(group, self._buffer.add(group))
