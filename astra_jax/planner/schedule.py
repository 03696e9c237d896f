"""Duration of a compiled program on a TPU, from its schedule.

The compiler writes the order in which a chip runs a computation's instructions, and for most their cycles. This module
walks that order with a clock. A collective that starts and ends at different points takes only the time by which it is
longer than the work in between; any other takes all of its time. Kernels have no estimate. For them the clock advances
by the larger of two times: arithmetic at the matrix units' rate, and traffic at HBM's.

Not counted: latencies of collectives and of parallel copies, the work of the kernels' vector units, and the host's work
between programs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from astra_jax.planner.collectives import KINDS, Collective, collective_of, is_continued
from astra_jax.planner.cycles import category, estimated, is_free, is_kernel, kernel_name
from astra_jax.planner.hlo import Computation, Instruction, Module, array_bytes, shapes
from astra_jax.planner.kernels import work_of
from astra_jax.planner.network import Torus
from astra_jax.run.chips import Chip


@dataclass(frozen=True)
class Schedule:
    """Seconds of one run of a program.

    Attributes:
        work: by category (`cycles.category`), attention's kernels, and `kernel` for others.
        exposed: time in which the chip waits for collectives, by kind of collective and the mesh axes that it crosses.
        hidden: time of collectives hidden by work, by the same keys.
        unknown: kernels of unknown arithmetic (their traffic is counted) and loops of unknown length (counted once).
    """

    work: dict[str, float]
    exposed: dict[str, float]
    hidden: dict[str, float]
    unknown: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(self.work.values()) + sum(self.exposed.values())


def schedule_of(module: Module, chip: Chip, network: Torus, mesh_shape: dict[str, int]) -> Schedule:
    """Compute the schedule of a module compiled for a TPU.

    Args:
        mesh_shape: sizes by axis; partition i is the mesh's i-th device.
    """
    walk = _Walk(module, chip, network, mesh_shape)
    walk.computation(module.entry, 1.0)
    unknown = (*sorted(walk.unknown), *(f"loop {name}" for name in module.unknown_loops))
    return Schedule(dict(walk.work), dict(walk.exposed), dict(walk.hidden), unknown)


class _Walk:
    def __init__(self, module: Module, chip: Chip, network: Torus, mesh_shape: dict[str, int]) -> None:
        assert chip.clock is not None
        self._module, self._chip, self._network, self._mesh = module, chip, network, mesh_shape
        self._clock = chip.clock
        self.work: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        self.unknown: set[str] = set()

    def computation(self, name: str, runs: float) -> float:
        """Add a computation's seconds, `runs` times. Return those of one run."""
        now = 0.0
        links: dict[str, float] = defaultdict(float)  # time at which the links of some axes are free again
        under_way: dict[str, tuple[float, float, str]] = {}  # by start or chain: end, seconds, name

        def start(key: str, one: Collective) -> None:
            way = one.way(self._mesh)
            seconds = self._network.seconds(one)
            # A permutation uses one direction of its axis, so two may run at once.
            lane = f"{way} {one.groups[0]}" if one.kind == "collective-permute" else way
            lane = "network" if one.between_slices else lane
            links[lane] = max(now, links[lane]) + seconds
            under_way[key] = links[lane], seconds, f"{one.kind} over {way}"

        def wait(key: str) -> None:
            nonlocal now
            end, seconds, what = under_way.pop(key, (now, 0.0, ""))
            if what:
                late = max(0.0, end - now)
                self.exposed[what] += late * runs
                self.hidden[what] += max(0.0, seconds - late) * runs
                now += late

        computation = self._module.computations[name]
        for one in computation.instructions:
            if one.opcode == "while":
                trips = self._module.trips(computation, one)
                body = one.calls("body")
                trips = 1 if trips is None else trips
                now += 0.0 if body is None else trips * self.computation(body, runs * trips)
            elif one.opcode in ("call", "conditional"):
                called = [each for each in one.called if each in self._module.computations]
                if one.opcode == "conditional":  # the longest branch
                    called = [max(called, key=lambda each: self.computation(each, 0.0))]
                now += sum(self.computation(each, runs) for each in called)
            elif (moved := self._collective(one, name)) is not None:
                key = _chain(self._module, one) or one.name
                start(key, moved)
                if not _is_started(self._module, one):
                    wait(key)
            elif one.opcode.endswith("-done") or _ends_chain(self._module, one):
                wait(_chain(self._module, one) or _started_by(computation, one))
            elif (spent := self._seconds(one)) is not None:
                self.work[spent[0]] += spent[1] * runs
                now += spent[1]
        for key in list(under_way):  # they end in the next trip
            wait(key)
        return now

    def _seconds(self, one: Instruction) -> tuple[str, float] | None:
        """Return (category, seconds) of an instruction that is not a collective; None if it takes no time."""
        if (cycles := estimated(one)) is not None:
            return category(one), cycles / self._clock
        if is_kernel(one):
            work = work_of(one, self._mesh.get("expert", 1))
            if work is None:
                self.unknown.add(f"kernel {kernel_name(one)}")
                return "kernel", self._traffic(one)
            rate = self._chip.flops * min(1.0, work.contracted / self._chip.matrix_side)
            rate *= work.busy[self._chip.matrix_side > 128]
            return work.part, max(work.flops / rate, work.traffic / self._chip.hbm_bandwidth)
        if one.opcode == "call-start":
            self.unknown.add(f"{one.name}, which runs beside")
        if is_free(one):
            return None
        if one.opcode == "custom-call":
            self.unknown.add(f"custom call {kernel_name(one)}")
        return category(one), self._traffic(one)

    def _traffic(self, one: Instruction) -> float:
        """Return the seconds to read and write an instruction's result."""
        return 2 * sum(array_bytes(*shape) for shape in shapes(one.result)) / self._chip.hbm_bandwidth

    def _collective(self, one: Instruction, name: str) -> Collective | None:
        """Return the collective that an instruction starts, itself or in a computation that it calls."""
        if one.opcode.removesuffix("-start") in (*KINDS, "recv"):
            return collective_of(one, name)
        if one.opcode not in ("fusion", "async-start", "call-start"):
            return None
        for called in one.called:
            for inner in self._module.computations[called].instructions if called in self._module.computations else ():
                if not is_continued(inner) and (found := collective_of(inner, called)) is not None:
                    return found
        return None


def _is_started(module: Module, one: Instruction) -> bool:
    """Return whether a collective only starts here."""
    return one.opcode == "recv" or one.opcode.endswith("-start") or _has(module, one, "AsyncCollectiveStart")


def _ends_chain(module: Module, one: Instruction) -> bool:
    return one.opcode == "fusion" and _has(module, one, "AsyncCollectiveDone")


def _has(module: Module, one: Instruction, target: str) -> bool:
    return any(
        f'custom_call_target="{target}"' in inner.attributes
        for called in one.called
        if called in module.computations
        for inner in module.computations[called].instructions
        if inner.opcode == "custom-call"
    )


def _chain(module: Module, one: Instruction) -> str | None:
    """Return the chain of fusions to which a fusion belongs and which carries out one collective."""
    if one.opcode != "fusion":
        return None
    for called in one.called:
        for inner in module.computations[called].instructions if called in module.computations else ():
            if inner.opcode in KINDS and (found := re.search(r'chain_id="(\d+)"', inner.attributes)):
                return f"chain {found.group(1)}"
    return None


def _started_by(computation: Computation, done: Instruction) -> str:
    """Return the name of the instruction that a `-done` ends."""
    name = done.operands[0] if done.operands else ""
    while (one := computation.by_name.get(name)) is not None and one.opcode.endswith("-update") and one.operands:
        name = one.operands[0]
    return name
