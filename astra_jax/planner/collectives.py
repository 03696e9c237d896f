"""What a compiled program sends between devices, read from its HLO text.

Loops count as often as they run. A collective that the TPU compiler cut into pieces, one in each of a chain of fusions
that hide it, is counted once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?\("
)
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|branch_computations|called_computations)=\{?((?:%[\w.\-]+,? ?)+)"
)
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4}


def bytes_by_axis(hlo: str, mesh_shape: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a device receives in one run of the program, by the mesh axes (joined by +) that they cross.

    Args:
        hlo: the text of a compiled (partitioned) module.
        mesh_shape: sizes by axis, in the mesh's order; partition i is the mesh's i-th device.
    """
    computations, entry = _computations(hlo)
    runs = _runs(computations, entry)
    counted: dict[tuple[str, str], tuple[str, float]] = {}
    for name, lines in computations.items():
        for line in lines:
            if (found := _COLLECTIVE.search(line)) is None or not runs.get(name):
                continue
            result, kind, started = found.groups()
            group = _group(line, kind)
            if len(group) < 2:
                continue
            size = _bytes(result, started=bool(started), kind=kind)
            if kind == "all-reduce" and "all-reduce-scatter" in name:  # TPU's form of reduce-scatter
                received = size * (len(group) - 1) / len(group)
            else:
                received = size * _share(kind, len(group))
            chain = re.search(r'chain_id="(\d+)"', line)
            key = (kind, f"chain {chain.group(1)}" if chain else f"{name}:{line[:80]}")
            total = received * runs[name]
            if key not in counted or counted[key][1] < total:
                counted[key] = _axes(group, mesh_shape), total
    sums: dict[str, float] = defaultdict(float)
    for axes, total in counted.values():
        sums[axes] += total
    return dict(sorted(sums.items()))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in hlo.splitlines():
        if lines is None:
            if found := _COMPUTATION.match(line):
                lines = computations[found.group(2)] = []
                entry = found.group(2) if found.group(1) else entry
        elif line.startswith("}"):
            lines = None
        else:
            lines.append(line)
    return computations, entry


def _runs(computations: Mapping[str, list[str]], entry: str) -> dict[str, float]:
    """How often each computation runs."""
    callers: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for name, lines in computations.items():
        for line in lines:
            if "-done(" in line or "-update(" in line:  # they name what their start calls
                continue
            times = 1.0
            if " while(" in line:
                times = _trips(line, computations)
            for called in _CALLED.finditer(line):
                for one in re.findall(r"%([\w.\-]+)", called.group(1)):
                    callers[one].append((name, times))
    runs = {entry: 1.0}

    def count(name: str) -> float:
        if name not in runs:
            runs[name] = 0.0  # a cycle cannot occur; this only ends a malformed text
            runs[name] = sum(count(caller) * times for caller, times in callers[name])
        return runs[name]

    for name in computations:
        count(name)
    return runs


def _trips(line: str, computations: Mapping[str, list[str]]) -> float:
    """Of a `while` instruction: as the compiler annotated it, or the constant that its condition compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return float(known.group(1))
    found = re.search(r"condition=%([\w.\-]+)", line)
    condition = computations.get(found.group(1), []) if found else []
    constants = {
        found.group(1): int(found.group(2))
        for one in condition
        if (found := re.search(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", one))
    }
    for one in condition:
        if "direction=LT" in one:
            for name in re.findall(r"%([\w.\-]+)", one.partition("compare(")[2].partition(")")[0]):
                if name in constants:
                    return float(constants[name])
    return float(max(constants.values(), default=1))


def _bytes(result: str, *, started: bool, kind: str) -> float:
    if started and kind != "all-reduce" and result.startswith("(("):  # ((operands), results): several made one
        result = _after_group(result[1:])
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n) * _BYTES.get(kind_of, 4)
        for kind_of, dims in _SHAPE.findall(result)
    ]
    if started and kind != "all-reduce" and result.startswith("("):  # (operand, result, contexts)
        return max(sizes) if kind == "all-gather" else min(sizes[:2])
    return sum(sizes)


def _after_group(text: str) -> str:
    """What follows the parenthesis that the text begins with, up to the next group's end."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[index + 1 :].lstrip(", ").replace("(", "", 1)
    return ""


def _share(kind: str, group: int) -> float:
    """Bytes received over the bytes of the result, with ring algorithms."""
    if kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return (group - 1) / group
    if kind == "reduce-scatter":
        return group - 1
    return 2 * (group - 1) / group if kind == "all-reduce" else 1.0


def _group(line: str, kind: str) -> list[int]:
    """One group of partitions that exchange."""
    if kind == "collective-permute":
        pair = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line)
        return [int(pair.group(1)), int(pair.group(2))] if pair else []
    text = line.partition("replica_groups=")[2]
    if found := re.match(r"\{\{([\d,]+)\}", text):
        return [int(n) for n in found.group(1).split(",")]
    if found := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, dims = ([int(n) for n in found.group(i).split(",")] for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found.group(3):
            ids = ids.transpose([int(n) for n in found.group(3).split(",")])
        return ids.reshape(groups[0], -1)[0].tolist()
    if found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? *\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        wanted = re.findall(r"'([^']+)'", found.group(3))
        ids = np.arange(math.prod(sizes.values()))
        if found.group(2):
            ids = np.array([int(n) for n in re.findall(r"\d+", found.group(2))])
        ids = ids.reshape(list(sizes.values()))
        index = tuple(slice(None) if name in wanted else 0 for name in sizes)
        return ids[index].reshape(-1).tolist()
    return []


def _axes(group: list[int], mesh_shape: Mapping[str, int]) -> str:
    places = np.stack(np.unravel_index(group, tuple(mesh_shape.values())), axis=1)
    return "+".join(name for name, column in zip(mesh_shape, places.T, strict=True) if len(set(column.tolist())) > 1)
