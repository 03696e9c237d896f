"""One normal form of JSON schemas, whatever draft or OpenAPI version they were written for.

References are resolved, null alternatives and words that JSON Schema does not know dropped, type names spelled as it
(Draft 2020-12) spells them. Keywords that `synthesis.core.tool_schemas` does not check have no normal form: nobody
could say whether arguments fit. The normal form of a normal form is itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from synthesis.core.tool_schemas import KEYWORDS, MOST_DEPTH, MOST_VALUES, TYPES, UncheckableSchema, brief, check_schema

_SPELLINGS = {"str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number",
              "double": "number", "bool": "boolean", "dict": "object", "list": "array", "tuple": "array",
              "map": "object"}  # fmt: skip
_REFERENCES = 16
"""Most references on the way to a place in a schema."""
_UNCHECKED = {"patternProperties", "dependencies", "dependentSchemas", "dependentRequired", "propertyNames", "if",
              "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems",
              "unevaluatedProperties"}  # fmt: skip
"""JSON Schema's keywords that nothing here checks; none of the 9,978 tools of 1,704 public MCP servers has one."""
_KNOWN = (KEYWORDS | {"additionalItems"}) - {"$schema", "$id", "$comment", "example", "readOnly", "writeOnly"}
"""What is kept, but for words that say nothing to a model."""
_LONGEST_REFERENCE = 1_000
_ONE = {"additionalProperties", "additionalItems", "not"}
"""Keywords whose value is a schema."""
_ANNOTATIONS = {"description", "title", "default", "examples", "deprecated"}
"""What may differ between two schemas that hold at once; the nearer one is kept."""


class Unmappable(Exception):
    """What has no normal form; `reason` is counted, `detail` is one line for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, " ".join(detail.split())[:300]


def normal_schema(schema: Mapping[str, Any], *, root: Any = None) -> dict[str, Any]:
    """The schema without `$schema`, titles, references and null alternatives, with JSON Schema's type names.

    Args:
        schema: of any draft from 3 on, or of OpenAPI 3.
        root: the document that references (`#/components/schemas/Pet`) point into; the schema itself when None.

    Raises:
        Unmappable: recursive or foreign references, `allOf` that contradicts itself, unknown types, too large or deep.
    """
    normal = _Normalizer(schema if root is None else root).schema(schema, (), 0)
    if not isinstance(normal, dict):
        raise Unmappable("invalid_schema", f"a schema must be an object, found {normal!r}")
    return normal


def object_schema(schema: Any) -> dict[str, Any]:
    """The normal form of a tool's parameters: an object schema that Draft 2020-12 allows.

    Raises:
        Unmappable: as in `normal_schema`; or it is not an object schema, or not a schema at all.
    """
    if not isinstance(schema, Mapping) or not schema:
        raise Unmappable("no_schema", "the tool document has no parameter schema; add one of type object")
    parameters = normal_schema(schema)
    if parameters.setdefault("type", "object") != "object":
        raise Unmappable("not_an_object", f"the parameter schema is of type {parameters['type']!r}")
    parameters.setdefault("properties", {})
    try:
        check_schema(parameters)
    except UncheckableSchema as error:
        raise Unmappable("invalid_schema", str(error)) from None
    if unknown := [key for key in parameters.get("required", []) if key not in parameters["properties"]]:
        raise Unmappable("invalid_schema", f"required parameter {unknown[0]!r} is not among the properties")
    return parameters


def resolve(reference: Any, root: Any) -> Any:
    """What a local reference (`#/a/b`, RFC 6901) points to.

    Raises:
        Unmappable: `foreign_reference`: it points elsewhere, or to nothing.
    """
    if not isinstance(reference, str) or not reference.startswith("#/") or len(reference) > _LONGEST_REFERENCE:
        raise Unmappable("foreign_reference", f"{brief(reference):.100} is not defined in the schema")
    value = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise Unmappable("foreign_reference", f"{brief(reference):.100} is not defined in the schema")
    return value


class _Normalizer:
    def __init__(self, root: Any) -> None:
        self.root, self.nodes = root, 0

    def schema(self, schema: Any, trail: tuple[str, ...], depth: int) -> Any:
        """`trail` holds the references that led here."""
        self.count(depth)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise Unmappable("invalid_schema", f"a schema must be an object, found {brief(schema):.80}")
        if "$ref" in schema:
            return self.reference(schema, trail, depth)
        if dynamic := [key for key in ("$dynamicRef", "$recursiveRef") if key in schema]:
            raise Unmappable("recursive_schema", f"{dynamic[0]} has no plain form")
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self.alternatives(schema, key, trail, depth)
        normal: dict[str, Any] = {}
        for key, value in schema.items():
            if not isinstance(key, str):
                raise Unmappable("invalid_schema", f"the keyword {brief(key):.80} is not a text")
            if key in _UNCHECKED:
                raise Unmappable("unsupported_keyword", f"{key!r} is no keyword that tools may use; leave it out")
            if key not in _KNOWN or (key == "title" and isinstance(value, str)):
                continue
            if key == "properties" and isinstance(value, Mapping):
                normal[key] = {name: self.schema(one, trail, depth + 1) for name, one in _named(key, value)}
            elif key in _ONE:
                normal[key] = self.schema(value, trail, depth + 1)
            elif key in ("items", "prefixItems"):
                if isinstance(value, list):  # before Draft 2020-12 a list in `items` was what prefixItems is now
                    normal["prefixItems"] = [self.schema(one, trail, depth + 1) for one in value]
                else:
                    normal[key] = self.schema(value, trail, depth + 1)
            elif key == "type":
                normal.update(_type(value))
            elif not (key == "default" and value is None):  # "default: null" goes with the null alternative
                normal[key] = self.plain(value, depth + 1)
        _mend_properties(normal, schema.get("properties"))
        _mend_limits(normal)
        if "type" not in normal and (name := _type_shown_by(normal)):
            normal["type"] = name
        return normal

    def reference(self, schema: Mapping[str, Any], trail: tuple[str, ...], depth: int) -> Any:
        reference = schema["$ref"]
        if reference in trail or reference == "#":
            raise Unmappable("recursive_schema", f"{reference} contains itself")
        target = resolve(reference, self.root)
        if len(trail) >= _REFERENCES:
            raise Unmappable("recursive_schema", f"references nest deeper than {_REFERENCES}")
        found = self.schema(target, (*trail, reference), depth + 1)
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _merged(found, self.schema(beside, trail, depth + 1)) if beside else found

    def alternatives(self, schema: Mapping[str, Any], key: str, trail: tuple[str, ...], depth: int) -> Any:
        listed = schema[key]
        if not isinstance(listed, list) or not listed:
            raise Unmappable("invalid_schema", f"{key} is {brief(listed):.80}, not a list of schemas")
        rest = self.schema({name: value for name, value in schema.items() if name != key}, trail, depth + 1)
        options = [self.schema(option, trail, depth + 1) for option in listed]
        if key == "allOf":
            merged = options[0]
            for option in options[1:]:
                merged = _merged(merged, option)
            return _merged(merged, rest)
        options = [option for option in options if option != {"type": "null"}]
        if not options:
            raise Unmappable("invalid_schema", f"{key} has no alternative but null")
        different = list({json.dumps(option, sort_keys=True): option for option in reversed(options)}.values())[::-1]
        return _merged(different[0], rest) if len(different) == 1 else _merged(rest, {"anyOf": different})

    def plain(self, value: Any, depth: int) -> Any:
        """A keyword's value that is no schema; it must be JSON, which YAML and Python values need not be."""
        self.count(depth)
        if isinstance(value, Mapping):
            return {name: self.plain(one, depth + 1) for name, one in _named("a value", value)}
        if isinstance(value, list):
            return [self.plain(one, depth + 1) for one in value]
        if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise Unmappable("invalid_schema", f"{brief(value):.80} is not a JSON value")

    def count(self, depth: int) -> None:
        self.nodes += 1
        if depth > MOST_DEPTH:
            raise Unmappable("schema_too_large", f"the schema nests deeper than {MOST_DEPTH}")
        if self.nodes > MOST_VALUES:  # a page of references to references would otherwise grow without end
            raise Unmappable(
                "schema_too_large", f"the schema has more than {MOST_VALUES} values once references are in"
            )


def _named(key: str, value: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    if unnamed := [name for name in value if not isinstance(name, str)]:
        raise Unmappable("invalid_schema", f"{key} has the name {brief(unnamed[0]):.80}, which is not a text")
    return list(value.items())


def _mend_properties(normal: dict[str, Any], raw: Any) -> None:
    """`required` as a list: Draft 3 marked the property itself. Read-only properties are no arguments."""
    if isinstance(normal.get("required"), bool):
        del normal["required"]
    properties = normal.get("properties")
    if not isinstance(properties, dict) or not isinstance(raw, Mapping):
        return
    required = normal.get("required", [])
    if not isinstance(required, list):
        return  # the check of the whole schema says what is wrong
    hidden = [name for name, one in raw.items() if isinstance(one, Mapping) and one.get("readOnly") is True]
    marked = [name for name, one in raw.items() if isinstance(one, Mapping) and one.get("required") is True]
    for name in hidden:
        del properties[name]
    wanted = [name for name in _once([*required, *marked]) if name not in hidden]
    if "required" in normal or wanted:
        normal["required"] = wanted


def _once(names: list[Any]) -> list[Any]:
    """Each name once; a list that holds what is no name as it is, for the check of the whole schema."""
    return list(dict.fromkeys(names)) if all(isinstance(name, str) for name in names) else names


def _mend_limits(normal: dict[str, Any]) -> None:
    """Draft 4's `exclusiveMinimum: true` beside `minimum` and `additionalItems`; null among the values of `enum`."""
    further = normal.pop("additionalItems", None)
    if further is not None and "prefixItems" in normal:
        normal.setdefault("items", further)
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(normal.get(exclusive), bool) and normal.pop(exclusive) and limit in normal:
            normal[exclusive] = normal.pop(limit)
    values = normal.get("enum")
    if isinstance(values, list) and None in values and any(value is not None for value in values):
        normal["enum"] = [value for value in values if value is not None]


def _type_shown_by(normal: Mapping[str, Any]) -> str:
    """The type of a schema that leaves it out but leaves no doubt."""
    if "properties" in normal:
        return "object"
    if "items" in normal or "prefixItems" in normal:
        return "array"
    values = normal.get("enum")
    return "string" if isinstance(values, list) and values and all(isinstance(one, str) for one in values) else ""


def _merged(first: Any, second: Any) -> Any:
    """One schema for two that hold at once.

    Raises:
        Unmappable: `all_of`: they contradict each other, or say the same keyword in two ways.
    """
    for one, other in ((first, second), (second, first)):
        if one is True or one == {}:
            return other
        if one is False:
            return False
    merged = dict(first)
    for key, value in second.items():
        if key not in merged or key in _ANNOTATIONS or merged[key] == value:
            merged[key] = value
        elif key == "required" and isinstance(value, list) and isinstance(merged[key], list):
            merged[key] = _once([*merged[key], *value])
        elif key == "properties" and isinstance(value, dict) and isinstance(merged[key], dict):
            both = {name: _merged(merged[key][name], value[name]) for name in merged[key] if name in value}
            merged[key] = {**merged[key], **value, **both}
        elif key == "additionalProperties" and isinstance(value, bool):
            merged[key] = False
        else:
            values = f"{brief(merged[key]):.80} and {brief(value):.80}"
            raise Unmappable("all_of", f"{brief(key):.80} is said twice: {values}")
    return merged


def _type(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        names = [name for name in value if name != "null"] or value[:1]
        if len(names) != 1:
            types = [_type(name).get("type") for name in names]
            single = list(dict.fromkeys(name for name in types if isinstance(name, str)))
            if len(types) == 0 or not all(isinstance(name, str) for name in types):
                return {}
            return {"type": single if len(single) > 1 else single[0]}
        value = names[0]
    if not isinstance(value, str):
        raise Unmappable("invalid_schema", f"type is {brief(value):.80}")
    name = _SPELLINGS.get(value.lower(), value.lower())
    if name == "any":
        return {}
    if name not in TYPES:
        raise Unmappable("unknown_type", f"type {brief(value):.80} is not a JSON Schema type")
    return {"type": name}
