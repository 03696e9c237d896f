"""Plan of one job: one model on one slice.

For TPUs the step's time is expected: the compiler's own cycles and its schedule, with a roofline of our kernels and the
collectives that nothing hides (`schedule`). Compilers for GPUs estimate nothing, so there it is a bound, the slowest of
three parts. These are matmuls at a stated share of the chip's bf16 peak, unavoidable memory traffic at its bandwidth,
and collectives over a host's links and adapters. The parts are assumed to overlap perfectly; real steps are slower.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from astra_jax.attention.splash import BLOCK, good_length
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import make_mesh
from astra_jax.models.lora import FULL
from astra_jax.models.model import Model
from astra_jax.planner import programs
from astra_jax.planner.collectives import collectives
from astra_jax.planner.cycles import count_cycles
from astra_jax.planner.hardware import Slice, mesh_sizes
from astra_jax.planner.jobs import (
    Job,
    executed_flops_per_token,
    for_tokens,
    job_on,
    least_traffic,
    longest,
    saved_flops_per_token,
)
from astra_jax.planner.network import Hosts, Torus
from astra_jax.planner.rollouts import rollout_seconds
from astra_jax.planner.schedule import schedule_of
from astra_jax.run.chips import GIB
from astra_jax.run.matmuls import check_matmul
from astra_jax.sft.config import SFTConfig

GPU_EFFICIENCY = 0.6
"""Share of a GPU's bf16 peak that large matmuls reach at best inside a training step. Our assumption, not measured."""


@dataclass(frozen=True)
class Plan:
    """Result of `make_plan`; sizes in bytes per chip, times in seconds.

    Attributes:
        tokens: the longest sequence requested; `row_tokens` is its padded length.
        yarn_factor: factor by which the model's context is stretched for it; 1 is not.
        remat, micro_batch_size, batch_size: of the run; rows of one forward pass, and of one optimizer step.
        host_bytes_per_chip: bytes in the host's memory: an optimizer's state, and activations with `remat=offload`. Not
            checked against the host's capacity.
        fits: the compiler accepted every program, and everything else on the chip fits beside it.
        refusal: the program that the compiler refused, and why; empty if it accepted all.
        peak_bytes_per_chip: peak of the largest program, with what is resident beside it. Programs that the compiler
            refused for lack of another memory than the chip's are excluded (`refusal` names them).
        flops_per_token: flops of forward and backward, with causal attention and no recomputation: the basis of MFU.
        executed_flops_per_token: the same with recomputation by the kernels and rematerialisation.
        collective_bytes_by_axis: bytes that a chip receives in one optimizer step; "… between slices" over the network.
        cycles: cycles of one optimizer step, by category, as the compiler estimates; {} for GPUs.
        expected: True if `step_seconds` is the expected time, the sum of `seconds`; else it is a bound, their largest.
        seconds: seconds by the chip's activity; "… over AXES" is waiting for a collective.
        bound: the largest of `seconds`.
        mfu: useful arithmetic over the chip's bf16 peak, whatever the dtype of matmuls.
        uncounted: names of parts that the time leaves out: unknown kernels, loops of unknown length.
        compile_seconds: duration of compiling here.
        steps: steps of the run; None if they depend on its data.
        rollout_seconds: duration of a step's rollouts on the same chips (`rollouts.rollout_seconds`); 0 for SFT, and
            None if the model has no room to sample.
        hours, dollars: duration of the run's steps with their rollouts, in turns, and the chips' price for it; without
            evaluation.
        flags: flags of the training program for this plan.
    """

    job: str
    topology: str
    chips: int
    mesh: dict[str, int]
    tokens: int
    row_tokens: int
    yarn_factor: float
    remat: str
    micro_batch_size: int
    batch_size: int
    fits: bool
    refusal: str
    peak_bytes_per_chip: float
    hbm_bytes_per_chip: int
    host_bytes_per_chip: float
    bytes_by_kind: dict[str, float]
    flops_per_token: float
    executed_flops_per_token: float
    collective_bytes_by_axis: dict[str, float]
    cycles: dict[str, float]
    expected: bool
    seconds: dict[str, float]
    bound: str
    step_seconds: float
    tokens_per_second_per_chip: float
    mfu: float
    uncounted: tuple[str, ...]
    compile_seconds: float
    steps: int | None
    rollout_seconds: float | None
    hours: float | None
    dollars: float | None
    flags: tuple[str, ...]


def make_plan(
    model: Model,
    config: SFTConfig | GRPOConfig,
    slice_: Slice,
    *,
    tokens: int | None = None,
    mesh: Mapping[str, int] | None = None,
    steps: int | None = None,
    price_per_chip_hour: float | None = None,
    options: Mapping[str, str | int | bool] | None = None,
    given: tuple[Model, SFTConfig | GRPOConfig] | None = None,
    on_text: Callable[[str, str], None] = lambda name, text: None,
) -> Plan:
    """Compile the job's step for a slice, with the configuration's own settings.

    Args:
        tokens: the longest sequence. Rows are padded to whole blocks of attention and YaRN stretches the model for it;
            None: everything as configured.
        mesh: sizes by axis; None: rows over `context` until a chip has few tokens of one, the rest `fsdp`.
        steps: steps of the run; None: the configuration's.
        options: compiler options, besides the run's own.
        given: the training program's original model and configuration, for the plan's flags; None: `model` and
            `config`.
        on_text: receives each compiled program's name and text.

    Raises:
        InputError, PlanError, SettingError: the run would not start so, or there is no such slice.
    """
    start = given or (model, config)
    wanted = longest(config) if tokens is None else tokens
    sizes = dict(mesh) if mesh else mesh_sizes(slice_, wanted)
    devices = make_mesh(**sizes, devices=slice_.devices())
    if tokens is not None:
        length = row_length(config, tokens, devices.shape["context"])
        model, config = for_tokens(model, config, tokens, length)
    check_matmul(config.matmul_quantization, model, devices)
    job = job_on(model, config, devices, blocks=BLOCK if slice_.chip.clock else 1)
    how = programs.Compiling(options or {}, on_text)
    if isinstance(job.config, SFTConfig):
        compiled = programs.sft_programs(model, job.config, devices, how)
    else:
        compiled = programs.grpo_programs(model, job.config, devices, how, job.row_tokens, job.micro_batches)

    flags = flags_of(job, devices.shape, *start)
    return _plan(job, model, compiled, slice_, devices, wanted, steps or job.steps, price_per_chip_hour, flags)


def _plan(
    job: Job,
    model: Model,
    compiled: list[programs.Compiled],
    slice_: Slice,
    devices: Mesh,
    wanted: int,
    steps: int | None,
    price_per_chip_hour: float | None,
    flags: tuple[str, ...],
) -> Plan:
    """Return the plan of a job whose programs are compiled."""
    chip = slice_.chip
    worst = max(compiled, key=lambda one: one.peak + one.resident)
    traffic: dict[str, float] = defaultdict(float)
    for one in compiled:
        for axes, size in one.traffic.items():
            traffic[axes] += size * one.runs
    useful = model.flops_per_token(job.row_tokens)[0]
    executed = executed_flops_per_token(model, job.row_tokens, job.config.remat, chip, job.config.lora)
    seconds, cycles, uncounted = _times(job, model, compiled, slice_, devices, executed)
    host, expected = max(one.host for one in compiled), bool(cycles)
    bound = max(seconds, key=lambda name: seconds[name])
    step_seconds = sum(seconds.values()) if expected else seconds[bound]
    speed = job.rows * job.row_tokens / step_seconds / slice_.chips
    mfu = useful * speed / chip.flops
    sampling: float | None = 0.0
    if isinstance(job.config, GRPOConfig):
        sampling = rollout_seconds(model, job.config, chip, slice_.chips, mfu)
    hours = None if steps is None else steps * (step_seconds + (sampling or 0.0)) / 3600
    priced = hours is not None and price_per_chip_hour is not None
    peak = worst.peak + worst.resident
    refusal = "; ".join(f"{one.name} {one.refusal}" for one in compiled if one.refusal)
    return Plan(
        job=job.kind,
        topology=slice_.name,
        chips=slice_.chips,
        mesh={axis: size for axis, size in devices.shape.items() if size > 1},
        tokens=wanted,
        row_tokens=job.row_tokens,
        yarn_factor=model.stretch,
        remat=job.config.remat,
        micro_batch_size=job.micro_batch_size,
        batch_size=job.rows,
        fits=not refusal and peak <= chip.hbm_bytes,
        refusal=refusal,
        peak_bytes_per_chip=peak,
        hbm_bytes_per_chip=chip.hbm_bytes,
        host_bytes_per_chip=host,
        bytes_by_kind={
            "arguments": worst.arguments,
            "temporaries": worst.temporaries,
            "resident": worst.resident,
        },
        flops_per_token=useful,
        executed_flops_per_token=executed,
        collective_bytes_by_axis=dict(traffic),
        cycles=dict(cycles),
        expected=expected,
        seconds=seconds,
        bound=bound,
        step_seconds=step_seconds,
        tokens_per_second_per_chip=speed,
        mfu=mfu,
        uncounted=tuple(sorted(uncounted)),
        compile_seconds=sum(one.seconds for one in compiled),
        steps=steps,
        rollout_seconds=sampling,
        hours=hours,
        dollars=hours * price_per_chip_hour * slice_.chips if priced and hours and price_per_chip_hour else None,
        flags=flags,
    )


def _times(
    job: Job, model: Model, compiled: list[programs.Compiled], slice_: Slice, devices: Any, executed: float
) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Return the seconds of an optimizer step by part, the compiler's cycles by category, and what is not counted.

    Args:
        executed: arithmetic of a token, in FLOP.

    Returns:
        No cycles where the compiler estimates none; then each part is a bound by itself.
    """
    chip, config = slice_.chip, job.config
    cycles: dict[str, float] = {}
    uncounted: set[str] = set()
    if chip.clock is not None and all(one.module is not None for one in compiled):
        seconds, cycles, uncounted = _scheduled(compiled, slice_, devices)
    else:
        seconds = {
            "compute": (executed - saved_flops_per_token(model, config.matmul_quantization, config.remat, chip))
            * (job.rows * job.row_tokens / slice_.chips / (chip.flops * _efficiency(slice_))),
            "memory": least_traffic(model, config, devices.shape, job.micro_batches) / chip.hbm_bandwidth,
            "network": _sent_seconds(compiled, slice_),
        }
    if any(one.host for one in compiled):
        uncounted.add("copies from and to the host's memory")
    if isinstance(config, GRPOConfig) and config.objective.kl_coef:
        uncounted.add("the forward pass of objective.kl_coef")
    return seconds, cycles, uncounted


def row_length(config: SFTConfig | GRPOConfig, tokens: int, context: int) -> int:
    """Return the smallest configured bucket that fits the tokens, or else a length with large blocks of attention."""
    return min((bucket for bucket in config.row_buckets if bucket >= tokens), default=good_length(tokens, context))


def flags_of(job: Job, mesh: Mapping[str, int], model: Model, config: SFTConfig | GRPOConfig) -> tuple[str, ...]:
    """Return the training program's flags for a job, quoted for a shell.

    Args:
        mesh: sizes by axis.
        model, config: the program's original ones; the flags are the differences from them.
    """
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    settings: dict[str, object] = {"micro_batch_size": job.micro_batch_size, "remat": job.config.remat}
    for name, usual in (
        ("matmul_quantization", "none"),
        ("optimizer_state_dtype", "float32"),
        ("optimizer_offload", False),
    ):
        if (own := getattr(job.config, name)) != usual:
            settings[name] = own
    if job.config.batch_size != config.batch_size:
        settings["batch_size"] = job.config.batch_size
    if isinstance(job.config, SFTConfig):
        settings["data.seq_len"] = job.row_tokens
    elif isinstance(config, GRPOConfig):
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if (tokens := getattr(job.config.episode, name)) != getattr(config.episode, name):
                settings[f"episode.{name}"] = tokens
    if job.config.row_buckets or config.row_buckets:
        settings["row_buckets"] = str(list(job.config.row_buckets)).replace(" ", "")
    if (lora := job.config.lora).rank is not None:
        settings |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha}
        if lora.targets != FULL.targets:
            settings["lora.targets"] = _quoted(lora.targets)
        if lora.rank_stabilized:
            settings["lora.rank_stabilized"] = "true"
        if lora.weight_quantization != FULL.weight_quantization:
            settings["lora.weight_quantization"] = lora.weight_quantization
    given = [f"--config.{job.kind}.{name}={value}" for name, value in settings.items()]
    given += [f"--config.model.{name}={value}" for name, value in _differing(job.model, model).items()]
    return (*([f"--mesh={axes}"] if axes else []), *given)


def _differing(model: Model, given: Model) -> dict[str, object]:
    """Return the model's settings that differ from the given model's: context length and YaRN."""
    settings: dict[str, object] = {}
    for field in dataclasses.fields(model):
        if (own := getattr(model, field.name)) != getattr(given, field.name):
            settings[field.name] = _quoted(_said(own)) if dataclasses.is_dataclass(own) else own
    return settings


def _said(settings: Any) -> dict[str, object]:
    """Return the settings that differ from their defaults."""
    every = {field.name: (getattr(settings, field.name), field.default) for field in dataclasses.fields(settings)}
    return {name: own for name, (own, usual) in every.items() if own != usual}


def _quoted(value: object) -> str:
    """Return a value as JSON, quoted for a shell."""
    return f"'{json.dumps(value, separators=(',', ':'))}'"


def _scheduled(
    compiled: list[programs.Compiled], slice_: Slice, devices: Any
) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Return (seconds by part, cycles by category, uncounted parts) of an optimizer step on a TPU slice."""
    chip = slice_.chip
    network = Torus.of(
        list(devices.devices.flat), slice_.shape, chip.link_bandwidth, chip.network_bandwidth or chip.link_bandwidth
    )
    seconds: dict[str, float] = defaultdict(float)
    cycles: dict[str, float] = defaultdict(float)
    uncounted: set[str] = set()
    for one in compiled:
        assert one.module is not None
        found = schedule_of(one.module, chip, network, dict(devices.shape))
        for part, spent in (found.work | found.exposed).items():
            seconds[part] += spent * one.runs
        for name, count in count_cycles(one.module).by_category.items():
            cycles[name] += count * one.runs
        uncounted.update(found.unknown)
    return dict(seconds), dict(cycles), uncounted


def _sent_seconds(compiled: list[programs.Compiled], slice_: Slice) -> float:
    """Return a lower bound of the seconds for the collectives of an optimizer step on GPUs."""
    modules = [(one.module, one.runs) for one in compiled if one.module is not None]
    return Hosts.of(slice_).seconds(
        (moved, often * runs) for module, runs in modules for moved, often in collectives(module)
    )


def _efficiency(slice_: Slice) -> float:
    return 1.0 if slice_.chip.clock else GPU_EFFICIENCY


def describe(plan: Plan, command: Sequence[str] = ()) -> str:
    """Describe a plan as lines of text.

    Args:
        command: command that trains what is planned; by default the plan's flags alone.
    """

    def gib(size: float) -> str:
        return f"{size / GIB:.2f} GiB"

    kinds = ", ".join(f"{name} {gib(size)}" for name, size in plan.bytes_by_kind.items() if size)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one chip"
    lines = [
        f"{plan.job} on {plan.topology} ({plan.chips} chips: {mesh}), rows of {plan.row_tokens} tokens, "
        f"{plan.micro_batch_size} a micro-batch, {plan.batch_size} a step, remat {plan.remat}"
        + (f", context stretched {plan.yarn_factor:g} times by YaRN" if plan.yarn_factor > 1 else ""),
        f"  {'fits' if plan.fits else 'DOES NOT FIT'}: {gib(plan.peak_bytes_per_chip)} of "
        f"{gib(plan.hbm_bytes_per_chip)} a chip{f' ({kinds})' if kinds else ''}",
        f"  {plan.flops_per_token / 1e9:.1f} GFLOP a token, {plan.executed_flops_per_token / 1e9:.1f} executed",
    ]
    if plan.host_bytes_per_chip:
        lines.append(f"  {gib(plan.host_bytes_per_chip)} a chip in the host's memory")
    for axes, size in plan.collective_bytes_by_axis.items():
        lines.append(f"  {gib(size)} received a chip and step over {axes}")
    if plan.refusal:
        lines.append(f"  the compiler refuses {plan.refusal}")
    parts = sorted(plan.seconds.items(), key=lambda part: -part[1])
    times = ", ".join(f"{name} {value:.3g} s" for name, value in parts if value >= 0.005 * plan.step_seconds)
    speed = f"{plan.tokens_per_second_per_chip:.0f} tokens/s a chip, MFU {plan.mfu:.0%}"
    if plan.expected:
        lines.append(f"  expected {plan.step_seconds:.3g} s a step: {speed}; most is {plan.bound} ({times})")
    else:
        # On GPUs attention visits no other document: rows of several take less time.
        step = f"at least {plan.step_seconds:.3g} s a step of rows of one document each"
        lines.append(f"  {step}, bound by {plan.bound} ({times}): at most {speed}")
    if plan.uncounted:
        lines.append(f"  not counted: {', '.join(plan.uncounted)}")
    lines += _run_lines(plan)
    if not plan.fits:
        lines.append(_advice(plan))
    lines.append(f"  {' '.join(command or plan.flags)}")
    return "\n".join(lines)


def _run_lines(plan: Plan) -> Iterator[str]:
    """Yield lines about rollouts, hours and cost."""
    if plan.rollout_seconds is None:
        yield f"  rollouts: the model has no room to sample on {plan.topology}; use servers on larger chips"
    elif plan.rollout_seconds:
        yield (
            f"  rollouts about {plan.rollout_seconds:.3g} s a step on the same chips, if every episode has "
            f"{plan.tokens:,} tokens and every group is valid"
        )
    if plan.hours is not None:
        what = "updates and rollouts in turns" if plan.rollout_seconds else "updates"
        cost = "" if plan.dollars is None else f", {plan.dollars:,.{0 if plan.dollars >= 100 else 2}f} dollars"
        yield f"  {plan.steps} steps: {plan.hours:.3g} hours of {what}{cost}"


def _advice(plan: Plan) -> str:
    """Return a line that says how a plan that does not fit may fit."""
    given = " ".join(plan.flags)
    ways = [
        ("remat=full", "", f"--config.{plan.job}.remat=full"),
        ("lora.rank=", "", f"--config.{plan.job}.lora.rank=16"),
        ("lora.weight_quantization=", "lora.rank=", f"--config.{plan.job}.lora.weight_quantization=int8"),
    ]
    flags = [flag for mark, needs, flag in ways if mark not in given and needs in given]
    return f"  to make it fit: {''.join(f'{flag}, ' for flag in flags)}smaller --tokens, or a larger --topology"
