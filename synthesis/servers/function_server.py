"""Python functions as an MCP server over stdio: `python -m synthesis.servers.function_server my_module:my_tools`.

`my_tools` is a function, a LangChain tool, or a list of them. A function's docstring and annotations are its document
(the MCP SDK makes it, by pydantic; `Annotated[str, Field(description="…")]` describes a parameter). What a function
returns is its result, a text or JSON; what it raises is an error that the agent sees.

Functions run in this process, with the rights and the environment of the user who started the run. They run in the
folder that the run was started in. Runs call them at the same time; functions that are not `async` run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from mcp.server.lowlevel import Server
from mcp.server.mcpserver.utilities.context_injection import find_context_parameter
from mcp.server.mcpserver.utilities.func_metadata import func_metadata
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool
from pydantic import TypeAdapter

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import first_line
from astra_jax.base.terminal import protect_streams, say
from synthesis.core.references import OWN_FOLDER, referred
from synthesis.servers.collect import RejectedTool

_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_CALLED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class FunctionTool:
    """A function that agents may call.

    Attributes:
        document: name, description and parameters, for MCP.
        call: runs it with the arguments that a model wrote. Raises what the function raises.
        origin: a module's object, in whose file its code is.
    """

    document: Tool
    call: Callable[[dict[str, Any]], Awaitable[Any]]
    origin: Any


@dataclass(frozen=True)
class OwnTools:
    """Tools of a server in this process.

    Attributes:
        description: of all tools together, a line; "" if there is none.
        made_of: the content that tools are read from; the tools change only with it.
        rejected: functions that cannot be tools, and why.
    """

    tools: Sequence[FunctionTool]
    description: str
    made_of: bytes
    rejected: Sequence[RejectedTool] = ()


class ToolFailed(Exception):
    """A call failed; the agent is shown the message as it is."""


def function_tools(reference: str) -> list[FunctionTool]:
    """Return the tools that a reference names.

    Raises:
        InputError: it names no functions, or one that no document can be made of.
    """
    found = referred(reference)
    several = isinstance(found, Iterable) and not (callable(found) or _is_langchain(found))
    tools = [_tool(one, reference) for one in (found if several else [found])]
    if not tools:
        raise InputError(f"{reference} holds no functions")
    names = [tool.document.name for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{reference}: two tools have the name {repeated[0]!r}; rename one")
    return tools


def _tool(given: Any, reference: str) -> FunctionTool:
    name = getattr(given, "name", None) if _is_langchain(given) else getattr(given, "__name__", None)
    where = f"{reference}: {name or type(given).__name__}"
    try:
        if _is_langchain(given):
            schema = _langchain_schema(given, where)
            document = Tool(name=given.name, description=given.description, input_schema=_object(schema))
            return FunctionTool(document, given.ainvoke, type(given))
        if not callable(given) or inspect.isclass(given) or not isinstance(name, str):
            raise InputError(f"{where} is a {type(given).__name__}; give functions with `def`, or LangChain tools")
        if not (about := inspect.getdoc(given)):
            raise InputError(f"{where} has no docstring, which is what the agent reads of it; write one")
        parameters = inspect.signature(given).parameters.values()
        if unnamed := [str(one) for one in parameters if one.kind not in _CALLED_BY_NAME]:
            raise InputError(f"{where}: parameter {unnamed[0]!r} cannot be given by name; write named parameters")
        if context := find_context_parameter(given):
            raise InputError(f"{where}: parameter {context!r} is MCP's Context, which no run has; remove it")
        metadata = func_metadata(given, structured_output=False)
        schema = metadata.arg_model.model_json_schema(by_alias=True)
        for one in parameters:
            if one.annotation is one.empty:  # the SDK says text, and validates nothing
                schema["properties"][one.name].pop("type", None)
        is_async = inspect.iscoroutinefunction(given)
        # The SDK puts `field_` before names that pydantic's models have themselves.
        known = metadata.arg_model.model_fields
        fields = {one.name: one.name if one.name in known else f"field_{one.name}" for one in parameters}

        async def call(arguments: dict[str, Any]) -> Any:
            # Not `validate_arguments`, which reads texts that are JSON: "null" for `str | None` is a text.
            valid = metadata.arg_model.model_validate(arguments)
            named = {one.name: getattr(valid, fields[one.name]) for one in parameters}  # whatever alias they have
            result = await metadata.call_fn(given, is_async, named)
            return [one async for one in result] if inspect.isasyncgen(result) else result

        return FunctionTool(Tool(name=name, description=about, input_schema=_object(schema)), call, given)
    except InputError:
        raise
    except Exception as error:  # whatever annotations of one's own raise
        raise InputError(
            f"{where}: no document can be made of it ({type(error).__name__}: {first_line(error)})"
        ) from error


def _is_langchain(given: Any) -> bool:
    """Return whether it is a tool of LangChain, by the attributes of such a tool."""
    return all(hasattr(given, name) for name in ("name", "description", "tool_call_schema", "ainvoke"))


def _langchain_schema(tool: Any, where: str) -> dict[str, Any]:
    """Return the schema of the arguments that a model gives. Raises `InputError`: the tool needs others too."""
    if tool.args_schema is None:  # `Tool` of a function of one text has a schema of its own methods
        needed = [name for name, one in tool.args.items() if "default" not in one]
        return {"type": "object", "properties": tool.args, "required": needed}
    described = tool.tool_call_schema
    if isinstance(described, dict):
        return described
    schema: dict[str, Any] = described.model_json_schema()
    needed = tool.get_input_schema().model_json_schema().get("required", [])
    if injected := [name for name in needed if name not in schema.get("properties", {})]:
        raise InputError(f"{where}: {injected[0]!r} is injected, and nothing injects it here; give it a default")
    return schema


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without the words about the class that it was made of."""
    kept = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"type": "object", "properties": {}, **kept}


def _shown(value: Any) -> str:
    """Return a function's result as text: itself, or JSON."""
    if isinstance(value, str):
        return value
    return _ANY.dump_json(value, fallback=str).decode()


def served_functions(reference: str) -> OwnTools:
    """Return the functions that a reference names, and the content of the files that hold them.

    Raises:
        InputError: see `function_tools`.
    """
    tools = function_tools(reference)
    place = reference.rpartition(":")[0]
    module = sys.modules.get(place)
    files = {Path(place) if module is None else Path(module.__file__ or "")}
    for tool in tools:
        with contextlib.suppress(TypeError):  # one of the interpreter's own
            files.add(Path(inspect.getsourcefile(inspect.unwrap(tool.origin)) or ""))
    made_of = b"\0".join(sorted(file.read_bytes() for file in files if file.is_file()))
    about = (inspect.getdoc(module) or "").partition("\n\n")[0] if module else ""
    return OwnTools(tools, " ".join(about.split()), made_of)


def _server(tools: Iterable[FunctionTool]) -> Server[Any]:
    by_name = {tool.document.name: tool for tool in tools}

    async def list_tools(context: Any, parameters: Any) -> ListToolsResult:
        return ListToolsResult(tools=[tool.document for tool in by_name.values()])

    async def call_tool(context: Any, parameters: Any) -> CallToolResult:
        tool = by_name.get(parameters.name)
        if tool is None:
            text, failed = f"Unknown tool: {parameters.name}", True
        else:
            try:
                text, failed = _shown(await tool.call(dict(parameters.arguments or {}))), False
            except MCPError:
                raise
            except ToolFailed as error:
                text, failed = str(error), True
            except (Exception, SystemExit) as error:  # the function's own
                text, failed = f"{type(error).__name__}: {error}", True
        return CallToolResult(content=[TextContent(text=text)], is_error=failed)

    return Server("functions", on_list_tools=list_tools, on_call_tool=call_tool)


async def _run(tools: Iterable[FunctionTool]) -> None:
    server = _server(tools)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def serve(make: Callable[[], OwnTools]) -> int:
    """Serve tools over stdio, or with `--describe` print what they are made of, as a line of JSON.

    Returns:
        The exit status; 1 where `make` refused.
    """
    protect_streams()
    with contextlib.suppress(FileNotFoundError):  # another machine may not have it
        os.chdir(os.environ.get(OWN_FOLDER, "."))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # modules may print, and stdout has the protocol's messages
            served = make()
    except UserError as error:
        say(first_line(error), file=sys.stderr)
        return 1
    if "--describe" not in sys.argv:
        asyncio.run(_run(served.tools))
        return 0
    whole = hashlib.sha256(served.made_of)
    for tool in served.tools:
        whole.update(tool.document.model_dump_json().encode())
    rejected = [msgspec.structs.asdict(one) for one in served.rejected]
    say(json.dumps({"description": served.description, "digest": whole.hexdigest()[:16], "rejected": rejected}))
    return 0


if __name__ == "__main__":
    sys.exit(serve(lambda: served_functions(sys.argv[1])))
