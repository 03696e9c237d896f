"""What a TPU's compiler expects a program to take, in cycles of its clock: its own `estimated_cycles`, times the trips.

Collectives and kernels (Pallas) have no estimate and are not in it, nor are copies that the chip makes beside the
arithmetic (`copy-start`, `slice-start`); GPUs' and CPUs' compilers write none at all.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from astra_jax.planner.collectives import KINDS
from astra_jax.planner.hlo import Computation, Instruction, Module, shapes

_MOST = 1e15
"""Cycles; the compiler writes numbers near 2^63 where it knows nothing."""
_FREE = frozenset(
    {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "while", "call", "conditional", "after-all"}
    | {"partition-id", "replica-id", "add-dependency", "opt-barrier", "domain"}
)
"""Take no time of their own."""
_BESIDE = frozenset(
    f"{name}{end}"
    for name in ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "async", "call", *KINDS)
    for end in ("-start", "-update", "-done")
) | frozenset({"send", "recv", "send-done", "recv-done"})
"""What runs beside the arithmetic: copies between memories, collectives, and the network between slices."""

_PLACES = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
)
"""Custom calls that only say where something is, or what comes."""

MATMUL, COPY, GATHER, ELEMENTWISE = "matmul", "copy", "gather and scatter", "elementwise"


@dataclass(frozen=True)
class Cycles:
    """Of one run of a program on one chip.

    Attributes:
        by_category: cycles of matmuls (with what is fused into them), of copies and transpositions, of gathers and
            scatters, and of all else.
        kernels: how often each Pallas kernel runs.
        unestimated: how often other instructions run for which the compiler wrote no estimate, by
            opcode; those of single numbers are left out.
    """

    by_category: dict[str, float]
    kernels: dict[str, float]
    unestimated: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_category.values())


def count_cycles(module: Module) -> Cycles:
    """Of a compiled module; of a conditional's branches the one with most of them counts."""
    sums: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)

    def own(computation: Computation) -> float:
        if computation.name in module.apart:
            return 0.0
        return sum(estimated(one) or 0.0 for one in computation.instructions)

    every = module.runs(own)
    for name, computation in module.computations.items():
        runs = every[name]
        if not runs or name in module.apart:
            continue
        for one in computation.instructions:
            if (cycles := estimated(one)) is not None:
                sums[category(one)] += cycles * runs
            elif is_kernel(one):
                kernels[kernel_name(one)] += runs
            elif not is_free(one) and one.opcode not in KINDS and not carries_collective(module, one):
                others[one.opcode] += runs
    return Cycles(dict(sums), dict(kernels), dict(others))


def estimated(one: Instruction) -> float | None:
    """The compiler's estimate for one run of an instruction; None where it made none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
    cycles = float(found.group(1)) if found else None
    return None if cycles is None or cycles > _MOST else cycles


def category(one: Instruction) -> str:
    """Of an instruction that takes cycles."""
    if "kind=kOutput" in one.attributes or one.opcode in ("convolution", "dot"):
        return MATMUL
    if one.opcode in ("copy", "transpose") or re.match(r"(copy|transpose|bitcast_copy)(_|\.|$)", one.name):
        return COPY
    if one.opcode in ("gather", "scatter") or re.search(r"(?<!all-)(?<!reduce-)\b(gather|scatter)\b", one.name):
        return GATHER
    return ELEMENTWISE


def is_kernel(one: Instruction) -> bool:
    """Whether an instruction is a kernel of ours, or of JAX's."""
    return one.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.attributes


def kernel_name(one: Instruction) -> str:
    """Without the number that the compiler put behind it."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", one.name)


def is_free(one: Instruction) -> bool:
    """Whether an instruction takes no time of its own: a value's name, a copy beside the rest, a number."""
    if one.opcode == "custom-call":
        return any(f'custom_call_target="{place}"' in one.attributes for place in _PLACES)
    return one.opcode in _FREE | _BESIDE or all(math.prod(dims) <= 1 for _, dims in shapes(one.result))


def carries_collective(module: Module, one: Instruction) -> bool:
    """Whether a fusion is there for a collective: it starts or ends one, or is one with what is cut from it."""
    return one.opcode == "fusion" and any(
        inner.opcode in KINDS or "AsyncCollective" in inner.attributes
        for name in one.called
        if name in module.computations
        for inner in module.computations[name].instructions
    )
