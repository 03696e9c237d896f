"""Search for the fastest mesh, micro-batch, remat and row length on a slice, and for the smallest slice that fits.

Arithmetic gives lower bounds of each candidate's memory and time. Candidates that cannot fit are skipped. The others
are compiled, the potentially fastest first. The search stops when no candidate could be faster than the best one, or
after a maximum number of compilations. If a candidate exceeds the chip's memory, those with a larger bound are skipped
too. If one is refused for lack of another memory, such as VMEM, nothing follows for others.
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
from astra_jax.base.errors import UserError
from astra_jax.base.settings import SettingError
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

_PADDING = 1.15
"""Largest factor by which rows may exceed their sequences to get larger blocks of attention."""
_ROWS = (1, 2, 4)
"""Rows of a micro-batch, for each batch position of the mesh."""


class Sized(Model, Protocol):
    """Model with the sizes of `layers.sizes.Sizes`."""

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


def unsized(model: Model) -> list[str]:
    """Return the sizes of `Sized` that a model of the user's own lacks; memory is estimated from them."""
    return [name for name in vars(Sized) if not name.startswith("_") and not hasattr(model, name)]


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        model, config: arguments of a plan.
        mesh: sizes by axis.
        holds: lower bound of the bytes per chip.
        takes: lower bound of the seconds per step.
        guess: seconds per step if no traffic were hidden; the search order.
    """

    model: Sized
    config: SFTConfig | GRPOConfig
    mesh: dict[str, int]
    holds: float
    takes: float
    guess: float


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        fastest: fastest plan on the slice; None if no compiled one fits.
        smallest: plan with the least memory on the smallest slice of its kind that fits; None if none does.
        tried: every plan that was made, in order.
        considered: number of candidates that arithmetic did not rule out.
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
    given: tuple[Sized, SFTConfig | GRPOConfig] | None = None,
    **options: Any,
) -> SearchResult:
    """Find the fastest way on a slice, and the smallest slice of its kind, not larger, that fits the job.

    Args:
        tokens: the longest sequence; None: rows as configured.
        compiles: most candidates to compile for the slice, and as many for smaller ones.
        on_plan: receives each plan as it is made.
        given: see `make_plan`.
        options: options of `make_plan`.

    Raises:
        PlanError: arithmetic rules out every way to run the job on the slice.
    """
    tried: list[Plan] = []

    def plan_of(one: Way, where: Slice) -> Plan:
        made = make_plan(one.model, one.config, where, mesh=one.mesh, given=given or (model, config), **options)
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
        # If nothing fitted so far, the last try is the candidate with the least memory.
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
    """Yield the candidates that the run would accept on the slice and that arithmetic does not rule out."""
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
                except (UserError, SettingError):  # the mesh does not divide the job
                    continue
                step = job.rows * job.row_tokens
                arithmetic, sent = least_seconds(
                    sized[0],
                    job.row_tokens,
                    rows,
                    step,
                    slice_,
                    mesh,
                    remat,
                    job.config.matmul_quantization,
                    config.lora,
                )
                late = between_slices_seconds(trained, slice_)
                yield Way(sized[0], changed, mesh, holds, max(arithmetic, sent) + late, arithmetic + sent + late)


def _meshes(model: Sized, slice_: Slice) -> Iterator[dict[str, int]]:
    """Yield every way to spread a job over the chips, with one copy of the weights per slice."""
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
    """Return row lengths for sequences of `tokens`: the smallest, with large blocks, and with the largest block."""
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
    """Return a lower bound of a chip's bytes in a step: state, and what the forward pass keeps for the backward pass.

    Args:
        config: sets the optimizer's state; `remat` is separate.
        weights: number of parameters of the model.
        trained: number of trained parameters, or of the adapters' parameters.
        tokens: tokens of a row.
        rows: rows for each batch position of the mesh.
    """
    chips = math.prod(mesh.values())
    # Weights and gradients in float32, and two statistics, nearly all of which may be in the host's memory.
    statistics = 2 * jnp.dtype(config.optimizer_state_dtype).itemsize * (not config.optimizer_offload)
    width = jnp.dtype(model.param_dtype).itemsize
    layers = model.matmul_parameters()[0] if config.lora.weight_quantization != "none" else 0  # in 8 bits
    frozen = 0 if config.lora.rank is None else width * (weights - layers) + layers
    state = (frozen + (2 * 4 + statistics) * trained) / (chips / mesh["data"])
    tokens_here = rows * tokens / mesh["context"]
    heads = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim / mesh["tensor"]
    attended = model.n_heads * model.head_dim / mesh["tensor"]
    wide = 2 * model.d_ff * (model.experts_per_token or 1) / mesh["tensor"]
    dots = 0 if model.n_experts else wide  # experts' products come out of kernels, and are recomputed
    kept = {  # per layer, bfloat16 numbers per token
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
    """Return lower bounds of the seconds of a step's arithmetic, and of its traffic.

    Args:
        tokens: tokens of a row.
        rows: rows of a micro-batch, for each batch position of the mesh.
        step: tokens of a step, with padding.
        matmul: a name of `matmuls.MATMUL_QUANTIZATIONS`.
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
    # Weights forward and backward, in bfloat16 or, for layers, in 8 bits; sums over `tensor` twice per layer, as often;
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
    """Return the seconds to sum a step's gradients over the network, float32, when all micro-batches are done."""
    network = slice_.chip.network_bandwidth
    if slice_.count == 1 or network is None:
        return 0.0
    return 4 * weights / (slice_.chips / slice_.count) * 2 * (1 - 1 / slice_.count) / network
