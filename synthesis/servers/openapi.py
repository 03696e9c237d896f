"""OpenAPI 3 documents as tools: each operation is one (OpenAPI Specification 3.0 and 3.1).

A tool's arguments are the path and query parameters and the JSON body. Headers and cookies are left out: they carry
credentials and negotiation, which are the caller's business, not the agent's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from synthesis.core.tool_schemas import brief
from synthesis.servers.collect import RejectedTool
from synthesis.servers.schemas import Unmappable, normal_schema, resolve

_METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_JSON = re.compile(r"(?:application|text|\*)/(?:json|\*|[\w.-]+\+json)\b|application/x-www-form-urlencoded\b")
"""Bodies that are an object of named values; forms are too."""
_JUMPS = 16


def openapi_tools(document: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[RejectedTool]]:
    """The document's operations in OpenAI's form, and those that have none.

    Operations are named by `operationId`, or else by method and path: `get_pets_petId`.

    Raises:
        Unmappable: `unknown_form`: the document has no paths.
    """
    paths = document.get("paths")
    if not isinstance(paths, Mapping):
        raise Unmappable("unknown_form", f"an OpenAPI document has `paths`, an object; found {brief(paths):.80}")
    tools: list[dict[str, Any]] = []
    rejected: list[RejectedTool] = []
    for path, item in paths.items():
        try:
            item = _followed(item, document)
        except Unmappable as problem:
            rejected.append(RejectedTool(str(path), problem.reason, problem.detail))
            continue
        for method in _METHODS:
            if method not in item:
                continue
            name = f"{method}_{re.sub(r'[^a-zA-Z0-9]+', '_', str(path)).strip('_')}"
            try:
                operation = _followed(item[method], document)
                given = operation.get("operationId")
                name = given if isinstance(given, str) and given else name
                parameters = _parameters(item.get("parameters"), operation, document)
            except Unmappable as problem:
                rejected.append(RejectedTool(name, problem.reason, problem.detail))
                continue
            function = {"name": name, "description": _description(operation, item), "parameters": parameters}
            tools.append({"type": "function", "function": function})
    return tools, rejected


def _followed(value: Any, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object itself, or the one it refers to."""
    for _ in range(_JUMPS):
        if not isinstance(value, Mapping):
            raise Unmappable("unknown_form", f"an OpenAPI document has an object here; found {brief(value):.80}")
        if "$ref" not in value:
            return value
        value = resolve(value["$ref"], document)
    raise Unmappable("recursive_schema", f"{brief(value):.80} is reached by more than {_JUMPS} references")


def _description(operation: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for text in (operation.get("summary"), operation.get("description") or item.get("description")):
        if isinstance(text, str) and (text := text.strip()) and text.casefold() not in "\n".join(parts).casefold():
            parts.append(text if text.endswith((".", "。", "!", "?")) else f"{text}.")
    return " ".join(parts)


def _parameters(shared: Any, operation: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """One object schema of the parameters and the body.

    Raises:
        Unmappable: `unsupported_body`: files and the like; or a schema without a normal form.
    """
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for listed in (shared, operation.get("parameters")):
        if listed is not None and not isinstance(listed, list):
            raise Unmappable("unknown_form", f"`parameters` is a list; found {brief(listed):.80}")
        for raw in listed or []:
            one = _followed(raw, document)
            if not isinstance(one.get("name"), str):
                raise Unmappable("unknown_form", f"a parameter has a name; found {brief(one.get('name')):.80}")
            place = one.get("in")
            # The operation's own takes the place of the path's.
            found[one["name"], place if isinstance(place, str) else ""] = one
    properties: dict[str, Any] = {}
    required: list[str] = []
    for (name, place), one in found.items():
        if place not in ("path", "query"):
            continue
        key = name if name not in properties else f"{name}_{place}"
        properties[key] = _described(one, document)
        if one.get("required") is True or place == "path":
            required.append(key)
    if operation.get("requestBody") is not None:
        _add_body(_followed(operation["requestBody"], document), document, properties, required)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _described(parameter: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    schema = parameter.get("schema")
    if schema is None:
        schema = _media_schema(parameter) or {}
    normal = normal_schema(schema, root=document) if isinstance(schema, Mapping) else {}
    description = parameter.get("description")
    if isinstance(description, str) and description.strip():
        normal["description"] = description.strip()
    return normal


def _media_schema(holder: Mapping[str, Any]) -> Any:
    """The schema of the JSON media type among `content`; None where there is none."""
    content = holder.get("content")
    for kind, media in content.items() if isinstance(content, Mapping) else ():
        if isinstance(kind, str) and _JSON.match(kind.lower()) and isinstance(media, Mapping):
            return media.get("schema", {})
    return None


def _add_body(
    body: Mapping[str, Any], document: Mapping[str, Any], properties: dict[str, Any], required: list[str]
) -> None:
    schema = _media_schema(body)
    must = body.get("required") is True
    if not isinstance(schema, Mapping):
        if not must and schema is None:
            return  # what may be left out is
        kinds = ", ".join(map(str, body["content"])) if isinstance(body.get("content"), Mapping) else "nothing"
        raise Unmappable("unsupported_body", f"the request body is {kinds:.100}, not JSON")
    normal = normal_schema(schema, root=document)
    inner = normal.get("properties")
    plain = set(normal) <= {"type", "properties", "required", "description", "additionalProperties", "examples"}
    if plain and isinstance(inner, dict) and inner and not set(inner) & set(properties):
        properties.update(inner)
        wanted = normal.get("required", [])
        if must and isinstance(wanted, list):  # what is no name is kept for the check of the whole schema
            required += [name for name in wanted if not isinstance(name, str) or name in inner]
    else:
        key = "body" if "body" not in properties else "request_body"
        properties[key] = normal
        required += [key] if must else []
