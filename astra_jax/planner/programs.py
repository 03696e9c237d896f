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
from jax.sharding import Mesh

from astra_jax.grpo import step as grpo_step
from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.adapters import abstract_base
from astra_jax.models.model import Model
from astra_jax.planner.collectives import bytes_by_axis
from astra_jax.planner.hlo import Module, read_hlo
from astra_jax.run.moments import HOST
from astra_jax.sft import step as sft_step
from astra_jax.sft.config import SFTConfig


@dataclass(frozen=True)
class Compiled:
    """One program on one device; sizes in bytes.

    Attributes:
        peak: peak memory as the compiler reports it, also if it refused the program for that; 0 after other refusals.
        arguments: weights, optimizer state, batch.
        temporaries: all else.
        resident: the job's memory on the device that is not an argument of this program.
        host: the job's memory on the host for this device, whether or not this program uses it.
        refusal: why the compiler refused it; empty if it accepted it.
        traffic: bytes received per run, by mesh axes.
        runs: number of runs per step.
        seconds: duration of compiling.
        module: the compiled module; None if the compiler refused it.
    """

    name: str
    peak: float
    arguments: float
    temporaries: float
    resident: float
    host: float
    refusal: str
    traffic: dict[str, float]
    runs: int
    seconds: float
    module: Module | None


@dataclass(frozen=True)
class Compiling:
    """Compilation settings.

    Attributes:
        options: compiler options by name, as `jax.jit(compiler_options=...)` takes them.
        on_text: receives each compiled program's name and text.
    """

    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    on_text: Callable[[str, str], None] = lambda name, text: None


def sft_programs(model: Model, config: SFTConfig, mesh: Mesh, how: Compiling) -> list[Compiled]:
    """Compile SFT's step."""
    steps = 1_000  # only a constant of the schedule
    arguments = sft_step.abstract_arguments(model, config, steps, mesh)

    def lower() -> Any:
        base = abstract_base(model, config.lora, mesh)
        options: dict[str, Any] = {"model": model, "config": config, "steps": steps, "mesh": mesh}
        options |= {"base": base, "bucket_ids_a": sft_step.abstract_bucket_ids(config, mesh)}
        return sft_step.train_step.lower(*arguments, **options)

    return [_compile("train_step", lower, mesh, how, host=_held(arguments[1], HOST))]


def grpo_programs(
    model: Model, config: GRPOConfig, mesh: Mesh, how: Compiling, length: int, micro_batches: int
) -> list[Compiled]:
    """Compile GRPO's two programs: gradients of a micro-batch of rows of `length`, and the optimizer's step."""
    params, opt_state, gradients, batch, total = grpo_step.abstract_arguments(model, config, length, mesh)
    base = abstract_base(model, config.lora, mesh)

    def accumulate() -> Any:
        return grpo_step.accumulate.lower(params, gradients, batch, base=base, model=model, config=config, mesh=mesh)

    def take_step() -> Any:
        return grpo_step.take_step.lower(params, opt_state, gradients, total, total, config=config, mesh=mesh)

    resident, host = _held(opt_state), _held(opt_state, HOST)
    # The run's initial weights, for the KL term, are placed like the optimizer's statistics.
    reference = _held(params) if config.objective.kl_coef and base is None else 0
    kept, host = (0, host + reference) if config.optimizer_offload else (reference, host)
    first = _compile("accumulate", accumulate, mesh, how, resident=resident + kept, host=host, runs=micro_batches)
    return [first, _compile("take_step", take_step, mesh, how, resident=_held(base) + kept, host=host)]


def _held(tree: Any, memory: str | None = None) -> int:
    """Return the bytes of one device's parts in a kind of memory; None is the device's own memory."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == HOST) == (memory == HOST)
    )


def _compile(
    name: str,
    lower: Callable[[], Any],
    mesh: Mesh,
    how: Compiling,
    *,
    resident: float = 0.0,
    host: float = 0.0,
    runs: int = 1,
) -> Compiled:
    lowered = lower()
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=dict(how.options) or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds = time.perf_counter() - started
        peak, refusal = refused(str(error))
        return Compiled(name, peak, 0.0, 0.0, resident, host, refusal, {}, runs, seconds, None)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    how.on_text(name, text)
    module = read_hlo(text)
    arguments = memory.argument_size_in_bytes
    # GPU programs do not report their peak.
    held = arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    peak = max(memory.peak_memory_in_bytes or held, arguments)
    traffic = bytes_by_axis(module, dict(mesh.shape))
    host += memory.host_temp_size_in_bytes
    return Compiled(name, peak, arguments, peak - arguments, resident, host, "", traffic, runs, seconds, module)


def refused(message: str) -> tuple[float, str]:
    """Parse a compiler's error about memory. Return (bytes of the chip's memory that a program needed, reason).

    A chip has several memories. A kernel's blocks or a fusion may be too large for a small one, such as a TPU core's
    VMEM. Then the bytes tell nothing about the chip's memory: they are 0, as for errors without a number.
    """
    # "… Ran out of memory in memory space hbm. Used 72.00G of 31.25G hbm. Exceeded …"
    if found := re.search(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) (\w+)", message):
        wanted, limit = (_bytes(*found.group(at, at + 1)) for at in (1, 3))
        return (wanted if found[5] == "hbm" else 0.0), _want(wanted, limit, found[5])
    # "Allocation (size=268435456) would exceed memory (size=134217728) :: … space=vmem, …"
    if found := re.search(r"\(size=(\d+)\) would exceed memory \(size=(\d+)\)", message):
        space = re.search(r"space=(\w+)", message)
        return 0.0, _want(float(found[1]), float(found[2]), space[1] if space else "another memory than hbm")
    # "… the total memory required for HLO temporaries (112.24G) exceeds available HBM (15.75G)."
    if found := re.search(r"total memory required[^(]*\(([\d.]+)([KMGT])\) exceeds[^(]*\(([\d.]+)([KMGT])\)", message):
        wanted, limit = (_bytes(*found.group(at, at + 1)) for at in (1, 3))
        return wanted, _want(wanted, limit, "hbm")
    return 0.0, message.partition("\n")[0][:200]


def _want(wanted: float, limit: float, space: str) -> str:
    return f"wants {wanted / 2**20:,.1f} MiB of {space}, which has {limit / 2**20:,.1f}"


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024 ** ("KMGT".index(unit) + 1)
