"""Calls of OpenAPI operations: which part of a request each argument of a tool is, and how it is written there.

Parameters are encoded by `style` and `explode` (OpenAPI Specification 3.1, style values; `collectionFormat` of 2.0). A
value is always percent-encoded, so that a model that writes arguments cannot choose another path, query or host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

import msgspec

from astra_jax.base.errors import InputError
from synthesis.servers.openapi import JSON_MEDIA, PATH_NAME, declared_parameters, followed

JSON_BODY: Final = "application/json"
FORM_BODY: Final = "application/x-www-form-urlencoded"
FILES_BODY: Final = "multipart/form-data"
_RESERVED: Final = ":/?#[]@!$&'()*+,;="
_COLLECTIONS: Final[Mapping[str, tuple[str, bool]]] = {
    "csv": ("form", False), "ssv": ("spaceDelimited", False), "tsv": ("tabDelimited", False),
    "pipes": ("pipeDelimited", False), "multi": ("form", True),
}  # fmt: skip
_DELIMITERS: Final[Mapping[str, str]] = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C",
                                         "tabDelimited": "%09"}  # fmt: skip


FieldValue = str | int | float | bool | None
"""Value of a form's field in the HTTP client; ours are texts."""


class BadArgument(ValueError):
    """An argument that cannot be part of a request; the message names it."""


class ApiParameter(msgspec.Struct, frozen=True):
    """An argument that is part of the path or the query.

    Attributes:
        argument: the name that the tool has for it.
        name: the name that the API has for it.
        place: `path` or `query`.
        as_json: the value is written as JSON (`content` in place of `schema`).
        reserved: the query keeps reserved characters (`allowReserved`).
    """

    argument: str
    name: str
    place: str
    style: str
    explode: bool
    as_json: bool = False
    reserved: bool = False


class ApiOperation(msgspec.Struct, frozen=True):
    """One operation of an API.

    Attributes:
        method: in capitals.
        path: as the document has it, with `{name}` for parameters.
        parameters: of path and query.
        media: the type of the request body; "" where there is none.
        whole_body: the argument that is the whole body; "" where all other arguments are its fields.
        headers: required headers, with their only value; "" if the user must give it.
        url: the base URL that the document gives for it; "" where it gives none.
    """

    method: str
    path: str
    parameters: list[ApiParameter]
    media: str
    whole_body: str
    headers: dict[str, str]
    url: str

    @property
    def reads(self) -> bool:
        """True if the method promises to change nothing (RFC 9110, safe methods)."""
        return self.method in ("GET", "HEAD", "OPTIONS")


class ApiRequest(msgspec.Struct, frozen=True):
    """Content of a call's request: path and query after the base URL, and the fields or the whole of the body."""

    path: str
    query: str
    body: Any = msgspec.UNSET


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def operation_of(tool: Mapping[str, Any], document: Mapping[str, Any], *, address: str = "") -> ApiOperation:
    """Return the operation that a tool of `openapi_tools` stands for.

    Args:
        address: of the document, which relative URLs of servers are relative to.

    Raises:
        Unmappable: a part of the document is not of its form.
    """
    path, method = tool["operation"]
    item = followed(document["paths"][path], document)
    operation = followed(item[method], document)
    properties = tool["function"]["parameters"]["properties"]
    parameters: list[ApiParameter] = []
    headers: dict[str, str] = {}
    used: set[str] = set()
    for one in declared_parameters(path, item, operation, document, {}):
        name, place = one["name"], one["in"]
        if place == "header" and one["required"]:
            headers[name] = _only_value(one, document)
        if place in ("path", "query", "formData"):
            argument = name if name not in used else f"{name}_{place}"
            used.add(argument)
            if place != "formData":
                parameters.append(_parameter(one, argument))
    media, schema = _body(operation, document)
    left = [name for name in properties if name not in {one.argument for one in parameters}]
    whole = ""
    if left in (["body"], ["request_body"]) and left[0] not in (schema.get("properties") or {}):
        whole = left[0]
    return ApiOperation(
        method.upper(), PATH_NAME.sub(r"{\1}", path), parameters, media if left else "", whole, headers,
        _server_url(operation, item, document, address),
    )  # fmt: skip


def _parameter(one: Mapping[str, Any], argument: str) -> ApiParameter:
    place = one["in"]
    style = one.get("style") if isinstance(one.get("style"), str) else "simple" if place == "path" else "form"
    explode = one.get("explode") if isinstance(one.get("explode"), bool) else style == "form"
    if "schema" not in one and "content" not in one and place == "query":  # OpenAPI 2.0
        style, explode = _COLLECTIONS.get(str(one.get("collectionFormat")), ("form", False))
    return ApiParameter(
        argument, one["name"], place, str(style), bool(explode), "content" in one, one.get("allowReserved") is True
    )


def _only_value(header: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    schema = header.get("schema")
    schema = followed(schema, document) if isinstance(schema, Mapping) else header
    given = schema.get("enum")
    values = given if isinstance(given, list) else []
    value = schema.get("default", schema.get("const", values[0] if len(values) == 1 else ""))
    return value if isinstance(value, str) else json.dumps(value)


def _body(operation: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the media type of the body that is sent, and its schema, as far as references lead."""
    if operation.get("requestBody") is None:  # OpenAPI 2.0
        kinds = operation.get("consumes", document.get("consumes"))
        named = kinds if isinstance(kinds, list) else []
        return (next((one for one in (FORM_BODY, FILES_BODY) if one in named), JSON_BODY), {})
    content = followed(operation["requestBody"], document).get("content")
    content = content if isinstance(content, Mapping) else {}
    for wanted in (JSON_MEDIA, re.compile(re.escape(FORM_BODY)), re.compile(re.escape(FILES_BODY))):
        for kind, media in content.items():
            if isinstance(kind, str) and wanted.match(kind.lower()) and isinstance(media, Mapping):
                schema = media.get("schema")
                said = followed(schema, document) if isinstance(schema, Mapping) else {}
                return (JSON_BODY if "*" in kind else kind.lower()), said
    return JSON_BODY, {}


def _server_url(
    operation: Mapping[str, Any], item: Mapping[str, Any], document: Mapping[str, Any], address: str
) -> str:
    """Return the base URL that the document gives: the operation's, else the path's, else the document's."""
    for holder in (operation, item, document):
        listed = holder.get("servers")
        for server in listed if isinstance(listed, list) else ():
            url = server.get("url") if isinstance(server, Mapping) else None
            if isinstance(url, str):
                variables = server.get("variables")
                for name, one in (variables if isinstance(variables, Mapping) else {}).items():
                    if isinstance(one, Mapping) and isinstance(one.get("default"), str):
                        url = url.replace(f"{{{name}}}", one["default"])
                return urljoin(address, url) if address else url
    if isinstance(host := document.get("host"), str):  # OpenAPI 2.0
        schemes = document.get("schemes")
        scheme = "https" if not isinstance(schemes, list) or "https" in schemes else "http"
        base = document.get("basePath")
        return f"{scheme}://{host}{base if isinstance(base, str) else ''}"
    return ""


def check_url(url: str, where: str) -> str:
    """Return a base URL without a slash at its end.

    Raises:
        InputError: it is none of http or https, or has a query or a fragment.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "{" in url:
        raise InputError(f"{where}: url is {url!r:.200}; give the API's base URL, for example https://HOST/v1")
    return url.rstrip("/")


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def request_of(operation: ApiOperation, arguments: Mapping[str, Any]) -> ApiRequest:
    """Return what is sent for a call.

    Raises:
        BadArgument: an argument of the path is missing, empty, or would lead to another path.
    """
    path, pairs = operation.path, list[str]()
    left = dict(arguments)
    for one in operation.parameters:
        value = left.pop(one.argument, None)
        if one.place == "path":
            path = path.replace(f"{{{one.name}}}", _in_path(one, value))
        elif value is not None:
            pairs += _in_query(one, value)
    if not operation.media or not left:
        return ApiRequest(path, "&".join(pairs))
    body = left[operation.whole_body] if operation.whole_body else left
    return ApiRequest(path, "&".join(pairs), body)


def form_pairs(body: Any) -> list[tuple[str, FieldValue]]:
    """Return the fields of a form, a list's each by itself."""
    if not isinstance(body, Mapping):
        raise BadArgument("a form needs an object of fields")
    return [
        (name, _text(one)) for name, value in body.items() for one in (value if isinstance(value, list) else [value])
    ]


def _in_path(one: ApiParameter, value: Any) -> str:
    if value is None:
        raise BadArgument(f"{one.argument} is part of the path; give it")
    if one.as_json:
        return _encoded(_json(value))
    first, between = {"label": (".", "." if one.explode else ","), "matrix": (";", ";" if one.explode else ",")}.get(
        one.style, ("", ",")
    )
    name = quote(one.name, safe="") if one.style == "matrix" else ""
    if isinstance(value, Mapping) and value:
        parts = list(_members(value, explode=one.explode))
    elif isinstance(value, list) and value:
        parts = [f"{name}={_encoded(_text(item))}" if name and one.explode else _encoded(_text(item)) for item in value]
    else:
        parts = [_encoded(_text(value))]
        if name:
            return f";{name}={parts[0]}"
    if name and not one.explode:
        parts[0] = f"{name}={parts[0]}"
    text = first + between.join(parts)
    if text in ("", ".", ".."):
        raise BadArgument(f"{one.argument} is {value!r:.80}, which would lead to another path")
    return text


def _in_query(one: ApiParameter, value: Any) -> list[str]:
    name, safe = quote(one.name, safe="[]"), _RESERVED.replace("&", "").replace("#", "") if one.reserved else ""
    if one.as_json:
        return [f"{name}={_encoded(_json(value), safe)}"]
    if isinstance(value, Mapping):
        if one.style == "deepObject":
            return [f"{name}{key}={text}" for key, text in _deep(value, safe)]
        if one.explode:
            return list(_members(value, explode=True, safe=safe))
        return [f"{name}={','.join(_members(value, explode=False, safe=safe))}"]
    if isinstance(value, list):
        texts = [_encoded(_text(item), safe) for item in value]
        if one.explode:
            return [f"{name}={text}" for text in texts]
        return [f"{name}={_DELIMITERS.get(one.style, ',').join(texts)}"]
    return [f"{name}={_encoded(_text(value), safe)}"]


def _members(value: Mapping[str, Any], *, explode: bool, safe: str = "") -> Iterator[str]:
    for key, one in value.items():
        pair = _encoded(str(key), safe), _encoded(_text(one), safe)
        yield from (["=".join(pair)] if explode else pair)


def _deep(value: Mapping[str, Any], safe: str) -> Iterator[tuple[str, str]]:
    for key, one in value.items():
        place = f"[{_encoded(str(key))}]"
        if isinstance(one, Mapping):
            yield from ((f"{place}{inner}", text) for inner, text in _deep(one, safe))
        else:
            for item in one if isinstance(one, list) else [one]:
                yield place, _encoded(_text(item), safe)


def _encoded(text: str, safe: str = "") -> str:
    return quote(text.encode("utf-8", "replace"), safe=safe)


def _text(value: Any) -> str:
    """Return a value as APIs spell it in addresses and forms: texts as they are, anything else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
