"""The normal form of JSON schemas, and why some have none."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processor_time import at_most

from synthesis.core.schemas import Unmappable, normal_schema, object_schema
from synthesis.core.tool_schemas import MOST_DEPTH, argument_error


def test_schemas_of_all_drafts_have_one_form():
    assert normal_schema(
        {
            "properties": {
                "a": {"anyOf": [{"type": "string", "pattern": r"\p{L}+"}, {"type": "null"}], "description": "A name."},
                "b": {"enum": ["x", "y", None]},
                "c": {"type": "number", "required": True, "minimum": 0, "exclusiveMinimum": True},
                "d": {"items": [{"type": "int"}, {"$ref": "#/properties/b"}], "additionalItems": False},
                "e": {"type": ["null"]},
                "f": {"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}, "x-go": 1, "gem_name": "go"},
                "$ref": {"type": "bool"},
            },
            "$defs": {"n": {"type": ["int", "str", "integer", "null"]}},
        }
    ) == {
        "properties": {
            # A pattern is a word for the model: nothing here reads it.
            "a": {"type": ["string", "null"], "pattern": r"\p{L}+", "description": "A name."},
            "b": {"enum": ["x", "y", None], "type": ["string", "null"]},
            "c": {"type": "number", "exclusiveMinimum": 0},
            "d": {"prefixItems": [{"type": "integer"}, {"enum": ["x", "y", None], "type": ["string", "null"]}],
                  "items": False, "type": "array"},
            "e": {"type": "null"},
            "f": {"type": "object", "additionalProperties": {"type": ["integer", "string", "null"]}},
            "$ref": {"type": "boolean"},
        },
        "required": ["c"],
        "type": "object",
    }  # fmt: skip


def kept(schema) -> dict:
    """The normal form, which is its own normal form and a schema of Draft 2020-12."""
    normal = object_schema(schema)
    jsonschema.Draft202012Validator.check_schema(normal, format_checker=None)
    assert object_schema(normal) == normal
    return normal


def of(**properties) -> dict:
    return kept({"type": "object", "properties": properties})["properties"]


CITY, DAYS = {"type": "string", "description": "Where."}, {"type": "integer", "default": 3}


@pytest.mark.parametrize(
    "given",
    [
        {"city": {"type": "str", "description": "Where."}, "days": {"type": "int, optional", "default": 3}},
        {"city": {"type": "String", "description": "Where."}, "days": {"type": "int32, default=3", "default": "3"}},
        {"city": {**CITY, "required": True}, "days": {"type": "int", "required": False, "default": 3}},
        [{"name": "city", **CITY, "required": True}, {"name": "days", "schema": {"type": "integer"}, "default": 3}],
        [{"name": "city", **CITY}, {"name": "days", "type": "int (optional)", "default": 3}],
        {"type": "dict", "city": CITY, "days": DAYS, "required": ["city"]},
        {"type": "OBJECT", "properties": {"city": {**CITY, "type": "STRING"}, "days": {**DAYS, "type": "INTEGER"}},
         "required": ["city"]},
        {"properties": {"city": CITY, "days": DAYS, "required": ["city"]}},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_in_other_forms_become_properties(given):
    """xLAM, smolagents, Cohere, OpenAPI 2.0, lists of parameters, BFCL, Gemini, and keywords at the wrong level."""
    assert kept(given) == {"type": "object", "properties": {"city": CITY, "days": DAYS}, "required": ["city"]}


def test_maps_of_names_have_parameters_that_are_called_as_keywords():
    names = {
        "title": {"type": "str"},
        "type": {"type": "str"},
        "properties": {"type": "List[str]"},
        "if": {"type": "x|y"},
    }
    assert set(kept({name: {"type": "str"} for name in names})["properties"]) == set(names)
    assert kept({"a": "string", "b": "List[int]"})["properties"]["b"] == {"type": "array", "items": {"type": "integer"}}
    assert of(place={"lat": {"type": "number"}, "xml": {"name": "p"}})["place"] == {
        "type": "object",
        "properties": {"lat": {"type": "number"}},
    }


@pytest.mark.parametrize(
    ("written", "schema"),
    [
        ("List[Union[int, float]]", {"type": "array", "items": {"type": ["integer", "number"]}}),
        ("Dict[str, List[int]]", {"type": "object", "additionalProperties": {"type": "array",
                                                                             "items": {"type": "integer"}}}),
        ("Tuple[float, float]", {"type": "array", "prefixItems": [{"type": "number"}] * 2, "minItems": 2,
                                 "maxItems": 2}),
        ("typing.Optional[str]", {"type": ["string", "null"]}),
        ("string | null", {"type": ["string", "null"]}),
        ("str or None", {"type": ["string", "null"]}),
        ("number[]", {"type": "array", "items": {"type": "number"}}),
        ("Array<string>", {"type": "array", "items": {"type": "string"}}),
        ("Literal['a', 'b']", {"type": "string", "enum": ["a", "b"]}),
        ("ArrayList", {"type": "array"}),
        ("HashMap", {"type": "object"}),
        ("any", {}),
        ("datetime", {"type": "string", "format": "date-time"}),
        ("BOOLEAN", {"type": "boolean"}),
    ],
)  # fmt: skip
def test_types_of_programming_languages(written, schema):
    assert of(a={"type": written}) == {"a": schema}


@pytest.mark.parametrize(
    "written", ["colour", "", "List[", "List[[[[[[[[int]]]]]]]]", "int, later", "Callable[[int], int]"]
)
def test_what_is_no_type_is_rejected(written):
    with pytest.raises(Unmappable, match="is not a JSON Schema type"):
        object_schema({"type": "object", "properties": {"a": {"type": written}}})


@pytest.mark.parametrize("given", [None, {}, [], {"type": "object"}, {"title": "X", "type": "object", "properties": {}},
                                   {"type": "object", "$defs": {"A": {"type": "string"}}},
                                   {"additionalProperties": False}])  # fmt: skip
def test_tools_that_take_nothing_say_so_or_say_nothing(given):
    normal = kept(given)
    assert normal.pop("additionalProperties", False) is False and normal == {"type": "object", "properties": {}}


@pytest.mark.parametrize("given", [{"description": "A city."}, {"city": "the name of a city"},
                                   {"type": "object", "args": [{}]},
                                   {"type": "object", "fields": {"a": {"kind": "text"}}}])  # fmt: skip
def test_parameters_that_cannot_be_read_never_give_a_tool_that_takes_nothing(given):
    with pytest.raises(Unmappable) as problem:
        object_schema(given)
    assert problem.value.reason == "no_parameters_found"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/S"}]},
        {"type": "string", "nullable": True},
        {"allOf": [{"$ref": "#/$defs/S"}], "nullable": True},
        {"$ref": "#/$defs/S", "x-nullable": True},
        {"type": "string", "enum": ["a", None]},
        {"type": "string", "enum": ["a"], "nullable": True},
        {"type": "string", "default": None},
        {"type": ["string", None]},
        {"anyOf": [{"type": "string"}, {"type": None, "description": "YAML without quotes."}]},
        {"$ref": "#/$defs/S", "default": None},
        {"type": "Optional[str]"},
        {"const": "a", "nullable": True},
        {"anyOf": [{"type": "string"}, {"type": "integer"}], "nullable": True},
    ],
    ids=str,
)
def test_null_stays_a_value_where_a_document_allows_it(schema):
    normal = kept({"properties": {"a": schema}, "required": ["a"], "$defs": {"S": {"type": "string"}}})
    assert (
        normal["required"] == ["a"]
        and not argument_error(normal, {"a": None})
        and not argument_error(normal, {"a": "a"})
    )
    assert argument_error(normal, {}) and argument_error(normal, {"a": []})


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([{"type": "number"}, {"type": "integer"}], {"type": "integer"}),
        ([{"type": ["string", "integer"]}, {"type": ["number", "null"]}], {"type": "integer"}),
        ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}], {"enum": ["b"], "type": "string"}),
        ([{"type": "integer", "minimum": 0, "maximum": 9}, {"minimum": 3, "maximum": 30}],
         {"type": "integer", "minimum": 3, "maximum": 9}),
        ([{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}], {"type": "integer", "multipleOf": 12}),
        ([{"type": "object", "additionalProperties": {"type": "string"}}, {"additionalProperties": True}],
         {"type": "object", "additionalProperties": {"type": "string"}}),
        ([{"type": "object", "additionalProperties": {"type": "integer"}}, {"additionalProperties": {"maximum": 3}}],
         {"type": "object", "additionalProperties": {"type": "integer", "maximum": 3}}),
        ([{"properties": {"a": {"type": "number"}}}, {"additionalProperties": {"maximum": 3}}],
         {"type": "object", "properties": {"a": {"type": "number", "maximum": 3}},
          "additionalProperties": {"maximum": 3}}),
        ([{"properties": {"a": {}, "b": {}}, "required": ["a"]}, {"properties": {"a": {"type": "string"}},
                                                                  "additionalProperties": False}],
         {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}),
        ([{"type": "string", "pattern": "^a"}, {"pattern": "b$"}, {"pattern": "^a"}],
         {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}),
        ([{"type": "array", "items": {"type": "number"}}, {"items": {"type": "integer"}}],
         {"type": "array", "items": {"type": "integer"}}),
        ([{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"oneOf": [{"type": "number"}, {"type": "null"}]}],
         {"type": "integer"}),
        ([{"type": "string", "not": {"const": "a"}}, {"not": {"const": "b"}}],
         {"type": "string", "not": {"anyOf": [{"const": "a"}, {"const": "b"}]}}),
        ([{"type": "string", "description": "One."}, {"description": "Two."}],
         {"type": "string", "description": "Two."}),
    ],
    ids=str,
)  # fmt: skip
def test_schemas_that_hold_at_once_are_intersected(parts, merged):
    assert of(x={"allOf": parts}) == {"x": merged}
    if len(parts) == 2:  # keywords beside a reference hold too
        normal = kept({"properties": {"x": {"$ref": "#/$defs/X", **parts[1]}}, "$defs": {"X": parts[0]}})
        assert normal["properties"] == {"x": merged}


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "object"}, {"type": "array"}],
        [{"enum": ["a"]}, {"enum": ["b"]}],
        [{"minimum": 5}, {"maximum": 3}],
        [{"const": 1}, {"const": 2}],
        [{"required": ["a"], "properties": {"a": {}}}, {"properties": {"b": {}}, "additionalProperties": False}],
        [{"type": "string"}, {"anyOf": [{"type": "integer"}, {"type": "array"}]}],
        [{"type": "number", "multipleOf": 0.3}, {"multipleOf": 0.7}],
    ],
    ids=str,
)
def test_schemas_that_contradict_each_other_are_rejected(parts):
    with pytest.raises(Unmappable) as problem:
        of(x={"allOf": parts})
    assert problem.value.reason == "all_of"


TYPES = ["string", "integer", "number", "boolean", "array", "object", "null"]
names = st.sampled_from("ab")
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 4) | st.sampled_from([0.5, 1.0, "", "a", "bc"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=5,
)


def with_values_of_its_type(schema: dict) -> dict:
    fits = jsonschema.Draft202012Validator({"type": schema["type"]}).is_valid
    listed = {"enum": [value for value in schema.get("enum", []) if fits(value)]}
    return {key: value for key, value in schema.items() if key != "enum"} | (listed if listed["enum"] else {})


def schemas(inner):
    numbers, counts = st.integers(-2, 4), st.integers(0, 3)
    optional = {
        "enum": st.lists(values, min_size=1, max_size=4), "minimum": numbers, "maximum": numbers,
        "exclusiveMinimum": numbers, "multipleOf": st.sampled_from([1, 2, 3, 0.5]), "minLength": counts,
        "maxItems": counts, "uniqueItems": st.booleans(), "required": st.lists(names, max_size=2, unique=True),
        "properties": st.dictionaries(names, inner, max_size=2), "additionalProperties": inner, "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2), "propertyNames": inner, "not": inner,
        "allOf": st.lists(inner, min_size=1, max_size=3), "anyOf": st.lists(inner, min_size=1, max_size=3),
    }  # fmt: skip
    types = st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=4, unique=True)
    return st.fixed_dictionaries({"type": types}, optional=optional).map(with_values_of_its_type)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=4),
    st.lists(values, min_size=1, max_size=6),
)
def test_normal_forms_take_what_their_schemas_take(schema, arguments):
    """By the reference implementation; schemas that contradict themselves are rejected instead."""
    try:
        normal = kept({"type": "object", "properties": {"x": schema}})
    except Unmappable as problem:
        assert problem.reason in ("all_of", "invalid_schema")
        return
    for value in arguments:
        taken = not argument_error(normal, {"x": value})
        assert taken == jsonschema.Draft202012Validator(schema).is_valid(value), normal


@pytest.mark.parametrize(
    "given",
    [
        {"properties": {"a": {"type": "string", "enum": None, "items": None, "anyOf": None, "minimum": None}}},
        {"properties": {"a": {"type": "string"}}, "required": None, "additionalProperties": None},
        {"properties": {"a": {"type": None, "anyOf": [{"type": "string"}]}}},
    ],
    ids=str,
)
def test_keywords_that_are_null_are_not_there(given):
    assert kept({"type": "object", **given}) == {"type": "object", "properties": {"a": {"type": "string"}}}
    assert kept({"type": "object", "properties": None}) == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("schema", "left", "change"),
    [
        ({"properties": {"id": {"$ref": "#/$defs/Id"}, "b": {}}, "required": ["id", "b"]}, "b", "read_only_property"),
        ({"properties": {"id": {"allOf": [{"$ref": "#/$defs/Id"}]}, "b": {}}}, "b", "read_only_property"),
        ({"allOf": [{"$ref": "#/$defs/Base"}, {"required": ["id", "b"]}]}, "b", "read_only_property"),
        ({"$ref": "#/$defs/Base", "required": ["id"]}, "b", "read_only_property"),
        ({"$ref": "#/$defs/Base", "properties": {"c": {}}, "additionalProperties": False}, "c",
         "closed_by_all_of"),
        ({"properties": {"b": {"type": "integer", "divisible": 2}}}, "b", "unknown_keyword"),
        ({"properties": {"b": {"type": "string", "enum": []}}}, "b", "empty_enum"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_schema_loses_is_counted(schema, left, change):
    defined = {
        "Id": {"type": "string", "readOnly": True},
        "Base": {"properties": {"id": {"$ref": "#/$defs/Id"}, "b": {}}},
    }
    for whole in (schema, {"properties": {"inner": schema}}):
        changes: dict[str, str] = {}
        made = object_schema({**whole, "$defs": defined}, changes=changes)
        made = made if whole is schema else made["properties"]["inner"]
        assert list(made["properties"]) == [left] and change in changes
        assert set(made.get("required", [])) <= {left}


def test_names_of_properties():
    """zod 4 writes records with `propertyNames`, TypeBox with `patternProperties`."""
    values = {"type": "object", "additionalProperties": {"type": "string"}}
    assert of(env={**values, "propertyNames": {"type": "string"}})["env"] == values
    assert of(env={"type": "object", "patternProperties": {"^(.*)$": {"type": "string"}}})["env"] == values
    several = {"type": "object", "patternProperties": {"^a": {"type": "string"}, "^b": {"type": "null"}}}
    assert of(env=several)["env"]["additionalProperties"] == {"type": ["string", "null"]}
    several["patternProperties"]["^b"] = {"type": "integer"}
    assert of(env=several)["env"]["additionalProperties"] == {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    changes: dict[str, str] = {}
    limited = {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x-": {"type": "string"}},
               "additionalProperties": False}  # fmt: skip
    normal = object_schema({"properties": {"env": limited}}, changes=changes)
    assert normal["properties"]["env"] == {
        "type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"},
        "propertyNames": {"anyOf": [{"pattern": "^x-"}, {"type": "string", "enum": ["a"]}]},
    }  # fmt: skip
    assert list(changes) == ["unchecked_name_pattern"] and kept(normal) == normal
    closed = kept({"properties": {"env": {**values, "propertyNames": {"enum": ["A", "B"]}}}})
    assert not argument_error(closed, {"env": {"A": "x"}})
    assert "'C' is not one of" in argument_error(closed, {"env": {"C": "x"}})


def test_schemas_that_hold_themselves_are_written_out_to_a_depth():
    changes: dict[str, str] = {}
    node = {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/N"}}}
    normal = object_schema({"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": node}}, changes=changes)
    inner = {"type": "object", "properties": {"name": {"type": "string"}, "next": {}}}
    assert normal["properties"]["a"] == {"type": "object", "properties": {"name": {"type": "string"}, "next": inner}}
    assert "#/$defs/N contains itself" in changes["recursive_schema"] and kept(normal) == normal
    assert "properties" in kept({"properties": {"a": {"type": "string"}, "b": {"$ref": "#"}}})["properties"]["b"]


def test_a_reference_is_a_level():
    """Depth counts what a reference leads to, so that references cannot hide it."""

    def chain(references: int, arrays: int) -> dict:
        """A schema of arrays in arrays, the first ones by reference."""
        inner: dict = {"type": "string"}
        for _ in range(arrays):
            inner = {"type": "array", "items": inner}
        levels = {f"l{i}": {"type": "array", "items": {"$ref": f"#/$defs/l{i + 1}"}} for i in range(references)}
        return {"$defs": {**levels, f"l{references}": inner}, "properties": {"a": {"$ref": "#/$defs/l0"}}}

    rest = MOST_DEPTH - 22  # `a` and the first reference, then ten arrays and as many references
    object_schema(chain(10, rest))
    with pytest.raises(Unmappable, match=f"nests deeper than {MOST_DEPTH}"):
        object_schema(chain(10, rest + 1))
    object_schema(chain(15, 0))
    with pytest.raises(Unmappable, match="references nest deeper than 16"):
        object_schema(chain(16, 0))


@pytest.mark.parametrize("defined", [
    {"$ref": "#/$defs/N", "$defs": {"N": {"type": "string"}}},
    {"$ref": "#n", "$defs": {"N": {"$anchor": "n", "type": "string"}}},
    {"$ref": "#n", "definitions": {"N": {"$id": "#n", "type": "string"}}},
    {"$ref": "https://example.com/n.json", "$defs": {"N": {"$id": "https://example.com/n.json", "type": "string"}}},
    {"$ref": "#/$defs/a~1b~0%20c", "$defs": {"a/b~ c": {"type": "string"}}},
    {"$ref": "#/$defs/a~01", "$defs": {"a~1": {"type": "string"}, "a/": {"type": "integer"}}},
])  # fmt: skip
def test_schemas_are_found_by_path_id_and_anchor(defined):
    definitions = {key: value for key, value in defined.items() if key != "$ref"}
    assert kept({"properties": {"a": {"$ref": defined["$ref"]}}, **definitions})["properties"] == {
        "a": {"type": "string"}
    }


def test_recursion_by_id_is_bounded():
    """TypeBox writes recursive types so."""
    node = {"$id": "T0", "type": "object", "properties": {"next": {"$ref": "T0"}}}
    assert "next" in kept({"properties": {"a": node}})["properties"]["a"]["properties"]
    assert "next" in kept({"properties": {"a": {"$ref": "T0"}}, "$defs": {"x": node}})["properties"]["a"]["properties"]


@pytest.mark.parametrize(
    ("schema", "fitted", "change"),
    [
        ({"type": "string", "enum": [1, 2, True, 1.5]}, {"type": "string", "enum": ["1", "2", "true", "1.5"]}, None),
        (
            {"type": "integer", "enum": ["1", "2"], "default": "1"},
            {"type": "integer", "enum": [1, 2], "default": 1},
            None,
        ),
        ({"type": "boolean", "default": "False"}, {"type": "boolean", "default": False}, None),
        ({"type": "array", "default": "[1]"}, {"type": "array", "default": [1]}, None),
        ({"type": "integer", "default": ""}, {"type": "integer"}, "default_of_other_type"),
        (
            {"type": "string", "enum": ["a", "b"], "default": "c"},
            {"type": "string", "enum": ["a", "b"]},
            "default_does_not_fit",
        ),
        ({"type": "integer", "minimum": 1, "default": 0}, {"type": "integer", "minimum": 1}, "default_does_not_fit"),
        (
            {"type": "array", "items": {"enum": ["a"]}, "default": ["b"]},
            {"type": "array", "items": {"type": "string", "enum": ["a"]}},
            "default_does_not_fit",
        ),
        ({"type": "integer", "examples": [1, "x"]}, {"type": "integer", "examples": [1]}, "examples_of_other_type"),
        ({"type": "string", "maxLength": "9"}, {"type": "string", "maxLength": 9}, None),
        ({"type": "string", "description": {"en": "x"}}, {"type": "string"}, "malformed_annotation"),
        (
            {"properties": {"b": {"type": "string"}, "required": ["b"]}},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
            "parameters_rewritten",
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "string"}},
            {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "string"}},
            "unchecked_name_pattern",
        ),
        (
            {"type": "object", "allOf": [{"propertyNames": {"anyOf": [{"pattern": "^a"}, {"maxLength": 3}]}}]},
            {"type": "object", "propertyNames": {"anyOf": [{"pattern": "^a"}, {"maxLength": 3}]}},
            "unchecked_name_pattern",
        ),
    ],
    ids=str,
)
def test_values_are_of_the_type_beside_them(schema, fitted, change):
    changes: dict[str, str] = {}
    assert object_schema({"properties": {"a": schema}}, changes=changes)["properties"] == {"a": fitted}
    assert list(changes) == ([change] if change else [])


def test_an_enum_of_another_type_is_rejected():
    for schema in (
        {"type": "array", "enum": ["a"]},
        {"type": "integer", "enum": [1, "x"]},
        {"type": "object", "const": 1},
    ):
        with pytest.raises(Unmappable) as problem:
            of(a=schema)
        assert problem.value.reason == "enum_of_other_type"


def laughs(count=12) -> dict:
    """References to references: a schema of a few lines that would have 10^12 values."""
    level = {f"l{i}": {"anyOf": [{"properties": {f"p{j}": {"$ref": f"#/$defs/l{i + 1}"}}} for j in range(10)]}
             for i in range(count)}  # fmt: skip
    return {"$defs": {**level, f"l{count}": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/l0"}}}


def nested(depth=300) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"properties": {"a": schema}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (laughs(), "schema_too_large"),
        (nested(), "schema_too_large"),
        ({"properties": {"a": {"$ref": {"not": "a text"}}}}, "foreign_reference"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "recursive_schema"),
        ({"properties": {"a": {"$dynamicRef": "#x"}}}, "recursive_schema"),
        ({"anyOf": {"type": "string"}}, "invalid_schema"),
        ({"allOf": [{"type": "object"}, {"type": "array"}]}, "all_of"),
        ({"type": 42}, "invalid_schema"),
        ({"properties": ["a"]}, "invalid_schema"),
        ({"required": "a"}, "invalid_schema"),
        ({"properties": {"a": {"minLength": "long"}}}, "invalid_schema"),
        ({"properties": {"a": {"patternProperties": ["("]}}}, "invalid_schema"),
        ({"if": {}}, "unsupported_keyword"),
        ({"properties": {"a": {"extends": {"properties": {"b": {}}}}}}, "unsupported_keyword"),
        ({"properties": {"a": {"disallow": "null"}}}, "unsupported_keyword"),
        ({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": False}]}, "all_of"),
        ({"properties": {"a": {"$ref": "https://example.com/schema.json"}}}, "foreign_reference"),
        ({"properties": {"a": {"$ref": "#" + "/a" * 10_000}}}, "foreign_reference"),
        ({"properties": {"a": {"enum": list(range(6_000))}}}, "schema_too_large"),
        ({"properties": {"a": {"anyOf": [{"const": i} for i in range(6_000)]}}}, "schema_too_large"),
        ({"properties": {"a": {"default": float("nan")}}}, "invalid_schema"),
        ("x", "no_schema"),
    ],
    ids=str,
)
def test_schemas_without_a_normal_form_have_a_reason(schema, reason):
    with pytest.raises(Unmappable) as problem:
        object_schema(schema)
    assert problem.value.reason == reason and 0 < len(problem.value.detail) <= 300


def test_reasons_name_the_property():
    with pytest.raises(Unmappable) as problem:
        object_schema({"properties": {"where": {"properties": {"city": {"type": "file"}}}}})
    assert problem.value.detail == "'where.city': type 'file' is not a JSON Schema type"


def test_schemas_of_many_parts_take_bounded_work():
    wide = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 100} for i in range(8)} | {"l8": {"type": "string"}}
    with at_most(seconds=2), pytest.raises(Unmappable) as problem:
        object_schema({"properties": {"a": {"$ref": "#/$defs/l0"}}, "$defs": wide})
    assert problem.value.reason == "schema_too_large"


def test_words_beside_an_alternative_are_kept():
    given = {
        "anyOf": [{"type": "string", "description": "A date."}, {"type": "null"}],
        "description": "When it starts.",
    }
    assert of(a=given) == {"a": {"type": ["string", "null"], "description": "When it starts."}}
    assert of(a={"anyOf": given["anyOf"]})["a"]["description"] == "A date."
