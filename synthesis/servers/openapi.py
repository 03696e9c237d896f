"""OpenAPI documents as tools: each operation is one (OpenAPI Specification 2.0, also called Swagger, 3.0 and 3.1).

A tool's arguments are the path and query parameters and the JSON body. Headers and cookies are left out: they carry
credentials and negotiation, which are the caller's business, not the agent's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from synthesis.core.parameter_forms import read_flag
from synthesis.core.schema_keywords import name_text
from synthesis.core.schemas import Unmappable, normal_schema, resolve
from synthesis.core.tool_schemas import brief
from synthesis.servers.collect import RejectedTool

_METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace", "query")
_BESIDE_METHODS = {"$ref", "summary", "description", "servers", "parameters"}
"""Fields of a path that are no operations."""
_PLACES = ("path", "query", "header", "cookie", "body", "formData")
"""Places of a parameter, in all versions of OpenAPI."""
JSON_MEDIA = re.compile(r"(?:application|text|\*)/(?:json|\*|[\w.*-]+\+json)(?![\w.+-])")
"""Media types of bodies that are JSON, ranges (`*/*`) among them."""
PATH_NAME = re.compile(r"\{[+*]?([^{}+*]+)[+*]?\}")
"""A parameter in a path, also one that gateways let have slashes (`{file+}`)."""
_FIELDS = re.compile(r"application/x-www-form-urlencoded\b")
_FORM = re.compile(r"multipart/form-data\b")
"""A form that may have files."""
_JUMPS = 16


def openapi_tools(document: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[RejectedTool]]:
    """Return the document's operations in OpenAI's form, and the rejected ones.

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
            item = followed(item, document)
        except Unmappable as problem:
            rejected.append(RejectedTool(str(path), problem.reason, problem.detail))
            continue
        for field in item:
            if field not in _METHODS and field not in _BESIDE_METHODS and not str(field).startswith("x-"):
                detail = f"{brief(field):.80} is not a field of a path; methods are {', '.join(_METHODS)}"
                rejected.append(RejectedTool(f"{field} {path}", "unknown_form", detail))
        for method in _METHODS:
            if method not in item:
                continue
            name = f"{method}_{re.sub(r'[^a-zA-Z0-9]+', '_', str(path)).strip('_')}"
            try:
                operation = followed(item[method], document)
                given = name_text(operation.get("operationId"))
                name = given if given and given not in names else name
                names.add(name)
                changes: dict[str, str] = {}
                declared = declared_parameters(str(path), item, operation, document, changes)
                parameters = _parameters(declared, operation, document, changes)
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


def followed(value: Any, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object itself, or the target of its reference, with the fields beside the reference.

    Raises:
        Unmappable: it is no object, or the reference leads nowhere.
    """
    beside: dict[str, Any] = {}
    for _ in range(_JUMPS):
        if not isinstance(value, Mapping):
            raise Unmappable("unknown_form", f"an OpenAPI document has an object here; found {brief(value):.80}")
        if "$ref" not in value:
            return {**value, **beside} if beside else value
        beside = {**{key: one for key, one in value.items() if key != "$ref"}, **beside}
        value = resolve(value["$ref"], document)
    raise Unmappable("recursive_schema", f"{brief(value):.80} is reached by more than {_JUMPS} references")


def _description(operation: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for text in (operation.get("summary"), operation.get("description") or item.get("description")):
        if isinstance(text, str) and (text := text.strip()) and text.casefold() not in "\n".join(parts).casefold():
            parts.append(text if text.endswith((".", "。", "!", "?")) else f"{text}.")
    return " ".join(parts)


def _topic(operation: Mapping[str, Any], path: str) -> str:
    """Return the operation's first tag, or the first part of its path that is a name."""
    tags = operation.get("tags")
    if isinstance(tags, list) and tags and isinstance(tags[0], str) and tags[0].strip():
        return tags[0]
    parts = [part for part in path.split("/") if part and not part.startswith("{")]
    return next((part for part in parts if not re.fullmatch(r"v\d[\w.]*|api|rest", part.lower())), "other")


def declared_parameters(
    path: str, item: Mapping[str, Any], operation: Mapping[str, Any], document: Mapping[str, Any],
    changes: dict[str, str],
) -> list[Mapping[str, Any]]:  # fmt: skip
    """Return the parameters of a path and its operation, in the order in which the tool has them.

    Each has a `name`, an `in` and `required`: true, false, or None where nothing says it. A name in braces in the path
    that no parameter has is a text (`path_parameter_added` in `changes`).

    Raises:
        Unmappable: `unknown_form`: a parameter has no name, is in no place that there is, or not in this path.
    """
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for listed in (item.get("parameters"), operation.get("parameters")):
        if listed is not None and not isinstance(listed, list):
            raise Unmappable("unknown_form", f"`parameters` is a list; found {brief(listed):.80}")
        for raw in listed or []:
            one = followed(raw, document)
            name, place = name_text(one.get("name")), one.get("in")
            if name is None:
                raise Unmappable("unknown_form", f"a parameter has a name; found {brief(one.get('name')):.80}")
            if place not in _PLACES:
                places = ", ".join(_PLACES)
                raise Unmappable("unknown_form", f"`in` of {name!r:.80} is {brief(place):.80}; use one of {places}")
            required = read_flag(one.get("required"))
            if required is None and one.get("required") is not None:
                given = brief(one["required"])
                raise Unmappable("unknown_form", f"`required` of {name!r:.80} is {given:.80}; write true or false")
            # The operation's own takes the place of the path's.
            found[name, place] = {**one, "name": name, "required": place == "path" or required}
    names = PATH_NAME.findall(path.partition("?")[0])
    if misplaced := [name for name, place in found if place == "path" and name not in names]:
        there = ", ".join(names) or "none"
        raise Unmappable("unknown_form", f"parameter {misplaced[0]!r:.80} is not in {path:.100}, which has {there:.80}")
    for name in names:
        if (name, "path") not in found:
            found[name, "path"] = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            changes["path_parameter_added"] = (
                f"{path:.150} has {{{name:.80}}}, which no parameter declares; it is a text"
            )
    return list(found.values())


def _parameters(
    declared: Sequence[Mapping[str, Any]],
    operation: Mapping[str, Any],
    document: Mapping[str, Any],
    changes: dict[str, str],
) -> dict[str, Any]:
    """One object schema of the parameters and the body.

    Raises:
        Unmappable: `unsupported_body`: files and the like; or a schema without a normal form.
    """
    properties: dict[str, Any] = {}
    made: dict[str, Any] = {"type": "object", "properties": properties, "required": []}
    for one in declared:
        name, place = one["name"], one["in"]
        if place == "body":  # OpenAPI 2.0's request body
            _add_body(one, one.get("schema"), document, made, changes)
        if place not in ("path", "query", "formData"):
            continue
        if place == "formData" and one.get("type") == "file":
            if not one["required"]:
                changes["body_left_out"] = f"the form's field {name!r:.80} may be left out, and is a file"
                continue
            raise Unmappable("unsupported_body", f"the form's field {name!r:.80} is a file")
        key = name if name not in properties else f"{name}_{place}"
        properties[key] = _described(one, document, changes)
        made["required"] += [key] if one["required"] else []
    if operation.get("requestBody") is not None:
        body = followed(operation["requestBody"], document)
        schema = _media_schema(body)
        if schema is None and isinstance(form := _media_schema(body, [_FORM]), Mapping):
            schema = None if _has_files(normal_schema(form, root=document)) else form
        _add_body(body, schema, document, made, changes)
    return {key: value for key, value in made.items() if key != "required" or value}


def _described(parameter: Mapping[str, Any], document: Mapping[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    schema = parameter.get("schema")
    if schema is None:
        schema = _media_schema(parameter, [re.compile("")])
    if schema is None:  # of OpenAPI 2.0: the parameter is its own schema
        schema = {key: value for key, value in parameter.items() if key not in ("name", "in", "required", "content")}
    normal = normal_schema(schema, root=document, changes=changes) if isinstance(schema, Mapping) else {}
    description = parameter.get("description")
    if isinstance(description, str) and description.strip():
        normal["description"] = description.strip()
    return normal


def _media_schema(holder: Mapping[str, Any], kinds: Sequence[re.Pattern[str]] = (JSON_MEDIA, _FIELDS)) -> Any:
    """Return the schema of the first kind of media type among `content`; None where there is none."""
    content = holder.get("content")
    for wanted in kinds:
        for kind, media in content.items() if isinstance(content, Mapping) else ():
            if isinstance(kind, str) and wanted.match(kind.lower()) and isinstance(media, Mapping):
                return media.get("schema", {})
    return None


def _has_files(form: Mapping[str, Any]) -> bool:
    """Return whether a form has a field that is a file."""
    fields = form.get("properties")
    several = [field.get("items", field) for field in fields.values() if isinstance(field, Mapping)] if fields else []
    return any(
        isinstance(one, Mapping) and (one.get("format") == "binary" or "contentMediaType" in one) for one in several
    )


def _add_body(
    body: Mapping[str, Any], schema: Any, document: Mapping[str, Any], made: dict[str, Any], changes: dict[str, str]
) -> None:
    """Add a request body to an object schema: its properties where it has any, or a property for the whole."""
    said = read_flag(body.get("required"))
    must = said is True
    if not isinstance(schema, Mapping):
        if not must and schema is None:
            changes["body_left_out"] = "the request body may be left out, and is not JSON"
            return
        kinds = ", ".join(map(str, body["content"])) if isinstance(body.get("content"), Mapping) else "nothing"
        raise Unmappable("unsupported_body", f"the request body is {kinds:.100}, not JSON")
    normal = normal_schema(schema, root=document, changes=changes)
    inner, properties, required = normal.get("properties"), made["properties"], made["required"]
    if said is None and normal.get("required"):  # a body without them is wrong, one with them is right either way
        must = True
        changes["body_required"] = f"nothing says if the body is required; it is, for {brief(normal['required']):.100}"
    plain = set(normal) <= {"type", "properties", "required", "description", "additionalProperties", "examples"}
    if plain and isinstance(inner, dict) and inner and not set(inner) & set(properties):
        properties.update(inner)
        wanted = normal.get("required", [])
        if must and isinstance(wanted, list):  # what is no name is kept for the check of the whole schema
            required += [name for name in wanted if not isinstance(name, str) or name in inner]
        elif wanted:
            changes["body_not_required"] = f"the request body may be left out, so {brief(wanted):.100} are optional"
        if normal.get("additionalProperties", False) is not False:
            made["additionalProperties"] = normal["additionalProperties"]
    else:
        key = "body" if "body" not in properties else "request_body"
        properties[key] = normal
        required += [key] if must else []
