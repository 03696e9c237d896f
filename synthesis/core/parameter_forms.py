"""Parameters in other forms than JSON schema, as data sets and frameworks publish them, rewritten as JSON schema.

- A map of names: `{"city": {"type": "str, optional", "default": "Oslo"}}` (xLAM/APIGen, smolagents, Cohere), or
  `{"city": "string"}`.
- A list of named parameters: `[{"name": "city", "type": "string", "required": true}]`.
- An object schema whose `properties` keyword is missing: `{"type": "object", "city": {"type": "string"}}`.
- Types of programming languages: `List[int]`, `Optional[str]`, `Dict[str, float]`, `int | None`, Java's ArrayList.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from synthesis.core.intersections import nullable
from synthesis.core.tool_schemas import KEYWORDS, TYPES

_LONGEST_TYPE, _MOST_BRACKETS = 300, 6
_TYPES = {
    **{name: name for name in TYPES},
    **dict.fromkeys(("str", "text", "char", "character"), "string"),
    **dict.fromkeys(("int", "long", "short", "byte", "bigint", "int32", "int64", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("float", "double", "num", "numeric", "decimal", "float32", "float64"), "number"),
    **dict.fromkeys(("none", "nonetype", "undefined"), "null"),
    "bool": "boolean",
}  # fmt: skip
_LISTS = {"list", "array", "arraylist", "sequence", "iterable", "set", "frozenset", "tuple", "vector"}
_MAPS = {"dict", "dictionary", "map", "mapping", "hashmap", "hashtable", "record", "object", "struct", "json"}
_FORMATS = {"date": "date", "datetime": "date-time", "time": "time", "uuid": "uuid", "email": "email", "uri": "uri",
            "url": "uri"}  # fmt: skip
OTHER_WORDS = {"$defs", "definitions", "xml", "discriminator", "externalDocs", "errorMessage", "nullable", "$ref",
               "patternProperties", "dependencies", "dependentSchemas", "dependentRequired", "if", "then", "else",
               "contains", "extends", "disallow", "unevaluatedItems", "unevaluatedProperties", "additionalItems",
               "$vocabulary", "annotations", "metadata", "meta", "_meta"}  # fmt: skip
"""Names in a schema that are no parameters, beside the keywords that tools may use."""
_NEVER_NAMES = {"anyOf", "oneOf", "allOf", "not", "additionalProperties", "patternProperties", "propertyNames"}
"""Keywords that no parameter is called."""
_TEXTS = {"title", "description", "format", "pattern", "contentEncoding", "contentMediaType", "type"}
"""Keywords whose value is a text: an object there is a parameter of that name."""
_SHOWS_SCHEMA = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "items"}
_FLAGS = {"name", "in", "required", "optional", "schema"}
"""Names in a parameter's object that its schema has no use for."""


def read_type(text: str) -> tuple[dict[str, Any] | None, bool]:
    """Return the schema of a type as programmers write it, None where the text is no type; and if it says optional.

    Remarks after a comma or in parentheses may be `optional`, `required` and `default …`.
    """
    if len(text) > _LONGEST_TYPE:
        return None, False
    kind, *remarks = _split(re.sub(r"\((optional|required)\)", r", \1", text, flags=re.IGNORECASE), ",")
    remarks = [remark.strip().casefold() for remark in remarks]
    if not all(remark in ("optional", "required") or remark.startswith("default") for remark in remarks):
        return None, False
    schema = _read_type(kind, 0)
    default = next((remark for remark in remarks if remark.startswith("default")), None)
    return schema, "optional" in remarks or default is not None


def _read_type(text: str, depth: int) -> dict[str, Any] | None:
    """Return the schema of a type without remarks; `{}` takes any value."""
    text = text.strip()
    options = [part for piece in _split(text, "|") for part in re.split(r"\sor\s", piece)]
    if depth > _MOST_BRACKETS:
        return None
    if len(options) > 1:
        return _union([_read_type(option, depth + 1) for option in options])
    if text.endswith("[]"):
        return _of("list", [text.removesuffix("[]")], depth)
    bracket = re.search(r"[\[<(]", text)
    if bracket and text[-1] == {"[": "]", "<": ">", "(": ")"}[bracket[0]]:
        name = text[: bracket.start()].strip().rpartition(".")[2].casefold()
        return _of(name, _split(text[bracket.end() : -1], ","), depth)
    name = text.rpartition(".")[2].casefold()
    if name in ("any", "enum"):  # an enum's values say what type they are
        return {}
    if name in _FORMATS:
        return {"type": "string", "format": _FORMATS[name]}
    kind = "array" if name in _LISTS else "object" if name in _MAPS else _TYPES.get(name)
    return None if kind is None else {"type": kind}


def _of(name: str, inner: list[str], depth: int) -> dict[str, Any] | None:
    """Return the schema of a type with others in brackets."""
    if name == "literal":
        try:
            return {"enum": [ast.literal_eval(one.strip()) for one in inner]}
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if name == "tuple" and inner[-1].strip() == "...":
        name, inner = "list", inner[:-1]
    parts = [_read_type(one, depth + 1) for one in inner if one.strip()]
    known = [one for one in parts if one is not None]
    if not known or len(known) < len(parts):
        return None
    if name == "optional":
        return nullable(known[0]) or {}
    if name == "annotated":
        return known[0]
    if name == "union":
        return _union(parts)
    if name == "tuple":
        return {"type": "array", "prefixItems": known, "minItems": len(known), "maxItems": len(known)}
    if name in _LISTS and len(known) == 1:
        return {"type": "array", "items": known[0]}
    if name in _MAPS and len(known) == 2:
        return {"type": "object", "additionalProperties": known[1]}
    return None


def _union(options: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    known = [one for one in options if one is not None]
    if len(known) < len(options):
        return None
    if all(set(one) == {"type"} for one in known):
        return {"type": list(dict.fromkeys(one["type"] for one in known))}
    return {"anyOf": known}


def _split(text: str, sign: str) -> list[str]:
    """Return the parts of a text between signs that stand in no brackets and no quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, letter in enumerate(text):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "[<({":
            depth += 1
        elif letter in "]>)}":
            depth -= 1
        elif letter == sign and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def object_form(given: Any, *, required: Any = None) -> Mapping[str, Any] | None:
    """Return a tool's parameters as a JSON schema of type object; None where they are one, or in no known form.

    Args:
        given: what a tool document has as parameters.
        required: names of required parameters that the document has beside them, or anything else.
    """
    if isinstance(given, list):
        named = [one for one in given if isinstance(one, Mapping) and isinstance(one.get("name"), str)]
        if not named or len(named) < len(given):
            return None
        is_unique = len({one["name"] for one in named}) == len(named)
        return _object((one["name"], one) for one in named) if is_unique else None
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        return None
    inner = given.get("properties")
    if (
        isinstance(inner, Mapping)
        and isinstance(inner.get("type"), str)
        and isinstance(inner.get("properties"), Mapping)
    ):
        return inner  # the schema, put one level too deep
    if _is_schema(given) or not all(_is_parameter(name, value) for name, value in given.items()):
        return missing_properties(given)
    form = _object(given.items())
    wanted = [name for name in required if name in given] if isinstance(required, list) else []
    return {**form, "required": wanted} if wanted else form


def missing_properties(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return an object schema with the keyword `properties` that was left out around its properties, or None."""
    kind = given.get("type")
    if isinstance(kind, str):
        is_object = (read_type(kind)[0] or {}).get("type") == "object"
    else:
        is_object = (kind is None or _shows(kind)) and not set(given) & (_SHOWS_SCHEMA - {"type"})
    if not is_object or "properties" in given:
        return None
    names = [
        name
        for name, value in given.items()
        if isinstance(name, str) and not name.startswith(("x-", "$")) and name not in OTHER_WORDS
        and (name not in KEYWORDS or name in _TEXTS) and _shows(value)
    ]  # fmt: skip
    if not names:
        return None
    rest = {name: value for name, value in given.items() if name not in names}
    return {**rest, "type": "object", "properties": {name: given[name] for name in names}}


def _shows(value: Any) -> bool:
    """Return whether a value is a schema with more than descriptive keywords."""
    return isinstance(value, Mapping) and bool(set(value) & _SHOWS_SCHEMA)


def _is_schema(given: Mapping[str, Any]) -> bool:
    """Return whether an object is a JSON schema: one of its keywords has a value that no parameter has."""
    inner = given.get("properties")
    return (
        isinstance(given.get("type"), str | list)
        or isinstance(given.get("required"), list)
        or isinstance(given.get("enum"), list)
        or not given.keys().isdisjoint(_NEVER_NAMES)
        or any(name.startswith("$") for name in given)
        or (isinstance(inner, Mapping) and not isinstance(inner.get("type"), str))
    )


def _is_parameter(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return name not in ("title", "description") and read_type(value)[0] is not None
    is_keyword = name in (KEYWORDS | OTHER_WORDS) - _TEXTS
    return isinstance(value, Mapping) and (not is_keyword or isinstance(value.get("type"), str))


def _object(parameters: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object schema. If some parameters are marked as required or optional, the others are the opposite.
    Where none is marked, those without a default are required.
    """
    properties: dict[str, Any] = {}
    required: dict[str, bool | None] = {}
    for name, given in parameters:
        properties[name], required[name] = _parameter(given)
    flags = set(required.values())
    wanted = [
        name
        for name, flag in required.items()
        if flag or (flag is None and True not in flags and (False in flags or "default" not in properties[name]))
    ]
    return {"type": "object", "properties": properties, **({"required": wanted} if wanted else {})}


def _parameter(given: Any) -> tuple[dict[str, Any], bool | None]:
    """Return the schema of one parameter, and whether it is required; None where it does not say."""
    if isinstance(given, str):
        schema, optional = read_type(given)
        return schema or {}, False if optional else None
    inner = given.get("schema")
    schema = {**inner} if isinstance(inner, Mapping) else {}
    schema |= {
        key: value
        for key, value in given.items()
        if key not in _FLAGS or (key == "required" and isinstance(value, list))
    }
    kind = given.get("type")
    if isinstance(kind, str) and read_type(kind)[1]:
        return schema, False
    for key, meaning in (("required", True), ("optional", False)):
        if (flag := read_flag(given.get(key))) is not None:
            return schema, flag is meaning
    return schema, None


def read_flag(value: Any) -> bool | None:
    """Return a boolean that may be written as a text (`yes` in YAML 1.1); None for anything else."""
    if isinstance(value, str):
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(value.casefold())
    return value if isinstance(value, bool) else None
