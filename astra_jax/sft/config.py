"""SFT's settings: the paper's, where it gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astra_jax.run.optimizers import OptimizerName
from astra_jax.sft.data import DataConfig


@dataclass(frozen=True)
class SFTConfig:
    """Defaults are the paper's for 14B where it gives one; the others are ours, with the reason.

    Attributes:
        data: rows of 20k tokens, 32 of them a batch (paper).
        epochs: passes over the data (paper: 2); not used when `steps` is given.
        steps: optimizer steps; None takes them from `epochs`.
        accumulation: micro-batches of a batch; divides `data.rows`. The step's result does not depend on it.
        optimizer: `adamw` (paper), or `muon` for small models from scratch.
        learning_rate: the peak (paper: 5e-6 for 14B, 2e-6 for 32B).
        warmup_fraction: of all steps (paper: 0.05).
        final_fraction: of the peak, where the cosine ends. Ours: 0.1, so that the last steps still teach.
        b1, b2, eps: AdamW's. Ours: b2 0.95, as usual for language models; it forgets the warm-up's statistics.
        weight_decay: on matrices only. Ours: 0; two epochs at 5e-6 hardly move the weights.
        max_grad_norm: gradients are scaled down to this norm. Ours: 1.
        rounding: of weights whose type is bfloat16 (`model.param_dtype`): `nearest`, or `stochastic`, with which small
            updates are not lost: at 5e-6 nearly all are below half of a bfloat16's last place. The optimizer's state is
            float32 then. Without effect on float32 weights.
        remat: what the backward pass recomputes; a policy of the model's `forward`.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_states: full training states that are kept (paper: the last one or two).
        keep_params: weights that are kept; None keeps all (paper: weights at high frequency).
        log_every: steps between rows of metrics; fetching them waits for the device.
        eval_every: steps between losses on the held-out dataset, if there is one.
        eval_batches: how many batches of it, at most: always the same ones.
        sample_every: steps between samples: what the model says to the openings of held-out conversations, or of the
            training data's, if there is no held-out dataset. 0 draws none.
        samples: how many openings.
        sample_tokens: of a sample, at most.
    """

    data: DataConfig = DataConfig(seq_len=20_480, rows=32)
    epochs: float = 2.0
    steps: int | None = None
    accumulation: int = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 5e-6
    warmup_fraction: float = 0.05
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    remat: str = "none"
    checkpoint_every: int = 100
    keep_states: int = 2
    keep_params: int | None = None
    log_every: int = 1
    eval_every: int = 100
    eval_batches: int = 16
    sample_every: int = 100
    samples: int = 4
    sample_tokens: int = 256

    def __post_init__(self) -> None:
        positive = ("accumulation", "checkpoint_every", "log_every", "eval_every", "eval_batches")
        for name in (*positive, "samples", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sample_every < 0:
            raise ValueError(f"sample_every is {self.sample_every}; it must be at least 1, or 0 for no samples")
        if self.data.rows % self.accumulation:
            raise ValueError(
                f"accumulation is {self.accumulation}, which does not divide data.rows ({self.data.rows}); "
                "choose a divisor"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, or None to use epochs")
