"""Report of an exhausted run: rewards of the sampled groups, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from astra_jax.grpo.config import GRPOConfig
from astra_jax.rollout.buffer import FillCounts
from astra_jax.rollout.records import Group
from astra_jax.run.metrics import EXHAUSTED
from synthesis.core.rewards import bounds_of

_MOST_ENVIRONMENTS = 8
"""Most environments listed on the terminal; the page lists all."""
_CLOSE = 1e-3
"""Share of the reward range within which a reward counts as the maximum. F1's epsilon keeps a perfect episode below 1.
"""


@dataclass(frozen=True)
class EnvironmentRewards:
    """Rewards of one environment's scored episodes."""

    id: str
    groups: int
    episodes: int
    mean: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        spread = f"mean {self.mean:.3g}, min {self.lowest:.3g}, max {self.highest:.3g}"
        return f"{self.id}: reward {spread}, {self.episodes} episodes in {self.groups} groups"


class Exhaustion:
    """Groups sampled for a batch that could not be filled.

    Args:
        update: the update without a batch, from 0.
        groups: all groups finished since the previous batch, valid or not.
        counts: of these groups.
        summary: from `GroupBuffer.summary`.
    """

    def __init__(
        self, update: int, groups: Sequence[Group], counts: FillCounts, summary: str, config: GRPOConfig
    ) -> None:
        self.update, self.counts = update, counts
        self._groups = [group for group in groups if group.episodes]
        self._summary, self._config = summary, config
        self._rewards = np.array([reward for group in self._groups for reward in group.rewards], np.float64)

    @cached_property
    def environments(self) -> list[EnvironmentRewards]:
        """Rewards by environment, the highest mean first."""
        rewards: dict[str, list[list[float]]] = {}
        for group in self._groups:
            rewards.setdefault(group.environment_id, []).append(group.rewards)
        found = []
        for name, by_group in rewards.items():
            values = np.concatenate(by_group)
            spread = float(values.mean()), float(values.min()), float(values.max())
            found.append(EnvironmentRewards(name, len(by_group), len(values), *spread))
        return sorted(found, key=lambda one: (-one.mean, one.id))

    def metrics(self) -> dict[str, float]:
        """Return metric names and values for a row without an update."""
        found = {f"{EXHAUSTED}{name}": float(value) for name, value in self.counts.metrics().items()}
        if self._rewards.size:
            spread = {"mean": self._rewards.mean(), "min": self._rewards.min(), "max": self._rewards.max()}
            found |= {f"{EXHAUSTED}reward_{name}": float(value) for name, value in spread.items()}
        return found

    def lines(self) -> list[str]:
        """Return the report for a terminal, without the advice."""
        config, shown = self._config, self.environments[:_MOST_ENVIRONMENTS]
        first = f"update {self.update}: no batch of {config.batch_size} valid groups: {self._summary}"
        more = len(self.environments) - len(shown)
        rest = [f"  and {more} more environments"] if more else []
        masked = [f"  masked episodes: {self.counts.why_masked}"] if self.counts.masked else []
        return [f"{first} (max_groups_per_step: {config.most_groups})", *(f"  {one}" for one in shown), *rest, *masked]

    def shown_groups(self) -> list[tuple[str, Group]]:
        """Return the groups with the highest, lowest and median mean reward, each with a title."""
        by_mean = sorted(self._groups, key=lambda group: -float(np.mean(group.rewards)))
        places = {"Best group": 0, "Typical group": len(by_mean) // 2, "Worst group": len(by_mean) - 1}
        shown: dict[int, tuple[str, Group]] = {}
        for title, place in places.items():
            if by_mean:
                shown.setdefault(place, (title, by_mean[place]))
        return list(shown.values())

    @property
    def advice(self) -> str:
        """State whether all rewards were 0 or the maximum, and what to try."""
        rewards, counts = self._rewards, self.counts
        if not rewards.size:
            return "No episode was scored." + (f" Masked: {counts.why_masked}." if counts.masked else "")
        lowest, highest = bounds_of(self._config.episode.reward)
        close = _CLOSE * (highest - lowest)
        full = rewards >= highest - close
        none = (rewards == 0) | (rewards <= lowest)
        count = f"All {rewards.size} episodes scored"
        if rewards.min() == rewards.max() or full.all() or none.all():
            if full.all():
                return (
                    f"{count} {rewards.mean():.3g}, the maximum: the policy solves these environments. Try harder "
                    "ones, more irrelevant tools (--config.grpo.episode.distractors_per_band), or those that it solves "
                    "sometimes (astra difficulty, --config.grpo.solve_rates)."
                )
            if none.all():
                return (
                    f"{count} {rewards.mean():.3g}. Try easier environments (astra difficulty, "
                    "--config.grpo.solve_rates) or a reward with partial credit. Or raise --config.grpo.group_size or "
                    "--config.grpo.episode.temperature, or give --weights of a model after SFT."
                )
            return (
                f"{count} {rewards[0]:.3g}: the reward does not tell them apart. Add one that does to "
                "--config.grpo.episode.reward."
            )
        return f"{self._mixture()} {self._remedy()}"

    def _mixture(self) -> str:
        lowest, highest = bounds_of(self._config.episode.reward)
        of = [group.rewards for group in self._groups if len(group.episodes) > 1 and group.deviation == 0]
        none = sum(rewards[0] == 0 or rewards[0] <= lowest for rewards in of)
        full = sum(rewards[0] >= highest - _CLOSE * (highest - lowest) for rewards in of)
        return (
            f"Of {len(self._groups)} groups {none} scored 0 in all episodes, {full} the maximum, "
            f"{len(of) - none - full} another equal reward; {self.counts.within_delta} differ by at most "
            f"min_reward_std, {self.counts.valid} are valid and {self._config.batch_size} are needed."
        )

    def _remedy(self) -> str:
        counts, config = self.counts, self._config
        if counts.within_delta > max(counts.equal, counts.valid):
            return f"Lower --config.grpo.min_reward_std below {counts.largest_deviation:.3g}."
        if counts.valid:
            return (
                f"Raise --config.grpo.max_groups_per_step (it is {config.most_groups}) or lower "
                "--config.grpo.batch_size."
            )
        return (
            "Raise --config.grpo.group_size or --config.grpo.episode.temperature, or select environments that are "
            "solved sometimes (astra difficulty, --config.grpo.solve_rates)."
        )
