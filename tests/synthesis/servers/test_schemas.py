"""The normal form of JSON schemas, and why some have none."""

from __future__ import annotations

import pytest

from synthesis.servers.schemas import Unmappable, normal_schema, object_schema


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
            "a": {"type": "string", "pattern": r"\p{L}+", "description": "A name."},  # words: nothing here reads it
            "b": {"enum": ["x", "y"], "type": "string"},
            "c": {"type": "number", "exclusiveMinimum": 0},
            "d": {"prefixItems": [{"type": "integer"}, {"enum": ["x", "y"], "type": "string"}], "items": False,
                  "type": "array"},
            "e": {"type": "null"},
            "f": {"type": "object", "additionalProperties": {"type": ["integer", "string"]}},
            "$ref": {"type": "boolean"},
        },
        "required": ["c"],
        "type": "object",
    }  # fmt: skip


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
        ({"properties": {"a": {"$ref": "#"}}}, "recursive_schema"),
        ({"properties": {"a": {"$dynamicRef": "#x"}}}, "recursive_schema"),
        ({"anyOf": {"type": "string"}}, "invalid_schema"),
        ({"allOf": [{"type": "object"}, {"type": "array"}]}, "all_of"),
        ({"type": 42}, "invalid_schema"),
        ({"properties": ["a"]}, "invalid_schema"),
        ({"required": "a"}, "invalid_schema"),
        ({"properties": {"a": {"minLength": "long"}}}, "invalid_schema"),
        ({"properties": {"a": {"patternProperties": {"(": {}}}}}, "unsupported_keyword"),
        ({"if": {}}, "unsupported_keyword"),
        ({"properties": {"a": {"$ref": "https://example.com/schema.json"}}}, "foreign_reference"),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
            "recursive_schema",
        ),
        ({"properties": {"a": {"$ref": "#" + "/a" * 10_000}}}, "foreign_reference"),
        ({"properties": {"a": {"enum": list(range(6_000))}}}, "schema_too_large"),
        ({"properties": {"a": {"anyOf": [{"const": i} for i in range(6_000)]}}}, "schema_too_large"),
        ({"properties": {"a": {"default": float("nan")}}}, "invalid_schema"),
        ([], "no_schema"),
    ],
    ids=str,
)
def test_schemas_without_a_normal_form_have_a_reason(schema, reason):
    with pytest.raises(Unmappable) as problem:
        object_schema(schema)
    assert problem.value.reason == reason and 0 < len(problem.value.detail) <= 300
