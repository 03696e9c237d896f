"""GRPO's settings: the paper's, where it gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from astra_jax.grpo.groups import Order
from astra_jax.grpo.losses import ObjectiveConfig
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run.optimizers import OptimizerName


@dataclass(frozen=True)
class GRPOConfig:
    """Defaults are the paper's where it gives one; those it leaves open are ours, with the reason.

    Attributes:
        updates: optimizer steps. The paper's curves run to about 140.
        groups_per_batch: valid groups in an update (paper: batch 256 = mini-batch 256, so one update a batch).
        group_size: episodes of a group. Ours: 8, the least that gives a usable deviation on F1's coarse grid.
        optimizer: see `astra_jax.run.optimizers`.
        learning_rate: constant (paper).
        objective: clips, ratio, advantages, normalisation, importance sampling.
        mini_batches: optimizer steps that a batch is cut into (paper: 1); the ratio is to the weights before the first.
        delta: a group trains when Std(reward) > delta. Ours: 0.01, below the smallest deviation that one differing
            episode of 8 causes, above rounding.
        surplus_max_age: updates that a valid surplus group may wait (paper: it trains one update late); 0 drops it.
        oversample: groups under way over those expected to be needed. Ours: 1.25, see `filling.fill`.
        concurrent_groups: upper bound of groups under way; slots / group_size keeps an engine full.
        deadline_seconds: of a batch's rollouts: from then on groups count in the order in which they finish, and what
            is still under way when the batch is full is cancelled, see `filling.fill`. None waits for all.
        async_steps: 0 is strictly online (paper). 1: the next batch is sampled while this one is trained on, by
            weights one update older, which importance sampling corrects.
        max_groups_per_update: stop training (result `exhausted`) when a batch needs more; None samples on (paper).
        episode: turns, token limits, sampling and reward.
        solve_rates: (lowest, highest): train only on environments whose recorded solve rate, 0 to 1, lies within; see
            `launch.difficulty`. None trains on all.
        order: of the environments in each pass over them: `shuffled`, or `easy_first`: by recorded solve rate, the
            highest first, shuffled among equals.
        row_buckets: allowed lengths of packed rows; the smallest that holds the batch's longest episode is used.
        micro_batch_rows: rows of one gradient accumulation step.
        remat: the forward's rematerialisation policy.
        b1, b2, eps, weight_decay, max_grad_norm: AdamW and clipping by global norm. Ours: verl's defaults,
            which the paper's framework would have used.
        checkpoint_every: updates between full checkpoints; the last update is always saved.
        episodes_every: updates between pages of sampled episodes in `workdir/episodes`; 0 writes none.
        seed: of environment order, distractors and sampling.
    """

    updates: int = 140
    groups_per_batch: int = 256
    group_size: int = 8
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 2e-6
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    mini_batches: int = 1
    delta: float = 0.01
    surplus_max_age: int = 1
    oversample: float = 1.25
    concurrent_groups: int = 64
    deadline_seconds: float | None = None
    async_steps: Literal[0, 1] = 0
    max_groups_per_update: int | None = None
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    solve_rates: tuple[float, float] | None = None
    order: Order = "shuffled"
    row_buckets: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768, 74_752)
    micro_batch_rows: int = 1
    remat: str = "none"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    checkpoint_every: int = 10
    episodes_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; advantages are relative to the group: use at least 2")
        if self.mini_batches < 1 or self.groups_per_batch % self.mini_batches:
            raise ValueError(
                f"mini_batches is {self.mini_batches}, which does not divide groups_per_batch ({self.groups_per_batch})"
            )
        if self.concurrent_groups < 1:
            raise ValueError(f"concurrent_groups is {self.concurrent_groups}; a batch needs at least 1 under way")
        if self.max_groups_per_update is not None and self.max_groups_per_update < self.groups_per_batch:
            raise ValueError(
                f"max_groups_per_update is {self.max_groups_per_update}, groups_per_batch {self.groups_per_batch}: no "
                "batch could be filled; raise the first or lower the second"
            )
        if not 0 <= self.delta < 0.5:
            raise ValueError(
                f"delta is {self.delta}: rewards are in [0, 1], so no group deviates by 0.5 or more and no batch could "
                "be filled; use a number in [0, 0.5)"
            )
        if self.deadline_seconds is not None and self.deadline_seconds <= 0:
            raise ValueError(f"deadline_seconds is {self.deadline_seconds}; use a positive number, or None")
        if self.solve_rates is not None and not 0 <= self.solve_rates[0] <= self.solve_rates[1] <= 1:
            raise ValueError(f"solve_rates is {self.solve_rates}; use (lowest, highest), each from 0 to 1")
        if self.episode.temperature <= 0 or self.episode.top_p < 1:
            raise ValueError(
                f"episode.temperature is {self.episode.temperature} and top_p {self.episode.top_p}; training needs "
                "samples from the policy's own distribution: use a positive temperature and top_p 1"
            )
        longest = self.episode.max_prompt_tokens + self.episode.max_response_tokens
        if max(self.row_buckets) < longest - 1:
            raise ValueError(
                f"the largest of row_buckets ({self.row_buckets}) must hold an episode of {longest} tokens"
            )
