"""Settings of SFT; defaults from the paper where it gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from astra_jax.base.settings import Bound, Count, CountOrZero, Length, SettingError, Share
from astra_jax.run.config import ROW_BUCKET, Decay, HostOnly, LearningRate, Resumable, TrainingConfig
from astra_jax.sft.data import DataConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainingConfig):
    """Defaults are the paper's for 14B where it gives one; the others are ours, with the reason.

    Attributes, beside `TrainingConfig`'s:
        data: rows of 20k tokens (paper).
        row_buckets: lengths below `data.seq_len` that a micro-batch's rows are cut to where the longest fits: what none
            of them holds is not computed, and the loss is the same. The step is compiled for each. Ours: none, since
            the paper's conversations fill rows of 20k tokens to 97 % and more.
        batch_size: rows in a batch, over all hosts (paper: 32). The last batch of an epoch has the rows that are left.
        epochs: passes over the data (paper: 2), each of which trains on each example once; of 1.5 the second pass ends
            after half of its batches. Not used when `steps` is given.
        steps: optimizer steps; None takes them from `epochs`.
        optimizer: `adamw` (paper), or `muon` for small models from scratch.
        learning_rate: the peak (paper: 5e-6 for 14B, 2e-6 for 32B).
        warmup_fraction: paper: 0.05.
        final_fraction: ours: 0.1, so that the last steps still teach.
        b2: ours: 0.95, as usual for language models; it forgets the warm-up's statistics.
        weight_decay: ours: 0; two epochs at 5e-6 hardly move the weights.
        log_every: steps between rows of metrics; fetching them waits for the device.
        eval_every: steps between losses on the held-out dataset, if there is one.
        eval_batches: cap: evaluate on this many batches of the held-out dataset, always the same ones. Ours: None, all
            of it; with a cap the loss depends on `batch_size`.
        sample_every: steps between samples: what the model says to the openings of held-out conversations, or of the
            training data's, if there is no held-out dataset. 0 draws none.
        samples: how many openings.
        sample_tokens: of a sample, at most.
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
