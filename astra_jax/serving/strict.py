"""`strict` schemas of functions and answers: closed schemas, as OpenAI requires, which sampling enforces completely.

A strict schema guarantees the output, so no part of it may be ignored. OpenAI's vocabulary can be enforced
(https://platform.openai.com/docs/guides/structured-outputs#supported-schemas): types, properties, items, enum, const,
anyOf, bounds of numbers and lengths, pattern, format, references and recursion. Anything else is refused by name, and
so is an object in which names may be added or missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from astra_jax.serving.protocol import InvalidRequest, shown

MOST_SCHEMAS, MOST_LEVELS = 1_000, 32
"""Most schemas, and most levels of nesting, in one function."""
MOST_CHARACTERS = 1 << 15
"""Most characters of a schema as JSON, without its descriptions."""

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_TOLD = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment", "discriminator"}
"""Keywords that do not constrain values."""
_DEFINITIONS = ("$defs", "definitions")


def check_schema(schema: Any, where: str) -> None:
    """Check that all of a strict schema can be enforced.

    Raises:
        InvalidRequest: it cannot, or it allows other names.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise _refused(where, "is not a schema of type object, which a strict one has to be")
    checked = _Checked(schema, where)
    said = checked.read(schema, where)
    definitions = {
        f"#/{key}/{name}": checked.read(inner, f"{where}.{key}.{name[:64]}")
        for key in _DEFINITIONS
        if isinstance(named := schema.get(key), dict)
        for name, inner in named.items()
    }
    if len(json.dumps([said, definitions])) > MOST_CHARACTERS:
        raise _refused(where, f"has more than {MOST_CHARACTERS} characters without its descriptions")


class _Checked:
    """Reader of the parts of one schema, each once: references are not followed."""

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._count = 0
        self._where = where
        self._names = {"#"} | {
            f"#/{key}/{name}" for key in _DEFINITIONS if isinstance(root.get(key), dict) for name in root[key]
        }

    def read(self, schema: Any, where: str, level: int = 0) -> dict[str, Any]:
        """Return the schema without its descriptions."""
        self._count += 1
        if self._count > MOST_SCHEMAS or level > MOST_LEVELS:
            raise _refused(self._where, f"has more than {MOST_SCHEMAS} schemas or {MOST_LEVELS} levels")
        if not isinstance(schema, dict):
            raise _refused(where, f"is {shown(schema)}, no schema")
        said = {key: value for key, value in schema.items() if key not in _TOLD and key not in _DEFINITIONS}
        if "$ref" in said:
            if not isinstance(said["$ref"], str) or said["$ref"] not in self._names or len(said) > 1:
                what = f"is {shown(said['$ref'])}, which is not one of $defs, or does not stand alone"
                raise _refused(f"{where}.$ref", what)
            return said
        for key, value in said.items():
            if key not in _SOUND:
                raise _refused(f"{where}.{key[:64]}", "cannot be enforced here")
            if not _SOUND[key](value):
                raise _refused(f"{where}.{key}", f"is {shown(value)}")
            if key in ("enum", "const"):
                self._count += _values(value)

        def inside(inner: Any, key: str) -> dict[str, Any]:
            return self.read(inner, f"{where}.{key}", level + 1)

        if not set(said) & {"type", "anyOf", "enum", "const"}:
            raise _refused(where, "says no type")
        properties, types = said.get("properties", {}), said.get("type")
        if "object" in (types or ()) or set(said) & {"properties", "required", "additionalProperties"}:
            if said.get("additionalProperties") is not False:
                raise _refused(f"{where}.additionalProperties", "must be false in a strict schema")
            if set(said.get("required", ())) != set(properties):
                raise _refused(f"{where}.required", "must name all properties in a strict schema")
            said["properties"] = {name: inside(inner, name[:64]) for name, inner in properties.items()}
        if "items" in said:
            said["items"] = inside(said["items"], "items")
        if "anyOf" in said:
            said["anyOf"] = [inside(inner, f"anyOf[{i}]") for i, inner in enumerate(said["anyOf"])]
        return said


def _refused(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {why}; change the schema, or leave strict out", param=where)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _are_types(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return bool(several) and all(isinstance(one, str) and one in _TYPES for one in several)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_SOUND: dict[str, Callable[[Any], bool]] = {
    "type": _are_types,
    "properties": lambda value: isinstance(value, dict),
    "required": _are_names,
    "additionalProperties": lambda value: isinstance(value, (bool, dict)),
    "items": lambda value: isinstance(value, dict),
    "anyOf": _is_filled,
    "enum": _is_filled,
    "const": lambda value: True,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _is_count),
    **dict.fromkeys(("pattern", "format"), lambda value: isinstance(value, str)),
}
"""Enforceable keywords, and checks of their values by JSON Schema; the grammar checks patterns and formats."""


def _values(value: Any) -> int:
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        count += 1
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return count
