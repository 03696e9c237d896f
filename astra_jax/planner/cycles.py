"""Cycle estimates of a TPU program: the compiler's own `estimated_cycles`, times the number of runs.

Collectives and kernels (Pallas) have no estimate and are not included. Copies beside the arithmetic (`copy-start`,
`slice-start`) are not included either. Compilers for GPUs and CPUs write no estimates.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from astra_jax.planner.collectives import KINDS
from astra_jax.planner.hlo import Computation, Instruction, Module, shapes

_MOST = 1e15
"""Largest plausible number of cycles; the compiler writes numbers near 2^63 if it knows nothing."""
_FREE = frozenset(
    {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "while", "call", "conditional", "after-all"}
    | {"partition-id", "replica-id", "add-dependency", "opt-barrier", "domain"}
)
"""Opcodes that take no time of their own."""
_BESIDE = frozenset(
    f"{name}{end}"
    for name in ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "async", "call", *KINDS)
    for end in ("-start", "-update", "-done")
) | frozenset({"send", "recv", "send-done", "recv-done"})
"""Opcodes that run beside the arithmetic: copies between memories, collectives, and the network between slices."""

_PLACES = (
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"),
    *("PrepareAsyncCallStart", "PrepareAsyncCallDone"),
)
"""Custom calls that only name a place or announce a call."""

MATMUL, COPY, GATHER, ELEMENTWISE = "matmul", "copy", "gather and scatter", "elementwise"


@dataclass(frozen=True)
class Cycles:
    """Cycles of one run of a program on one chip.

    Attributes:
        by_category: cycles of matmuls (with what is fused into them), of copies and transpositions, of gathers and
            scatters, and of all else.
        kernels: number of runs of each Pallas kernel.
        unestimated: number of runs of other instructions without an estimate, by opcode. Instructions on single numbers
            are left out.
    """

    by_category: dict[str, float]
    kernels: dict[str, float]
    unestimated: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_category.values())


def count_cycles(module: Module) -> Cycles:
    """Count the cycles of a compiled module. Of a conditional's branches the one with the most cycles counts."""
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
    """Return the compiler's estimate for one run of an instruction, or None."""
    found = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
    cycles = float(found.group(1)) if found else None
    return None if cycles is None or cycles > _MOST else cycles


def category(one: Instruction) -> str:
    """Return the category of an instruction that takes cycles."""
    if "kind=kOutput" in one.attributes or one.opcode in ("convolution", "dot"):
        return MATMUL
    if one.opcode in ("copy", "transpose") or re.match(r"(copy|transpose|bitcast_copy)(_|\.|$)", one.name):
        return COPY
    if one.opcode in ("gather", "scatter") or re.search(r"(?<!all-)(?<!reduce-)\b(gather|scatter)\b", one.name):
        return GATHER
    return ELEMENTWISE


def is_kernel(one: Instruction) -> bool:
    """Return whether an instruction is a kernel, ours or JAX's."""
    return one.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.attributes


def kernel_name(one: Instruction) -> str:
    """Return a kernel's name without the compiler's number at its end."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", one.name)


def is_free(one: Instruction) -> bool:
    """Return whether an instruction takes no time of its own: it names a value, copies in parallel, or is a number."""
    if one.opcode == "custom-call":
        return any(f'custom_call_target="{place}"' in one.attributes for place in _PLACES)
    return one.opcode in _FREE | _BESIDE or all(math.prod(dims) <= 1 for _, dims in shapes(one.result))


def carries_collective(module: Module, one: Instruction) -> bool:
    """Return whether a fusion starts or ends a collective, or is one with a slice of its result."""
    return one.opcode == "fusion" and any(
        inner.opcode in KINDS or "AsyncCollective" in inner.attributes
        for name in one.called
        if name in module.computations
        for inner in module.computations[name].instructions
    )
