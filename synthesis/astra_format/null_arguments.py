"""Removal of nulls that a library filled in: nulls in call arguments that the tool's schema does not allow.

A table has one schema for all rows, so that `datasets` and pandas give each call the arguments of every call, null
where it has none. They come in .parquet files and, once written from such a table, in .jsonl files alike. A null stays
where the schema allows it: by its type, `nullable`, an alternative, its values or its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from synthesis.astra_format.records import Defect
from synthesis.core.records import Message, ToolSpec

_MOST_DEPTH = 40
_SAYS_WHAT = ("anyOf", "oneOf", "allOf", "$ref", "properties", "items")


def without_null_arguments(
    messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> tuple[list[Message], list[Defect]]:
    """Return the messages without such nulls, and a defect `null_argument` for each, with the tool and the path."""
    schemas = {tool.name: tool.parameters for tool in tools}
    found: list[Defect] = []

    def of(message: Message) -> Message:
        calls = []
        for call in message.tool_calls:
            schema = schemas.get(call.name, {})
            left, paths = _without(call.arguments, [schema], schema, call.name, 0)
            found.extend(Defect("null_argument", path) for path in paths)
            calls.append(msgspec.structs.replace(call, arguments=left) if paths else call)
        return msgspec.structs.replace(message, tool_calls=calls) if calls != message.tool_calls else message

    return [of(message) for message in messages], found


def _without(value: Any, schemas: Sequence[Any], root: Any, path: str, depth: int) -> tuple[Any, list[str]]:
    """Return a value without the nulls that none of the schemas allows, and their paths."""
    if depth > _MOST_DEPTH or not isinstance(value, dict | list):
        return value, []
    every = _flat(schemas, root)
    paths: list[str] = []
    if isinstance(value, list):
        items = [one["items"] for one in every if "items" in one]
        kept_items = []
        for one in value:
            left, more = _without(one, items, root, f"{path}[]", depth + 1)
            kept_items.append(left)
            paths += more
        return kept_items, paths
    kept: dict[str, Any] = {}
    for name, one in value.items():
        own, here = _property(every, name), f"{path}.{name}"
        is_needed = any(name in schema["required"] for schema in every if isinstance(schema.get("required"), list))
        if one is None and not is_needed and not _allows_null(own, root):
            paths.append(here)
            continue
        left, more = _without(one, own, root, here, depth + 1)
        paths += more
        if more and not left and not is_needed:  # an object of nulls alone
            continue
        kept[name] = left
    return kept, paths


def _property(schemas: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    listed = [one["properties"] for one in schemas if isinstance(one.get("properties"), dict)]
    own = [properties[name] for properties in listed if name in properties]
    return own or [more for one in schemas if isinstance(more := one.get("additionalProperties"), dict) and more]


def _flat(schemas: Sequence[Any], root: Any) -> list[Mapping[str, Any]]:
    """Schemas, their alternatives and what they refer to, each once: a schema may refer to itself."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = list(schemas)
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and id(one) not in found:
            found[id(one)] = one
            waiting += _alternatives(one, root)
    return list(found.values())


def _alternatives(schema: Mapping[str, Any], root: Any) -> list[Any]:
    listed = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    return [*listed, _referred(schema["$ref"], root)] if "$ref" in schema else listed


def _referred(reference: Any, root: Any) -> Any:
    """Return the target of a reference within the document; None: another document's, or nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in filter(None, reference[1:].split("/")):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _allows_null(schemas: Sequence[Any], root: Any) -> bool:
    """Return whether a schema, an alternative or what it refers to allows null."""
    return any(one is True for one in schemas) or any(_allows_null_itself(one) for one in _flat(schemas, root))


def _allows_null_itself(schema: Mapping[str, Any]) -> bool:
    if schema.get("nullable") is True or ("default" in schema and schema["default"] is None):
        return True
    if isinstance(schema.get("enum"), list):
        return None in schema["enum"]
    if "const" in schema:
        return schema["const"] is None
    kinds = schema.get("type")
    if kinds is not None:
        return not {"null", "any"}.isdisjoint(map(str, kinds if isinstance(kinds, list) else [kinds]))
    return not any(key in schema for key in _SAYS_WHAT)
