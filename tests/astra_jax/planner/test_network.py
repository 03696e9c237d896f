"""How long collectives take on slices: links as they are, rings only where a slice closes them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from astra_jax.planner.collectives import Collective
from astra_jax.planner.network import Torus

LINK, NETWORK = 90e9, 6.25e9
BYTES = 7e9


def slice_of(shape: str) -> Torus:
    sides = [int(side) for side in shape.split("x")]
    places = itertools.product(*map(range, sides))
    devices = [SimpleNamespace(coords=(*place, 0, 0)) for place in places]
    return Torus.of(devices, shape, 2 * len(sides) * LINK, NETWORK)


def collective(kind: str, *groups: tuple[int, ...]) -> Collective:
    return Collective(kind, groups, BYTES, ("bf16",))


def test_rings_are_closed_on_whole_cubes_and_on_sides_of_sixteen() -> None:
    assert slice_of("2x2x4").wraps == (False, False, False) and slice_of("4x4x8").wraps == (True, True, True)
    assert slice_of("8x16").wraps == (False, True) and slice_of("2x4").wraps == (False, False)
    assert slice_of("2x4").link == LINK == slice_of("2x2x2").link


@pytest.mark.parametrize(
    ("shape", "group", "links"),
    [
        ("2x4", (0, 1, 2, 3), 1.0),  # a line: its end has one link into it
        ("2x4", (0, 4), 1.0),
        ("2x4", tuple(range(8)), 2.0),  # both sides at once: a corner has two links
        ("2x2x2", tuple(range(8)), 3.0),
        ("16x16", tuple(range(16)), 2.0),  # a ring
        ("16x16", tuple(range(256)), 4.0),
        ("2x4", (0, 2), 0.5),  # every other chip: those between use the same links
        ("2x4", (0, 5), 1.0),  # no grid
    ],
)
def test_gathers_take_what_the_least_linked_chip_can_receive(shape: str, group: tuple[int, ...], links: float) -> None:
    assert slice_of(shape).seconds(collective("all-gather", group)) == pytest.approx(BYTES / links / LINK)


def test_an_exchange_of_all_with_all_is_bound_by_the_middle_of_a_side() -> None:
    line = slice_of("16x16")
    long = line.seconds(collective("all-to-all", tuple(range(16))))
    assert long == pytest.approx(BYTES * 16 / 15 * 16 / 4 / 2 / LINK)  # half of what each has crosses two places
    assert line.seconds(collective("all-to-all", (0, 1))) == pytest.approx(BYTES / LINK)


def test_permutations_take_what_the_most_crossed_link_carries() -> None:
    network = slice_of("2x4")
    around = [0, 1, 2, 3, 7, 6, 5, 4]
    ring = tuple(zip(around, around[1:] + around[:1], strict=True))
    assert network.seconds(collective("collective-permute", *ring)) == pytest.approx(BYTES / LINK)
    line = ((0, 1), (1, 2), (2, 3), (3, 0))  # back over the links of the other direction
    assert network.seconds(collective("collective-permute", *line)) == pytest.approx(BYTES / LINK)
    far = ((0, 2), (1, 3))
    assert network.seconds(collective("collective-permute", *far)) == pytest.approx(2 * BYTES / LINK)
    assert slice_of("16x16").seconds(collective("collective-permute", (0, 15), (1, 14))) == pytest.approx(
        2 * BYTES / LINK  # the short way, over the end
    )
