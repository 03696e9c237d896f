"""Collect from registries: files of tool documents whose servers do not run here (paper 2.1.1).

What a record is, is found from its content:

- a row of a Smithery-style dump: `metadata.server_name`, `metadata.remote_server_response.tools`, `labels`;
- an OpenAPI document (`openapi` or `swagger`, `paths`);
- a RapidAPI document (`api_list`, as ToolBench's crawl writes it);
- a server as such: an object with `tools` (a list, or JSON of one), also the answer to MCP's `tools/list`; or with
  `functions`, `function` (BFCL), `functionDeclarations` (Gemini), `toolConfig` (Bedrock);
- a list of tools in any vendor's form (`synthesis.core.tool_documents`), or a tool a line, which are one server.

Files are JSON Lines (`.jsonl`, `.ndjson`: a record a line), JSON (`.json`, `.jsonc`: one record, or a list of them) or
YAML (`.yaml`, `.yml`: one record), each also with `.gz`; a folder stands for all such files in it.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.mirror import fetched
from synthesis.core.records import EmulatedExecution, Language
from synthesis.core.schemas import Unmappable
from synthesis.core.tool_documents import inner_tools, is_tool, listed_tools
from synthesis.core.tool_schemas import brief
from synthesis.pipeline.languages import NAMES, as_prose, language_of
from synthesis.servers.collect import RejectedTool, ServerDocument
from synthesis.servers.document_files import LINES, WHOLE, read_values, suffix
from synthesis.servers.openapi import openapi_tools

_DOMAIN = "other"
"""Domain of servers whose registry names none."""
_TEXT = 4_000
"""Characters that decide a server's language."""


_LICENCE = 200
"""Characters of a license's name at most."""


class RejectedServer(msgspec.Struct, frozen=True):
    """A record that gave no server: where it is (`file:number`), a reason that is counted, a line for a person."""

    place: str
    reason: str
    detail: str


@dataclass
class RegistryRead:
    """Result of reading a registry; `read == len(documents) + len(rejected)`, always."""

    read: int = 0
    documents: list[ServerDocument] = field(default_factory=list)
    rejected: list[RejectedServer] = field(default_factory=list)

    def reasons(self) -> Counter[str]:
        return Counter(record.reason for record in self.rejected)


def read_registries(paths: Iterable[Path | str], *, languages: Iterable[Language] = ("en", "zh")) -> RegistryRead:
    """Read the servers of all registries, in the order of files and records. Invalid content raises nothing.

    Args:
        paths: files or folders, also in a bucket; one that cannot be read is rejected as `registry_unreadable`, and the
            others go on.
        languages: servers in another language, by the words of their documents, are rejected as `other_language`.
    """
    result = RegistryRead()
    wanted = list(languages)
    for path, place, record in (found for root in paths for found in records_in(fetched(root))):
        result.read += 1
        try:
            if isinstance(record, Unmappable):
                raise record
            document = _document(record, path, place, wanted)
            if document.language not in wanted:
                raise Unmappable("other_language", f"server {document.id} is in {NAMES[document.language]}")
            result.documents.append(document)
        except Unmappable as problem:
            result.rejected.append(RejectedServer(place, problem.reason, problem.detail))
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Files


def records_in(root: Path) -> Iterator[tuple[Path, str, Any]]:
    """(file, place, record or why there is none), one after the other."""
    try:
        found = sorted(path for path in root.rglob("*") if path.is_file() and suffix(path)) if root.is_dir() else [root]
        if not found:
            raise Unmappable("registry_unreadable", f"{root}: no {', '.join((*LINES, *WHOLE))} in this folder")
    except (OSError, Unmappable) as error:
        yield root, root.name, Unmappable("registry_unreadable", str(error))
        return
    for path in found:
        try:
            yield from _file(path)
        except (OSError, EOFError, zlib.error, InputError) as error:  # also half-way: what came before counts
            hint = "; correct `tools`" if isinstance(error, FileNotFoundError) else ""
            yield path, path.name, Unmappable("registry_unreadable", f"{path.name}: {error}{hint}")


def _file(path: Path) -> Iterator[tuple[Path, str, Any]]:
    tools: list[Any] = []
    for number, value in read_values(path):
        if number is not None and is_tool(value):
            tools.append(value)
        elif number is not None:
            yield path, f"{path.name}:{number}", value
        elif isinstance(value, list) and value and not any(is_tool(one) for one in value):
            for place, record in enumerate(value, 1):
                yield path, f"{path.name}:{place}", record
        else:
            yield path, path.name, value
    if tools:  # a tool a line
        yield path, path.name, tools


# ---------------------------------------------------------------------------------------------------------------------
# Records


def _document(record: Any, path: Path, place: str, languages: Sequence[Language]) -> ServerDocument:
    """Return the server of one record.

    Args:
        languages: that it may be in, where its texts do not tell.

    Raises:
        Unmappable: `unknown_form`, `not_connected`, `no_tools`.
    """
    if isinstance(record, list) or is_tool(record):
        record = {"tools": record if isinstance(record, list) else [record]}
    if not isinstance(record, Mapping):
        raise Unmappable("unknown_form", f"a record is an object or a list of tools, found {brief(record):.80}")
    metadata = record.get("metadata")
    if isinstance(metadata, Mapping) and "remote_server_response" in metadata:
        server = _smithery(record, metadata)
    elif "openapi" in record or "swagger" in record:
        server = _openapi(record)
    elif "api_list" in record:
        server = _rapidapi(record)
    elif (tools := listed_tools(record)) is not None:
        server = _Server(
            _text(record.get("id")) or _text(record.get("name")),
            _text(record.get("title")) or _text(record.get("name")),
            _text(record.get("description")),
            _text(record.get("domain")) or _text(record.get("category")),
            tools,
        )
    else:
        keys = ", ".join(map(str, list(record)[:6]))
        raise Unmappable(
            "unknown_form",
            f"none of a Smithery row, OpenAPI, RapidAPI, or an object with `tools`; its keys: {keys:.150}",
        )
    if not isinstance(server.tools, list):
        raise Unmappable("unknown_form", f"`tools` is a list, found {brief(server.tools):.80}")
    server.tools = [inner for one in server.tools for inner in inner_tools(one)]
    if not server.tools and not server.rejected:
        raise Unmappable("no_tools", f"server {server.title or place} lists no tool")
    stem = path.name.split(".")[0]
    number = place.rpartition(":")[2] if ":" in place else ""
    own = "_".join(filter(None, (_slug(stem), number))) or "server"
    texts = [server.title, *(as_prose(text) for text in (server.description, *map(_words, server.tools)) if text)]
    return ServerDocument(
        _slug(server.id) or own,
        server.title or stem,
        server.description,
        server.domain or _DOMAIN,
        language_of(" ".join(texts)[:_TEXT], languages),
        server.tools,
        EmulatedExecution(),
        server.rejected,
        _license(record),
    )


def _license(record: Mapping[str, Any]) -> str:
    """Return the license that a record, its `info` (OpenAPI) or its `metadata` names: a text, or an object's name of
    it."""
    for place in (record, _object(record.get("info")), _object(record.get("metadata"))):
        for given in (place.get("license"), place.get("licence")):
            named = _object(given)
            texts = (given, named.get("spdx_id"), named.get("identifier"), named.get("name"), named.get("key"))
            if found := next((text for one in texts if (text := _text(one))), ""):
                return found[:_LICENCE]
    return ""


@dataclass
class _Server:
    """Common fields of all forms; texts are empty if the record has none."""

    id: str
    title: str
    description: str
    domain: str
    tools: Any
    rejected: list[RejectedTool] = field(default_factory=list)


def _smithery(record: Mapping[str, Any], metadata: Mapping[str, Any]) -> _Server:
    """Read a row of the crawl of smithery.ai. Only what the running server answered is taken: the tools in
    `server_info_crawled` were read off a web page, whose parameters are all texts and often not the server's.
    """
    response, labels = _object(metadata["remote_server_response"]), _object(record.get("labels"))
    info = _object(metadata.get("server_info_crawled"))
    title = _text(metadata.get("server_name"))
    if not response.get("tools") and not response.get("is_success", True):
        error = _text(response.get("error")) or "no reason given"
        raise Unmappable("not_connected", f"server {title}: the crawl could not connect: {error}")
    return _Server(
        _text(metadata.get("original_file")).rpartition("/")[2].removesuffix(".json") or title,
        title,
        _text(info.get("overview")),
        _text(labels.get("primary_label")),
        response.get("tools"),
    )


def _openapi(record: Mapping[str, Any]) -> _Server:
    version = record.get("openapi", record.get("swagger"))
    if not re.match(r"[23](?:\.|$)", str(version) if isinstance(version, str | int | float) else ""):
        raise Unmappable("unknown_form", f"OpenAPI version {brief(version):.20}; convert the document to version 3")
    info = _object(record.get("info"))
    tools, rejected = openapi_tools(record)
    categories = info.get("x-apisguru-categories")  # of the catalogue apis.guru
    category = categories[0] if isinstance(categories, list) and categories else ""
    return _Server(
        _text(info.get("title")), _text(info.get("title")), _text(info.get("description")), _text(category),
        tools, rejected,
    )  # fmt: skip


def _rapidapi(record: Mapping[str, Any]) -> _Server:
    name = _text(record.get("tool_name")) or _text(record.get("name"))
    listed = record["api_list"]
    tools = [_rapidapi_tool(one) for one in listed] if isinstance(listed, list) else listed
    return _Server(
        _text(record.get("standardized_name")) or name,
        _text(record.get("title")) or name,
        _text(record.get("tool_description")) or _text(record.get("description")),
        _text(record.get("category")),
        tools,
    )


def _rapidapi_tool(one: Any) -> Any:
    if not isinstance(one, Mapping):
        return one
    properties: dict[str, Any] = {}
    required: list[str] = []
    changes: dict[str, str] = {}
    unnamed: list[Any] = []
    for key in ("required_parameters", "optional_parameters"):
        listed = one.get(key) or []
        for parameter in listed if isinstance(listed, list) else [listed]:
            name = _text(_object(parameter).get("name"))
            if not name:
                unnamed.append(parameter)
            elif name in properties:
                changes["parameter_named_twice"] = f"{key} has {name!r:.80} again, which is left out"
            else:
                properties[name] = _rapidapi_parameter(parameter)
                required += [name] if key == "required_parameters" else []
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    function = {
        "name": one.get("name"),
        "description": one.get("description"),
        "parameters": unnamed or parameters,  # a list of what has no name rejects the tool
    }
    return {"type": "function", "function": function, "changes": changes}


_RAPIDAPI_TYPES = {"STRING": "string", "TEXT": "string", "NUMBER": "number", "INTEGER": "integer",
                   "BOOLEAN": "boolean", "ARRAY": "array", "LIST": "array", "OBJECT": "object", "JSON": "object",
                   "MAP": "object"}  # fmt: skip


def _rapidapi_parameter(parameter: Mapping[str, Any]) -> dict[str, Any]:
    """RapidAPI's types are upper-case, with more kinds of text (`DATE (YYYY-MM-DD)`, `ENUM`) than JSON Schema has."""
    kind = _text(parameter.get("type")).upper().split(" ")[0]
    schema: dict[str, Any] = {"type": _RAPIDAPI_TYPES.get(kind, "string")}
    if description := _text(parameter.get("description")):
        schema["description"] = description
    if (example := parameter.get("default")) not in ("", None):  # what the web page's form is filled with, no default
        schema["examples"] = [example]
    return schema


# ---------------------------------------------------------------------------------------------------------------------


def _words(tool: Any) -> str:
    found = _object(tool)
    function = _object(found.get("function", found.get("toolSpec", found)))
    return _text(function.get("description"))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def _slug(text: str) -> str:
    """Return a text in a form that can name files too."""
    return re.sub(r"[^a-z0-9_-]+", "_", text.lower()).strip("_-")[:60]
