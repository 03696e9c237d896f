"""Answers of MCP servers, as strangers write them: lists with invalid entries, and results of any shape.

The SDK validates each answer as a whole. One tool without a name costs the whole list; one block of an unknown type
costs the whole result. So the SDK gets only the part of an answer that it needs, in the form that it accepts. The
server's original answer is in `_meta`, and is read here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCRequest, JSONRPCResponse

from synthesis.core.chat_format import parse_json
from synthesis.core.openai_messages import texts_of

Entry = TypeVar("Entry")

LIST_FIELDS: Final[Mapping[str, str]] = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
"""Requests for lists, and the field of the answer that holds the entries."""
_AS_WRITTEN: Final = "astra/as-written"
"""The key in `_meta` of the answer as the server wrote it."""
_CALL: Final = "tools/call"
_LINK: Final = ("uri", "name", "title", "description", "mimeType", "size")
"""Fields of a link to a resource that the model is shown."""


# ---------------------------------------------------------------------------------------------------------------------
# On the way to the SDK


@asynccontextmanager
async def tolerant(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """The streams of an SDK transport, whose lists and results reach the client whatever is wrong with an entry."""
    async with transport as (read, write):
        methods: dict[str | int, str] = {}
        yield _Incoming(read, methods), _Outgoing(write, methods)


def as_written(answer: Any) -> Mapping[str, Any]:
    """Return the server's own answer, of an SDK result that came through `tolerant`."""
    found = (answer.meta or {}).get(_AS_WRITTEN, {})
    return found if isinstance(found, Mapping) else {}


class _Stream:
    """A stream of the SDK's transport, with what this module has to see of its messages."""

    def __init__(self, stream: Any, methods: dict[str | int, str]) -> None:
        self._stream, self._methods = stream, methods

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Any:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)


class _Outgoing(_Stream):
    async def send(self, item: SessionMessage) -> None:
        if isinstance(item.message, JSONRPCRequest):
            self._methods[item.message.id] = item.message.method
        await self._stream.send(item)


class _Incoming(_Stream):
    def __aiter__(self) -> _Incoming:
        return self

    async def __anext__(self) -> Any:
        return self._accepted(await self._stream.__anext__())

    async def receive(self) -> Any:
        return self._accepted(await self._stream.receive())

    def _accepted(self, item: Any) -> Any:
        if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
            # Servers may send a number back as text; so does the SDK take it.
            id = item.message.id
            method = self._methods.pop(int(id) if isinstance(id, str) and id.isdecimal() else id, "")
            item.message.result = _accepted(method, item.message.result)
        return item


def _accepted(method: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return the answer in the form that the SDK accepts under every version of the protocol."""
    common = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "_meta": {_AS_WRITTEN: result}}
    if method == _CALL and result.get("resultType", "complete") in ("complete", None):
        return {**common, "content": [], "isError": False}
    if (field := LIST_FIELDS.get(method)) is None:
        return result
    tools = result.get(field) if method == "tools/list" else []
    return {**common, field: [_known_tool(one) for one in _list(tools) if isinstance(_field(one, "name"), str)]}


def _known_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool as the SDK knows it: by name, with the properties that say which arguments are headers too."""
    properties = _field(tool.get("inputSchema"), "properties")
    given = properties.items() if isinstance(properties, Mapping) else ()
    kept = {name: schema for name, schema in given if isinstance(schema, Mapping)}
    return {"name": tool["name"], "inputSchema": {"type": "object", "properties": kept}}


# ---------------------------------------------------------------------------------------------------------------------
# Lists


class Listing(NamedTuple, Generic[Entry]):
    """A server's list of tools, resources or prompts.

    Attributes:
        entries: of all pages that could be read.
        problem: why pages are missing behind them; "" if none are.
    """

    entries: list[Entry]
    problem: str = ""


class ListedTool(msgspec.Struct, frozen=True):
    """A tool of a running server. `document` is in OpenAI's form; anything may be wrong with it.

    Attributes:
        name: as the server has it; "" where it has none.
        reads: whether the server declares that the tool only reads; None where it does not say.
    """

    name: str
    document: dict[str, Any]
    reads: bool | None


def listed_tool(entry: Any) -> ListedTool:
    """Return the tool of an entry, whatever the entry is."""
    names = (("name", "name"), ("description", "description"), ("parameters", "inputSchema"))
    function = {ours: entry[theirs] for ours, theirs in names if _field(entry, theirs) is not None}
    hint = _field(_field(entry, "annotations"), "readOnlyHint")
    reads = hint if isinstance(hint, bool) else None
    name = function.get("name")
    document = {"type": "function", "function": function, "read_only": reads}
    return ListedTool(name if isinstance(name, str) else "", document, reads)


# ---------------------------------------------------------------------------------------------------------------------
# Results


def result_text(result: Mapping[str, Any]) -> str:
    """Return the text of a tool's result (MCP, `CallToolResult`) for a model, in the order of its blocks.

    Texts are shown as they are, links as JSON. Structured content follows as JSON, unless the texts are the same data.
    A text that stands in the structured content is shown there alone. Images, sounds and binary resources are named
    with their count. `_meta` is for clients, by the protocol, and is not shown.
    """
    content = result.get("content")
    texts: list[str] = []
    hidden: Counter[str] = Counter()
    for block in content if isinstance(content, list) else [] if content is None else [content]:
        if binary := _binary(block):
            hidden[binary] += 1
        elif text := _block_text(block):
            texts.append(text)
    structured = result.get("structuredContent", result.get("structured_content"))
    if structured is not None and not _same_data(texts, structured):
        inside = {one.strip() for one in texts_of(structured)}
        texts = [text for text in texts if text.strip() not in inside]
        texts.append(_json(structured))
    if hidden:
        texts.append(f"[not shown: {', '.join(f'{count} {what}' for what, count in hidden.items())}]")
    return "\n".join(texts)


def is_error(result: Mapping[str, Any]) -> bool:
    """Return whether the server reports that the call failed."""
    value = result.get("isError", result.get("is_error"))
    return value not in (None, False, 0, "false", "False", "")


def _binary(block: Any) -> str:
    """Return the kind of a block that is no text, with its type and address; "" of any other."""
    if not isinstance(block, Mapping):
        return ""
    kind, held = block.get("type"), block
    if kind == "resource" and isinstance(block.get("resource"), Mapping):
        held = block["resource"]
    if isinstance(held.get("text"), str) or not any(isinstance(held.get(key), str) for key in ("data", "blob")):
        return ""
    address = f" {held['uri']:.200}" if isinstance(held.get("uri"), str) else ""
    media = f" ({held['mimeType']:.80})" if isinstance(held.get("mimeType"), str) else ""
    return f"{kind:.40}{address}{media}" if isinstance(kind, str) else f"block{address}{media}"


def _block_text(block: Any) -> str:
    if not isinstance(block, Mapping):
        return block if isinstance(block, str) else _json(block)
    kind = block.get("type")
    if kind == "text" and "text" in block:
        text = block["text"]
        return text if isinstance(text, str) else "" if text is None else _json(text)
    if kind == "resource" and isinstance(text := _field(block.get("resource"), "text"), str):
        return text
    if kind == "resource_link":
        return _json({key: block[key] for key in _LINK if block.get(key) is not None})
    return _json({key: value for key, value in block.items() if key != "_meta"})


def _same_data(texts: list[str], structured: Any) -> bool:
    """Return whether the texts, or one of them, have the same data as the structured content."""
    wanted = [structured]
    if isinstance(structured, Mapping) and list(structured) == ["result"]:
        wanted.append(structured["result"])  # SDKs wrap what is no object
    values = [list(_values(text)) for text in texts]
    if any(value == one for found in values for value in found for one in wanted):
        return True
    # SDKs write a block for each entry of a list.
    lists = [one for one in wanted if isinstance(one, list) and len(one) == len(values) and values]
    return any(all(entry in found for entry, found in zip(one, values, strict=True)) for one in lists)


def _values(text: str) -> Iterator[Any]:
    """Yield the values that a text may serialise: itself, JSON, or JSON behind a few words or in a code fence."""
    yield text
    try:
        yield parse_json(text)
        return
    except (ValueError, RecursionError):
        pass
    for start in {text.find("{"), text.find("[")} - {-1}:
        try:
            yield json.JSONDecoder().raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
