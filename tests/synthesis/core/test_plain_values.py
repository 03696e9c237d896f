"""What functions return, as JSON: converted without loss, or refused by type."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import enum
import ipaddress
import json
import uuid
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest

from synthesis.core.plain_values import json_text


class Size(enum.IntEnum):
    SMALL = 1


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Box:
    width: int
    labels: set[str]


class Struct(msgspec.Struct):
    width: Decimal


class Model(pydantic.BaseModel):
    day: datetime.date


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (2, "2"), (1.5, "1.5"), ("ö", '"ö"'), ("\ud800", '"?"'),
        (10**30, "1" + "0" * 30),
        (np.int64(3), "3"), (np.float32(0.5), "0.5"), (np.bool_(True), "true"), (np.str_("a"), '"a"'),
        (np.array([[1, 2], [3, 4]]), "[[1,2],[3,4]]"), (np.array(7), "7"), ({"a": np.int32(1)}, '{"a":1}'),
        (np.datetime64("2024-01-02"), '"2024-01-02"'), (np.array(["2024-01-02"], "M8[D]"), '["2024-01-02"]'),
        (np.float64("nan"), '"NaN"'), (float("-inf"), '"-Infinity"'), (array.array("i", [1, 2]), "[1,2]"),
        (Decimal("1.10"), '"1.10"'), (Fraction(1, 3), '"1/3"'), (uuid.UUID(int=1), f'"{uuid.UUID(int=1)}"'),
        (datetime.datetime(2024, 1, 2, 3), '"2024-01-02T03:00:00"'), (datetime.date(2024, 1, 2), '"2024-01-02"'),
        (datetime.time(3, 4), '"03:04:00"'), (datetime.timedelta(hours=1), '"1:00:00"'),
        (PurePosixPath("/a"), '"/a"'), (ipaddress.ip_address("::1"), '"::1"'),
        (b"text", '"text"'), (b"\xff", '"/w=="'), (bytearray(b"a"), '"a"'),
        ((1, 2), "[1,2]"), (Point(1, 2), "[1,2]"), (range(2), "[0,1]"), (collections.deque([1]), "[1]"),
        ({1: 2}.keys(), "[1]"), ({1: 2}.items(), "[[1,2]]"), ({3, 1, 2}, "[1,2,3]"), ({"b", 1}, '["b",1]'),
        (frozenset({(2, 1), (1, 2)}), "[[1,2],[2,1]]"),
        (Size.SMALL, "1"), (Colour.RED, '"red"'), ({Size.SMALL: 2, None: 3, (1, 2): 4}, '{"1":2,"null":3,"[1, 2]":4}'),
        (Box(1, {"b", "a"}), '{"width":1,"labels":["a","b"]}'), (Struct(Decimal("2.0")), '{"width":"2.0"}'),
        (Model(day="2024-01-02"), '{"day":"2024-01-02"}'),
    ],
)  # fmt: skip
def test_what_has_a_lossless_form_is_converted(value: Any, text: str) -> None:
    assert json_text(value) == text
    json.loads(text)


class Series:
    """As pandas has it: a list of it would lose the index."""

    def tolist(self) -> list[int]:
        return [1]

    def to_dict(self) -> dict[str, int]:
        return {"a": 1}


def endless() -> list:
    found: list = []
    found.append(found)
    return found


async def later() -> None: ...


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1j, "type complex, which has no JSON form"),
        (np.complex64(1), "type complex"),
        (np.longdouble(1), "type numpy.longdouble"),
        (object(), "type object"),
        ((one for one in []), "type generator, which can be read once only; return a list"),
        (iter([]), "type list_iterator, which can be read once only"),
        (Series(), "Series, which has no JSON form; .*to_dict"),
        ({1: 2, "1": 3}, "a dict with two keys that JSON writes as '1'"),
        (endless(), "contains itself"),
        ([[object()]], "type object"),
        ("x" * 10_000_001, "10,000,003 characters; return at most"),
        (10**5000, "integer string"),
    ],
    ids=range(12),
)
def test_what_has_none_is_refused_by_its_type(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        json_text(value)
