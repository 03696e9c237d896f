"""OpenAPI documents as tools: each operation is one (OpenAPI Specification 2.0, also called Swagger, 3.0 and 3.1).

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
_FORM = re.compile(r"multipart/form-data\b")
"""A form that may have files."""
_JUMPS = 16


def openapi_tools(document: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[RejectedTool]]:
    """The document's operations in OpenAI's form, and those that have none.

    Operations are named by `operationId`, or else, also where an earlier one has the same, by method and path:
    `get_pets_petId`.

    Raises:
        Unmappable: `unknown_form`: the document has no paths.
    """
    paths = document.get("paths")
    if not isinstance(paths, Mapping):
        raise Unmappable("unknown_form", f"an OpenAPI document has `paths`, an object; found {brief(paths):.80}")
    tools: list[dict[str, Any]] = []
    rejected: list[RejectedTool] = []
    names: set[str] = set()
    for path, item in paths.items():
        if isinstance(path, str) and path.startswith("x-"):
            continue
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
                name = given if isinstance(given, str) and given and given not in names else name
                names.add(name)
                changes: dict[str, str] = {}
                parameters = _parameters(item.get("parameters"), operation, document, changes)
            except Unmappable as problem:
                rejected.append(RejectedTool(name, problem.reason, problem.detail))
                continue
            function = {"name": name, "description": _description(operation, item), "parameters": parameters}
            topic = _topic(operation, str(path))
            tools.append(
                {
                    "type": "function",
                    "function": function,
                    "topic": topic,
                    "changes": changes,
                    "operation": (path, method),
                }
            )
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


def _topic(operation: Mapping[str, Any], path: str) -> str:
    """The operation's first tag, or the first part of its path that is a name."""
    tags = operation.get("tags")
    if isinstance(tags, list) and tags and isinstance(tags[0], str) and tags[0].strip():
        return tags[0]
    parts = [part for part in path.split("/") if part and not part.startswith("{")]
    return next((part for part in parts if not re.fullmatch(r"v\d[\w.]*|api|rest", part.lower())), "other")


def _parameters(
    shared: Any, operation: Mapping[str, Any], document: Mapping[str, Any], changes: dict[str, str]
) -> dict[str, Any]:
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
        if place == "body":  # OpenAPI 2.0's request body
            _add_body(one, one.get("schema"), document, properties, required, changes)
        if place not in ("path", "query", "formData"):
            continue
        if place == "formData" and one.get("type") == "file":
            if one.get("required") is not True:
                changes["body_left_out"] = f"the form's field {name!r:.80} may be left out, and is a file"
                continue
            raise Unmappable("unsupported_body", f"the form's field {name!r:.80} is a file")
        key = name if name not in properties else f"{name}_{place}"
        properties[key] = _described(one, document, changes)
        if one.get("required") is True or place == "path":
            required.append(key)
    if operation.get("requestBody") is not None:
        body = _followed(operation["requestBody"], document)
        schema = _media_schema(body)
        if schema is None and isinstance(form := _media_schema(body, _FORM), Mapping):
            schema = None if _has_files(normal_schema(form, root=document)) else form
        _add_body(body, schema, document, properties, required, changes)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _described(parameter: Mapping[str, Any], document: Mapping[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    schema = parameter.get("schema")
    if schema is None:
        schema = _media_schema(parameter)
    if schema is None:  # of OpenAPI 2.0: the parameter is its own schema
        schema = {key: value for key, value in parameter.items() if key not in ("name", "in", "required", "content")}
    normal = normal_schema(schema, root=document, changes=changes) if isinstance(schema, Mapping) else {}
    description = parameter.get("description")
    if isinstance(description, str) and description.strip():
        normal["description"] = description.strip()
    return normal


def _media_schema(holder: Mapping[str, Any], kinds: re.Pattern[str] = _JSON) -> Any:
    """The schema of the media type among `content`; None where there is none."""
    content = holder.get("content")
    for kind, media in content.items() if isinstance(content, Mapping) else ():
        if isinstance(kind, str) and kinds.match(kind.lower()) and isinstance(media, Mapping):
            return media.get("schema", {})
    return None


def _has_files(form: Mapping[str, Any]) -> bool:
    """Whether a form has a field that is a file."""
    fields = form.get("properties")
    several = [field.get("items", field) for field in fields.values() if isinstance(field, Mapping)] if fields else []
    return any(
        isinstance(one, Mapping) and (one.get("format") == "binary" or "contentMediaType" in one) for one in several
    )


def _add_body(
    body: Mapping[str, Any], schema: Any, document: Mapping[str, Any], properties: dict[str, Any],
    required: list[str], changes: dict[str, str],
) -> None:  # fmt: skip
    must = body.get("required") is True
    if not isinstance(schema, Mapping):
        if not must and schema is None:
            changes["body_left_out"] = "the request body may be left out, and is not JSON"
            return
        kinds = ", ".join(map(str, body["content"])) if isinstance(body.get("content"), Mapping) else "nothing"
        raise Unmappable("unsupported_body", f"the request body is {kinds:.100}, not JSON")
    normal = normal_schema(schema, root=document, changes=changes)
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
