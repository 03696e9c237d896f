"""Normalise and filter: any tool document → OpenAI function schema, or a reason (paper, section 2.1.1).

Nothing is lost silently: for every document, kept tools + rejected tools = tools read.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from synthesis.core.normal_text import normalized
from synthesis.core.openai_messages import estimated_tokens
from synthesis.core.records import Language, McpExecution, ServedPrompt, ServedResource, ToolServer, ToolSpec
from synthesis.core.schema_keywords import name_text
from synthesis.core.schemas import Unmappable, object_schema
from synthesis.core.tool_documents import tool_function, tool_parameters
from synthesis.core.tool_schemas import brief
from synthesis.pipeline.languages import NAMES, as_prose, strays, words_without_spaces
from synthesis.servers.collect import RejectedTool, ServerDocument

_NAME_LENGTH = 64
_DIGITS = 8
"""Digits of the digest that ends a name which would otherwise equal another one."""
_SMALL_PART = 8
"""Tools of a part at least, where a server is split and smaller groups of tools can be put together."""
_NAMED = 5
"""Names of tools, resources and prompts that a line about a server has."""
_PLACEHOLDERS = re.compile(
    r"(?:no|missing|empty) (?:description|summary|documentation)[^\w]*(?:available|provided|yet|given)?"
    r"|(?:description|summary|documentation) (?:is )?(?:not|un)[- ]?(?:available|provided|yet)"
    r"|add (?:a )?description here|(?:暂无|没有|无)(?:描述|说明|介绍)?",
    re.IGNORECASE,
)
"""Texts that catalogues write in place of a missing description."""


_VERBS = {"get", "list", "create", "update", "delete", "post", "put", "patch", "add", "remove", "set", "find", "search",
          "fetch", "retrieve", "read", "write", "edit", "new", "all", "by", "the", "a"}  # fmt: skip
"""Words of a tool's name that do not say what it is about."""


class ChangedTool(msgspec.Struct, frozen=True):
    """A tool that was kept and says something else than its document: `change` is counted, `detail` is one line."""

    name: str
    change: str
    detail: str


class NormalizedServer(msgspec.Struct, frozen=True):
    """A document in normal form.

    Attributes:
        read: tools of the document.
        servers: what is left of it: one server, several where it has too many tools for one, or none.
        rejected: tools that are in none of them.
        changed: tools of them that say something else than the document.
    """

    server_id: str
    read: int
    servers: list[ToolServer]
    rejected: list[RejectedTool]
    changed: list[ChangedTool] = []

    @property
    def server(self) -> ToolServer | None:
        """The first server, None where there is none."""
        return self.servers[0] if self.servers else None

    def reasons(self) -> Counter[str]:
        return Counter(tool.reason for tool in self.rejected)


def normalize(
    document: ServerDocument, *, min_tools: int = 3, max_tools: int = 128, max_tokens: int = 58_000,
    read_only: bool = True, allowed: Collection[str] = (),
) -> NormalizedServer:  # fmt: skip
    """Return the document's servers in normal form. Raises nothing, whatever the document holds.

    Args:
        min_tools: servers with fewer tools are dropped; the paper's value is 3.
        max_tools: documents with more are split by topic; 128 is what OpenAI's interface takes in one request.
        max_tokens: of one turn of the agent. Tool documents take half of it at most: a server with longer ones is
            split, a single tool with a longer one is rejected.
        read_only: keep of running servers only tools that they declare read-only: runs share those servers, and a tool
            without `readOnlyHint` may write (MCP specification, annotations of tools: the hint defaults to false).
        allowed: names, as the server has them, of tools that are kept whatever it declares.
    """
    raw_names = [raw_name(tool) for tool in document.tools]
    kept: list[tuple[str, ToolSpec]] = []
    rejected = list(document.rejected)
    changed: list[ChangedTool] = []
    seen: set[str] = set()
    for raw, original, name in zip(document.tools, raw_names, fix_names(raw_names), strict=True):
        try:
            if original and original in seen:
                raise Unmappable("duplicate_name", f"the server has two tools of the name {brief(original):.80}")
            seen.add(original)
            if name is None:
                raise Unmappable("bad_name", "the name is missing, or is that of another tool")
            if read_only and isinstance(document.execution, McpExecution) and original not in allowed:
                _check_read_only(raw.get("read_only"))
            changes: dict[str, str] = {}
            tool = _tool(raw, name, document.language, changes)
            if (tokens := estimated_tokens([], [tool])) > max_tokens // 2:
                raise Unmappable(
                    "document_too_long",
                    f"the document has about {tokens} tokens, half of max_tokens is {max_tokens // 2}; shorten it or "
                    "raise max_tokens",
                )
            kept.append((_topic(raw, name), tool))
            changed += [ChangedTool(name, change, detail) for change, detail in changes.items()]
        except Unmappable as problem:
            rejected.append(RejectedTool(name or original, problem.reason, problem.detail))
    servers: list[ToolServer] = []
    parts = _parts(kept, min_tools, max_tools, max_tokens // 2)
    for number, (topics, tools) in enumerate(parts, 1):
        if len(tools) < min_tools:
            detail = f"server {document.id} has {len(kept)} usable tools, min_tools is {min_tools}"
            rejected += [RejectedTool(tool.name, "server_too_small", detail) for tool in tools]
            continue
        several = len(parts) > 1
        servers.append(
            ToolServer(
                f"{document.id}.{number}" if several else document.id,
                f"{document.title}: {topics:.100}" if several else document.title,
                document.description,
                document.domain,
                document.language,
                tools,
                document.execution,
                document.license,
                document.resources if document.resources and not servers else msgspec.UNSET,
                document.prompts if document.prompts and not servers else msgspec.UNSET,
            )
        )
    read = len(document.tools) + len(document.rejected)
    left = {tool.name for server in servers for tool in server.tools}
    return NormalizedServer(document.id, read, servers, rejected, [one for one in changed if one.name in left])


def _topic(raw: Any, name: str) -> str:
    """Return the topic of a tool: its document's tag, or the first word of its name that is no verb."""
    given = raw.get("topic")
    if isinstance(given, str) and given.strip():
        return " ".join(given.split())
    words = [word.lower() for word in re.split(r"[^a-zA-Z]+|(?<=[a-z])(?=[A-Z])", name) if word]
    return next((word.removesuffix("s") for word in words if word not in _VERBS), name)


def _parts(
    tools: Sequence[tuple[str, ToolSpec]], min_tools: int, max_tools: int, max_tokens: int
) -> list[tuple[str, list[ToolSpec]]]:
    """Split a document's tools into servers, with their topics: one, unless they are too many or too long."""

    def fits(several: Iterable[ToolSpec]) -> bool:
        listed = list(several)
        return len(listed) <= max_tools and sum(lengths[tool.name] for tool in listed) <= max_tokens

    lengths = {tool.name: estimated_tokens([], [tool]) for _, tool in tools}
    if fits(tool for _, tool in tools):
        return [("", [tool for _, tool in tools])]
    topics: dict[str, list[ToolSpec]] = {}
    for topic, tool in tools:
        topics.setdefault(topic, []).append(tool)
    small = max(min_tools, min(_SMALL_PART, max_tools))
    parts: list[tuple[list[str], list[ToolSpec]]] = []
    rest: tuple[list[str], list[ToolSpec]] = ([], [])
    for topic, several in topics.items():
        piece: list[ToolSpec] = []
        for tool in several:
            if not fits([*piece, tool]):
                parts.append(([topic], piece))
                piece = []
            piece.append(tool)
        if len(piece) >= small:
            parts.append(([topic], piece))
            continue
        if not fits([*rest[1], *piece]):
            parts.append(rest)
            rest = ([], [])
        rest = ([*rest[0], topic], [*rest[1], *piece])
        if len(rest[1]) >= small:
            parts.append(rest)
            rest = ([], [])
    if rest[1]:
        last = next((part for part in reversed(parts) if fits([*part[1], *rest[1]])), None)
        if last is None or len(rest[1]) >= min_tools:
            parts.append(rest)
        else:
            last[0].extend(rest[0])
            last[1].extend(rest[1])
    return [(", ".join(names), several) for names, several in parts]


def _check_read_only(declared: Any) -> None:
    if declared is True:
        return
    if declared is False:
        raise Unmappable("changes_state", "the server says that this tool is not read-only")
    raise Unmappable(
        "not_declared_read_only",
        "the server does not say that this tool is read-only, so it may write; if it does not, or may, name it in "
        "`allowed_tools`",
    )


def fix_names(names: Sequence[str]) -> list[str | None]:
    """Return names in `[a-zA-Z0-9_-]{1,64}`, each used once; None for an empty name and for one that is there twice.

    Letters lose their accents, and other characters become `_`. A name that nothing is left of, that becomes too long,
    or that becomes another tool's name, ends in a digest of the original. A running server's tools are found again by
    the same function: names do not depend on their order.
    """
    every = set(names)
    same = Counter(map(_clean, every))
    fixed: list[str | None] = []
    seen: set[str] = set()
    for name in names:
        new = _clean(name)
        if not new or len(new) > _NAME_LENGTH or (new != name and (new in every or same[new] > 1)):
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
            new = f"{(new or 'tool')[: _NAME_LENGTH - _DIGITS - 1]}_{digest}"
        fixed.append(new if name and name not in seen else None)
        seen.add(name)
    return fixed


def _clean(name: str) -> str:
    if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
        return name
    plain = re.sub(r"[\u0300-\u036f]", "", normalized("NFKD", name))
    return re.sub(r"_{2,}", "_", re.sub(r"[^a-zA-Z0-9_-]", "_", plain)).strip("_")


def raw_name(raw: Any) -> str:
    """Return a tool's name as its document has it; "" where it has none."""
    function = tool_function(raw)
    return (name_text(function.get("name")) or "") if function else ""


def _tool(raw: Any, name: str, language: Language, changes: dict[str, str]) -> ToolSpec:
    function = tool_function(raw)
    assert function is not None  # it has a name
    description = function.get("description")
    description = " ".join(description.split()) if isinstance(description, str) else ""
    if not description:
        raise Unmappable("no_description", "the description is missing or empty")
    if _is_vague(description, name):
        raise Unmappable(
            "vague_description", f"the description is a placeholder, the name or under three words: {description!r}"
        )
    # Tools are documented in English everywhere.
    if (other := strays(as_prose(description), language)) not in (None, "en"):
        raise Unmappable("other_language", f"the description is in {NAMES[other]}: {description:.80}")
    if isinstance(made := raw.get("changes"), Mapping):  # of `openapi` and `registry`
        changes.update(made)
    parameters = object_schema(tool_parameters(function), required=function.get("required"), changes=changes)
    return ToolSpec(name, description, parameters)


def _is_vague(description: str, name: str) -> bool:
    if _PLACEHOLDERS.fullmatch(description.strip(" .。!！-")):
        return True
    letters = re.sub(r"[\W_]+", "", description).casefold()
    if letters == re.sub(r"[\W_]+", "", name).casefold():
        return True
    return len(description.split()) < 3 and words_without_spaces(description) < 2


def served(server: ToolServer) -> str:
    """Return the offers of a running server, in a line for a person; "" for any other."""
    if not isinstance(server.execution, McpExecution):
        return ""
    every: Mapping[str, Sequence[ToolSpec | ServedResource | ServedPrompt]] = {
        "tools": server.tools, "resources": server.resources or [], "prompts": server.prompts or [],
    }  # fmt: skip
    offers = (
        f"{len(ones)} {what} ({', '.join(one.name for one in ones[:_NAMED])}{', …' if len(ones) > _NAMED else ''})"
        for what, ones in every.items()
        if ones
    )
    return f"{server.id}: {'; '.join(offers)}"
