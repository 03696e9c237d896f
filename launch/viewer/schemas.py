"""JSON schemas of tools for people. A schema is whatever JSON a record holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShownParameter:
    """One property of a tool's schema, as text."""

    name: str
    type: str
    required: bool
    description: str
    values: list[Any]


def parameters_of(schema: Mapping[str, Any]) -> list[ShownParameter]:
    """Return the properties of an object schema; what JSON Schema does not allow counts as left out."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [
        ShownParameter(
            name=name,
            type=" or ".join(map(str, _types(one))) or "any",
            required=name in names,
            description=str(one.get("description", "")),
            values=one["enum"] if isinstance(one.get("enum"), list) else [],
        )
        for name, one in _properties(schema).items()
    ]


def least_value(schema: Any) -> Any:
    """Return the smallest value of a schema: required properties only, each its default, first choice or empty."""
    if not isinstance(schema, dict):
        return None
    for name in ("default", "const"):
        if name in schema:
            return schema[name]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    kinds = [kind for kind in _types(schema) if kind != "null"]
    if "object" in kinds or "properties" in schema:
        return {one.name: least_value(_properties(schema)[one.name]) for one in parameters_of(schema) if one.required}
    if kinds and kinds[0] in ("integer", "number"):
        return schema.get("minimum", 0)
    return {"string": "", "boolean": False, "array": []}.get(str(kinds[0])) if kinds else None


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: one if isinstance(one, dict) else {} for name, one in properties.items()}


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]
