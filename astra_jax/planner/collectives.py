"""Traffic of a compiled program between devices, read from its HLO text.

A loop counts as often as it runs, a conditional by its largest branch. The TPU compiler may cut a collective into
pieces, one in each of a chain of fusions that hide it; it counts once, at its start. The compiler writes traffic
between slices as a `send` and a `recv` of the hosts' network, with the hosts' actions in their attributes.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from astra_jax.planner.hlo import Instruction, Module, array_bytes, read_hlo, shapes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective, as one device sees it.

    Attributes:
        kind: one of `KINDS`; an all-reduce of which each device keeps its part is a reduce-scatter.
        groups: partitions of each group that exchange; of a permutation each (from, to) with different ends.
        received: bytes that a device receives in one run, with ring algorithms.
        dtypes: dtypes of its operands.
        between_slices: True for traffic over the data centre's network. Its steps within a slice are separate
            collectives.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    received: float
    dtypes: tuple[str, ...]
    between_slices: bool = False

    def way(self, mesh_shape: Mapping[str, int]) -> str:
        """Return the mesh axes that it crosses, and whether it does so between slices."""
        return self.axes(mesh_shape) + (" between slices" if self.between_slices else "")

    def axes(self, mesh_shape: Mapping[str, int]) -> str:
        """Return the mesh axes that it crosses, joined by +."""
        crossed = np.zeros(len(mesh_shape), bool)
        for group in self.groups:
            places = np.stack(np.unravel_index(group, tuple(mesh_shape.values())), axis=1)
            crossed |= (places != places[0]).any(axis=0)
        return "+".join(name for name, one in zip(mesh_shape, crossed, strict=True) if one)


def gathered(mesh_shape: Mapping[str, int], axes: Sequence[str], received: float) -> Collective:
    """Return a gather over some axes of a mesh with this many bytes received per device."""
    return Collective("all-gather", _groups_over(tuple(mesh_shape.items()), tuple(axes)), received, ())


@functools.cache
def _groups_over(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    ids = np.arange(math.prod(size for _, size in mesh)).reshape([size for _, size in mesh])
    places = [place for place, (name, _) in enumerate(mesh) if name in axes]
    last = np.moveaxis(ids, places, range(-len(places), 0))
    return tuple(map(tuple, last.reshape(-1, math.prod(ids.shape[place] for place in places)).tolist()))


def bytes_by_axis(hlo: str | Module, mesh_shape: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes that a device receives in one run of the program, by way (`Collective.way`).

    Args:
        hlo: a compiled (partitioned) module, or its text.
        mesh_shape: sizes by axis, in the mesh's order; partition i is the mesh's i-th device.
    """
    sums: dict[str, float] = defaultdict(float)
    for one, runs in collectives(read_hlo(hlo) if isinstance(hlo, str) else hlo):
        sums[one.way(mesh_shape)] += one.received * runs
    return dict(sorted(sums.items()))


def collectives(module: Module) -> Iterator[tuple[Collective, float]]:
    """Yield every collective of the program that runs, with its number of runs.

    Of a conditional's branches only the one in which a device receives most counts.
    """
    found = {
        name: [
            moved
            for one in computation.instructions
            if not is_continued(one) and (moved := collective_of(one, name)) is not None
        ]
        for name, computation in module.computations.items()
    }
    runs = module.runs(lambda computation: sum(moved.received for moved in found[computation.name]))
    for name, every in found.items():
        for moved in every if runs[name] else ():
            yield moved, runs[name]


def is_continued(one: Instruction) -> bool:
    """Return whether the instruction is a later piece of a collective that a chain of fusions carries out."""
    flag = re.search(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"', one.attributes)
    return flag is not None and flag.group(1) != "-1"


def collective_of(one: Instruction, computation: str) -> Collective | None:
    """Return the collective that an instruction is or starts; None if there is none, or nothing to exchange.

    Args:
        computation: name of the instruction's computation.
    """
    if one.opcode == "recv":
        return _between_slices(one)
    started = one.opcode.endswith("-start")
    kind = one.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = _groups(one.attributes, kind)
    size = max((len(group) for group in groups), default=1)
    if size < 2:
        return None
    moved = _bytes(one.result, started=started, kind=kind)
    if kind == "all-reduce" and "all-reduce-scatter" in computation:  # TPU's form: the kept part is sliced out after it
        kind, moved = "reduce-scatter", moved / size
    dtypes = tuple(sorted({kind_of for kind_of, dims in shapes(one.result) if dims}))
    return Collective(kind, groups, moved * _share(kind, size), dtypes)


def _between_slices(one: Instruction) -> Collective:
    """Return what hosts receive for a device.

    Hosts count slices from 1 and write device 3 of slice 2 as 200003. All slices of a mesh have one size, and its first
    axis goes over them.

    Raises:
        ValueError: an attribute is unknown, so bytes would be missing.
    """
    said = re.search(r'_xla_megascale_transfer_type="(\w{1,40})"', one.attributes)
    kind = "" if said is None else said.group(1).lower().replace("_", "-")
    _, _, target = one.attributes.partition("_xla_megascale_target=")
    groups: list[list[tuple[int, int]]] = []
    if every := re.match(r'"\{([\d,]{1,9999})\}x\{0:(\d{1,6})\}"', target):
        slices = [int(index) for index in every.group(1).split(",")]
        groups = [[(index, place) for index in slices] for place in range(int(every.group(2)) + 1)]
    elif listed := re.match(r"\{((?:\{[\d,>-]+\},?)+)\}", target):
        for group in re.findall(r"\{([\d,>-]+)\}", listed.group(1)):
            groups.append([divmod(int(number), 100_000) for number in re.findall(r"\d+", group)])
    kind = "collective-permute" if "->" in target.partition("}")[0] else kind
    if kind not in KINDS or not groups:
        raise ValueError(f"{one.name} goes between slices in a way that is not known: {one.attributes[:300]}")
    each = 1 + max(place for group in groups for _, place in group)
    received = sum(array_bytes(*shape) for shape in shapes(one.result) if shape[1]) * _share(kind, len(groups[0]))
    dtypes = tuple(sorted({of_type for of_type, dims in shapes(one.result) if dims}))
    partitions = tuple(tuple((index - 1) * each + place for index, place in group) for group in groups)
    return Collective(kind, partitions, received, dtypes, True)


def _bytes(result: str, *, started: bool, kind: str) -> float:
    if started and kind != "all-reduce" and result.startswith("(("):  # ((operands), results): several combined
        result = _after_group(result[1:])
    sizes = [array_bytes(*shape) for shape in shapes(result)]
    if started and kind != "all-reduce" and result.startswith("("):  # (operand, result, contexts)
        return max(sizes) if kind == "all-gather" else min(sizes[:2])
    return sum(sizes)


def _after_group(text: str) -> str:
    """Return the text after its first parenthesis, up to the end of the next group."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[index + 1 :].lstrip(", ").replace("(", "", 1)
    return ""


def _share(kind: str, group: int) -> float:
    """Return bytes received over bytes of the result, with ring algorithms."""
    if kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return (group - 1) / group
    if kind == "reduce-scatter":
        return group - 1
    return 2 * (group - 1) / group if kind == "all-reduce" else 1.0


def _groups(attributes: str, kind: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of partitions that exchange."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes)
        ends = re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)) if pairs else []
        return tuple((int(source), int(target)) for source, target in ends if source != target)
    text = attributes.partition("replica_groups=")[2]
    if found := re.match(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", text):
        return tuple(tuple(int(n) for n in one.split(",")) for one in re.findall(r"\{([\d,]+)\}", found.group(1)))
    if found := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, dims = ([int(n) for n in found.group(i).split(",")] for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found.group(3):
            ids = ids.transpose([int(n) for n in found.group(3).split(",")])
        return tuple(map(tuple, ids.reshape(groups[0], -1).tolist()))
    if found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? *\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        wanted = re.findall(r"'([^']+)'", found.group(3))
        ids = np.arange(math.prod(sizes.values()))
        if found.group(2):
            ids = np.array([int(n) for n in re.findall(r"\d+", found.group(2))])
        ids = ids.reshape(list(sizes.values()))
        places = [axis for axis, name in enumerate(sizes) if name in wanted]
        together = math.prod(ids.shape[axis] for axis in places)
        moved = np.moveaxis(ids, places, range(-len(places), 0)) if places else ids
        return tuple(map(tuple, moved.reshape(-1, together).tolist()))
    return ()
