"""Settings of SFT; defaults from the paper where it gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from astra_jax.base.settings import Bound, Count, CountOrZero, Length, SettingError, Share
from astra_jax.run.config import ROW_BUCKET, Decay, HostOnly, LearningRate, Resumable, TrainingConfig
from astra_jax.sft.data import DataConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainingConfig):
    """Settings of SFT. Defaults are the paper's for 14B where it gives one; the others are ours, with the reason.

    Attributes, beside `TrainingConfig`'s:
        data: how conversations become rows of tokens. Default: rows of 20k tokens (paper).
        row_buckets: lengths below `data.seq_len`. A micro-batch is cut to the smallest one that holds its longest row,
            which saves computation and leaves the loss unchanged; each length is compiled once. Use it if your rows
            have much padding. Default: none, since the paper's conversations fill rows of 20k tokens to 97 % and more.
        batch_size: rows in a batch, over all hosts (paper: 32). The last batch of an epoch has the remaining rows. With
            fewer than 10,000 examples use 8.
        epochs: passes over the data (paper: 2). Each pass trains on each example once; 1.5 stops after half of the
            second pass. Not used if `steps` is given.
        steps: number of optimizer steps. None: computed from `epochs`.
        optimizer: `adamw` (paper), your own function as my_module:my_name, or `muon`, for small models trained from
            scratch.
        learning_rate: peak learning rate (paper: 5e-6 for 14B, 2e-6 for 32B).
        warmup_fraction: share of all steps in which the learning rate rises linearly to its peak (paper: 0.05).
        final_fraction: final learning rate as a share of the peak, after a cosine decay. Ours: 0.1, so that the last
            steps still change the weights.
        b2: AdamW's decay rate of the second moment. Ours: 0.95, as usual for language models: it forgets the statistics
            of the warm-up.
        weight_decay: AdamW's weight decay. Ours: 0, since two epochs at 5e-6 hardly change the weights.
        log_every: steps between logged metrics. Logging waits for the device, so raise it if steps are short.
        eval_every: steps between evaluations of the loss on the held-out dataset, if there is one.
        eval_batches: maximum number of held-out batches in an evaluation, always the same ones. Ours: None, all of
            them. With a limit the loss depends on `batch_size`.
        sample_every: steps between text samples: the model's answers to the openings of held-out conversations, or of
            training conversations if there is no held-out dataset. 0: no samples.
        samples: number of conversations to sample answers for.
        sample_tokens: maximum tokens of each sampled answer.
    """

    data: HostOnly[DataConfig] = DataConfig(seq_len=20_480)
    row_buckets: Resumable[tuple[Length, ...]] = ()
    batch_size: HostOnly[Count] = 32
    epochs: Resumable[HostOnly[Annotated[float, Bound(above=0, most=1e6)]]] = 2.0
    steps: HostOnly[Count | None] = None
    learning_rate: LearningRate = 5e-6
    warmup_fraction: Share = 0.05
    final_fraction: Share = 0.1
    b2: Decay = 0.95
    log_every: Resumable[HostOnly[Count]] = 1
    eval_every: Resumable[HostOnly[Count]] = 100
    eval_batches: Resumable[HostOnly[Count | None]] = None
    sample_every: Resumable[HostOnly[CountOrZero]] = 100
    samples: Resumable[HostOnly[Count]] = 4
    sample_tokens: Resumable[HostOnly[Length]] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.micro_batch_rows:
            raise SettingError(
                f"micro_batch_size is {self.micro_batch_size}, which does not divide batch_size ({self.batch_size}); "
                "choose a divisor"
            )
        if max(self.row_buckets, default=0) >= self.data.seq_len:
            raise SettingError(
                f"row_buckets is {self.row_buckets}, and rows are of data.seq_len ({self.data.seq_len}) tokens; give "
                "shorter lengths"
            )

    @property
    def length_buckets(self) -> tuple[int, ...]:
        """`row_buckets`, ascending."""
        return tuple(sorted({*self.row_buckets}))

    @property
    def row_lengths(self) -> dict[int, str]:
        """Possible row lengths, ascending, each with the setting that defines it."""
        return dict.fromkeys(self.length_buckets, ROW_BUCKET) | {self.data.seq_len: "data.seq_len"}

    @property
    def micro_batch_rows(self) -> int:
        """Rows in one forward and backward pass."""
        return self.micro_batch_size or self.batch_size

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a batch."""
        return self.batch_size // self.micro_batch_rows
