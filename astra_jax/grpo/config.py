"""Settings of GRPO; defaults from the paper where it gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from astra_jax.base.settings import Bound, Count, CountOrZero, Length, OneOf, Seconds, Seed, SettingError, Share, Slots
from astra_jax.grpo.losses import ObjectiveConfig
from astra_jax.models.matmuls import STORED
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.filling import begun_at_once
from astra_jax.run.config import ROW_BUCKET, HostOnly, LearningRate, Resumable, TrainingConfig, WeightDecay
from synthesis.core.rewards import bounds_of

Order = Literal["shuffled", "easy_first"]
"""Order of the environments in each pass over them."""

ROOM: Final = (
    "--config.grpo.concurrent_groups (slots are concurrent_groups x group_size), "
    "--config.grpo.episode.max_prompt_tokens or --config.grpo.episode.max_response_tokens"
)
"""The settings that decide how much memory the rollouts of the embedded engine need."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainingConfig):
    """Settings of GRPO. Defaults are the paper's where it gives one; the others are ours, with the reason.

    Attributes, beside `TrainingConfig`'s:
        steps: updates of the policy. The paper's curves run to about 140.
        batch_size: valid groups in an update (paper: batch 256 = mini-batch 256, so one update a batch).
        micro_batch_size: packed rows of one forward and backward pass. Ours: None, on a mesh a row for each place that
            it spreads rows over, else 1; the longest fill a chip.
        group_size: episodes of a group. Ours: 8, the least that gives a usable deviation on F1's coarse grid.
        learning_rate: the peak. Constant (paper), unless `warmup_fraction` or `final_fraction` say otherwise; the steps
            that these are of are then part of the run.
        objective: clips, ratio, advantages, normalisation, importance sampling.
        mini_batches: optimizer steps that a batch is cut into (paper: 1); the ratio is to the weights before the first.
        min_reward_std: a group trains when Std(reward) is above it. Ours: 0.01, below the smallest deviation that one
            differing episode of 8 causes, above rounding. In units of the reward: lower it for small rewards.
        surplus_max_age: strictly online: updates that a valid surplus group may wait (paper: it trains one update
            late); 0 drops it.
        oversample: strictly online: groups under way over those expected to be needed. Ours: 1.25, see `filling.fill`.
        concurrent_groups: as many episodes are under way at once as so many groups have; slots / group_size keeps an
            engine full. Strictly online they are of up to twice as many groups, see `filling.begun_at_once`.
        deadline_seconds: of a batch's rollouts: from then on groups count in the order in which they finish, and what
            is still under way when the batch is full is cancelled, see `filling.fill`. None waits for all. With
            `async_steps` none is waited for anyway.
        async_steps: 0 is strictly online (paper). k: rollouts continue during updates and across them, up to k batches
            ahead; a group is trained on when its oldest token is at most k updates old, else dropped and counted.
            Importance sampling corrects for the weights that sampled each token.
        max_masked_share: stop with an error when more of a batch's sampled episodes have no score, because
            infrastructure or a reward failed; see `filling/masked_…`. Ours: 0.2. Fewer than 4 never stop a run.
        max_groups_per_step: stop training (result `exhausted`, with the reason) when a batch needs more. The paper
            samples on; ours: None is 16 times `batch_size`, so that a dead sandbox, or a policy whose episodes all
            score the same, ends the run.
        episode: turns, token limits, sampling and reward.
        solve_rates: (lowest, highest): train only on environments whose recorded solve rate, 0 to 1, lies within; see
            `launch.difficulty`. None trains on all.
        stored: how the embedded engine keeps the layers' matrices that it samples with, see `EngineConfig.stored`:
            `int8` halves what decoding reads of them. What it samples otherwise than the trainer would is corrected by
            importance sampling, and logged (`mismatch_kl`). vLLM servers have settings of their own.
        order: of the environments in each pass over them: `shuffled`, or `easy_first`: by recorded solve rate, the
            highest first, shuffled among equals.
        row_buckets: allowed lengths of packed rows; the smallest that holds the batch's longest episode is used.
        weight_decay: with `b1`, `b2`, `eps` and `max_grad_norm` verl's defaults, which the paper's framework would have
            used.
        checkpoint_every: updates between full checkpoints; the last update is always saved.
        keep_params: ours: 5, of which one is 59 GB at 14B in float32; None keeps all, 14 of 140 updates.
        episodes_every: updates between pages of sampled episodes in `workdir/episodes`; 0 writes none.
        eval_every: updates between evaluations on held-out environments, if there are any; 0: only before the first
            update and after the last.
        eval_samples: episodes of each held-out environment at `episode.temperature`, beside the greedy one. Ours: 4, as
            in the paper's benchmarks.
        dump_batches: write each batch that is trained on to `workdir/batches`, a dataset that `launch.grpo --replay`
            trains on again and `launch.inspect` shows; up to 8 bytes a token before compression, and the texts.
        seed: of environment order, distractors and sampling.
    """

    steps: Resumable[HostOnly[Count]] = 140
    batch_size: HostOnly[Count] = 256
    group_size: HostOnly[Annotated[int, Bound(least=2, most=65_536, why="advantages are relative to the group")]] = 8
    learning_rate: HostOnly[LearningRate] = 2e-6
    warmup_fraction: HostOnly[Share] = 0.0
    final_fraction: HostOnly[Share] = 1.0
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    mini_batches: HostOnly[Count] = 1
    min_reward_std: HostOnly[Annotated[float, Bound(least=0, most=1e6)]] = 0.01
    surplus_max_age: HostOnly[CountOrZero] = 1
    oversample: HostOnly[Annotated[float, Bound(least=1, most=1_000)]] = 1.25
    concurrent_groups: Resumable[HostOnly[Slots]] = 64
    deadline_seconds: Resumable[HostOnly[Seconds | None]] = None
    async_steps: Annotated[int, Bound(least=0, most=1_000)] = 0
    max_masked_share: Resumable[HostOnly[Share]] = 0.2
    max_groups_per_step: Resumable[HostOnly[Count | None]] = None
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    solve_rates: HostOnly[tuple[Share, Share] | None] = None
    stored: HostOnly[Annotated[str, OneOf(STORED)]] = "none"
    order: HostOnly[Order] = "shuffled"
    row_buckets: Resumable[HostOnly[tuple[Length, ...]]] = (4_096, 8_192, 16_384, 32_768, 74_752)
    weight_decay: WeightDecay = 0.01
    checkpoint_every: Resumable[HostOnly[Count]] = 10
    keep_params: Resumable[HostOnly[Count | None]] = 5
    episodes_every: Resumable[HostOnly[CountOrZero]] = 10
    eval_every: Resumable[HostOnly[CountOrZero]] = 0
    eval_samples: Resumable[HostOnly[Count]] = 4
    dump_batches: Resumable[HostOnly[bool]] = False
    seed: HostOnly[Seed] = 0

    @property
    def constant_rate(self) -> bool:
        """True if the learning rate is the same in all steps, whatever their number."""
        return self.warmup_fraction == 0 and self.final_fraction == 1 and self.schedule == "cosine"

    @property
    def most_groups(self) -> int:
        """Most groups that are sampled for a step."""
        return 16 * self.batch_size if self.max_groups_per_step is None else self.max_groups_per_step

    @property
    def episodes_at_once(self) -> int:
        """Most episodes that run at once."""
        return self.concurrent_groups * self.group_size

    @property
    def groups_at_once(self) -> int:
        """Strictly online: most groups that are started and not yet in a batch."""
        return begun_at_once(self.concurrent_groups, self.batch_size)

    @property
    def row_lengths(self) -> dict[int, str]:
        """Possible row lengths, each with the setting that defines it."""
        return dict.fromkeys(self.row_buckets, ROW_BUCKET)

    @property
    def most_age(self) -> int:
        """Largest age in updates of a token in training."""
        return self.async_steps or self.surplus_max_age

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.async_steps and self.deadline_seconds is not None:
            raise SettingError(
                f"deadline_seconds is {self.deadline_seconds:g} with async_steps={self.async_steps}, where groups "
                "count as they finish and are given up by their age; leave it out"
            )
        lowest, highest = bounds_of(self.episode.reward)
        if self.min_reward_std >= (highest - lowest) / 2:
            raise SettingError(
                f"min_reward_std is {self.min_reward_std:g}; use a number below {(highest - lowest) / 2:g}: rewards of "
                f"{self.episode.reward!r} are from {lowest:g} to {highest:g}, so no batch could be filled"
            )
        if self.batch_size % self.mini_batches:
            raise SettingError(
                f"mini_batches is {self.mini_batches}, which does not divide batch_size ({self.batch_size}); "
                "choose a divisor"
            )
        if self.max_groups_per_step is not None and self.max_groups_per_step < self.batch_size:
            raise SettingError(
                f"max_groups_per_step is {self.max_groups_per_step}, batch_size {self.batch_size}: no batch could be "
                "filled; raise the first or lower the second"
            )
        if self.solve_rates is not None and self.solve_rates[0] > self.solve_rates[1]:
            raise SettingError(f"solve_rates is {self.solve_rates}; use (lowest, highest), each from 0 to 1")
        if self.episode.temperature <= 0 or self.episode.top_p < 1:
            raise SettingError(
                f"episode.temperature is {self.episode.temperature} and top_p {self.episode.top_p}; training needs "
                "samples from the policy's own distribution: use a positive temperature and top_p 1"
            )
        longest = self.episode.max_prompt_tokens + self.episode.max_response_tokens
        if max(self.row_buckets, default=0) < longest:
            raise SettingError(
                f"the largest of row_buckets ({self.row_buckets}) must hold an episode of {longest} tokens"
            )
