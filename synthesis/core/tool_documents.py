"""Documents of tools in any vendor's form: where a tool, its name and its parameters are in them.

{"type": "function", "function": {"name": …, "parameters": {…}}}    OpenAI
{"name": …, "input_schema": {…}}                                    Anthropic; MCP's `inputSchema`
{"functionDeclarations": [{"name": …, "parameters": {…}}]}          Gemini
{"toolSpec": {"name": …, "inputSchema": {"json": {…}}}}             Amazon Bedrock
{"name": …, "args": {"city": {"type": "string"}}}                   LangChain; smolagents' `inputs`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from astra_jax.base.nesting import check_nesting
from synthesis.core.schemas import Unmappable
from synthesis.core.tool_schemas import brief

PARAMETER_KEYS = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema",
               "parameter_definitions", "inputs", "args_schema", "args", "arguments", "params")  # fmt: skip
"""Keys of a tool's parameters in tool documents: OpenAI, Anthropic, MCP, Gemini, Cohere, smolagents, LangChain."""
WRAPPER_KEYS = ("function", "toolSpec", "tool_spec")
"""Keys of objects that wrap a tool: OpenAI, Amazon Bedrock."""
_SCHEMA_WRAPPERS = ("json", "jsonSchema", "schema")
"""Keys of objects that wrap a tool's parameters: Amazon Bedrock, AI SDK."""


HOLDER_KEYS = ("tools", "functions", "functionDeclarations", "function_declarations", "function")
"""Keys of the tools in a record, or in a group of tools within it."""


def listed_tools(record: Mapping[str, Any]) -> Any:
    """Return a record's tools, whatever they are; None where it has none of the names that they have."""
    for place in (record, _mapping(record.get("result")), _mapping(record.get("toolConfig"))):
        for key in HOLDER_KEYS:
            if key in place and (key != "function" or isinstance(place[key], list)):
                return opened_text(place[key])
    return None


def inner_tools(tool: Any) -> list[Any]:
    """Return the tools of a group of them (Gemini's declarations, OpenAI's name spaces), or the tool itself."""
    found = _mapping(tool)
    groups = [found[key] for key in HOLDER_KEYS if isinstance(found.get(key), list)]
    return groups[0] if groups and not has_parameters(found) else [opened_text(tool)]


def opened_text(value: Any) -> Any:
    """Return the value of a text that is JSON, as tables of data sets hold it; others as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return check_nesting(msgspec.json.decode(value))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return value


def is_tool(value: Any) -> bool:
    """Return whether a value is the document of a tool, and no group of them."""
    if not isinstance(value, Mapping):
        return False
    if any(isinstance(value.get(key), Mapping) for key in ("function", "toolSpec")):
        return True
    return "name" in value and (has_parameters(value) or "description" in value) and listed_tools(value) is None


def has_parameters(value: Mapping[str, Any]) -> bool:
    """Return whether an object has parameters where tool documents have them."""
    return any(key in value for key in PARAMETER_KEYS)


def tool_function(raw: Any) -> Mapping[str, Any] | None:
    """Return the tool that stands in a wrapper, or the object itself where there is none."""
    if not isinstance(raw, Mapping):
        return None
    function = next((raw[key] for key in WRAPPER_KEYS if key in raw), raw)
    return function if isinstance(function, Mapping) else None


def tool_parameters(function: Mapping[str, Any]) -> Any:
    """Return a tool's parameters as its document has them; None where it has none.

    Raises:
        Unmappable: `no_schema`: they are there under a name that nobody knows.
    """
    every = [function[key] for key in PARAMETER_KEYS if function.get(key) is not None]
    given = next((one for one in every if not _says_nothing(one)), every[0] if every else None)
    if given is None and isinstance(function.get("properties"), Mapping):
        given = {key: function[key] for key in ("properties", "required", "additionalProperties") if key in function}
        return {"type": "object", **given}
    if given is None:
        named = [key for key in function if isinstance(key, str) and re.search("param|arg|input|schema", key.lower())]
        odd = [key for key in named if function[key] and not re.search("out|return|resp|result", key.lower())]
        if odd:
            raise Unmappable("no_schema", f"{odd[0]!r:.80} is no name for parameters; call them `parameters`")
        if isinstance(kind := function.get("type"), str) and kind not in ("function", "tool"):
            raise Unmappable("no_schema", f"a tool of type {kind!r:.80} has its arguments elsewhere; add `parameters`")
    if isinstance(given, str):  # tables of data sets hold JSON texts
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise Unmappable("no_schema", f"the parameters are {brief(given):.80}, a text that is no JSON") from None
    while isinstance(given, Mapping) and len(given) == 1:
        inner = next((given[key] for key in _SCHEMA_WRAPPERS if key in given), None)
        if not isinstance(inner, Mapping) or not (
            isinstance(inner.get("properties"), Mapping) or inner == {"type": "object"}
        ):
            break
        given = inner
    return given


def _says_nothing(parameters: Any) -> bool:
    """Return whether parameters are none, so that those under another name count."""
    named = parameters.get("properties", parameters) if isinstance(parameters, Mapping) else parameters
    return named in ({}, [], "")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
