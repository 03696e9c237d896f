"""Strict schemas: what can be promised, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from astra_jax.serving.protocol import InvalidRequest
from astra_jax.serving.strict import MOST_SCHEMAS, check_schema

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
# As the agents' library of OpenAI and pydantic's send them.
SCHEMA: dict[str, Any] = {
    "$defs": {"City": {**CITY, "title": "City"}},
    "type": "object",
    "title": "route_args",
    "properties": {
        "start": {"$ref": "#/$defs/City"},
        "via": {"type": "array", "items": {"$ref": "#/$defs/City"}, "maxItems": 2},
        "by": {"enum": ["car", "train"], "type": "string", "description": "How."},
        "hours": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
    },
    "required": ["start", "via", "by", "hours", "day", "code"],
    "additionalProperties": False,
}


def obj(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


TREE = obj(next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}, all={"type": "array", "items": {"$ref": "#"}})


def test_closed_schemas_are_taken():
    for schema in (SCHEMA, obj(), TREE | {"$defs": {"Node": TREE}}):
        check_schema(schema, "p")


# Each level is in the next one twice: followed, a thousand references would be 2 ** 500 schemas.
DOUBLED = obj(a={"$ref": "#/$defs/d600"}) | {
    "$defs": {"d0": {"type": "string"}}
    | {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 601)}
}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(40):
    DEEP = obj(a=DEEP)


@pytest.mark.parametrize(
    ("schema", "param", "why"),
    [
        ({"type": "string"}, "p", "not a schema of type object"),
        ({**obj(), "additionalProperties": True}, "p.additionalProperties", "must be false"),
        ({"type": "object", "properties": {}}, "p.additionalProperties", "must be false"),
        ({**obj(a={"type": "string"}), "required": []}, "p.required", "must name all properties"),
        (obj(a={"type": "object"}), "p.a.additionalProperties", "must be false"),
        (obj(a={"type": ["object", "null"]}), "p.a.additionalProperties", "must be false"),
        (obj(a={"type": "null", "additionalProperties": {"pattern": "x"}}), "p.a.additionalProperties", "must be"),
        (obj() | {"$defs": {"x": {"type": "object"}}}, "p.$defs.x.additionalProperties", "must be false"),
        (obj(a={}), "p.a", "says no type"),
        (obj(a={"type": "string", "pattern": 3}), "p.a.pattern", "is 3"),
        (obj(a={"allOf": []}), "p.a.allOf", "cannot be enforced here"),
        (obj(a={"$ref": "http://127.0.0.1/schema"}), "p.a.$ref", "not one of $defs"),
        (obj(a={"$ref": ["#"]}), "p.a.$ref", "not one of $defs"),
        (obj(a={"type": "text"}), "p.a.type", 'is "text"'),
        (obj(a={"type": "integer", "multipleOf": 0}), "p.a.multipleOf", "is 0"),
        (obj(a={"enum": []}), "p.a.enum", "is []"),
        (obj(a=3), "p.a", "is 3, no schema"),
        (obj(a={"enum": ["x" * 40_000]}), "p", "more than 32768 characters"),
        (obj(a={"enum": [1] * MOST_SCHEMAS}, b={"type": "null"}), "p", "more than 1000 schemas"),
        (DEEP, "p", "more than 1000 schemas or 32 levels"),
        (DOUBLED, "p", "more than 1000 schemas or 32 levels"),
    ],
)  # fmt: skip
def test_what_cannot_be_promised_is_refused_by_name(schema, param, why):
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "p")
    assert refused.value.param == param and why in str(refused.value)
    assert "change the schema, or leave strict out" in str(refused.value)
