"""The closed vocabulary of tools' schemas, the check of arguments beside JSON Schema's own, and what both cost."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processor_time import MOST_SECONDS, loop_seconds

from synthesis.core import tool_schemas
from synthesis.core.tool_schemas import (
    KEYWORDS,
    MOST_DEPTH,
    MOST_VALUES,
    WORDS,
    UncheckableSchema,
    argument_error,
    check_schema,
    check_size,
    with_integers,
)

COUNTRY = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}


def of(schema: Any) -> dict[str, Any]:
    """A tool's schema with one parameter, `x`."""
    return {"type": "object", "properties": {"x": schema}}


def test_argument_errors_name_the_argument() -> None:
    assert argument_error(COUNTRY, {"country": "France"}) == ""
    assert argument_error(COUNTRY, {"country": 3}) == "argument 'country': 3 is not of type 'string'"
    assert argument_error(of({"type": "array", "items": {"enum": ["a"]}}), {"x": ["a", "b"]}) == (
        "argument 'x.1': 'b' is not one of ['a']"
    )
    assert len(argument_error(COUNTRY, {"country": ["x" * 10_000]})) < 400


@pytest.mark.parametrize("further", [{}, {"additionalProperties": False}])
def test_a_name_that_a_schema_does_not_list_is_refused(further: Any) -> None:
    problem = argument_error(COUNTRY | further, {"land": "x"})
    assert problem == "unknown argument 'land'; known arguments: country"


def test_a_schema_may_take_names_that_it_does_not_list() -> None:
    further = {"additionalProperties": {"type": "integer"}}
    assert argument_error(COUNTRY | further, {"country": "x", "n": 1}) == ""
    assert "argument 'n'" in argument_error(COUNTRY | further, {"country": "x", "n": "y"})
    assert argument_error({"anyOf": [COUNTRY]}, {"country": "x"}) == ""


# ---------------------------------------------------------------------------------------------------------------------
# Against the reference

TYPES = ["string", "integer", "number", "boolean", "array", "object", "null"]
names = st.sampled_from("abc")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 6)
    | st.sampled_from([0.5, 1.0, 2.5, -1.0])
    | st.sampled_from(["", "a", "bc"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
numbers, counts = st.integers(-2, 4) | st.just(1.5), st.integers(0, 3)
leaf = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True),
        "enum": st.lists(values, min_size=1, max_size=3), "const": values,
        "required": st.lists(names, max_size=2, unique=True),
        "minimum": numbers, "maximum": numbers, "exclusiveMinimum": numbers, "exclusiveMaximum": numbers,
        "multipleOf": st.sampled_from([1, 2, 0.5]), "minLength": counts, "maxLength": counts, "minItems": counts,
        "maxItems": counts, "uniqueItems": st.booleans(), "minProperties": counts, "maxProperties": counts,
        "format": st.just("email"), "pattern": st.just(""),
    },
)  # fmt: skip
schemas = st.recursive(
    leaf | st.booleans(),
    lambda inner: st.builds(
        lambda own, of_schemas: own | of_schemas,
        leaf,
        st.fixed_dictionaries(
            {},
            optional={
                "properties": st.dictionaries(names, inner, max_size=2), "additionalProperties": inner, "items": inner,
                "propertyNames": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2), "not": inner,
                "anyOf": st.lists(inner, min_size=1, max_size=2), "oneOf": st.lists(inner, min_size=1, max_size=2),
                "allOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
    ),
    max_leaves=5,
)  # fmt: skip


@given(schemas, values)
def test_what_fits_is_what_json_schema_says(schema: Any, value: Any) -> None:
    reference = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (argument_error(of(schema), {"x": value}) == "") == reference


@pytest.mark.parametrize(
    ("schema", "value", "given"),
    [
        ({"type": "integer"}, 3.0, 3),
        ({"type": ["integer", "null"]}, -0.0, 0),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, 1e20, 10**20),
        ({"type": "number"}, 3.0, 3.0),
        ({"type": ["integer", "number"]}, 3.0, 3.0),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 9}]}, 3.0, 3.0),
        ({}, 3.0, 3.0),
        ({"type": "integer"}, True, True),
        ({"type": "array", "items": {"type": "integer"}}, [1.0, 2], [1, 2]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "number"}}, [1.0, 2.0], [1, 2.0]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1.0}, {"a": 1}),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}]}, {"a": 1.0}, {"a": 1}),
    ],
)  # fmt: skip
def test_whole_floats_are_integers_where_a_schema_takes_no_other_number(schema: Any, value: Any, given: Any) -> None:
    assert repr(with_integers(of(schema), {"x": value})) == repr({"x": given})


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"type": "integer"}, [1, 1.0, -0.0], [1.5, True, "1", float("inf")]),
        ({"type": "number"}, [1, 1.5], [True, "1"]),
        ({"minimum": 2}, [2, 2.0, True], [1.99, 1]),
        ({"maximum": 2}, [2, 2.0], [2.01, 3]),
        ({"exclusiveMinimum": 2}, [2.01, 3], [2, 2.0]),
        ({"exclusiveMaximum": 2}, [1.99, 1], [2, 2.0]),
        ({"minLength": 2}, ["ab", "abc"], ["a", ""]),
        ({"maxLength": 2}, ["ab", ""], ["abc"]),
        ({"minItems": 2}, [[1, 1]], [[1], []]),
        ({"maxItems": 2}, [[1, 1], []], [[1, 1, 1]]),
        ({"minProperties": 1}, [{"a": 1}], [{}]),
        ({"maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 1}]),
        ({"oneOf": [{"minimum": 1}, {"maximum": 1}]}, [0, 2], [1]),
        ({"const": 1}, [1, 1.0], [True, "1"]),
        ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[], [1], [1, "a"]],
         [["a"], [1, 2], [1, "a", 1]]),
        ({"enum": [1, "a"]}, [1.0, "a"], [True, "b"]),
    ],
    ids=str,
)  # fmt: skip
def test_bounds_include_their_value_and_whole_floats_are_integers(
    schema: Any, fits: list[Any], fails: list[Any]
) -> None:
    assert [one for one in fits if argument_error(of(schema), {"x": one})] == []
    assert [one for one in fails if not argument_error(of(schema), {"x": one})] == []


def test_a_decimal_is_a_multiple_as_people_count() -> None:
    assert argument_error(of({"multipleOf": 0.1}), {"x": 0.3}) == ""
    assert argument_error(of({"multipleOf": 0.1}), {"x": 10**400}) and argument_error(
        of({"multipleOf": 0.1}), {"x": 0.35}
    )


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary

REFUSED = {
    "a reference": {"$ref": "https://example.com/schema.json"},
    "a local reference": {"$ref": "#/$defs/a"},
    "a circle": {"$ref": "#"},
    "definitions": {"$defs": {"a": {}}},
    "names by pattern": {"patternProperties": {"^(a+)+$": {}}},
    "a condition": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "an unknown word": {"limit": 5},
    "an unknown type": {"type": "text"},
    "no type": {"type": []},
    "an endless number": {"minimum": float("nan")},
    "a fraction of a letter": {"minLength": 0.5},
    "a step of nothing": {"multipleOf": 0},
    "a text as a list": {"required": "a"},
    "a list as an object": {"properties": [{}]},
    "no alternatives": {"anyOf": []},
    "a text as a schema": {"items": "string"},
    "a set": {"const": {1, 2}},
}


@pytest.mark.parametrize("where", [lambda one: one, of, lambda one: {"items": {"anyOf": [of(one)]}}], ids=range(3))
@pytest.mark.parametrize("odd", REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_is_refused_with_its_name(odd: Any, where: Any) -> None:
    with pytest.raises(UncheckableSchema) as problem:
        check_schema(where(odd))
    assert any(str(key) in str(problem.value) for key in odd) or "JSON" in str(problem.value)
    with pytest.raises(UncheckableSchema):
        argument_error(where(odd), {"x": "y"})


def test_every_keyword_is_checked_or_a_word() -> None:
    for keyword in KEYWORDS - {"const", "default", "example"}:
        with pytest.raises(UncheckableSchema, match=re.escape(keyword)):
            check_schema({keyword: {"not": "a schema"}})
    check_schema(dict.fromkeys(["x-anything", "const", "default", "example"], {"not": "a schema"}))
    words = {"examples": ["a"], "deprecated": True, "readOnly": True, "writeOnly": False}
    check_schema(dict.fromkeys(WORDS, "words") | words)


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


def nested(depth: int, keyword: str = "items") -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema, schema] if keyword.endswith("Of") else schema}
    return schema


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_and_size_are_bounded() -> None:
    check_schema(nested(MOST_DEPTH - 1))
    many = {"properties": {f"p{i}": {"type": "string"} for i in range(MOST_VALUES)}}
    for schema in (
        nested(3 * MOST_DEPTH), nested(MOST_DEPTH - 2, "anyOf"), many, {"default": deep(5_000)},
        {"enum": list(range(MOST_VALUES + 1))}, {"description": "x" * 10**6}, {"properties": {"x" * 10**6: {}}},
    ):  # fmt: skip
        for check in (check_schema, check_size):

            def refused(check: Callable[[Any], None] = check, schema: Any = schema) -> None:
                with pytest.raises(UncheckableSchema, match="deeper than|more than"):
                    check(schema)

            assert loop_seconds(refused) < MOST_SECONDS


LARGE = [1] * 50_000
COSTLY = {
    "a pattern that backtracks": (of({"type": "string", "pattern": "^(a+)+$"}), {"x": "a" * 5_000 + "!"}, True),
    "many alternatives of many values": (
        of({"items": {"anyOf": [{"type": "string", "const": str(i)} for i in range(800)]}}), {"x": LARGE}, False,
    ),
    "a long list of what is allowed": (
        of({"items": {"enum": [[i, str(i)] for i in range(900)]}}), {"x": [[i] for i in range(50_000)]}, False,
    ),
    "alternatives within alternatives": (of(nested(8, "anyOf")), {"x": [LARGE] * 10}, False),
    "one schema of 50,000 values": (of({"items": {"type": "integer", "minimum": 0}}), {"x": LARGE}, False),
    "50,000 wrong values": (of({"items": {"type": "string"}}), {"x": LARGE}, False),
    "unique values": (of({"uniqueItems": True}), {"x": [{"a": i} for i in range(50_000)]}, False),
    "deep values": (of({"enum": [deep(30)]}), {"x": deep(900)}, False),
    "many names": (of({}) | {"additionalProperties": {"type": "integer"}}, {f"n{i}": 1 for i in range(50_000)}, False),
    "many unknown names": (COUNTRY, {f"n{i}": 1 for i in range(50_000)}, False),
    "a huge text": (of({"type": "string", "maxLength": 5}), {"x": "a" * 10**6}, False),
    "a huge number": (of({"type": "integer", "multipleOf": 0.5}), {"x": 10**4200}, False),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "arguments", "fits"), COSTLY.values(), ids=COSTLY)
def test_no_check_holds_the_loop(schema: Any, arguments: Any, fits: bool) -> None:
    problem = argument_error(schema, arguments)
    assert (problem == "") == fits and len(problem) < 500
    assert loop_seconds(lambda: argument_error(schema, arguments)) < MOST_SECONDS


def test_what_an_alternative_would_say_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears it, and a long value's beginning takes longer than its check."""
    made: list[Any] = []
    plain = tool_schemas.brief
    monkeypatch.setattr(tool_schemas, "brief", lambda value: made.append(value) or plain(value))
    problem = argument_error(of(nested(8, "anyOf")), {"x": [LARGE] * 10})
    assert problem.startswith("argument 'x': [[1, 1") and len(made) == 1


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        pytest.fail("a schema opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for url in ("http://127.0.0.1:9/x.json", "https://example.com/x", "file:///etc/passwd"):
        for schema in ({"$ref": url}, of({"$ref": url}), {"$schema": url, "$id": url, **of({"$dynamicRef": url})}):
            with pytest.raises(UncheckableSchema, match="[$](dynamicR|r)ef"):
                argument_error(schema, {"x": 1})
    assert argument_error({"$schema": "http://127.0.0.1:9/x.json", **COUNTRY}, {"country": "x"}) == ""


@given(
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(sorted(KEYWORDS)), inner)),
    values,
)
def test_any_schema_is_checked_or_refused(schema: Any, value: Any) -> None:
    try:
        check_schema(schema)
    except UncheckableSchema as error:
        assert str(error)
    else:
        assert isinstance(schema, bool | dict) and json.dumps(schema)
        assert isinstance(argument_error(of(schema), {"x": value}), str)
