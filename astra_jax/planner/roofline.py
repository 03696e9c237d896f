"""Roofline of a program: its time from arithmetic and traffic, for CPUs, whose compiler estimates nothing.

It walks over the instructions that run, times the trips of their loops, as for TPUs (`schedule`). But each instruction
takes the larger of two times: its matmuls at a measured rate, and its bytes at a measured bandwidth.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from astra_jax.planner.cycles import is_free
from astra_jax.planner.hlo import Computation, Instruction, Module, array_bytes, shapes

_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class Rates:
    """Measured speed of a machine.

    Attributes:
        flops: flops of matmuls per second.
        bandwidth: bytes per second that elementwise work reads and writes.
    """

    flops: float
    bandwidth: float


def roofline(module: Module, rates: Rates) -> dict[str, float]:
    """Return the seconds of one run of a program, for `matmul` and `memory`. Of branches the longest counts."""
    return _Walk(module, rates).computation(module.entry)


class _Walk:
    def __init__(self, module: Module, rates: Rates) -> None:
        self._module, self._rates = module, rates

    def computation(self, name: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)

        def add(parts: dict[str, float], times: float = 1.0) -> None:
            for part, seconds in parts.items():
                sums[part] += times * seconds

        computation = self._module.computations[name]
        for one in computation.instructions:
            called = [each for each in one.called if each in self._module.computations]
            if one.opcode == "while":
                body = one.calls("body")
                trips = self._module.trips(computation, one)
                if body is not None:
                    add(self.computation(body), 1 if trips is None else trips)
            elif one.opcode == "conditional":
                add(max((self.computation(each) for each in called), key=lambda parts: sum(parts.values())))
            elif one.opcode == "call":
                for each in called:
                    add(self.computation(each))
            elif not is_free(one):
                matmul = self._flops(computation, one) / self._rates.flops
                memory = self._traffic(computation, one) / self._rates.bandwidth
                add({"matmul": matmul} if matmul > memory else {"memory": memory})
        return sums

    def _flops(self, computation: Computation, one: Instruction) -> float:
        """Return the flops of an instruction's matmuls, its own or fused ones."""
        if one.opcode == "dot":
            return dot_flops(computation, one)
        return sum(
            self._flops(self._module.computations[name], inner)
            for name in (one.called if one.opcode == "fusion" else ())
            for inner in self._module.computations[name].instructions
        )

    def _traffic(self, computation: Computation, one: Instruction) -> float:
        """Return the bytes that an instruction reads and writes; of a slice only the part that is cut out or put in."""
        if one.opcode in _SLICES:
            return 2 * _size(one)
        if one.opcode in _UPDATES:
            return 2 * _operand_size(computation, one, len(one.operands) - 1 if one.opcode == "scatter" else 1)
        inner = self._module.computations.get(one.calls("calls") or "") if one.opcode == "fusion" else None
        if inner is None:
            read = sum(_operand_size(computation, one, place) for place in range(len(one.operands)))
            return read + _size(one)
        return sum(_read(inner, each) for each in inner.instructions if each.opcode == "parameter") + _written(inner)


def dot_flops(computation: Computation, one: Instruction) -> float:
    """Count a multiplication and an addition for each number of the result and each number that is summed over."""
    left = computation.by_name.get(one.operands[0])
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
    if left is None or found is None:
        return 0.0
    dims = shapes(left.result)[0][1]
    summed = math.prod(dims[int(axis)] for axis in found.group(1).split(",") if axis)
    return 2.0 * math.prod(shapes(one.result)[0][1]) * summed


def _size(one: Instruction) -> int:
    return sum(array_bytes(*shape) for shape in shapes(one.result))


def _operand_size(computation: Computation, one: Instruction, place: int) -> int:
    if place >= len(one.operands) or (operand := computation.by_name.get(one.operands[place])) is None:
        return 0
    return _size(operand)


def _read(inner: Computation, parameter: Instruction) -> int:
    """Return the bytes read of a fusion's operand: all, the part cut out of it, or none if it is only written into."""
    users = [one for one in inner.instructions if parameter.name in one.operands]
    if users and all(one.opcode in (*_SLICES, *_UPDATES) and one.operands[0] == parameter.name for one in users):
        return sum(_size(one) for one in users if one.opcode in _SLICES)
    return _size(parameter)


def _written(inner: Computation) -> int:
    """Return the bytes that a fusion writes: its results, or the parts put into them."""
    root = inner.root
    if root is None:
        return 0
    results = [inner.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_operand_size(inner, one, 1) if one.opcode == "dynamic-update-slice" else _size(one) for one in results)
