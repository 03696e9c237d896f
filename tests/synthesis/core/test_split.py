"""A held-out share of conversations: which records it has, whatever their order, and with few of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from sft_world import make_dataset, trajectory

from astra_jax.base.errors import InputError
from synthesis.core.datasets import read_dataset
from synthesis.core.records import Message, Trajectory
from synthesis.core.split import split_conversations


def conversations(count: int) -> list[Trajectory]:
    return [
        replace(trajectory(i, ["Peru"]), messages=[Message("user", f"Question {i}"), Message("assistant", "Lima")])
        for i in range(count)
    ]


@dataclass(frozen=True)
class Parts:
    train: list[Trajectory]
    held_out: list[Trajectory]


def split(folder: Path, records: list[Trajectory], share: float, seed: int = 0) -> Parts:
    """Split with a cache of its own, as on another machine."""
    data = make_dataset(folder / "data", records)
    parts = split_conversations(data, share, seed, folder / "cache")
    assert split_conversations(data, share, seed, folder / "cache") == parts
    return Parts(*(read_dataset(part, Trajectory) for part in parts))


@pytest.mark.parametrize(("count", "share", "held"), [(1_000, 0.05, 50), (40, 0.05, 2), (30, 0.05, 2), (3, 0.01, 1),
                                                      (2, 0.5, 1), (10, 0.99, 9)])  # fmt: skip
def test_each_record_is_in_one_part_and_the_share_is_rounded_up(tmp_path, count: int, share: float, held: int) -> None:
    records = conversations(count)
    parts = split(tmp_path, records, share)
    assert len(parts.held_out) == held
    both = {record.id for record in parts.train} | {record.id for record in parts.held_out}
    assert len(parts.train) + held == count and both == {record.id for record in records}
    assert [record.id for record in parts.train] == [one.id for one in records if one not in parts.held_out]


def test_content_and_seed_decide(tmp_path) -> None:
    """Not the order of the rows, nor their ids, which differ where the rows come from several files."""
    records = conversations(60)
    first = split(tmp_path / "a", records, 0.2)
    shuffled = random.Random(1).sample([replace(one, id=f"other-{one.id}") for one in records], k=60)
    again = split(tmp_path / "b", shuffled, 0.2)
    assert messages(first.held_out) == messages(again.held_out)
    assert messages(first.held_out) != messages(split(tmp_path / "c", records, 0.2, seed=1).held_out)
    # A larger share has the smaller one's conversations, too.
    assert messages(first.held_out) < messages(split(tmp_path / "d", records, 0.5).held_out)


def messages(records: list[Trajectory]) -> set[str]:
    return {str(record.messages) for record in records}


def test_equal_conversations_are_in_one_part(tmp_path) -> None:
    records = [replace(one, id=f"{one.id}-{copy}") for one in conversations(20) for copy in range(3)]
    parts = split(tmp_path, records, 0.25)
    assert not messages(parts.train) & messages(parts.held_out)
    assert len(parts.held_out) == 15


def test_what_cannot_be_split_is_refused(tmp_path) -> None:
    for records in (conversations(1), [replace(one, messages=[]) for one in conversations(4)]):
        with pytest.raises(InputError, match=rf"{len(records)} conversations, 1 of them different, cannot be split"):
            split(tmp_path, records, 0.5)
