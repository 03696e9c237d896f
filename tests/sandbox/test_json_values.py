"""What a tool may return beside JSON data: each type has one lossless JSON form, or an error that names it."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import sqlite3
import types
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import attrs
import msgspec
import numpy as np
import pydantic
import pytest

from sandbox.json_values import MOST_DIGITS, NotJsonError, has_plain_keys, to_json


class Colour(enum.Enum):
    RED = "red"
    BOTH = (1, 2)


class Text(str, enum.Enum):  # noqa: UP042  # what is written for Pythons before 3.11
    A = "a"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Part:
    name: str
    price: Decimal
    tags: set[str] = dataclasses.field(default_factory=set)
    count: Any = 0


class Pair(NamedTuple):
    x: int
    y: int


class Struct(msgspec.Struct, rename="camel"):
    long_name: datetime.date


@attrs.define
class Attrs:
    x: Any


class Model(pydantic.BaseModel):
    when: datetime.date


class Words(str):
    __slots__ = ()


def rows() -> sqlite3.Row:
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    row: sqlite3.Row = connection.execute("select 1 as a, 'b' as b").fetchone()
    return row


DAY = datetime.datetime(2026, 1, 2, 3, 4, 5)
FORMS: dict[str, tuple[Any, Any]] = {
    "JSON data": ({"a": [1, 2.5, "x", None, True, {}]}, {"a": [1, 2.5, "x", None, True, {}]}),
    "subclasses": ([Words("a"), Level.LOW, Text.A], ["a", 1, "a"]),
    "enums": ([Colour.RED, Colour.BOTH], ["red", [1, 2]]),
    "sequences": (
        [(1, 2), Pair(3, 4), range(2), collections.deque([5]), array.array("i", [6])],
        [[1, 2], [3, 4], [0, 1], [5], [6]],
    ),
    "user's containers": (
        [collections.UserList([1]), collections.UserDict(a=1), collections.UserString("x")],
        [[1], {"a": 1}, "x"],
    ),
    "mappings": (
        [collections.Counter("aab"), collections.ChainMap({"a": 1}), types.MappingProxyType({"b": 2})],
        [{"a": 2, "b": 1}, {"a": 1}, {"b": 2}],
    ),
    "views": ([{"b": 1, "a": 2}.keys(), {"a": 1}.values(), {"a": 1}.items()], [["b", "a"], [1], [["a", 1]]]),
    "sets": (
        [{3, 1, 2}, frozenset("ba"), {1, "a", None, 0.5}, {frozenset((2, 1)), frozenset((0, 9))}],
        [[1, 2, 3], ["a", "b"], [0.5, 1, "a", None], [[0, 9], [1, 2]]],
    ),
    "dataclass": (
        Part("bolt", Decimal("1.10"), {"b", "a"}),
        {"name": "bolt", "price": 1.1, "tags": ["a", "b"], "count": 0},
    ),
    "other declared fields": (
        [Struct(DAY.date()), Attrs((1,)), Model(when=DAY.date()), types.SimpleNamespace(a={1})],
        [{"longName": "2026-01-02"}, {"x": [1]}, {"when": "2026-01-02"}, {"a": [1]}],
    ),
    "database row": (rows(), {"a": 1, "b": "b"}),
    "decimals": (
        [
            Decimal(text)
            for text in ("1.10", "5", "5.00", "0.1", "-0", "1E+3", "0.10000000000000000001", "1E-5000", "1E+9999")
        ],
        [1.1, 5, 5, 0.1, -0.0, 1000, "0.10000000000000000001", "1E-5000", "1E+9999"],
    ),
    "fractions": ([Fraction(1, 2), Fraction(4, 2), Fraction(1, 3), Fraction(1, 10)], [0.5, 2, "1/3", 0.1]),
    "moments": (
        [DAY, DAY.date(), DAY.time(), DAY.replace(tzinfo=datetime.UTC)],
        ["2026-01-02T03:04:05", "2026-01-02", "03:04:05", "2026-01-02T03:04:05+00:00"],
    ),
    "durations": (
        [
            datetime.timedelta(days=1, hours=2, minutes=3, seconds=4.5),
            datetime.timedelta(0),
            datetime.timedelta(days=-1),
            datetime.timedelta(seconds=-90),
            datetime.timedelta(days=2),
        ],
        ["P1DT2H3M4.5S", "PT0S", "-P1D", "-PT1M30S", "P2D"],
    ),
    "bytes": ([b"ab", bytearray(b"c"), memoryview("é".encode())], ["ab", "c", "é"]),
    "names of things": (
        [
            uuid.UUID(int=1),
            pathlib.PurePosixPath("a/b"),
            ipaddress.ip_address("::1"),
            ipaddress.ip_network("10.0.0.0/8"),
        ],
        ["00000000-0000-0000-0000-000000000001", "a/b", "::1", "10.0.0.0/8"],
    ),
    "numpy scalars": (
        [np.int64(23), np.float32(0.5), np.float64(0.1), np.bool_(True), np.str_("s"), np.longdouble(2)],
        [23, 0.5, 0.1, True, "s", 2.0],
    ),
    "numpy arrays": (
        [np.arange(4).reshape(2, 2), np.array(3), np.array([{1}, None], dtype=object)],
        [[[0, 1], [2, 3]], 3, [[1], None]],
    ),
    "numpy times": (
        [
            np.array(["2026-01-01"], "datetime64[ns]"),
            np.datetime64("2026-01"),
            np.timedelta64(90, "m"),
            np.timedelta64(5, "ns"),
        ],
        [["2026-01-01T00:00:00.000000000"], "2026-01", "PT1H30M", "5 nanoseconds"],
    ),
    "numpy records": (np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), [{"a": 1, "b": 2.5}]),
    "keys": (
        {
            1: 0,
            1.5: 0,
            False: 0,
            None: 0,
            Colour.RED: 0,
            Text.A: 0,
            DAY.date(): 0,
            Decimal("0.5"): 0,
            np.int64(7): 0,
            b"k": 0,
        },
        dict.fromkeys(("1", "1.5", "false", "null", "red", "a", "2026-01-02", "0.5", "7", "k"), 0),
    ),
    "an integer of as many digits as there may be": (10**MOST_DIGITS - 1, 10**MOST_DIGITS - 1),
}
CYCLE: list[Any] = []
CYCLE.append({"again": CYCLE})
DEEP: Any = 1
for _ in range(201):
    DEEP = [DEEP]


class Broken:
    def __init__(self) -> None:
        self.tolist = self.dtype = None

    def __fspath__(self) -> str:
        raise RuntimeError("unlucky")


async def coroutine() -> None: ...


REFUSED: dict[str, tuple[Any, str]] = {
    "NaN": ({"a": [1.0, float("nan")]}, r"its \['a'\]\[1\] is nan, which JSON cannot hold"),
    "infinity": (float("-inf"), "it is -inf"),
    "a decimal that is no number": ([Decimal("NaN")], r"its \[0\] is NaN"),
    "digits": ({"n": -(10**MOST_DIGITS)}, r"its \['n'\] is an integer of more than 4300 digits; return it as text"),
    "complex": (1j, "it is a complex, which has no JSON form"),
    "bytes": (b"\xff", "bytes that are not UTF-8; return them as base64"),
    "half a surrogate pair": (["\ud800"], r"its \[0\] is a text that is not Unicode"),
    "generator": ((n for n in range(2)), "a generator, which can be read once; return a list"),
    "iterator": ({"a": map(str, [])}, "a map, which can be read once; return a list"),
    "function": (len, "the builtin_function_or_method 'len'; return what it holds or computes"),
    "class": (Part, "the type 'Part'"),
    "object": ({"a": object()}, r"its \['a'\] is an object, which has no JSON form"),
    "cycle": (CYCLE, r"its \[0\]\['again'\] is the list that contains it"),
    "depth": (DEEP, "nests deeper than 200 levels"),
    "tuple as a key": ({(1, 2): 3}, r"an object with the key \(1, 2\); use texts as keys"),
    "NaN as a key": ({float("nan"): 3}, "is nan"),
    "1 and '1'": ({1: "a", "1": "b"}, r"it is an object whose keys 1 and '1' are one in JSON, \"1\"; rename one"),
    "None and 'null'": ([{None: "a", "null": "b"}], r"its \[0\] is an object whose keys None and 'null'"),
    "True and 'true'": ({"true": "a", True: "b"}, "keys 'true' and True"),
    "1.0 and '1.0'": ({1.0: "a", "1.0": "b"}, "keys 1.0 and '1.0'"),
    "an enum and its value": ({Colour.RED: 1, "red": 2}, "keys <Colour.RED: 'red'> and 'red'"),
    "a date and its text": ({DAY.date(): 1, "2026-01-02": 2}, "are one in JSON"),
    "methods that raise": (Broken(), "the conversion failed with RuntimeError: unlucky"),
    "NaT": (np.datetime64("NaT"), "it is NaT"),
    "a longer float": (np.longdouble("0.1"), "a longdouble that no float holds exactly"),
}


@pytest.mark.parametrize("name", FORMS)
def test_converts_each_type_to_its_one_form(name: str) -> None:
    value, form = FORMS[name]
    found = to_json(value)
    assert found == form
    assert json.loads(json.dumps(found)) == form  # plain types alone
    assert repr(found) == repr(form)  # 1 and 1.0 and True are equal


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_a_value_without_a_json_form_by_its_place_and_type(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(NotJsonError, match=message):
        to_json(value)


def test_names_a_coroutine_by_what_to_write_instead() -> None:
    waiting = coroutine()
    with pytest.raises(NotJsonError, match="a coroutine; define the function with `def`"):
        to_json(waiting)
    waiting.close()


def test_converts_an_object_that_occurs_twice() -> None:
    tags = {"a"}
    assert to_json([tags, {"again": tags}]) == [["a"], {"again": ["a"]}]


def test_sorts_sets_whatever_order_they_are_met_in() -> None:
    sets = [frozenset(names) for names in ("a", "b", "ab", "c")]  # of these, `<` says which contains which
    assert to_json(set(sets)) == to_json(set(reversed(sets))) == [["a", "b"], ["a"], ["b"], ["c"]]


def test_decimal_context_does_not_change_a_form() -> None:
    with decimal.localcontext() as context:
        context.prec = 3
        assert to_json([Decimal("1.23456"), Decimal("123456")]) == [1.23456, 123456]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ([1, "{"], True),
        ({"a": 1}, True),
        ({"a": {"b": ({"c": 1}, [{}])}}, True),
        ({1: "a"}, False),
        ({Text.A: 1}, False),
        ([{"a": [({"b": 1},), {None: 2}]}], False),
    ],
)
def test_finds_keys_that_are_no_plain_texts(value: Any, plain: bool) -> None:
    assert has_plain_keys(value, json.dumps(value).encode()) is plain
