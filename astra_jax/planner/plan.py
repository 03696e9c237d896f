"""A plan: one job, one model, one slice.

What a step costs is computed, what it holds and sends is the compiler's. Step time is a bound: the slowest of matmuls
at the chip's bf16 peak, memory traffic that cannot be avoided at its bandwidth, and collectives over all of its links,
each perfectly overlapped with the others. Real steps are slower; the bound says which of the three to look at.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import BATCH, make_mesh
from astra_jax.models.model import Model, parameters
from astra_jax.planner import programs
from astra_jax.planner.hardware import PlanError, Slice, larger, mesh_sizes, row_length
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run.chips import GIB
from astra_jax.sft.config import SFTConfig


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found; sizes in bytes a chip, times in seconds.

    Attributes:
        tokens: the longest sequence that was asked for; `row_tokens` is what it is padded to.
        yarn_factor: by which the model's context is stretched for it; 1 is not.
        micro_batch_size, batch_size: rows of one forward pass, and of one optimizer step.
        fits: the compiler took every program, and what else is on the chip has room beside it.
        peak_bytes_per_chip: of the largest program, with what is resident beside it.
        flops_per_token: of forward and backward, attention counted causally, nothing recomputed: what MFU is of.
        executed_flops_per_token: with what rematerialisation computes again.
        collective_bytes_by_axis: received by a chip in one optimizer step.
        bound: the slowest of `seconds`: compute, memory or network.
    """

    job: str
    topology: str
    chips: int
    mesh: dict[str, int]
    tokens: int
    row_tokens: int
    yarn_factor: float
    micro_batch_size: int
    batch_size: int
    fits: bool
    peak_bytes_per_chip: float
    hbm_bytes_per_chip: int
    bytes_by_kind: dict[str, float]
    flops_per_token: float
    executed_flops_per_token: float
    collective_bytes_by_axis: dict[str, float]
    seconds: dict[str, float]
    bound: str
    step_seconds: float
    tokens_per_second_per_chip: float


def make_plan(
    model: Model,
    config: SFTConfig | GRPOConfig,
    slice_: Slice,
    *,
    tokens: int,
    mesh: dict[str, int] | None = None,
) -> Plan:
    """Compile the job's step for a slice.

    Args:
        model: its `param_dtype` is replaced by float32, its `dtype` by bfloat16; stretched by YaRN to `tokens`.
        tokens: the longest sequence; the row length.
        mesh: sizes by axis; None chooses (`hardware.mesh_sizes`).

    Raises:
        PlanError: the compiler for it is missing, or the slice is unknown.
        ValueError: the mesh does not divide the model or the slice.
    """
    model = model.stretched(tokens).in_training_precision()
    sizes = mesh or mesh_sizes(slice_.chips, tokens)
    devices = make_mesh(**sizes, devices=slice_.devices())
    context = devices.shape["context"]
    length = row_length(tokens, context)
    micro_rows = math.prod(devices.shape[axis] for axis in BATCH)
    if isinstance(config, SFTConfig):
        micro_batches = max(1, -(-config.batch_size // micro_rows))
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, seq_len=length),
            batch_size=micro_batches * micro_rows,
            micro_batch_size=micro_rows,
            remat="full",
        )
        compiled = programs.sft_programs(model, config, devices)
    else:
        # Rows of the longest episodes: the paper's batch of groups, each episode a row.
        micro_batches = -(-config.batch_size * config.group_size // micro_rows)
        config = dataclasses.replace(
            config,
            episode=_episode_of(config.episode, tokens),
            remat="full",
            row_buckets=(length,),
            micro_batch_size=micro_rows,
        )
        compiled = programs.grpo_programs(model, config, devices, length, micro_batches)

    chip = slice_.chip
    worst = max(compiled, key=lambda one: one.peak + one.resident)
    peak = worst.peak + worst.resident
    traffic: dict[str, float] = {}
    for one in compiled:
        for axes, size in one.traffic.items():
            traffic[axes] = traffic.get(axes, 0.0) + size * one.runs
    useful, executed = model.flops_per_token(length)
    rows = micro_batches * micro_rows
    seconds = {
        "compute": executed * rows * length / slice_.chips / chip.flops,
        "memory": _memory_bytes(model, devices.shape, micro_batches) / chip.hbm_bandwidth,
        "network": sum(traffic.values()) / slice_.link_bandwidth,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return Plan(
        job="sft" if isinstance(config, SFTConfig) else "grpo",
        topology=slice_.name,
        chips=slice_.chips,
        mesh={axis: size for axis, size in devices.shape.items() if size > 1},
        tokens=tokens,
        row_tokens=length,
        yarn_factor=model.stretch,
        micro_batch_size=micro_rows,
        batch_size=rows,
        fits=all(one.fits for one in compiled) and peak <= chip.hbm_bytes,
        peak_bytes_per_chip=peak,
        hbm_bytes_per_chip=chip.hbm_bytes,
        bytes_by_kind={
            "arguments": worst.arguments,
            "temporaries": worst.temporaries,
            "resident": worst.resident,
        },
        flops_per_token=useful,
        executed_flops_per_token=executed,
        collective_bytes_by_axis=traffic,
        seconds=seconds,
        bound=bound,
        step_seconds=seconds[bound],
        tokens_per_second_per_chip=rows * length / seconds[bound] / slice_.chips,
    )


def _episode_of(episode: EpisodeConfig, tokens: int) -> EpisodeConfig:
    """The same with `tokens` for prompt and response together, in their old proportion."""
    prompt = tokens * episode.max_prompt_tokens // (episode.max_prompt_tokens + episode.max_response_tokens)
    return dataclasses.replace(episode, max_prompt_tokens=prompt, max_response_tokens=tokens - prompt)


def smallest(model: Model, config: SFTConfig | GRPOConfig, slice_: Slice, *, tokens: int) -> Plan:
    """The plan of the smallest slice of `slice_`'s kind that fits, not larger than `slice_`.

    Slices that cannot hold weights and optimizer state alone are not compiled.

    Raises:
        PlanError: none fits.
    """
    state = 4 * 4 * parameters(model)  # weights, gradients and two statistics, float32
    for one in larger(slice_):
        if one.chips > slice_.chips:
            break
        if state / one.chips > one.chip.hbm_bytes:
            continue
        try:
            plan = make_plan(model, config, one, tokens=tokens)
        except ValueError:  # the mesh does not divide the model
            continue
        if plan.fits:
            return plan
    raise PlanError(f"no {slice_.chip.name} slice of up to {slice_.chips} chips fits; give a larger --topology")


def _memory_bytes(model: Model, mesh: Any, micro_batches: int) -> float:
    """Bytes that a chip must read and write in a step at least: optimizer state and weights."""
    layers, head = model.matmul_parameters()
    optimizer = 4 * 7 * parameters(model) / (math.prod(mesh.values()) / mesh["data"])  # read w, g, m, v; write w, m, v
    weights = 2 * (layers + head) / mesh["tensor"]  # gathered, bfloat16
    # Read forward, again, and for the inputs' gradient; weight gradients are written once. Gathers are written too.
    return optimizer + micro_batches * 5 * weights


def describe(plan: Plan) -> str:
    """A plan as lines of text."""

    def gib(size: float) -> str:
        return f"{size / GIB:.2f} GiB"

    kinds = ", ".join(f"{name} {gib(size)}" for name, size in plan.bytes_by_kind.items() if size)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one chip"
    lines = [
        f"{plan.job} on {plan.topology} ({plan.chips} chips: {mesh}), rows of {plan.row_tokens} tokens, "
        f"{plan.micro_batch_size} a micro-batch, {plan.batch_size} a step"
        + (f", context stretched {plan.yarn_factor:g} times by YaRN" if plan.yarn_factor > 1 else ""),
        f"  {'fits' if plan.fits else 'DOES NOT FIT'}: {gib(plan.peak_bytes_per_chip)} of "
        f"{gib(plan.hbm_bytes_per_chip)} a chip{f' ({kinds})' if kinds else ''}",
        f"  {plan.flops_per_token / 1e9:.1f} GFLOP a token, {plan.executed_flops_per_token / 1e9:.1f} executed",
    ]
    for axes, size in plan.collective_bytes_by_axis.items():
        lines.append(f"  {gib(size)} received a chip and step over {axes}")
    times = ", ".join(f"{name} {value:.2f} s" for name, value in plan.seconds.items())
    lines.append(
        f"  at least {plan.step_seconds:.2f} s a step, bound by {plan.bound} ({times}): at most "
        f"{plan.tokens_per_second_per_chip:.0f} tokens/s a chip"
    )
    return "\n".join(lines)
