"""The training steps, compiled as they run, for devices that are only described."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from astra_jax.grpo import step as grpo_step
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.packing import PolicyBatch
from astra_jax.mesh import BATCH, batch_sharding
from astra_jax.models.model import Model
from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.hlo import Module, read_hlo
from astra_jax.run.batch import PackedBatch
from astra_jax.run.optimizers import abstract_state
from astra_jax.sft import step as sft_step
from astra_jax.sft.config import SFTConfig


@dataclass(frozen=True)
class Compiled:
    """One program on one device; bytes.

    Attributes:
        peak: the most that is held at once; as the compiler says, also where it refused.
        arguments: weights, optimizer state, batch.
        temporaries: all else.
        resident: of the job, on the device, but no argument of this program.
        fits: the compiler's verdict.
        traffic: bytes received a run, by mesh axes.
        runs: how often a step runs it.
        seconds: that compiling took.
        module: what was compiled; None where the compiler refused.
    """

    name: str
    peak: float
    arguments: float
    temporaries: float
    resident: float
    fits: bool
    traffic: dict[str, float]
    runs: int
    seconds: float
    module: Module | None


@dataclass(frozen=True)
class Compiling:
    """How programs are compiled.

    Attributes:
        options: of the compiler, by name, as `jax.jit(compiler_options=...)` takes them.
        on_text: told of each compiled program's name and text.
    """

    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    on_text: Callable[[str, str], None] = lambda name, text: None


def sft_programs(model: Model, config: SFTConfig, mesh: Mesh, how: Compiling) -> list[Compiled]:
    """SFT's step."""
    steps = 1_000  # only a constant of the schedule
    params, opt_state = _state(model, sft_step.sft_optimizer(config, steps), mesh)
    sharding = NamedSharding(mesh, PartitionSpec(None, BATCH, "context"))
    shape = (config.micro_batches, config.rows_at_once, config.data.seq_len)
    one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    batch = PackedBatch(one, one, one, one)

    def lower() -> Any:
        options = {"model": model, "config": config, "steps": steps, "mesh": mesh}
        return sft_step.train_step.lower(params, opt_state, batch, **options)

    return [_compile("train_step", lower, mesh, how)]


def grpo_programs(
    model: Model, config: GRPOConfig, mesh: Mesh, how: Compiling, length: int, micro_batches: int
) -> list[Compiled]:
    """GRPO's two programs: gradients of a micro-batch of rows of `length`, and the optimizer's step."""
    params, opt_state = _state(model, grpo_step.grpo_optimizer(config), mesh)
    gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), params)
    one = jax.ShapeDtypeStruct((config.micro_batch_size or 1, length), jnp.float32, sharding=batch_sharding(mesh))
    whole = jax.ShapeDtypeStruct(one.shape, jnp.int32, sharding=one.sharding)
    batch = PolicyBatch(whole, whole, whole, whole, one, one)
    total = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

    def accumulate() -> Any:
        return grpo_step.accumulate.lower(params, gradients, batch, model=model, config=config, mesh=mesh)

    def take_step() -> Any:
        return grpo_step.take_step.lower(params, opt_state, gradients, total, config=config)

    resident = sum(_bytes_per_device(x) for x in jax.tree.leaves(opt_state))
    first = _compile("accumulate", accumulate, mesh, how, resident=resident, runs=micro_batches)
    return [first, _compile("take_step", take_step, mesh, how)]


def _state(model: Model, optimizer: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Weights and optimizer state as a run places them."""
    return abstract_state(model.abstract_params(), optimizer, model.param_shardings(mesh))


def _bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize


def _compile(
    name: str, lower: Callable[[], Any], mesh: Mesh, how: Compiling, *, resident: float = 0.0, runs: int = 1
) -> Compiled:
    lowered = lower()
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=dict(how.options) or None)
    except jax.errors.JaxRuntimeError as error:
        # "… Ran out of memory in memory space hbm. Used 72.00G of 31.25G hbm. Exceeded …"
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds = time.perf_counter() - started
        return Compiled(name, _asked_for(str(error)), 0.0, 0.0, resident, False, {}, runs, seconds, None)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    how.on_text(name, text)
    module = read_hlo(text)
    arguments = memory.argument_size_in_bytes
    # GPU programs do not say their peak.
    held = arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    peak = max(memory.peak_memory_in_bytes or held, arguments)
    traffic = bytes_by_axis(module, dict(mesh.shape))
    return Compiled(name, peak, arguments, peak - arguments, resident, True, traffic, runs, seconds, module)


def _asked_for(message: str) -> float:
    """The bytes that a program wanted, from the compiler's refusal; NaN when it does not say."""
    for pattern in (r"Used ([\d.]+)([KMGT]) of", r"total memory required[^(]*\(([\d.]+)([KMGT])\)"):
        if found := re.search(pattern, message):
            return float(found.group(1)) * 1024 ** ("KMGT".index(found.group(2)) + 1)
    return float("nan")
