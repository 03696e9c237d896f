"""Settings shared by all training loops; each loop's configuration adds its own, and reasons for defaults."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from astra_jax.base.settings import Bound, Count, CountOrZero, OneOf, SettingError, Settings, Share, declared
from astra_jax.models.lora import LoRA
from astra_jax.models.matmuls import MATMUL_QUANTIZATIONS
from astra_jax.models.remat import REMATS

TRACKERS = ("wandb", "mlflow", "trackio")
"""See `astra_jax.run.trackers`."""
OPTIMIZERS = ("adamw", "muon")
"""See `astra_jax.run.optimizers`."""
LearningRate = Annotated[float, Bound(least=0, most=100)]
WeightDecay = Annotated[float, Bound(least=0, most=100)]
Decay = Annotated[float, Bound(least=0, below=1)]
"""Decay rate of a running mean."""
ROW_BUCKET = "a length in row_buckets"
"""Setting that defines a row's length, for messages."""

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
        steps: number of optimizer steps. None: the training loop computes it, see `epochs`.
        batch_size: size of the batch of a step: rows in SFT, groups of episodes in GRPO.
        micro_batch_size: rows in one forward and backward pass; lower it when memory runs out. None: on a mesh one row
            for each shard of the batch, without a mesh the whole batch. It does not change the result of a step:
            gradients are summed in float32 and divided once.
        optimizer: `adamw`, `muon`, or your own function as my_module:my_name (docs/extending.md).
        schedule: learning-rate schedule: `cosine` after a linear warm-up, or your own function as my_module:my_name.
        learning_rate: peak learning rate, for all parameters.
        warmup_fraction: share of all steps in which the learning rate rises linearly to its peak. 0: no warm-up.
        final_fraction: final learning rate as a share of the peak. 1 keeps the rate constant; below 1 it decays by a
            cosine.
        b1, b2, eps: AdamW's decay rates of the first and second moment, and its epsilon.
        weight_decay: AdamW's weight decay. It applies to matrices only. 0: none.
        max_grad_norm: gradients with a larger global norm are scaled down to it.
        rounding: how weights in bfloat16 are rounded after an update: `nearest` or `stochastic`. Keep `stochastic` for
            small learning rates: at 2e-6 nearly every update is below half of bfloat16's resolution, and `nearest`
            would lose it. The optimizer computes in float32 either way. No effect on float32 weights
            (`model.param_dtype`).
        optimizer_state_dtype: dtype of the optimizer's moments: `float32`, or `bfloat16` with stochastic rounding,
            which needs half of the memory. Cannot be changed when a run resumes.
        optimizer_offload: keep the moments of the layers' matrices in the host's memory between steps. This frees
            device memory and copies one layer at a time. Results differ by rounding only.
        on_nonfinite: reaction to a loss or gradient that is not finite. The step changes no weights in either case.
            `stop` ends the run before anything else is saved; `skip` counts the step and continues. The run also stops
            after 10 such steps in a row, and fails if more than half of all steps are such.
        remat: how much of the forward pass the backward pass recomputes, from `none` (fastest, most memory) to `full`
            (slowest, least memory). `dots` keeps the outputs of matmuls, `heads` the inputs and output of attention,
            `attention` its output, and `offload` the same in the host's memory.
        matmul_quantization: number format in which the layers' matrices are multiplied, forward and for the gradient of
            activations: the model's dtype (`none`), `int8` or `fp8`, which are faster on chips that support them.
            Embedding, head and the gradients of weights keep the model's dtype.
        lora: low-rank adapters. With a rank only the adapters are trained. The base weights are then stored once, in
            `model.param_dtype`, without gradients or moments.
        compiler_options: XLA compiler options, each as NAME=VALUE. They replace the default of the same name for the
            chip (`astra_jax.run.chips`); NAME= removes that default.
        checkpoint_every: steps between checkpoints. The last step is always saved.
        keep_states: number of full training states to keep, the newest ones (paper: the last one or two). A run resumes
            from such a state.
        keep_params: number of saved weights to keep in addition to those in full states. None keeps all (paper: weights
            at a high frequency).
        max_failed_restarts: number of consecutive starts that may fail without progress. The next start is refused, so
            that a supervisor does not restart a broken run forever. 0: no limit.
        log_to: experiment trackers that receive the metrics in addition to TensorBoard: `wandb`, `mlflow`, `trackio`,
            or your own class as my_module:MyTracker.
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
    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer_offload: Resumable[bool] = False
    on_nonfinite: Resumable[HostOnly[Literal["stop", "skip"]]] = "stop"
    remat: Resumable[Annotated[str, OneOf(REMATS)]] = "none"
    matmul_quantization: Annotated[str, OneOf(MATMUL_QUANTIZATIONS)] = "none"
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
        if self.lora.weight_quantization != "none" and self.matmul_quantization != "none":
            raise SettingError(
                f"matmul_quantization is {self.matmul_quantization}, lora.weight_quantization "
                f"{self.lora.weight_quantization}: matrices that are kept in 8 bits are multiplied in the model's "
                "dtype; leave one of the two out"
            )
