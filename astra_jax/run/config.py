"""The settings that every training loop has; each loop's configuration adds its own, and reasons for defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from astra_jax.models.remat import REMATS
from sandbox.settings import Bound, Count, OneOf, Settings

OptimizerName = Literal["adamw", "muon"]
LearningRate = Annotated[float, Bound(least=0, most=100)]
WeightDecay = Annotated[float, Bound(least=0, most=100)]
Decay = Annotated[float, Bound(least=0, below=1)]
"""Of a running mean."""

_FORMER_NAMES = {
    "data.rows": "batch_size",
    "accumulation": "micro_batch_size",
    "updates": "steps",
    "groups_per_batch": "batch_size",
    "micro_batch_rows": "micro_batch_size",
    "max_groups_per_update": "max_groups_per_step",
}


def todays_name(setting: str) -> str:
    """Of a training setting with a dotted name, which may be what it was called before, in a checkpoint or by habit."""
    for former, name in _FORMER_NAMES.items():
        if setting == former or setting.endswith(f".{former}"):
            return setting.removesuffix(former) + name
    return setting


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """What SFT and GRPO share.

    Attributes:
        steps: optimizer steps; None where the loop works them out.
        batch_size: of a step: rows (SFT) or groups of episodes (GRPO).
        micro_batch_size: rows of one forward and backward pass; None: on a mesh a row for each place that it spreads
            rows over, else the whole batch. A step's result does not depend on it: gradients are added up in float32
            and divided once.
        optimizer: see `astra_jax.run.optimizers`.
        learning_rate: of all parameters, or its peak.
        b1, b2, eps: AdamW's.
        weight_decay: on matrices only.
        max_grad_norm: gradients are scaled down to this global norm.
        rounding: of weights whose type is bfloat16 (`model.param_dtype`): `nearest`, or `stochastic`, with which small
            updates are not lost: at 2e-6 nearly all are below half of a bfloat16's last place. The optimizer's state is
            float32 either way. Without effect on float32 weights.
        on_nonfinite: a step whose loss or gradient is not finite changes nothing; then the run stops (`stop`), before
            anything else is saved, or goes on (`skip`), and such steps are counted.
        remat: what the backward pass recomputes; a policy of the model's forward pass.
        compiler_options: NAME=VALUE each, of the compiler of the run's devices; they replace the chip's own
            (`astra_jax.run.chips`) of that name, and NAME= leaves that to the compiler.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_states: full training states that are kept (paper: the last one or two).
        keep_params: weights that are kept; None keeps all (paper: weights at high frequency).
    """

    steps: Count | None
    batch_size: Count
    learning_rate: LearningRate
    micro_batch_size: Count | None = None
    optimizer: OptimizerName = "adamw"
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Annotated[float, Bound(least=1e-30, most=1)] = 1e-8
    weight_decay: WeightDecay = 0.0
    max_grad_norm: Annotated[float, Bound(least=1e-30, most=1e30)] = 1.0
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    remat: Annotated[str, OneOf(REMATS)] = "none"
    compiler_options: tuple[str, ...] = ()
    checkpoint_every: Count = 100
    keep_states: Count = 2
    keep_params: Count | None = None


FREE = (
    "checkpoint_every",
    "keep_states",
    "keep_params",
    "remat",
    "micro_batch_size",
    "on_nonfinite",
    "compiler_options",
)
"""Settings that may change when a run goes on: what is computed does not depend on them, but for rounding."""
