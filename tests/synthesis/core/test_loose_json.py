"""JSON that models write is repaired where one reading is possible, and refused where several are."""

from __future__ import annotations

from typing import Any

import pytest

from synthesis.core.loose_json import read_arguments, read_loosely


@pytest.mark.parametrize(
    ("text", "value", "repairs"),
    [
        ('{"a": 1}', {"a": 1}, []),
        ('\ufeff{"a": 1}', {"a": 1}, ["byte_order_mark"]),
        ('```json\n{"a": 1}\n```', {"a": 1}, ["code_fence"]),
        ('```{"a": 1}```', {"a": 1}, ["code_fence"]),
        ('｛"a"：[１，２]｝', {"a": [1, 2]}, ["full_width"]),
        ('{"a": "１，２"， "b": 1}', {"a": "１，２", "b": 1}, ["full_width"]),
        ("{“a”: “b”}", {"a": "b"}, ["curly_quotes"]),
        ('{"a": "one\ntwo\t"}', {"a": "one\ntwo\t"}, ["raw_control"]),
        ('{"a": [1, 2,], }', {"a": [1, 2]}, ["trailing_comma"]),
        ('{"a": ",]"}', {"a": ",]"}, []),
        ('{"a": 1}}', {"a": 1}, ["stray_bracket"]),
        ("{'a': True, 'b': None}", {"a": True, "b": None}, ["python_literal"]),
        ('\ufeff```json\n{"a": "\n",}\n```', {"a": "\n"},
         ["byte_order_mark", "code_fence", "raw_control", "trailing_comma"]),
    ],
)  # fmt: skip
def test_one_reading(text: str, value: Any, repairs: list[str]) -> None:
    found, needed = read_loosely(text)
    assert found == value and sorted(needed) == sorted(repairs)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1} I hope this helps', "text behind the JSON: 'I hope this helps'"),
        ('{"a": 1}{"b": 2}', "text behind the JSON"),
        ('{"a": 1, "a": 2}', "in one object twice"),
        ("{'a': 1, 'a': 2}", "Expecting property name"),
        ("{'a': (1, 2)}", "Expecting property name"),
        ("{1: 2}", "Expecting property name"),
        ("{'a': f()}", "Expecting property name"),
        ('{"a": "\\alpha"}', "Invalid .escape"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1e400}', "beyond the range"),
        ('{"a": "cut o', "Unterminated string"),
        ("{“a”: “b”, \"c\": 1}", "Expecting property name"),
        ('```\n{"a": 1}\n```\n```\n{"b": 1}\n```', "Expecting value"),
        ("1" * 5_000, "digits"),
    ],
)  # fmt: skip
def test_several_readings_or_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_loosely(text)


@pytest.mark.parametrize("given", [None, "", "  ", "null", "[]", "{}", {}, [], "```json\n{}\n```"])
def test_no_arguments(given: Any) -> None:
    assert read_arguments(given)[0] == {}


def test_arguments_in_other_forms() -> None:
    assert read_arguments({"a": 1}) == ({"a": 1}, [])
    assert read_arguments('"{\\"a\\": 1}"') == ({"a": 1}, ["encoded_twice"])
    for given in ("5", "[1]", '"text"', 5, [1], '"null, and more"', '{"a": "\\ud800"}'):
        with pytest.raises(ValueError, match="^the arguments"):
            read_arguments(given)


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 50_000, "{" * 100_000, '{"a": ' * 50_000, "[" * 300 + "]" * 300, "{'" * 50_000]
)
def test_hostile_texts_end(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_loosely(text)
