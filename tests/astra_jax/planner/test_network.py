"""How long collectives take on slices: links as they are, rings only where a slice closes them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from astra_jax.mesh import AXES, make_mesh
from astra_jax.planner.collectives import Collective, gathered
from astra_jax.planner.hardware import Slice
from astra_jax.planner.network import Hosts, Torus
from astra_jax.planner.search import least_seconds
from configs.training import MODELS

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


HOSTS = Hosts.of(Slice.parse("h200:2x8"))
NVLINK, ADAPTER = 450e9, 50e9


def over(*axes: str, **sizes: int) -> Collective:
    return gathered({axis: sizes.get(axis, 1) for axis in AXES}, axes, BYTES)


@dataclass(frozen=True)
class Gpu:
    """A device as far as a mesh is made of it."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def test_a_mesh_of_gpus_is_filled_host_by_host() -> None:
    """So what `Hosts` says of partitions holds of a run: its mesh has the devices in their order."""
    gpus = [Gpu(at, at // 8) for at in range(16)]
    mesh = make_mesh(fsdp=2, context=2, tensor=4, devices=gpus[8:] + gpus[:8])
    assert [one.id for one in mesh.devices.flat] == list(range(16))


def test_what_stays_in_a_host_takes_its_links_and_what_does_not_the_adapters_of_all() -> None:
    """At least: of a gather over 2 x 8 GPUs a host lacks a half, which comes once, in eighths."""
    assert HOSTS.seconds([(over("tensor", fsdp=2, tensor=8), 1.0)]) == BYTES / NVLINK
    assert HOSTS.seconds([(over("fsdp", fsdp=2, tensor=8), 1.0)]) == BYTES / ADAPTER
    assert HOSTS.seconds([(over("fsdp", fsdp=16), 1.0)]) == pytest.approx(BYTES / (NVLINK + ADAPTER))
    two = over("fsdp", fsdp=4, tensor=4)  # two of a host: what it lacks comes over two adapters
    assert HOSTS.seconds([(two, 1.0)]) == pytest.approx(BYTES * (4 - 2) / (4 - 1) / 2 / ADAPTER)
    assert HOSTS.seconds([(two, 2.0), (over("tensor", fsdp=2, tensor=8), 3.0)]) == pytest.approx(
        max(2 * BYTES / 3 / ADAPTER, 3 * BYTES / NVLINK, 5 * BYTES / (NVLINK + ADAPTER))
    )
    every = Collective("all-to-all", two.groups, BYTES, ())  # nobody else wants it
    assert HOSTS.seconds([(every, 1.0)]) == pytest.approx(BYTES * 2 / 3 / ADAPTER)
    ring = Collective("collective-permute", tuple((at, at + 1) for at in range(15)), BYTES, ())
    assert HOSTS.seconds([(ring, 1.0)]) == pytest.approx(max(BYTES / 8 / ADAPTER, BYTES / (NVLINK + ADAPTER)))
    assert Hosts.of(Slice.parse("h200:8")).seconds([(over("fsdp", fsdp=8), 1.0)]) == BYTES / NVLINK


def test_a_search_on_several_hosts_charges_each_axis_for_where_it_goes() -> None:
    model, step = MODELS["32b"].in_training_precision(), 32 * 32_768
    sent = {
        where: least_seconds(
            model, 32_768, 1, step, Slice.parse(where), dict.fromkeys(AXES, 1) | {"fsdp": 2, "tensor": 8}, "full"
        )[1]
        for where in ("h200:2x8", "h200:16")
    }
    sums = 16 * 7 / 8 * step / 2 * model.n_layers * model.d_model
    assert sent["h200:2x8"] == pytest.approx(sums / NVLINK) and sums / NVLINK < sent["h200:16"] < 2 * sums / NVLINK
