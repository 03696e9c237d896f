"""SFT's settings: the paper's, where it gives them."""

from __future__ import annotations

from dataclasses import dataclass

from astra_jax.run.config import TrainingConfig
from astra_jax.sft.data import DataConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TrainingConfig):
    """Defaults are the paper's for 14B where it gives one; the others are ours, with the reason.

    Attributes, beside `TrainingConfig`'s:
        data: rows of 20k tokens (paper).
        batch_size: rows in a batch, over all hosts (paper: 32).
        epochs: passes over the data (paper: 2); not used when `steps` is given.
        steps: optimizer steps; None takes them from `epochs`.
        optimizer: `adamw` (paper), or `muon` for small models from scratch.
        learning_rate: the peak (paper: 5e-6 for 14B, 2e-6 for 32B).
        warmup_fraction: of all steps (paper: 0.05).
        final_fraction: of the peak, where the cosine ends. Ours: 0.1, so that the last steps still teach.
        b2: ours: 0.95, as usual for language models; it forgets the warm-up's statistics.
        weight_decay: ours: 0; two epochs at 5e-6 hardly move the weights.
        log_every: steps between rows of metrics; fetching them waits for the device.
        eval_every: steps between losses on the held-out dataset, if there is one.
        eval_batches: how many batches of it, at most: always the same ones.
        sample_every: steps between samples: what the model says to the openings of held-out conversations, or of the
            training data's, if there is no held-out dataset. 0 draws none.
        samples: how many openings.
        sample_tokens: of a sample, at most.
    """

    data: DataConfig = DataConfig(seq_len=20_480)
    batch_size: int = 32
    epochs: float = 2.0
    steps: int | None = None
    learning_rate: float = 5e-6
    warmup_fraction: float = 0.05
    final_fraction: float = 0.1
    b2: float = 0.95
    log_every: int = 1
    eval_every: int = 100
    eval_batches: int = 16
    sample_every: int = 100
    samples: int = 4
    sample_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "log_every", "eval_every", "eval_batches", "samples", "sample_tokens")
        if self.sample_every < 0:
            raise ValueError(f"sample_every is {self.sample_every}; it must be at least 1, or 0 for no samples")
        if self.batch_size % self.rows_at_once:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, which does not divide batch_size ({self.batch_size}); "
                "choose a divisor"
            )

    @property
    def rows_at_once(self) -> int:
        """Of one forward and backward pass."""
        return self.micro_batch_size or self.batch_size

    @property
    def micro_batches(self) -> int:
        """Of a batch."""
        return self.batch_size // self.rows_at_once
