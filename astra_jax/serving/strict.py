"""`strict` functions: what is answered as a call of one fits its schema.

OpenAI constrains the model while it draws, which is not done here. What a strict function promises is kept all the
same: a call whose arguments do not fit is no call, and stays in the content as it was written. That takes a schema that
can be checked: of OpenAI's vocabulary for strict functions, all but `pattern`, `format` and recursion. Anything else is
refused by name, and so is an object that lets names be added or left out, as OpenAI does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from astra_jax.serving.protocol import InvalidRequest, shown
from synthesis.core.records import ToolCall
from synthesis.core.tool_schemas import UncheckableSchema, argument_error

MOST_SCHEMAS, MOST_LEVELS = 1_000, 32
"""Beside each other and inside each other, in one function, after references are followed."""
MOST_CHARACTERS = 1 << 15
"""Of a function's schema as JSON, what only describes it left out."""
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
_MOST_WORK = 100_000
"""Schemas times values of a call's arguments: half a second of checking at the very most."""

_TOO_MUCH = "the arguments are too many to be checked"
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_TOLD = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment"}
"""Say nothing about which arguments fit."""
_DEFINITIONS = ("$defs", "definitions")

Check = Callable[[ToolCall], str]
"""Why a call is not to be answered as one, or the empty string."""


def check_of(tools: Sequence[Mapping[str, Any]]) -> Check | None:
    """Of the functions that are strict; None when none is.

    Args:
        tools: OpenAI's, of a request that was read.

    Raises:
        InvalidRequest: as `enforceable`.
    """
    functions = [(tool["function"], f"tools[{i}].function") for i, tool in enumerate(tools)]
    schemas = {
        function["name"]: enforceable(_NOTHING if named is None else named, f"{where}.parameters")
        for function, where in functions
        for named in (function.get("parameters"),)
        if function.get("strict")
    }
    known: dict[str, str] = {}  # a stream asks again with each token

    def check(call: ToolCall) -> str:
        if call.name not in schemas:
            return ""
        schema, size = schemas[call.name]
        key = f"{call.name} {call.arguments!r}"
        if key not in known:
            known[key] = _misfit(schema, call.arguments) if size * _values(call.arguments) <= _MOST_WORK else _TOO_MUCH
        return known[key]

    return check if schemas else None


def enforceable(schema: Any, where: str) -> tuple[dict[str, Any], int]:
    """A strict function's schema with its references followed, and how many schemas are in it.

    Raises:
        InvalidRequest: it cannot be checked, or leaves open which names there are.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise _refused(where, "is no schema of type object, which a strict function needs")
    reader = _Reader(schema, where)
    whole = reader.read(schema, where, ())
    if len(json.dumps(whole)) > MOST_CHARACTERS:
        raise _refused(where, f"has more than {MOST_CHARACTERS} characters without its descriptions")
    return whole, reader.count


def _misfit(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    try:
        return argument_error(schema, arguments)
    except UncheckableSchema as problem:  # then nothing is known to fit it
        return str(problem)


class _Reader:
    """Follows the references of one schema."""

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self.count = 0
        self._where = where
        self._definitions = {
            f"#/{key}/{name}": inner
            for key in _DEFINITIONS
            if isinstance(named := root.get(key), dict)
            for name, inner in named.items()
        }

    def read(self, schema: Any, where: str, through: tuple[str, ...], level: int = 0) -> dict[str, Any]:
        self.count += 1
        if self.count > MOST_SCHEMAS or level > MOST_LEVELS:
            raise _refused(self._where, f"has more than {MOST_SCHEMAS} schemas or {MOST_LEVELS} levels")
        if not isinstance(schema, dict):
            raise _refused(where, f"is {shown(schema)}, no schema")
        said = {key: value for key, value in schema.items() if key not in _TOLD and key not in _DEFINITIONS}
        if "$ref" in said:
            return self._followed(said, where, through, level)
        for key, value in said.items():
            if key not in _SOUND:
                raise _refused(f"{where}.{key[:64]}", "cannot be enforced here")
            if not _SOUND[key](value):
                raise _refused(f"{where}.{key}", f"is {shown(value)}")
            if key in ("enum", "const"):
                self.count += _values(value)

        def inside(inner: Any, key: str) -> dict[str, Any]:
            return self.read(inner, f"{where}.{key}", through, level + 1)

        if not set(said) & {"type", "anyOf", "enum", "const"}:
            raise _refused(where, "says no type")
        properties, types = said.get("properties", {}), said.get("type")
        if "object" in (types or ()) or set(said) & {"properties", "required", "additionalProperties"}:
            if said.get("additionalProperties") is not False:
                raise _refused(f"{where}.additionalProperties", "must be false in a strict function")
            if set(said.get("required", ())) != set(properties):
                raise _refused(f"{where}.required", "must name all properties in a strict function")
            said["properties"] = {name: inside(inner, name[:64]) for name, inner in properties.items()}
        if "items" in said:
            said["items"] = inside(said["items"], "items")
        if "anyOf" in said:
            said["anyOf"] = [inside(inner, f"anyOf[{i}]") for i, inner in enumerate(said["anyOf"])]
        return said

    def _followed(self, said: Mapping[str, Any], where: str, through: tuple[str, ...], level: int) -> dict[str, Any]:
        name = said["$ref"]
        if not isinstance(name, str) or name not in self._definitions or len(said) > 1:
            raise _refused(f"{where}.$ref", f"is {shown(name)}, which is not one of $defs, or does not stand alone")
        if name in through:
            raise _refused(f"{where}.$ref", f"is {shown(name)}, which contains itself; that cannot be enforced here")
        return self.read(self._definitions[name], where, (*through, name), level + 1)


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
}
"""What can be checked, and whether it is said as JSON Schema wants it."""


def _values(value: Any) -> int:
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        count += 1
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return count
