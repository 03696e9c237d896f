"""Outputs that are read from the journal as they are asked for are those that a list would hold."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from astra_jax.base.errors import InputError
from synthesis.core.records import Answer
from synthesis.core.stages import Journal, Rejected, run_stage
from synthesis.core.stored import Concat, Keys, MapView, Records, Select


async def several(number: int) -> list[Answer]:
    """None, one, two or three; of a size that is packed and of one that is not."""
    if number % 7 == 3:
        raise Rejected("third", str(number))
    return [Answer(value=f"{number}.{part}", unit="x" * (number % 3) * 200) for part in range(number % 4)]


EXPECTED = [
    Answer(value=f"{number}.{part}", unit="x" * (number % 3) * 200)
    for number in range(300)
    if number % 7 != 3
    for part in range(number % 4)
]


@pytest.fixture
def journal(tmp_path: Path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


async def stored(journal: Journal) -> Records[Answer]:
    options = {"key": str, "out": Answer, "journal": journal, "stored": True, "concurrency": 16}
    result = await run_stage("several", several, range(300), **options)
    assert result.rejected == {"third": 43} and result.details == {"third": "3"}
    return result.outputs


async def test_parts_and_sums_are_those_of_a_list(journal: Journal) -> None:
    made = await stored(journal)
    assert len(made) == len(EXPECTED) > 300 and list(made) == EXPECTED == list(await stored(journal))
    assert [made[position] for position in (0, 200, -1)] == [EXPECTED[position] for position in (0, 200, -1)]
    with pytest.raises(IndexError):
        made[len(EXPECTED)]
    assert list(made[5:400:3]) == EXPECTED[5:400:3] and list(made[::-1]) == EXPECTED[::-1]
    short = made.filter(lambda one: not one.unit)
    expected = [one for one in EXPECTED if not one.unit]
    assert list(short) == expected and list(short[1:][::2]) == expected[1:][::2]
    both = short + made[:10] + Select(EXPECTED, [1, 1])
    assert list(both) == [*expected, *EXPECTED[:10], EXPECTED[1], EXPECTED[1]] and both[-1] == EXPECTED[1]
    mixed = both.select([len(both) - 1, 0, len(short), 0])
    assert list(mixed) == [EXPECTED[1], expected[0], EXPECTED[0], expected[0]]
    assert list(MapView(lambda one, other: (one.value, other.value), made[:2], short[:2])) == [
        (one.value, other.value) for one, other in zip(EXPECTED, expected[:2], strict=False)
    ]
    assert list(Concat([])) == [] and not made[:0]


async def test_it_is_read_while_a_later_stage_is_written(journal: Journal) -> None:
    made = await stored(journal)

    async def longer(one: Answer) -> list[Answer]:
        return [msgspec.structs.replace(one, unit=f"{one.value} {made[7].value}")]

    options = {"key": lambda one: str(one.value), "out": Answer, "journal": journal, "stored": True}
    result = await run_stage("longer", longer, made, **options)
    assert [one.unit for one in result.outputs] == [f"{one.value} {EXPECTED[7].value}" for one in EXPECTED]
    again = await run_stage("longer", longer, made, **options)
    assert again.resumed == len(EXPECTED) and list(again.outputs) == list(result.outputs)


async def test_rows_of_older_journals_are_read_and_large_ones_are_packed(journal: Journal) -> None:
    with sqlite3.connect(journal.path) as db:
        old = msgspec.json.encode([Answer(value="old" * 1000)])
        db.execute("INSERT INTO done VALUES ('several', '7', ?, '', '')", (old,))
    made = await stored(journal)
    assert made.filter(lambda one: one.value.startswith("old"))[0] == Answer(value="old" * 1000)
    with sqlite3.connect(journal.path) as db:
        (size,) = db.execute("SELECT length(outputs) FROM done WHERE key = '11'").fetchone()
    assert size < 200 < len(msgspec.json.encode([one for one in EXPECTED if one.value.startswith("11.")]))


async def test_outputs_of_another_type_are_refused(journal: Journal) -> None:
    await stored(journal)

    class Other(msgspec.Struct):
        text: str

    with pytest.raises(InputError, match="the finished work of stage several is of another version"):
        await run_stage("several", several, range(300), key=str, out=Other, journal=journal, stored=True)


def test_keys_take_their_text_and_are_there_once() -> None:
    keys = Keys("stage")
    for name in ("a", "", "\u00e9 1"):
        keys.add(name)
    with pytest.raises(InputError, match="stage stage: two inputs have the key '\u00e9 1'"):
        keys.add("\u00e9 1")
    assert list(keys) == ["a", "", "\u00e9 1"] and keys[-1] == "\u00e9 1" and keys[:2] == ["a", ""]
