"""Durations of collectives: on a TPU slice's links, between slices, and lower bounds for hosts of GPUs.

A slice is a grid of chips with a link in each direction between neighbours. Only in large slices are the ends of a side
linked too. A collective is limited by what the chip with the fewest links can receive, or by the link with the most
traffic; latency is not counted. Between slices a chip has its share of its host's adapters.

A GPU is linked with all GPUs of its host. Data from other hosts enters by the host's adapters, one for each GPU. Each
piece enters once and is passed on within the host. So collectives over several hosts may be nearly as fast as within
one, and a bound may not count all bytes at an adapter's rate.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from astra_jax.planner.collectives import Collective
from astra_jax.planner.hardware import Slice

Place = tuple[int, ...]


@dataclass(frozen=True)
class Torus:
    """Slice of TPUs.

    Attributes:
        places: by partition, the chip's coordinates in the slice.
        sides: lengths of the slice's sides, in chips.
        wraps: by side, whether its ends are linked.
        link: bytes per second over one link, in one direction.
        network: bytes per second that a chip receives from other slices.
    """

    places: tuple[Place, ...]
    sides: Place
    wraps: tuple[bool, ...]
    link: float
    network: float

    @classmethod
    def of(cls, devices: Sequence[Any], shape: str, link_bandwidth: float, network_bandwidth: float) -> Torus:
        """Describe the devices of a mesh, in its order.

        Args:
            shape: shape of a slice, such as `2x4`.
            link_bandwidth: bytes per second over all the links of a chip, two for each side.
            network_bandwidth: bytes per second that a chip receives from other slices.
        """
        sides = tuple(int(side) for side in shape.split("x"))
        places = tuple(tuple(device.coords[: len(sides)]) for device in devices)
        if len(sides) == 3:  # switches join cubes of 4 x 4 x 4, and also close the rings
            wraps = tuple(all(side % 4 == 0 for side in sides) for _ in sides)
        else:
            wraps = tuple(side == 16 for side in sides)
        return cls(places, sides, wraps, link_bandwidth / (2 * len(sides)), network_bandwidth)

    def seconds(self, one: Collective) -> float:
        """Return the seconds of one run, alone on the links."""
        if one.between_slices:
            return one.received / self.network
        if one.kind == "collective-permute":
            return one.received * self._most_crossed(one.groups) / self.link
        return max(self._of_group(one, group) for group in one.groups if len(group) > 1)

    def _of_group(self, one: Collective, group: Sequence[int]) -> float:
        """Return the seconds for one group. Each side that it spans is a line, or a ring if its ends are linked."""
        places = [self.places[index] for index in group]
        columns = [sorted(set(column)) for column in zip(*places, strict=True)]
        links, across = 0.0, 0.0
        whole = one.received * len(group) / (len(group) - 1)
        for values, side, wraps in zip(columns, self.sides, self.wraps, strict=True):
            if (n := len(values)) == 1:
                continue
            stride = min(b - a for a, b in itertools.pairwise(values))  # other groups' traffic crosses links in between
            usable = (2 if wraps and n * stride == side else 1) / stride
            links += usable
            across = max(across, whole * n / 4 / usable)  # half of a side sends half of its data to the other half
        if math.prod(map(len, columns)) != len(group):  # not a grid: one line through all of it
            links = min(links, 1.0)
        received = one.received / links
        return max(received, across if one.kind.endswith("all-to-all") else 0.0) / self.link

    def _most_crossed(self, pairs: Sequence[tuple[int, ...]]) -> int:
        """Return the messages on the busiest link; each message takes one side after the other, the shorter way."""
        crossed: Counter[tuple[Place, Place]] = Counter()
        for source, target in pairs:
            at = list(self.places[source])
            for axis, wanted in enumerate(self.places[target]):
                side = self.sides[axis]
                there = (wanted - at[axis]) % side
                step = 1 if wanted > at[axis] else -1
                if self.wraps[axis]:
                    step = 1 if there <= side - there else -1
                while at[axis] != wanted:
                    before = tuple(at)
                    at[axis] = (at[axis] + step) % side
                    crossed[before, tuple(at)] += 1
        return max(crossed.values(), default=0)


@dataclass(frozen=True)
class Hosts:
    """Hosts of GPUs.

    Attributes:
        each: GPUs of a host. A mesh of GPUs is filled in their order (`mesh.make_mesh`), so partitions are ordered by
            host, and the last axes of a mesh are within a host.
        link: bytes per second that a GPU receives from others of its host.
        network: bytes per second over the adapter of a GPU, from other hosts.
    """

    each: int
    link: float
    network: float

    @classmethod
    def of(cls, slice_: Slice) -> Hosts:
        """Describe a slice of GPUs."""
        chip = slice_.chip
        return cls(slice_.chips // slice_.hosts, chip.link_bandwidth, chip.network_bandwidth or chip.link_bandwidth)

    def seconds(self, sent: Iterable[tuple[Collective, float]]) -> float:
        """Return a lower bound for collectives with counts: all run at once, on links and adapters in parallel."""
        inside, across = 0.0, 0.0
        entering: dict[int, float] = defaultdict(float)
        for one, runs in sent:
            from_others = self._entering(one)
            for host, size in from_others.items():
                entering[host] += size * runs
            if from_others:
                across += one.received * runs
            else:
                inside += one.received * runs
        by_links = max(inside / self.link, (inside + across) / (self.link + self.network))
        return max(by_links, max(entering.values(), default=0) / self.each / self.network)

    def _entering(self, one: Collective) -> dict[int, float]:
        """Return the bytes that each host receives from others."""
        found: dict[int, float] = defaultdict(float)
        if one.kind == "collective-permute":
            for source, target in one.groups:
                if source // self.each != target // self.each:
                    found[target // self.each] += one.received
            return found
        for group in one.groups:
            here = Counter(index // self.each for index in group)
            for host, count in here.items() if len(here) > 1 else ():
                lacks = one.received * (len(group) - count) / (len(group) - 1)
                found[host] += lacks * (count if one.kind.endswith("all-to-all") else 1)
        return found
