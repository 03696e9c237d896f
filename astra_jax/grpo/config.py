"""Settings of GRPO; defaults from the paper where it gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from astra_jax.base.settings import Bound, Count, CountOrZero, Length, OneOf, Seconds, Seed, SettingError, Share, Slots
from astra_jax.grpo.losses import ObjectiveConfig
from astra_jax.models.matmuls import WEIGHT_QUANTIZATIONS
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.scheduler import groups_started_at_once
from astra_jax.run.config import ROW_BUCKET, HostOnly, LearningRate, Resumable, TrainingConfig, WeightDecay
from synthesis.core.rewards import bounds_of

Order = Literal["shuffled", "easy_first"]
"""Order of the environments in each pass over them."""

MEMORY_SETTINGS: Final = (
    "--config.grpo.concurrent_groups (slots are concurrent_groups x group_size), "
    "--config.grpo.episode.max_prompt_tokens or --config.grpo.episode.max_response_tokens"
)
"""The settings that decide how much memory the rollouts of the embedded engine need."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainingConfig):
    """Settings of GRPO. Defaults are the paper's where it gives one; the others are ours, with the reason.

    Attributes, beside `TrainingConfig`'s:
        steps: number of training steps, each on one batch of groups. The paper's curves run to about 140.
        batch_size: valid groups in a batch (paper: 256, with mini-batches of 256, so one update for each batch). Lower
            it for small models and few environments.
        micro_batch_size: packed rows in one forward and backward pass. Ours: None, one row for each shard of the batch
            on a mesh, else 1; the longest rows fill a chip.
        group_size: episodes in a group, all of one environment. Ours: 8, the least that gives a usable standard
            deviation with the coarse values of F1.
        learning_rate: peak learning rate. Constant (paper) unless `warmup_fraction` or `final_fraction` is set; with
            either, a resumed run must keep its `steps`.
        objective: clipping, ratio, advantages, loss aggregation and importance sampling.
        mini_batches: optimizer steps for each batch, on equal parts of it (paper: 1). The ratio is relative to the
            weights before the first.
        min_reward_std: a group is trained on if the standard deviation of its rewards is above this value. Ours: 0.01,
            above rounding errors and below the smallest deviation that one differing episode of 8 causes. In units of
            the reward: lower it for small rewards.
        oversample: with `async_rollouts=False`: groups to run at once, as a multiple of those expected to be needed.
            Higher values wait less at the end of a batch and waste more episodes. Ours: 1.25 (`GroupScheduler`).
        concurrent_groups: groups whose episodes may run at once. An engine is full with its `slots` divided by
            `group_size`. With `async_rollouts=False` up to twice as many groups are open (`groups_started_at_once`).
        deadline_seconds: time limit of a batch's rollouts, in seconds. After it, groups enter the batch in the order in
            which they finish, and groups still running when the batch is full are cancelled (`GroupScheduler`). The
            batch then depends on timing, and long episodes are less likely to be in it. None: wait for all. Not used
            with `async_rollouts`, which never waits for a group.
        async_rollouts: continue rollouts during updates, up to `max_off_policy_steps` batches ahead. Importance
            sampling corrects for the weights that sampled each token. False: strictly online (paper).
        max_off_policy_steps: maximum age of a group, in steps: its oldest token must be sampled by weights at most this
            much older than the trained ones. Older groups are dropped and counted. Strictly online, it is the age of
            surplus groups: 1 trains them one step late (paper), 0 drops them.
        max_masked_share: largest share of a batch's episodes that may lack a score because infrastructure or a reward
            failed (`filling/masked_…`). Above it the run stops with an error. Ours: 0.2. Fewer than 4 such episodes
            never stop a run.
        max_groups_per_step: maximum groups sampled for one batch. If they do not fill it, training stops with the
            result `exhausted` and the reason. The paper has no limit. Ours: None, 16 times `batch_size`, so that a
            broken sandbox, or a policy whose episodes all score the same, stops the run.
        episode: limits, sampling and reward of an episode.
        solve_rates: train only on environments with a recorded solve rate between these two values, 0 to 1 (lowest,
            highest); measure it with `astra difficulty`. None: train on all.
        weight_quantization: format of the layers' matrices in the embedded engine. `int8` halves the bytes that
            decoding reads. Importance sampling corrects for the difference to the trainer, which is logged
            (`train/mismatch_kl`). vLLM servers have their own setting.
        order: order of the environments in each pass: `shuffled`, or `easy_first`, from the highest recorded solve rate
            to the lowest, shuffled among equals.
        row_buckets: allowed lengths of packed rows, in tokens. A batch uses the smallest that holds its longest
            episode; each length is compiled once.
        weight_decay: AdamW's weight decay. Like `b1`, `b2`, `eps` and `max_grad_norm` it is verl's default, the
            framework of the paper.
        checkpoint_every: steps between full checkpoints. The last step is always saved.
        keep_params: number of saved weights to keep in addition to those in full states. Ours: 5; each is 59 GB for 14B
            in float32. None keeps all, 14 in 140 steps.
        episodes_every: steps between HTML pages of sampled episodes in `workdir/episodes`. 0: no pages.
        eval_every: steps between evaluations on held-out environments, if there are any. 0: only before the first step
            and after the last.
        eval_samples: episodes of each held-out environment at `episode.temperature`, in addition to a greedy one. Ours:
            4, as in the paper's benchmarks.
        dump_batches: write every training batch to `workdir/batches`. `astra grpo --replay` trains on this dataset
            again, and `astra inspect` shows it. A token takes up to 8 bytes before compression; the texts are stored
            too.
        seed: random seed of environment order, distractors and sampling.
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
    oversample: HostOnly[Annotated[float, Bound(least=1, most=1_000)]] = 1.25
    concurrent_groups: Resumable[HostOnly[Slots]] = 64
    deadline_seconds: Resumable[HostOnly[Seconds | None]] = None
    async_rollouts: bool = False
    max_off_policy_steps: Annotated[int, Bound(least=0, most=1_000)] = 1
    max_masked_share: Resumable[HostOnly[Share]] = 0.2
    max_groups_per_step: Resumable[HostOnly[Count | None]] = None
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    solve_rates: HostOnly[tuple[Share, Share] | None] = None
    weight_quantization: HostOnly[Annotated[str, OneOf(WEIGHT_QUANTIZATIONS)]] = "none"
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
        """Most groups that have started and not entered the buffer."""
        if self.async_rollouts:
            return self.concurrent_groups
        return groups_started_at_once(self.concurrent_groups, self.batch_size)

    @property
    def steps_ahead(self) -> int:
        """Most batches that rollouts are ahead of the update; 0 strictly online."""
        return self.max_off_policy_steps if self.async_rollouts else 0

    @property
    def row_lengths(self) -> dict[int, str]:
        """Possible row lengths, each with the setting that defines it."""
        return dict.fromkeys(self.row_buckets, ROW_BUCKET)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.async_rollouts and self.deadline_seconds is not None:
            raise SettingError(
                f"deadline_seconds is {self.deadline_seconds:g} with async_rollouts=True, where groups count as they "
                "finish and are cancelled by their age; leave it out"
            )
        if self.async_rollouts and not self.max_off_policy_steps:
            raise SettingError(
                "max_off_policy_steps is 0 with async_rollouts=True, whose rollouts are up to so many steps ahead; use "
                "at least 1, or async_rollouts=False"
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
