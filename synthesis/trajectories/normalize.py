"""Normalise and filter: any tool document → OpenAI function schema, or a reason (paper, section 2.1.1).

Nothing is lost silently: for every document, kept tools + rejected tools = tools read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import msgspec

from synthesis.records import StdioExecution, ToolServer, ToolSpec
from synthesis.trajectories.collect import ServerDocument

_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_SPELLINGS = {"str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
              "dict": "object", "list": "array", "tuple": "array", "map": "object"}  # fmt: skip
_NAME_LENGTH = 64
_DEPTH = 16


class RejectedTool(msgspec.Struct, frozen=True):
    name: str
    reason: str
    detail: str


class NormalizedServer(msgspec.Struct, frozen=True):
    """`server` is None when too few tools are left; then its kept tools are in `rejected` too."""

    server_id: str
    read: int
    server: ToolServer | None
    rejected: list[RejectedTool]

    def reasons(self) -> Counter[str]:
        return Counter(tool.reason for tool in self.rejected)


class _Unmappable(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def normalize(document: ServerDocument, *, min_tools: int = 3, read_only: bool = True) -> NormalizedServer:
    """The server in normal form.

    Args:
        min_tools: servers with fewer tools are dropped; the paper's value is 3.
        read_only: drop tools of running servers that say that they change state: runs share those servers.
    """
    names = fix_names([_raw_name(tool) for tool in document.tools], document.id)
    kept: list[ToolSpec] = []
    rejected: list[RejectedTool] = []
    for raw, name in zip(document.tools, names, strict=True):
        try:
            if name is None:
                raise _Unmappable("bad_name", "the name is missing, has no usable character, or is used twice")
            if read_only and isinstance(document.execution, StdioExecution) and raw.get("read_only") is False:
                raise _Unmappable("changes_state", "the server says that this tool is not read-only")
            kept.append(_tool(raw, name))
        except _Unmappable as problem:
            rejected.append(RejectedTool(name or _raw_name(raw), problem.reason, problem.detail))
    server: ToolServer | None = None
    if len(kept) >= min_tools:
        server = ToolServer(
            document.id,
            document.title,
            document.description,
            document.domain,
            document.language,
            kept,
            document.execution,
        )
    else:
        detail = f"server {document.id} has {len(kept)} usable tools, min_tools is {min_tools}"
        rejected += [RejectedTool(tool.name, "server_too_small", detail) for tool in kept]
    return NormalizedServer(document.id, len(document.tools), server, rejected)


def fix_names(names: Sequence[str], server_id: str) -> list[str | None]:
    """Names in `[a-zA-Z0-9_-]{1,64}`, each used once; None where there is none to be had.

    Other characters become `_`; a name that is taken gets the server's id in front. Names that need no change keep it
    whatever stands before them, so a running server's tools are found again by the same function.
    """
    cleaned = [re.sub(r"_{2,}", "_", re.sub(r"[^a-zA-Z0-9_-]", "_", name)).strip("_")[:_NAME_LENGTH] for name in names]
    cleaned = [
        name if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) else new for name, new in zip(names, cleaned, strict=True)
    ]
    fixed: list[str | None] = [None] * len(names)
    taken: set[str] = set()
    for unchanged in (True, False):
        for index, (name, new) in enumerate(zip(names, cleaned, strict=True)):
            if fixed[index] is not None or (unchanged and new != name):
                continue
            if new in taken and not unchanged:
                new = f"{re.sub(r'[^a-zA-Z0-9_-]', '_', server_id)}_{new}"[:_NAME_LENGTH]
            if new and new not in taken:
                fixed[index] = new
                taken.add(new)
    return fixed


def _raw_name(raw: Any) -> str:
    function = _function(raw)
    name = function.get("name") if function else None
    return name if isinstance(name, str) else ""


def _function(raw: Any) -> Mapping[str, Any] | None:
    """The `function` of OpenAI's form, or the object itself where the wrapper is missing."""
    if not isinstance(raw, Mapping):
        return None
    function = raw.get("function", raw)
    return function if isinstance(function, Mapping) else None


def _tool(raw: Any, name: str) -> ToolSpec:
    function = _function(raw)
    assert function is not None  # it has a name
    description = function.get("description")
    description = " ".join(description.split()) if isinstance(description, str) else ""
    if not description:
        raise _Unmappable("no_description", "the description is missing or empty")
    if _is_vague(description, name):
        raise _Unmappable("vague_description", f"the description says no more than the name: {description!r}")
    schema = next((function[key] for key in ("parameters", "input_schema", "inputSchema") if key in function), None)
    if not isinstance(schema, Mapping) or not schema:
        raise _Unmappable("no_schema", "the tool document has no parameter schema; add one of type object")
    parameters = normal_schema(schema)
    if parameters.setdefault("type", "object") != "object":
        raise _Unmappable("not_an_object", f"the parameter schema is of type {parameters['type']!r}")
    parameters.setdefault("properties", {})
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise _Unmappable("invalid_schema", error.message[:200]) from None
    if unknown := [key for key in parameters.get("required", []) if key not in parameters["properties"]]:
        raise _Unmappable("invalid_schema", f"required parameter {unknown[0]!r} is not among the properties")
    return ToolSpec(name, description, parameters)


def _is_vague(description: str, name: str) -> bool:
    letters = re.sub(r"[\W_]+", "", description).casefold()
    if letters == re.sub(r"[\W_]+", "", name).casefold():
        return True
    chinese = len(re.findall(r"[\u4e00-\u9fff]", description))
    return len(description.split()) < 3 and chinese < 4


def normal_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without `$schema`, titles, references and null alternatives, with JSON Schema's type names.

    Raises:
        _Unmappable: recursive or foreign references, `allOf` of several, unknown types.
    """
    definitions = {
        f"#/{key}/{name}": value
        for key in ("$defs", "definitions")
        if isinstance(schema.get(key), Mapping)
        for name, value in schema[key].items()
    }
    normal = _normal(schema, definitions, ())
    assert isinstance(normal, dict)
    return normal


def _normal(schema: Any, definitions: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise _Unmappable("invalid_schema", f"a schema must be an object, found {schema!r:.80}")
    if len(trail) > _DEPTH:
        raise _Unmappable("recursive_schema", f"references nest deeper than {_DEPTH}")
    if "$ref" in schema:
        reference = schema["$ref"]
        if reference in trail:
            raise _Unmappable("recursive_schema", f"{reference} contains itself")
        if reference not in definitions:
            raise _Unmappable("foreign_reference", f"{reference!r} is not defined in the schema")
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _normal({**definitions[reference], **beside}, definitions, (*trail, reference))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _alternatives(schema, key, definitions, trail)
    normal: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("$schema", "$id", "$defs", "definitions", "$comment") or (key == "title" and isinstance(value, str)):
            continue
        if key == "properties" and isinstance(value, Mapping):
            normal[key] = {name: _normal(one, definitions, trail) for name, one in value.items()}
        elif key in ("items", "additionalProperties"):
            normal[key] = _normal(value, definitions, trail)
        elif key == "type":
            normal.update(_type(value))
        elif not (key == "default" and value is None):  # "default: null" goes with the null alternative
            normal[key] = value
    if isinstance(normal.get("required"), bool):  # draft 3 marked the property itself
        del normal["required"]
    return normal


def _alternatives(
    schema: Mapping[str, Any], key: str, definitions: Mapping[str, Any], trail: tuple[str, ...]
) -> dict[str, Any]:
    beside = {name: value for name, value in schema.items() if name != key}
    options = [_normal(option, definitions, trail) for option in schema[key]]
    options = [option for option in options if option != {"type": "null"}]
    if not options:
        raise _Unmappable("invalid_schema", f"{key} has no alternative but null")
    rest = _normal(beside, definitions, trail)
    if len(options) == 1:
        return {**options[0], **rest}
    if key == "allOf":
        raise _Unmappable("all_of", "allOf of several schemas has no simple normal form")
    return {**rest, "anyOf": options}


def _type(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        names = [name for name in value if name != "null"]
        if len(names) != 1:
            types = [_type(name).get("type") for name in names]
            return {"type": types} if all(types) and types else {}
        value = names[0]
    if not isinstance(value, str):
        raise _Unmappable("invalid_schema", f"type is {value!r:.80}")
    name = _SPELLINGS.get(value.lower(), value.lower())
    if name == "any":
        return {}
    if name not in _TYPES:
        raise _Unmappable("unknown_type", f"type {value!r} is not a JSON Schema type")
    return {"type": name}
