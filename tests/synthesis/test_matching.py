"""The typed matcher against a table of (given output, expected answer, verdict)."""

from __future__ import annotations

from typing import Any

import pytest

from synthesis.matching import contains, match, same
from synthesis.records import Answer

A = Answer
YES: list[tuple[Any, Answer, str]] = [
    # numbers
    ({"population": 24874500}, A(24874500), "number"),
    ({"population": "24,874,500"}, A(24874500), "number"),
    ("24874500", A(24874500), "number"),
    (5, A(5), "number"),
    (5.0, A(5), "number"),
    ("５", A(5), "number"),
    ("The answer is 5.", A(5), "number"),
    ("a total of 5, all told", A(5), "number"),
    ("it fell to -12.5 degrees today", A(-12.5), "number"),
    ("共有三百二十人", A(320, unit="people"), "number"),
    ("三百二十万", A(3200000), "number"),
    ("人口约为2487.45万人", A(24874500, unit="people"), "number"),
    ("3.2 million people", A(3200000, unit="people"), "number"),
    ("1.5 km", A(1500, unit="m"), "number"),
    ("1500 米", A(1.5, unit="km"), "number"),
    ({"value": 1.5, "unit": "km"}, A(1500, unit="m"), "number"),
    ({"elevation": 10}, A(10, unit="ft"), "number"),
    ("elevation 10 ft", A(10, unit="ft"), "number"),
    (0.3333, A(1 / 3, tolerance=1e-3), "number"),
    (1.008, A(1.008, unit="u"), "number"),
    (0.1 + 0.2, A(0.3), "number"),
    ("1e3", A(1000), "number"),
    ("introduced in 1999年", A(1999), "number"),
    ([1, [2, {"x": [3]}]], A(3), "number"),
    ('{"count": 3}', A(3), "number"),
    ("99.986%", A(99.986, unit="%"), "number"),
    # dates
    ({"date": "2026-05-01"}, A("2026-05-01"), "date"),
    ("May 1, 2026", A("2026-05-01"), "date"),
    ("1st of May 2026", A("2026-05-01"), "date"),
    ("它在2026年5月1日举行。", A("2026-05-01"), "date"),
    ("２０２６年５月１日", A("2026-05-01"), "date"),
    ("2026/05/01", A("2026-05-01"), "date"),
    ("2026-05-01T10:00:00Z", A("2026-05-01"), "date"),
    # booleans
    ({"leap": True}, A(True), "boolean"),
    ("No", A(False), "boolean"),
    ("是", A(True), "boolean"),
    # strings
    ({"capital": "Tokyo"}, A("Tokyo"), "string"),
    ("tokyo ", A("Tokyo"), "string"),
    ("Ｔｏｋｙｏ", A("Tokyo"), "string"),
    ("The capital of Japan is Tokyo.", A("Tokyo"), "string"),
    ("日本的首都是Tokyo，人口众多。", A("Tokyo"), "string"),
    ("中国的首都是北京。", A("北京"), "string"),
    ({"city": "Oslo, Norway"}, A("Oslo"), "string"),
    ("capital: Oslo", A("Oslo"), "string"),
    ("Trinidad  and Tobago", A("Trinidad and Tobago"), "string"),
    ("Washington D.C.", A("Washington D.C"), "string"),
    (2, A("2"), "string"),
    (31.222, A("31.222"), "string"),
    ("the code for this country is NO now", A("NO"), "string"),
    ("dial +47 before the local number please", A("+47"), "string"),
    ("#F0F8FF", A("#f0f8ff"), "string"),
    ("the zone in use is Europe/Oslo there", A("Europe/Oslo"), "string"),
    # lists and aliases
    (["b", "a", "c"], A(["a", "b"]), "list"),
    ("Oslo, Tokyo and Rome", A(["Oslo"]), "list"),
    ({"x": 126, "y": "Tokyo"}, A(["Tokyo", "126"]), "list"),
    ({"day": "May 1, 2026"}, A(["2026-05-01"]), "list"),
    ("Czech Republic", A("Czechia", aliases=["Czech Republic"]), "alias"),
]
NO: list[tuple[Any, Answer]] = [
    (15, A(5)),
    ("15", A(5)),
    ("5.1", A(5)),
    ("A5", A(5)),
    ("1,234", A(234)),
    ("2026-05-01", A(5)),
    ("2026年5月1日", A(5)),
    ("12:30", A(30)),
    ("carbon-14", A(14)),
    ("version 1.2.3", A(2)),
    ("-5", A(5)),
    (True, A(1)),
    (1, A(True)),
    ({"5": "x"}, A(5)),
    ("1.5 km", A(1.5, unit="m")),
    ("5 kg", A(5, unit="km")),
    (0.34, A(1 / 3, tolerance=1e-3)),
    ("一个国家的资料", A(1)),
    (float("nan"), A(float("nan"))),
    ("2026-05-02", A("2026-05-01")),
    ("05/01/2026", A("2026-05-01")),
    ("2026-05", A("2026-05-01")),
    ("Guinea-Bissau", A("Guinea")),
    ("Equatorial Guinea", A("Guinea")),
    ("Mexico City", A("Mexico")),
    ("the time zone here is Europe/Oslo today", A("Oslo")),
    ("the domain of this country is .no today", A("no")),
    ("there is no such country in this table", A("NO")),
    ("hydrogen-1", A("hydrogen")),
    ("2", A("02")),
    (2, A("02")),
    ("47", A("+47")),
    ("Tokyoite", A("Tokyo")),
    ({"Tokyo": 1}, A("Tokyo")),
    ("Toky", A("Tokyo")),
    ("", A("")),
    ("anything", A("")),
    (None, A("None")),
    ([], A([])),
    (["a"], A(["a", "b"])),
    ("maybe true", A(True)),
    (0, A(False)),
]


@pytest.mark.parametrize(("output", "answer", "rule"), YES, ids=lambda x: repr(x)[:50])
def test_contained(output: Any, answer: Answer, rule: str) -> None:
    assert match(output, answer) == rule


@pytest.mark.parametrize(("output", "answer"), NO, ids=lambda x: repr(x)[:50])
def test_not_contained(output: Any, answer: Answer) -> None:
    assert not contains(output, answer)


def test_same_is_symmetric() -> None:
    assert same(A(1500, unit="m"), A(1500)) and same(A("Oslo"), A("oslo"))
    assert not same(A(["a", "b"]), A(["a"])) and not same(A(["a"]), A(["a", "b"]))
