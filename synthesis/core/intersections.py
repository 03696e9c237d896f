"""Intersection of two JSON schemas in normal form: one schema that takes what both take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from synthesis.core.tool_schemas import brief

_MOST_ALTERNATIVES = 64
"""Alternatives of `anyOf` that two lists of alternatives may make together."""
_ANNOTATIONS = {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly",
                "$schema", "$id", "$comment"}  # fmt: skip
"""Keywords that may differ between schemas that hold at once; the second schema's value is kept."""
_WORDS = ("pattern", "format", "contentEncoding", "contentMediaType")
"""Keywords of which several values hold at once only as `allOf`."""


class Contradiction(Exception):
    """No value fits both schemas, or their intersection cannot be written; the message names the keyword."""


def intersection(first: Any, second: Any) -> Any:
    """Return the schema of all values that fit both schemas.

    Args:
        first: a schema in normal form, or a boolean.
        second: the nearer one, whose annotations (`description`, `default`) are kept.

    Raises:
        Contradiction: see there.
    """
    for one, other in ((first, second), (second, first)):
        if one is True or one == {}:
            return other
        if one is False:
            return False
    merged = {**first, **second}
    for key in first.keys() & second.keys():
        if key in _JOINED and first[key] != second[key]:
            merged[key] = _JOINED[key](first[key], second[key])
        elif key not in _ANNOTATIONS and key not in _APART and first[key] != second[key]:
            raise Contradiction(_says(key, first[key], second[key]))
    _join_types(merged, first, second)
    _join_properties(merged, first, second)
    _join_items(merged, first, second)
    _join_words(merged, first, second)
    for least, most in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"),
                        ("minProperties", "maxProperties")):  # fmt: skip
        low, high = merged.get(least), merged.get(most)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            raise Contradiction(f"{least} {low} is above {most} {high}")
    return _without_impossible(merged)


def _without_impossible(merged: dict[str, Any]) -> Any:
    """Return the schema without `anyOf` alternatives of another type than its own; a single one is merged."""
    options, names = merged.get("anyOf"), type_names(merged)
    if not isinstance(options, list) or not names:
        return merged
    possible = [one for one in options if not isinstance(one, dict) or _may_be(one, names)]
    if not possible:
        raise Contradiction(f"no alternative of anyOf is of type {names}")
    rest = {key: value for key, value in merged.items() if key != "anyOf"}
    return intersection(rest, possible[0]) if len(possible) == 1 else {**rest, "anyOf": possible}


def _may_be(schema: Mapping[str, Any], names: list[Any]) -> bool:
    return "type" not in schema or bool(_common_types(names, type_names(schema)))


def type_names(schema: Mapping[str, Any]) -> list[Any]:
    """Return the type names of a schema as a list; empty where it leaves the type open."""
    names = schema.get("type", [])
    return names if isinstance(names, list) else [names]


def nullable(schema: Any) -> Any:
    """Return the schema that takes null too."""
    if not isinstance(schema, dict):
        return schema or {"type": "null"}
    names = type_names(schema)
    if set(schema) & {"const", "allOf", "not", "oneOf"}:
        shown = {key: schema[key] for key in schema.keys() & _ANNOTATIONS}
        rest = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        return {"anyOf": [rest, {"type": "null"}], **shown}
    wider = dict(schema)
    if names and "null" not in names:
        wider["type"] = [*names, "null"]
    if isinstance(values := schema.get("enum"), list) and None not in values:
        wider["enum"] = [*values, None]
    options = schema.get("anyOf")
    if isinstance(options, list) and not any(_takes_null(one) for one in options):
        wider["anyOf"] = [*options, {"type": "null"}]
    return wider


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return bool(schema)
    names = type_names(schema)
    return "null" in names or (not names and None in schema.get("enum", [None]) and "anyOf" not in schema)


def _common_types(first: list[Any], second: list[Any]) -> list[Any]:
    """Return the types that both lists take, of which `integer` is one of `number`."""
    shared = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return shared + [name for name in second if name == "integer" and "number" in first and name not in shared]


def _says(key: str, first: Any, second: Any) -> str:
    return f"{brief(key):.80} is {brief(first):.80} and {brief(second):.80}, which do not hold at once"


def _join_types(merged: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    if "type" not in first or "type" not in second:
        return
    names = _common_types(type_names(first), type_names(second))
    if not names:
        raise Contradiction(_says("type", first["type"], second["type"]))
    merged["type"] = names if len(names) > 1 else names[0]


def _join_properties(merged: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Each property as both schemas take it: what one does not list is one of its `additionalProperties`."""
    if "additionalProperties" in first and "additionalProperties" in second:
        merged["additionalProperties"] = intersection(first["additionalProperties"], second["additionalProperties"])
    one, other = first.get("properties", {}), second.get("properties", {})
    if not one and not other:
        return
    further, others = first.get("additionalProperties", True), second.get("additionalProperties", True)
    merged["properties"] = {}
    for name in dict.fromkeys([*one, *other]):
        both = intersection(one.get(name, further), other.get(name, others))
        if both is not False:
            merged["properties"][name] = both
        elif name in merged.get("required", []):
            raise Contradiction(f"property {name!r:.80} is required, and additionalProperties is false beside it")


def _join_items(merged: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    further, others = first.get("items", True), second.get("items", True)
    if "items" in first and "items" in second:
        merged["items"] = intersection(further, others)
    one, other = first.get("prefixItems", []), second.get("prefixItems", [])
    if one or other:
        merged["prefixItems"] = [
            intersection(one[i] if i < len(one) else further, other[i] if i < len(other) else others)
            for i in range(max(len(one), len(other)))
        ]


def _join_words(merged: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Patterns and formats: one stays where it is, several become `allOf`."""
    apart: list[dict[str, Any]] = []
    for part in (first, second):
        apart += [one for one in part.get("allOf", []) if isinstance(one, dict) and not set(one) <= set(_WORDS)]
    for key in _WORDS:
        values = {
            one[key]
            for part in (first, second)
            for one in (part, *part.get("allOf", []))
            if isinstance(one, dict) and isinstance(one.get(key), str)
        }
        if len(values) > 1:
            merged.pop(key, None)
            apart += [{key: value} for value in sorted(values)]
    if apart:
        merged["allOf"] = apart


def _shared(first: list[Any], second: list[Any]) -> list[Any]:
    wanted = {_frozen(one) for one in second}
    values = [one for one in first if _frozen(one) in wanted]
    if not values:
        raise Contradiction(_says("enum", first, second))
    return values


def _frozen(value: Any) -> bytes:
    """Return a value as JSON compares it: 1 is 1.0 and not true."""
    whole = isinstance(value, float) and value.is_integer()
    return msgspec.json.encode(int(value) if whole else value, order="deterministic")


def _union(first: list[Any], second: list[Any]) -> list[Any]:
    return [*first, *(name for name in second if name not in first)]


def _multiple(first: float, second: float) -> float:
    if isinstance(first, int) and isinstance(second, int):
        return math.lcm(first, second)
    for one, other in ((first, second), (second, first)):
        if math.isclose(one / other, round(one / other)):
            return one
    raise Contradiction(_says("multipleOf", first, second))


def _alternatives(first: list[Any], second: list[Any]) -> list[Any]:
    if len(first) * len(second) > _MOST_ALTERNATIVES:
        raise Contradiction(f"anyOf has {len(first)} alternatives in one schema and {len(second)} in another one")
    both: list[Any] = []
    for one in first:
        for other in second:
            try:
                option = intersection(one, other)
            except Contradiction:
                continue
            both += [option] if option is not False and option not in both else []
    if not both:
        raise Contradiction(_says("anyOf", first, second))
    return both


def _excluded(first: Any, second: Any) -> dict[str, Any]:
    options: list[Any] = []
    for one in (first, second):
        options += one["anyOf"] if isinstance(one, dict) and set(one) == {"anyOf"} else [one]
    return {"anyOf": [one for i, one in enumerate(options) if one not in options[:i]]}


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
    "required": _union, "enum": _shared, "multipleOf": _multiple, "anyOf": _alternatives, "not": _excluded,
    "propertyNames": intersection, "uniqueItems": lambda first, second: first or second,
}  # fmt: skip
"""Keywords whose two values have one that says both."""
_APART = {"type", "properties", "additionalProperties", "items", "prefixItems", "allOf", *_WORDS}
"""Keywords that need more of their schemas than their own two values."""
