"""Parser of a compiled module's text: computations, their instructions, and how often each computation runs.

It reads only what the planner needs. An instruction may span several lines (a kernel's metadata is JSON with its own
lines), so indentation marks computations. An unindented line that names a computation opens it, and a line that is
`}` alone closes it. Inside, a line that starts no instruction belongs to the previous one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

_OPENING = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r'\}(?:, execution_thread="\w+")?\s*$')
_NAMED = re.compile(r" +(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" *([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|branch_computations|true_computation|false_computation|called_computations)="
    r"\{?((?:%[\w.\-]+,? ?)+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}

_SAME = frozenset({"copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "bitcast-convert"})
"""Opcodes whose result is their first operand's value."""


def shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return (type, dimensions) of every array in a shape's text."""
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _SHAPE.findall(text)]


def array_bytes(kind: str, dims: Sequence[int]) -> int:
    """Return the bytes of an array: four-bit types take half a byte, eight-bit types one."""
    if kind in _BYTES:
        return math.prod(dims) * _BYTES[kind]
    width = re.match(r"[a-z]+(\d+)", kind)
    return -(-math.prod(dims) * (int(width.group(1)) if width else 0) // 8)  # tokens have no width


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        result: text of its shape.
        opcode: opcode, such as `fusion`.
        arguments: text in the parentheses after the opcode.
        attributes: text after the parentheses.
        root: True if its value is the computation's.
    """

    name: str
    result: str
    opcode: str
    arguments: str
    attributes: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Return the names of its operands."""
        return _NAME.findall(self.arguments)

    @property
    def called(self) -> list[str]:
        """Return the names of the computations that it runs: fused ones, a loop's parts, branches, reducers."""
        return [name for found in _CALLED.finditer(self.attributes) for name in _NAME.findall(found.group(1))]

    def calls(self, attribute: str) -> str | None:
        """Return the computation of one attribute, such as `body`."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return found.group(1) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {one.name: one for one in self.instructions}

    @property
    def root(self) -> Instruction | None:
        return next((one for one in self.instructions if one.root), None)

    def constant(self, name: str) -> int | None:
        """Return the integer value of an instruction, through copies; None if it is unknown or not an integer."""
        for _ in range(100):  # a chain of copies; longer ones are malformed
            one = self.by_name.get(name)
            if one is None:
                return None
            if one.opcode == "constant":
                return int(one.arguments) if re.fullmatch(r"-?\d+", one.arguments) else None
            if one.opcode not in _SAME or not one.operands:
                return None
            name = one.operands[0]
        return None


@dataclass(frozen=True)
class Module:
    """Parsed module.

    Attributes:
        entry: name of the computation that is the program.
    """

    computations: Mapping[str, Computation]
    entry: str
    _trips: dict[tuple[str, str], int | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def apart(self) -> frozenset[str]:
        """Computations that take no time of their own in the program's order, with all that they call.

        These are the inside of a fusion, and work that another core runs in parallel (a TPU's sparse cores).
        """
        inside: set[str] = set()
        left = [
            called
            for computation in self.computations.values()
            for one in computation.instructions
            if one.opcode in ("fusion", "call-start")
            for called in one.called
        ]
        while left:
            if (name := left.pop()) not in inside and name in self.computations:
                inside.add(name)
                left += [called for one in self.computations[name].instructions for called in one.called]
        return frozenset(inside)

    def runs(self, amount: Callable[[Computation], float]) -> Mapping[str, float]:
        """Return how often each computation runs.

        Of a conditional's branches only the one with the largest amount counts, as if it were always taken. A loop of
        unknown length (`unknown_loops`) counts once.

        Args:
            amount: the amount of a quantity in one run of a computation, without its callees.
        """
        totals: dict[str, float] = {}

        def total(name: str) -> float:
            if name not in totals:
                totals[name] = 0.0  # a cycle cannot occur; this only stops on a malformed text
                called = sum(total(each) * times for each, times in calls(self.computations[name]))
                totals[name] = amount(self.computations[name]) + called
            return totals[name]

        def calls(computation: Computation) -> Iterator[tuple[str, float]]:
            for one in computation.instructions:
                if one.opcode.endswith(("-done", "-update")):  # they name the computation that their start runs
                    continue
                times = 1.0 if one.opcode != "while" else float(self.trips(computation, one) or 1)
                called = [each for each in one.called if each in self.computations]
                if one.opcode == "conditional" and called:
                    called = [max(called, key=total)]
                yield from ((each, times) for each in called)

        callers: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for name, computation in self.computations.items():
            for each, times in calls(computation):
                callers[each].append((name, times))
        runs = {self.entry: 1.0}

        def count(name: str) -> float:
            if name not in runs:
                runs[name] = 0.0
                runs[name] = sum(count(caller) * times for caller, times in callers[name])
            return runs[name]

        for name in self.computations:
            count(name)
        return runs

    @property
    def unknown_loops(self) -> list[str]:
        """Names of the `while` instructions whose number of trips could not be read."""
        return [
            one.name
            for computation in self.computations.values()
            for one in computation.instructions
            if one.opcode == "while" and self.trips(computation, one) is None
        ]

    def with_unknown_loops(self, trips: int) -> Module:
        """Return the same module, in which loops of unknown length make this many trips."""
        known: dict[tuple[str, str], int | None] = {
            (computation.name, one.name): self.trips(computation, one) or trips
            for computation in self.computations.values()
            for one in computation.instructions
            if one.opcode == "while"
        }
        return dataclasses.replace(self, _trips=known)

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Return the number of trips of a `while` instruction of a computation, or None if it is unknown.

        It is the compiler's annotation, or follows from the counter's initial value, its step and its bound.
        """
        key = computation.name, loop.name
        if key not in self._trips:
            self._trips[key] = self._count(computation, loop)
        return self._trips[key]

    def _count(self, computation: Computation, loop: Instruction) -> int | None:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known.group(1))
        condition = self.computations.get(loop.calls("condition") or "")
        body = self.computations.get(loop.calls("body") or "")
        compared = None if condition is None else condition.root
        if condition is None or body is None or compared is None or compared.opcode != "compare":
            return None
        direction = re.search(r"direction=([A-Z]{2})", compared.attributes)
        left, right = (condition.constant(name) for name in compared.operands[:2])
        # (counter, bound): a bound on the left turns the comparison around.
        counter, bound, turned = (
            (compared.operands[0], right, False) if left is None else (compared.operands[1], left, True)
        )
        read = condition.by_name.get(counter)
        while read is not None and read.opcode in _SAME:
            read = condition.by_name.get(read.operands[0])
        if bound is None or direction is None or read is None or read.opcode != "get-tuple-element":
            return None
        place = re.search(r"\bindex=(\d+)", read.attributes)
        if place is None:
            return None
        begin, step = self._begin(computation, loop, int(place.group(1))), _step(body, int(place.group(1)))
        if begin is None or not step:
            return None
        kind = direction.group(1)
        kind = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(kind, kind) if turned else kind
        distance = bound - begin + {"LE": 1, "GE": -1}.get(kind, 0)
        if kind == "EQ" or (kind in ("LT", "LE") and step < 0) or (kind in ("GT", "GE") and step > 0):
            return None
        return max(0, math.ceil(distance / step))

    def _begin(self, computation: Computation, loop: Instruction, place: int) -> int | None:
        """Return the initial value of an element of the loop's tuple."""
        tuple_ = computation.by_name.get(loop.operands[0]) if loop.operands else None
        if tuple_ is None or tuple_.opcode != "tuple" or place >= len(tuple_.operands):
            return None
        return computation.constant(tuple_.operands[place])


def _step(body: Computation, place: int) -> int | None:
    """Return what a loop's body adds to an element of its tuple."""
    if body.root is None or body.root.opcode != "tuple" or place >= len(body.root.operands):
        return None
    total, name = 0, body.root.operands[place]
    for _ in range(1_000):  # unrolled bodies add several times
        one = body.by_name.get(name)
        if one is None:
            return None
        if one.opcode in _SAME:
            name = one.operands[0]
        elif one.opcode in ("add", "subtract"):
            first, second = (body.constant(operand) for operand in one.operands)
            if (first is None) == (second is None) or (one.opcode == "subtract" and second is None):
                return None
            added = second if first is None else first
            assert added is not None
            total += added if one.opcode == "add" else -added
            name = one.operands[0] if first is None else one.operands[1]
        elif one.opcode == "get-tuple-element":
            return total if re.search(rf"\bindex={place}\b", one.attributes) else None
        else:
            return None
    return None


def read_hlo(text: str) -> Module:
    """Parse the text of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, name = "", None
    parts: list[list[str]] = []
    for line in text.splitlines():
        if name is None:
            if found := _OPENING.match(line):
                name, parts = found.group(2), []
                entry = name if found.group(1) else entry
        elif _END.match(line):
            computations[name] = Computation(name, tuple(_instruction("\n".join(one)) for one in parts))
            name = None
        elif _NAMED.match(line):
            parts.append([line])
        elif parts:
            parts[-1].append(line)
    return Module(computations, entry)


def _instruction(text: str) -> Instruction:
    found = _NAMED.match(text)
    assert found is not None  # checked by `read_hlo`
    rest = text[found.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    result, rest = rest[:end], rest[end:]
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return Instruction(found.group(1), result, "", "", rest, False)
    end = _closing(rest, opcode.end() - 1)
    return Instruction(
        name=found.group(1),
        result=result,
        opcode=opcode.group(1),
        arguments=rest[opcode.end() : end - 1],
        attributes=rest[end:],
        root=text.lstrip().startswith("ROOT "),
    )


def _closing(text: str, opening: int) -> int:
    """Return the index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return opening + found.end()
    return len(text)
