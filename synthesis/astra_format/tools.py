"""The tools of a row: in which column, or in which part of the system message they stand, in any vendor's form.

Documents are read by `synthesis.core.tool_documents`. A tool whose parameters are a JSON schema stays as it is given,
so that training shows what a server will show; parameters in another form become one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from synthesis.astra_format.records import Defect, spec_of
from synthesis.core.chat_format import decoded
from synthesis.core.chatml import CALL_END, TOOLS_FOOTER, TOOLS_HEADER
from synthesis.core.loose_json import read_loosely
from synthesis.core.openai_messages import text_of
from synthesis.core.records import Message, ToolSpec
from synthesis.core.schemas import Unmappable, object_schema
from synthesis.core.stages import Rejected
from synthesis.core.tool_documents import (
    has_parameters,
    inner_tools,
    is_tool,
    listed_tools,
    tool_function,
    tool_parameters,
)
from synthesis.core.tool_schemas import KEYWORDS, TYPES

TOOL_COLUMNS = (
    "tools", "functions", "tool_defs", "tool_definitions", "tools_json", "tools_list", "tool_list", "tool_schemas",
    "tool_specs", "available_tools", "available_functions", "function_definitions", "function_defs", "function_schemas",
    "functions_json", "function_list", "tool_schema", "toolset", "tool_config", "toolConfig",
)  # fmt: skip
"""Columns that hold a row's tools; a row has one of them."""
_TOOLS_ALONE = ("tools", "functions")
"""Columns that hold only tools; in the other columns, names of tools are metadata."""
_MEANS_NULL = ("default", "const")
"""Keywords of a schema for which null is a value, and not filled in by a columnar file."""
_HOLD_SCHEMAS = ("properties", "$defs", "definitions")
_ARE_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "propertyNames")
_OPEN_KEYS = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "additionalProperties")
"""Keys by which a schema without properties takes arguments all the same."""
_TAGS = ("<tools>", "</tools>")
_HOW_TO_CALL = ("Use the following pydantic model json schema for each tool call", "For each function call")
"""Text that Hermes and Qwen write after the tools, up to an example of a call."""
_SENTENCE = re.compile(r"(?<=[.!?:])\s|\n")
_BRACKET = re.compile(r"[\[{]")
_MOST_BRACKETS = 64
"""Places of a system message at which JSON is looked for."""
_MOST_BETWEEN = 12
"""Characters between two tools of a list, such as the number of the next."""


# ---------------------------------------------------------------------------------------------------------------------
# Columns


def tools_column(row: Mapping[str, Any]) -> list[Any]:
    """Return the documents of the tools that a row lists in a column.

    Raises:
        Rejected: `bad_record`: columns that say different things, or a column that holds no tools.
    """
    given = {
        name: documents_in(row[name], f"column {name}")
        for name in TOOL_COLUMNS
        if row.get(name) and (name in _TOOLS_ALONE or not _are_words(row[name]))
    }
    (first, documents), *others = list(given.items()) or [("", [])]
    if different := next((name for name, one in others if one != documents), ""):
        raise Rejected("bad_record", f"the columns {first} and {different} hold different tools; remove one of them")
    return documents


def _are_words(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(one, str) and not one.lstrip().startswith(("[", "{")) for one in texts)


def documents_in(value: Any, where: str) -> list[Any]:
    """Return the documents of tools that a value holds: a list, a tool, groups of tools, tools by name; or their JSON.

    Raises:
        Rejected: `bad_record`: it holds none; `where` says which value it is.
    """
    if isinstance(value, str):
        value = _of_text(value, where)
    if isinstance(value, Mapping) and not is_tool(value):
        named = [{"name": name, **one} for name, one in value.items() if isinstance(one, Mapping)]
        held = listed_tools(value)
        value = held if held is not None else named if len(named) == len(value) else None
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise Rejected("bad_record", f"{where}: wants a list of tools, and is {value!r:.80}")
    opened = [_of_text(one, where) if isinstance(one, str) else one for one in value]
    return [_without_nulls(tool) for one in opened for group in inner_tools(one) for tool in inner_tools(group)]


def _of_text(text: str, where: str) -> Any:
    """Return the JSON value of a text, or the list of its JSON values in a row."""
    try:
        return read_loosely(text)[0]
    except (ValueError, RecursionError) as error:
        problem = error
    values, place = [], 0
    while rest := text[place:].lstrip(" \t\r\n,"):
        try:
            value, place = decoded(text, len(text) - len(rest))
        except (ValueError, RecursionError):
            raise Rejected("bad_record", f"{where}: its tools are no JSON ({problem}): {text!r:.80}") from None
        values.append(value)
    return values


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {name: one for name, one in schema.items() if one is not None or name in _MEANS_NULL}
        return {name: one if name in _MEANS_NULL else _without_nulls(one) for name, one in kept.items()}
    return [_without_nulls(one) for one in schema] if isinstance(schema, list) else schema


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def read_tools(documents: Iterable[Any]) -> tuple[list[ToolSpec], list[Defect]]:
    """Return the tools of documents, and what is wrong with them.

    `bad_schema` (a tool that is left out), `colliding_names` (two share a name; the first is kept), `tools_rewritten`
    (parameters in another form are read as a JSON schema).
    """
    tools: dict[str, ToolSpec] = {}
    defects: list[Defect] = []
    for document in documents:
        try:
            spec, change = _read(document)
        except Rejected as rejection:
            defects.append(Defect(rejection.reason, rejection.detail))
            continue
        if spec.name in tools:
            defects.append(Defect("colliding_names", f"two tools share the name {spec.name}"))
            continue
        tools[spec.name] = spec
        if change:
            defects.append(Defect("tools_rewritten", f"{spec.name}: {change}"))
    return list(tools.values()), defects


def _read(document: Any) -> tuple[ToolSpec, str]:
    """Return the tool, and how its parameters were changed. Raises `Rejected`: `bad_schema`."""
    function = tool_function(document) or {}
    name, changes = function.get("name"), dict[str, str]()
    try:
        given = tool_parameters(function)
        plain = given is None or _is_plain(given)
        parameters = (
            (given or {}) if plain else object_schema(given, required=function.get("required"), changes=changes)
        )
    except Unmappable as problem:
        raise Rejected("bad_schema", f"{name}: {problem.detail}") from None
    spec = spec_of({"name": name, "description": function.get("description"), "parameters": parameters})
    # Environments need `required` to be there; here a tool stays as it was given.
    kept = {key: value for key, value in spec.parameters.items() if key in parameters or key != "required"}
    said = "" if plain else "; ".join(changes.values()) or "types are spelled as JSON schema spells them"
    return msgspec.structs.replace(spec, parameters=kept), said


def _is_plain(given: Any) -> bool:
    """Return whether parameters are a JSON schema of an object, with JSON schema's names of types."""
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        return False
    if "properties" not in given:
        return all(name in KEYWORDS or name.startswith(("$", "x-")) or name in _OPEN_KEYS for name in given)
    return isinstance(given["properties"], Mapping) and all(_has_json_types(one) for one in _inner(given))


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _HOLD_SCHEMAS:
        if isinstance(schema.get(key), Mapping):
            yield from schema[key].values()
    for key in _ARE_SCHEMAS:
        if isinstance(one := schema.get(key), Mapping | list):
            yield from one if isinstance(one, list) else [one]


def _has_json_types(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return isinstance(schema, bool)
    kind = schema.get("type", "object")
    names = kind if isinstance(kind, list) else [kind]
    return all(isinstance(one, str) and one in TYPES for one in names) and all(map(_has_json_types, _inner(schema)))


def without_parameters(tools: Sequence[ToolSpec], messages: Sequence[Message]) -> Iterator[Defect]:
    """Yield `no_parameters` for each tool that lists none and is called with arguments."""
    bare = {one.name for one in tools if not one.parameters.get("properties")}
    bare -= {one.name for one in tools if any(one.parameters.get(key) for key in _OPEN_KEYS)}
    for number, message in enumerate(messages):
        for call in message.tool_calls:
            given = [name for name, value in call.arguments.items() if value is not None]
            if call.name in bare and given:
                bare.remove(call.name)
                detail = f"tool {call.name} lists no parameters, and message {number} calls it with {given[0]}"
                yield Defect("no_parameters", f"{detail}; add its parameters, a JSON schema")


# ---------------------------------------------------------------------------------------------------------------------
# The system message


def take_from_system(
    messages: Sequence[Any], listed: Sequence[ToolSpec]
) -> tuple[list[Any], list[ToolSpec], list[Defect]]:
    """Take the tools out of a system message that lists them, since chat formats list a conversation's tools.

    They are taken from between <tools> and </tools>, as in Hermes and Qwen, or from JSON that can only be tools. They
    must be the tools that the row lists in a column, or it must list none.

    Args:
        listed: the tools of the row's columns.

    Returns:
        The messages, the row's tools, and `tools_in_system` or `tools_stay_in_system` with the reason.
    """
    first = messages[0] if messages else None
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return [*messages], [*listed], []
    text = text_of(first.get("content"))
    try:
        found = _in_tags(text) or _in_json(text)
    except Rejected as rejection:
        return [*messages], [*listed], [Defect("tools_stay_in_system", rejection.detail)]
    if found is None:
        return [*messages], [*listed], []
    documents, rest = found
    tools, defects = read_tools(documents)
    names = [tool.name for tool in tools]
    if listed and sorted(names) != sorted(tool.name for tool in listed):
        detail = f"the system message lists {', '.join(names)}, and a column lists other tools"
        return [*messages], [*listed], [Defect("tools_stay_in_system", detail)]
    several = f"{len(tools)} tool{'' if len(tools) == 1 else 's'} ({', '.join(names)})"
    detail = f"{several} taken out of the system message, which is now {rest!r:.200}"
    kept = [{**first, "content": rest}] if rest else []
    return [*kept, *messages[1:]], [*listed] or tools, [Defect("tools_in_system", detail), *([] if listed else defects)]


def _in_tags(text: str) -> tuple[list[Any], str] | None:
    """Return the documents between <tools> and </tools>, and the text without them and the call instructions."""
    first, last = _TAGS
    begin = end = -1
    while (begin := text.find(first, end + 1)) >= 0 and (end := text.find(last, begin)) >= 0:
        if body := text[begin + len(first) : end].strip():
            break
    if begin < 0 or end < 0:
        return None
    documents = documents_in(body, f"the system message, between {first} and {last}")
    header, footer = TOOLS_HEADER.removesuffix(first), TOOLS_FOOTER.removeprefix(f"\n{last}")
    before, after = text[:begin], text[end + len(last) :]
    if before.endswith(header):
        before = before.removesuffix(header)
    else:
        place, pieces = 0, []
        for found in [*_SENTENCE.finditer(before), None]:
            piece = before[place : found.end() if found else len(before)]
            place += len(piece)
            pieces += [piece] if first not in piece else []
        before = _without_opening("".join(pieces))
    if after.startswith(footer):
        after = after.removeprefix(footer)
    elif after.lstrip().startswith(_HOW_TO_CALL) and CALL_END in after:
        after = after.rpartition(CALL_END)[2]
    return documents, "\n\n".join(filter(None, (before.strip(), after.strip())))


def _in_json(text: str) -> tuple[list[Any], str] | None:
    """Return the tools that stand in a text as JSON in one place, and the text without them."""
    documents: list[Any] = []
    begin = end = place = 0
    for _ in range(_MOST_BRACKETS):
        if not (found := _BRACKET.search(text, place)):
            break
        try:
            value, place = decoded(text, found.start())
        except (ValueError, RecursionError):
            place = found.end()
            continue
        inner = [tool for one in (value if isinstance(value, list) else [value]) for tool in inner_tools(one)]
        if not inner or not all(map(_is_certain, inner)):
            continue
        if documents and len(text[end : found.start()].strip()) > _MOST_BETWEEN:
            return None
        begin = begin if documents else found.start()
        documents += inner
        end = place
    if not documents:
        return None
    rest = (_without_opening(text[:begin]).strip(), text[end:].strip())
    return [_without_nulls(one) for one in documents], "\n\n".join(filter(None, rest))


def _is_certain(value: Any) -> bool:
    """Return whether an object can be nothing but a tool; a call has a name and arguments as well."""
    function = tool_function(value)
    if not function or not isinstance(function.get("name"), str):
        return False
    if isinstance(value.get("function"), Mapping) and value.get("type") == "function":
        return "arguments" not in function
    parameters = function.get("parameters", function.get("input_schema", function.get("inputSchema")))
    has_schema = isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping)
    return has_schema or (isinstance(function.get("description"), str) and has_parameters(function))


def _without_opening(text: str) -> str:
    """Return a text without the sentence at its end that only opens a list: it ends in a colon or a dash."""
    body = text.rstrip()
    if not body.endswith((":", "-")):
        return text
    sentences = [found.end() for found in _SENTENCE.finditer(body)]
    return body[: sentences[-1]] if sentences else ""
