"""Groups of episodes: one environment, one set of tools, one prompt, and `group_size` sampled episodes.

Consumes: environments, in seeded order, and finished episodes that the journal has.
Waits for: capacity for another of `at_once` episodes, the sampler, and the tools of the environment.
Unblocked by: an episode that finishes, those of the oldest groups first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any

from astra_jax.grpo.config import Order
from astra_jax.grpo.journal import BatchJournal
from astra_jax.rollout.episode import Episode, EpisodeConfig, EpisodeTask, make_task, run_episode
from astra_jax.rollout.records import Group
from astra_jax.rollout.sampler import Sampler
from astra_jax.rollout.scheduler import StaleGroup
from astra_jax.tokenizer import ChatTokenizer
from sandbox import Sandbox
from synthesis.core.environment import AnyEnvironment, solve_rate_of
from synthesis.core.stages import rng_for


class GroupSampler:
    """Starts groups in order of their numbers. Environment, tools and seeds of group i depend only on (seed, i).

    Attributes:
        next_index: number of the next group, saved in checkpoints.
        again: lower numbers that an earlier process started; they come first.
        version: of the sampler's current weights.
        too_old: returns whether tokens of a weight version are too old; such a group is dropped.
        unfinished: number of episodes running now.
        cancelled: number of episodes in groups cancelled since `reset_counts`.
    """

    def __init__(
        self,
        policy: Sampler,
        sandbox: Sandbox | None,
        environments: Sequence[AnyEnvironment],
        tokenizer: ChatTokenizer,
        config: EpisodeConfig,
        *,
        group_size: int,
        seed: int,
        next_index: int = 0,
        order: Order = "shuffled",
        at_once: int | None = None,
    ) -> None:
        """
        Args:
            at_once: most episodes running at once, those of the oldest groups first; None for no limit.
        """
        self.policy, self.sandbox, self.tokenizer = policy, sandbox, tokenizer
        self.environments, self.config = environments, config
        self.group_size, self.seed, self.next_index, self.order = group_size, seed, next_index, order
        self._room = nullcontext() if at_once is None else asyncio.Semaphore(at_once)
        self.again: list[int] = []
        self.too_old: Callable[[int], bool] = lambda version: False
        self.unfinished = 0
        self.reset_counts()
        self.set_version(0)

    def reset_counts(self) -> None:
        """Start a batch: reset `cancelled` and `groups`."""
        self.cancelled = 0
        self._groups: dict[int, Group] = {}

    def set_version(self, version: int, journal: BatchJournal | None = None) -> None:
        """Continue with weights of this version.

        Args:
            journal: stores finished episodes; those already there are not sampled again. Masked episodes are not
                stored.
        """
        self.version, self._journal = version, journal

    @property
    def upcoming(self) -> int:
        """Number of the group that starts next."""
        return self.again[0] if self.again else self.next_index

    @property
    def groups(self) -> list[Group]:
        """Groups finished since `reset_counts`, valid or not, in order of their numbers."""
        return [self._groups[index] for index in sorted(self._groups)]

    @property
    def finished(self) -> list[Episode]:
        """Scored episodes of `groups`."""
        return [episode for group in self.groups for episode in group.episodes]

    def __call__(self) -> Coroutine[Any, Any, Group]:
        """Return an awaitable for the next group; its number is assigned now."""
        index = self.upcoming
        if self.again:
            self.again.pop(0)
        else:
            self.next_index += 1
        return self._group(index)

    def environment(self, index: int) -> AnyEnvironment:
        """Return group `index`'s environment. Each pass has every environment once, in a new order.

        With `order="easy_first"` each must have a recorded solve rate.
        """
        count = len(self.environments)
        order = list(range(count))
        rng_for(self.seed, "environment_order", index // count).shuffle(order)
        if self.order == "easy_first":
            order.sort(key=self._solve_rate, reverse=True)  # stable sort: equal rates stay shuffled
        return self.environments[order[index % count]]

    def _solve_rate(self, number: int) -> float:
        rate = solve_rate_of(self.environments[number])
        assert rate is not None, "environments.select_environments"
        return rate

    async def _group(self, index: int) -> Group:
        environment, version = self.environment(index), self.version
        tools_seed = rng_for(self.seed, "tools", index).getrandbits(32)
        progress = GroupProgress()

        async def episode(task: EpisodeTask, number: int) -> Episode:
            async with self._room:  # first come, first served
                self.unfinished += 1
                try:
                    return await self._episode(task, index, number, progress)
                finally:
                    self.unfinished -= 1

        try:
            task = await asyncio.to_thread(make_task, environment, self.tokenizer, self.config, seed=tools_seed)
            running = [asyncio.ensure_future(episode(task, number)) for number in range(self.group_size)]
            try:
                episodes = await asyncio.gather(*running)
            finally:  # if one fails, cancel the others
                for one in running:
                    one.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:
            self.cancelled += self.group_size
            raise
        except StaleEpisode:
            self.cancelled += self.group_size
            raise StaleGroup(self.group_size, progress.tokens) from None
        scored = [episode for episode in episodes if not episode.is_masked]
        masked = [episode.masked for episode in episodes if episode.masked is not None]
        oldest = version if progress.oldest is None else progress.oldest
        group = Group(index=index, environment_id=environment.id, update=oldest, episodes=scored, masked=masked)
        self._groups[index] = group
        return group

    async def _episode(self, task: EpisodeTask, index: int, number: int, progress: GroupProgress) -> Episode:
        """Run an episode, or return it from the journal.

        Raises:
            StaleEpisode: the group's sampled tokens are too old.
        """
        found = None if self._journal is None else self._journal.take_episode(index, number)
        if found is not None:
            progress.finish(number, found)
            return found

        def check_age(versions: Sequence[int]) -> None:
            progress.add(number, versions)
            if progress.oldest is not None and self.too_old(progress.oldest):
                raise StaleEpisode

        finished = await run_episode(
            *(self.policy, self.sandbox, task, self.tokenizer, self.config),
            seed=rng_for(self.seed, "episode", index, number).getrandbits(32),
            session=f"group{index}.{number}",
            on_turn=check_age,
        )
        progress.finish(number, finished)
        if not finished.is_masked and self._journal is not None:
            await self._journal.keep_episode(index, number, finished)
        return finished


class StaleEpisode(Exception):
    """A group's sampled tokens are too old."""


class GroupProgress:
    """Sampled tokens of a running group: for each episode their number and oldest version."""

    def __init__(self) -> None:
        self._episodes: dict[int, tuple[int, int]] = {}

    def add(self, number: int, versions: Sequence[int]) -> None:
        """Add sampled tokens of an episode, with their versions."""
        if versions:
            tokens, oldest = self._episodes.get(number, (0, versions[0]))
            self._episodes[number] = tokens + len(versions), min(oldest, min(versions))

    def finish(self, number: int, episode: Episode) -> None:
        """Replace an episode's tokens by those of the finished one; a masked one counts none."""
        self._episodes.pop(number, None)
        if not episode.is_masked:
            self.add(number, [v for v, mask in zip(episode.versions, episode.loss_mask, strict=True) if mask])

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self._episodes.values())

    @property
    def oldest(self) -> int | None:
        return min((oldest for _, oldest in self._episodes.values()), default=None)
