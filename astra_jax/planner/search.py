"""Which mesh, micro-batch, remat and row length are the fastest on a slice, and which slice is the smallest that fits.

Arithmetic alone says of each candidate what it must hold and how long it takes at least, both a little low. What cannot
fit is left out; of the rest the compiler is asked, those first that could be the fastest, until none that is left could
be faster than the best found, or so many were compiled. What holds more than one that the chip's memory was too small
for, is left out too; one that was refused for want of another memory, such as VMEM, says nothing about others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from astra_jax.attention.splash import BLOCK, LARGEST_BLOCK, block_of, good_length, padded_length
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import AXES, BATCH, WIDTH, pieces_of
from astra_jax.models.adapters import abstract_trained
from astra_jax.models.lora import FULL, LoRA
from astra_jax.models.model import Model, parameters
from astra_jax.models.remat import REMATS
from astra_jax.planner.collectives import gathered
from astra_jax.planner.hardware import PlanError, Slice, larger
from astra_jax.planner.jobs import (
    attention_matmuls,
    executed_flops_per_token,
    for_tokens,
    job_on,
    longest,
    saved_flops_per_token,
)
from astra_jax.planner.network import Hosts
from astra_jax.planner.plan import Plan, make_plan
from astra_jax.sft.config import SFTConfig
from sandbox.settings import SettingError
from synthesis.core.refusals import Refusal

_PADDING = 1.15
"""Rows may be so much longer than their sequences, where attention's blocks are larger for it."""
_ROWS = (1, 2, 4)
"""Of a micro-batch, for each place of the mesh."""


class Sized(Model, Protocol):
    """A model whose sizes are those of `layers.sizes.Sizes`."""

    @property
    def d_model(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        model, config: as a plan takes them.
        mesh: sizes by axis.
        holds: bytes a chip, at least.
        takes: seconds a step, at least.
        guess: seconds a step, if nothing that is sent were hidden: what comes first.
    """

    model: Sized
    config: SFTConfig | GRPOConfig
    mesh: dict[str, int]
    holds: float
    takes: float
    guess: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        fastest: on the slice; None: nothing that was compiled fits.
        smallest: on the smallest slice of its kind that fits, in the way that holds least; None where none does.
        tried: every plan that was made, in order.
        considered: candidates that arithmetic did not rule out.
    """

    fastest: Plan | None
    smallest: Plan | None
    tried: tuple[Plan, ...]
    considered: int


def search(
    model: Sized,
    config: SFTConfig | GRPOConfig,
    slice_: Slice,
    *,
    tokens: int | None = None,
    compiles: int = 8,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    **options: Any,
) -> SearchResult:
    """The fastest way on a slice, and the smallest slice of its kind, not larger, that holds the job.

    Args:
        tokens: the longest sequence; None: rows as configured.
        compiles: at most so many candidates are compiled for the slice, and as many for smaller ones.
        on_plan: told of each plan as it is made.
        options: of `make_plan`.

    Raises:
        PlanError: no way to run the job on the slice is left when arithmetic is done.
    """
    tried: list[Plan] = []

    def plan_of(one: Way, where: Slice) -> Plan:
        made = make_plan(one.model, one.config, where, mesh=one.mesh, given=(model, config), **options)
        tried.append(made)
        on_plan(made)
        return made

    possible = sorted(candidates(model, config, slice_, tokens), key=lambda one: (one.guess, one.holds))
    if not possible:
        raise PlanError(f"no mesh of {slice_.name} can hold and run this job; give a larger --topology")
    considered, fastest = len(possible), None
    for left in range(compiles, 0, -1):
        if fastest is not None:
            possible = [one for one in possible if one.takes < fastest.step_seconds]
        if not possible:
            break
        # The last try is for what surely is the easiest to hold, if nothing did fit.
        easiest = min(possible, key=lambda one: one.holds)
        one = easiest if left == 1 and fastest is None else possible[0]
        possible.remove(one)
        plan = plan_of(one, slice_)
        if plan.peak_bytes_per_chip > plan.hbm_bytes_per_chip:
            possible = [other for other in possible if other.holds < one.holds]
        elif plan.fits and (fastest is None or plan.step_seconds < fastest.step_seconds):
            fastest = plan

    smallest, left = fastest, compiles
    for where in larger(slice_) if fastest is not None else ():
        if where.chips >= slice_.chips or not left:
            break
        least = min(candidates(model, config, where, tokens), key=lambda one: (one.holds, one.takes), default=None)
        if least is None:
            continue
        left -= 1
        if (plan := plan_of(least, where)).fits:
            smallest = plan
            break
    return SearchResult(fastest, smallest, tuple(tried), considered)


def candidates(model: Sized, config: SFTConfig | GRPOConfig, slice_: Slice, tokens: int | None) -> Iterator[Way]:
    """What the run would start with on the slice, and arithmetic does not rule out."""
    blocks, weights = BLOCK if slice_.chip.clock else 1, parameters(model)
    trained = sum(leaf.size for leaf in jax.tree.leaves(abstract_trained(model, config.lora)))
    for mesh in _meshes(model, slice_):
        abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        places = math.prod(mesh[axis] for axis in BATCH)
        for length in _lengths(tokens, mesh["context"]) if tokens else (None,):
            sized = (model, config) if length is None or tokens is None else for_tokens(model, config, tokens, length)
            for rows, remat in itertools.product(_ROWS, REMATS):
                holds = least_bytes(*sized, weights, trained, length or longest(config), rows, mesh, remat)
                if holds > slice_.chip.hbm_bytes:
                    continue
                try:
                    changed = dataclasses.replace(sized[1], micro_batch_size=rows * places, remat=remat)
                    job = job_on(sized[0], changed, abstract, blocks=blocks)
                except (Refusal, SettingError):  # the mesh does not divide it
                    continue
                step = job.rows * job.row_tokens
                arithmetic, sent = least_seconds(
                    sized[0], job.row_tokens, rows, step, slice_, mesh, remat, job.config.matmul, config.lora
                )
                late = between_slices_seconds(trained, slice_)
                yield Way(sized[0], changed, mesh, holds, max(arithmetic, sent) + late, arithmetic + sent + late)


def _meshes(model: Sized, slice_: Slice) -> Iterator[dict[str, int]]:
    """Every way to spread a job over the chips, with one copy of the weights in a slice."""
    chips = slice_.chips // slice_.count
    divisors = [n for n in range(1, chips + 1) if chips % n == 0]
    for context, tensor, expert in itertools.product(divisors, divisors, divisors):
        spread = context * tensor * expert
        if (
            chips % spread
            or model.n_kv_heads % tensor
            or (expert > 1 and (not model.n_experts or model.n_experts % expert))
        ):
            continue
        sizes = {"data": slice_.count, "fsdp": chips // spread, "expert": expert, "context": context, "tensor": tensor}
        yield {axis: sizes.get(axis, 1) for axis in AXES}


def _lengths(tokens: int, context: int) -> list[int]:
    """Row lengths for sequences of `tokens`: the least, the least with large blocks, and of the largest block."""
    pieces = pieces_of(context)
    least, largest = (-(-tokens // (pieces * block)) * pieces * block for block in (BLOCK, LARGEST_BLOCK))
    lengths = sorted({least, good_length(tokens, context), largest})
    return [length for length in lengths if length == least or length <= _PADDING * tokens]


def least_bytes(
    model: Sized,
    config: SFTConfig | GRPOConfig,
    weights: int,
    trained: int,
    tokens: int,
    rows: int,
    mesh: dict[str, int],
    remat: str,
) -> float:
    """What a chip holds in a step, at least: state, and what the forward pass keeps for the backward pass.

    Args:
        config: the optimizer's state is as it says; remat is given.
        weights: how many parameters the model has.
        trained: how many of them are trained, or how many its adapters have.
        tokens: of a row.
        rows: for each place of the mesh.
    """
    chips = math.prod(mesh.values())
    # Weights and gradients in float32, and two statistics, nearly all of which may be in the host's memory.
    statistics = 2 * jnp.dtype(config.moments).itemsize * (config.optimizer_memory == "device")
    width = jnp.dtype(model.param_dtype).itemsize
    layers = model.matmul_parameters()[0] if config.lora.stored != "none" else 0  # in 8 bits
    frozen = 0 if config.lora.rank is None else width * (weights - layers) + layers
    state = (frozen + (2 * 4 + statistics) * trained) / (chips / mesh["data"])
    tokens_here = rows * tokens / mesh["context"]
    heads = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim / mesh["tensor"]
    attended = model.n_heads * model.head_dim / mesh["tensor"]
    wide = 2 * model.d_ff * (model.experts_per_token or 1) / mesh["tensor"]
    dots = 0 if model.n_experts else wide  # experts' products come out of kernels, and are computed again
    kept = {  # of a layer, bfloat16 numbers a token
        "full": model.d_model,
        "offload": 0,
        "attention": model.d_model + attended,
        "heads": model.d_model + heads + attended,
        "dots": 2 * model.d_model + heads + attended + dots,
        "none": 4 * model.d_model + 2 * heads + attended + 2 * wide,
    }[remat]
    return state + 2 * tokens_here * model.n_layers * kept


def least_seconds(
    model: Sized,
    tokens: int,
    rows: int,
    step: int,
    slice_: Slice,
    mesh: dict[str, int],
    remat: str,
    matmul: str = "none",
    lora: LoRA = FULL,
) -> tuple[float, float]:
    """What a step's arithmetic takes, at least, and what it sends.

    Args:
        tokens: of a row.
        rows: of a micro-batch, for each place of the mesh.
        step: tokens of a step, padding too.
        matmul: a name of `matmuls.MATMULS`.
        lora: adapters, if they are trained in place of the weights.
    """
    chip = slice_.chip
    layers, head = model.matmul_parameters()
    share = min(1.0, model.head_dim / chip.matrix_side)
    whole = executed_flops_per_token(model, tokens, remat, chip, lora)
    whole -= saved_flops_per_token(model, matmul, remat, chip)
    attention = (model.flops_per_token(tokens)[0] - 6 * (layers + head)) / 6 * attention_matmuls(remat, chip)
    chunk = tokens // pieces_of(mesh["context"])
    block = block_of(padded_length(chunk))
    # A block of queries is multiplied with each number of the keys and values that are read for it.
    share = min(share, block * chip.hbm_bandwidth / chip.flops) if chip.clock else share
    arithmetic = (whole - attention + attention / share) * step / slice_.chips / chip.flops
    width = math.prod(mesh[axis] for axis in WIDTH)
    micro_batches = step / tokens / rows / math.prod(mesh[axis] for axis in BATCH)
    # Weights forward and backward, in bfloat16 or, of layers, in 8 bits; sums over `tensor` twice a layer, as often;
    # keys and values.
    a_layers = 2 if matmul == "none" else 1
    weights = 2 * (a_layers * layers + 2 * head) / mesh["tensor"] * (1 - 1 / width) * micro_batches
    here = step * mesh["tensor"] / slice_.chips
    sums = 2 * 2 * 2 * 2 * (1 - 1 / mesh["tensor"]) * here * model.n_layers * model.d_model
    keys = (
        2 * 2 * 2 * (mesh["context"] - 1) * here * model.n_layers * model.n_kv_heads * model.head_dim / mesh["tensor"]
    )
    if chip.clock:
        return arithmetic, (weights + sums + keys) / chip.link_bandwidth
    over = ((WIDTH, weights), (("tensor",), sums), (("context",), keys))
    return arithmetic, Hosts.of(slice_).seconds((gathered(mesh, axes, size), 1.0) for axes, size in over)


def between_slices_seconds(weights: int, slice_: Slice) -> float:
    """What the sums of a step's gradients take over the network, float32, when all micro-batches are done."""
    network = slice_.chip.network_bandwidth
    if slice_.count == 1 or network is None:
        return 0.0
    return 4 * weights / (slice_.chips / slice_.count) * 2 * (1 - 1 / slice_.count) / network
