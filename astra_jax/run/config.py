"""Settings shared by all training loops; each loop's configuration adds its own, and reasons for defaults."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from astra_jax.base.settings import Bound, Count, CountOrZero, OneOf, SettingError, Settings, Share, declared
from astra_jax.models.lora import LoRA
from astra_jax.models.matmuls import MATMULS
from astra_jax.models.remat import REMATS
from synthesis.core.compat import FORMER_SETTINGS

TRACKERS = ("wandb", "mlflow", "trackio")
"""See `astra_jax.run.trackers`."""
OPTIMIZERS = ("adamw", "muon")
"""See `astra_jax.run.optimizers`."""
OptimizerMemory = Literal["device", "host"]
LearningRate = Annotated[float, Bound(least=0, most=100)]
WeightDecay = Annotated[float, Bound(least=0, most=100)]
Decay = Annotated[float, Bound(least=0, below=1)]
"""Decay rate of a running mean."""
ROW_BUCKET = "a length in row_buckets"
"""Setting that defines a row's length, for messages."""

_FORMER_NAMES = {
    "data.rows": "batch_size",
    "accumulation": "micro_batch_size",
    "updates": "steps",
    "groups_per_batch": "batch_size",
    "micro_batch_rows": "micro_batch_size",
    "max_groups_per_update": "max_groups_per_step",
    "delta": "min_reward_std",
    "objective.normalisation": "objective.loss_agg_mode",
    "objective.proximal": "objective.ratio_reference",
    "max_faults": "max_failed_restarts",
    "servers": "tools",
    "registries": "tools",
    **FORMER_SETTINGS,
}


def todays_name(setting: str) -> str:
    """Return the current dotted name of a setting, whose given name may be a former one."""
    for former, name in _FORMER_NAMES.items():
        if setting == former or setting.endswith(f".{former}"):
            return setting.removesuffix(former) + name
    return setting


_T = TypeVar("_T")
_HOST_ONLY = object()
HostOnly = Annotated[_T, _HOST_ONLY]
"""Annotation of a setting that no compiled program reads: runs that differ only in such settings share their compiled
programs. `steps: HostOnly[Count] = 140`."""


_RESUMABLE = object()
Resumable = Annotated[_T, _RESUMABLE]
"""Annotation of a setting that may change when a run resumes: results do not depend on it, but for rounding."""


def host_only_fields(kind: type) -> frozenset[str]:
    """Return the names of the settings that are annotated with `HostOnly`."""
    return _annotated(kind, _HOST_ONLY)


def resumable_fields(kind: type) -> frozenset[str]:
    """Return the names of the settings that are annotated with `Resumable`."""
    return _annotated(kind, _RESUMABLE)


def _annotated(kind: type, mark: object) -> frozenset[str]:
    fields = declared(kind).items()
    return frozenset(name for name, annotation in fields if mark in getattr(annotation, "__metadata__", ()))


class JitKey:
    """Settings that a compiled program may read: a hashable value of exactly those fields, equal by value.

    `TrainingConfig.as_jit_key` makes it, a frozen dataclass with the names and values of the configuration.
    """

    def __getattr__(self, name: str) -> Any:
        """Report a missing field. Raises AttributeError."""
        raise AttributeError(
            f"a compiled program reads the setting {name!r}, which {type(self).__name__} does not have; if the setting "
            "is annotated with `HostOnly`, remove that annotation or pass the value to the program as an array"
        )


@functools.cache
def _key_type(kind: Any) -> Any:
    names = [name for name in declared(kind) if name not in host_only_fields(kind)]
    return dataclasses.make_dataclass(f"{kind.__name__}JitKey", names, bases=(JitKey,), frozen=True)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """Settings that SFT and GRPO share.

    Attributes:
        steps: optimizer steps; None where the loop works them out.
        batch_size: of a step: rows (SFT) or groups of episodes (GRPO).
        micro_batch_size: rows of one forward and backward pass; None: on a mesh a row for each place that it spreads
            rows over, else the whole batch. A step's result does not depend on it: gradients are added up in float32
            and divided once.
        optimizer: `adamw`, `muon`, or a function of your own, my_module:my_name (docs/extending.md).
        schedule: of the learning rate: `cosine` behind a linear warm-up, or a function of your own, my_module:my_name.
        learning_rate: of all parameters: its peak.
        warmup_fraction: of all steps: those in which it rises, linearly.
        final_fraction: of the peak, where the cosine after the peak ends; 1 is a constant rate.
        b1, b2, eps: AdamW's.
        weight_decay: on matrices only.
        max_grad_norm: gradients are scaled down to this global norm.
        rounding: of weights whose type is bfloat16 (`model.param_dtype`): `nearest`, or `stochastic`, with which small
            updates are not lost: at 2e-6 nearly all are below half of a bfloat16's last place. The optimizer computes
            in float32 either way. Without effect on float32 weights.
        moments: what the optimizer's running means are kept in: `float32`, or `bfloat16`, rounded stochastically, with
            half of the bytes. Cannot be changed when a run resumes.
        optimizer_memory: where those of the layers' matrices are between steps: with the weights (`device`), or in the
            host's memory (`host`), from where they come a layer at a time. A step differs by rounding only.
        on_nonfinite: a step whose loss or gradient is not finite changes nothing; then the run stops (`stop`), before
            anything else is saved, or continues (`skip`), and such steps are counted. After 10 of them in a row the run
            stops; if they are more than half of all steps, it ends with an error.
        remat: what the backward pass recomputes; a policy of the model's forward pass.
        matmul: in which numbers the layers' matrices are multiplied, forward and for the activations' gradient: the
            model's dtype (`none`), `int8` or `fp8`. Embedding, head and the weights' gradients stay in that dtype.
        lora: low-rank adapters that are trained in place of the weights, which then lie there once, without statistics
            or gradients, in `model.param_dtype`; with a rank.
        compiler_options: NAME=VALUE each, of the compiler of the run's devices; they replace the chip's own
            (`astra_jax.run.chips`) of that name, and NAME= leaves that to the compiler.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        keep_states: full training states that are kept (paper: the last one or two).
        keep_params: weights that are kept, beside those of full states; None keeps all (paper: weights at high
            frequency).
        max_failed_restarts: starts in a row that may end with a fault and without progress; the next one is refused, so
            that whatever starts the run again gives it up. 0: any number.
        log_to: experiment trackers that get the metrics beside TensorBoard: `wandb`, `mlflow`, `trackio`, or a class of
            your own, my_module:MyTracker.
    """

    steps: HostOnly[Count | None]
    batch_size: HostOnly[Count]
    learning_rate: LearningRate
    warmup_fraction: Share = 0.0
    final_fraction: Share = 1.0
    micro_batch_size: Resumable[HostOnly[Count | None]] = None
    optimizer: Annotated[str, OneOf(OPTIMIZERS, own=True)] = "adamw"
    schedule: Annotated[str, OneOf(("cosine",), own=True)] = "cosine"
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: Annotated[float, Bound(least=1e-30, most=1)] = 1e-8
    weight_decay: WeightDecay = 0.0
    max_grad_norm: Annotated[float, Bound(least=1e-30, most=1e30)] = 1.0
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    moments: Literal["float32", "bfloat16"] = "float32"
    optimizer_memory: Resumable[OptimizerMemory] = "device"
    on_nonfinite: Resumable[HostOnly[Literal["stop", "skip"]]] = "stop"
    remat: Resumable[Annotated[str, OneOf(REMATS)]] = "none"
    matmul: Annotated[str, OneOf(MATMULS)] = "none"
    lora: LoRA = LoRA()
    compiler_options: Resumable[tuple[str, ...]] = ()
    checkpoint_every: Resumable[HostOnly[Count]] = 100
    keep_states: Resumable[HostOnly[Count]] = 2
    keep_params: Resumable[HostOnly[Count | None]] = None
    max_failed_restarts: Resumable[HostOnly[CountOrZero]] = 10
    log_to: Resumable[HostOnly[tuple[Annotated[str, OneOf(TRACKERS, own=True)], ...]]] = ()

    def as_jit_key(self) -> JitKey:
        """Return the settings that a compiled program may read; equal for runs that differ only in `HostOnly` ones."""
        own_type: Any = type(self)
        key_type = _key_type(own_type)
        key: JitKey = key_type(**{field.name: getattr(self, field.name) for field in dataclasses.fields(key_type)})
        return key

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.rank is not None and self.optimizer == "muon":
            raise SettingError(
                f"optimizer is muon, lora.rank {self.lora.rank}: Muon makes a whole matrix's update orthogonal, and "
                "orthogonal updates of two factors do not make that of their product so; use adamw"
            )
        if self.lora.stored != "none" and self.matmul != "none":
            raise SettingError(
                f"matmul is {self.matmul}, lora.stored {self.lora.stored}: matrices that lie there in 8 bits are "
                "multiplied in the model's dtype; leave one of the two out"
            )
