"""Normalise and filter: any tool document → OpenAI function schema, or a reason (paper, section 2.1.1).

Nothing is lost silently: for every document, kept tools + rejected tools = tools read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from synthesis.core.normal_text import normalized
from synthesis.core.records import Language, McpExecution, ServedPrompt, ServedResource, ToolServer, ToolSpec
from synthesis.core.tool_schemas import brief
from synthesis.pipeline.languages import NAMES, strays
from synthesis.servers.collect import RejectedTool, ServerDocument
from synthesis.servers.schemas import Unmappable, object_schema

_NAME_LENGTH = 64
_NAMED = 5
"""Names of tools, resources and prompts that a line about a server has."""
_PLACEHOLDERS = re.compile(
    r"(?:no|missing|empty) (?:description|summary|documentation)[^\w]*(?:available|provided|yet|given)?"
    r"|(?:description|summary|documentation) (?:is )?(?:not|un)[- ]?(?:available|provided|yet)"
    r"|add (?:a )?description here|(?:暂无|没有|无)(?:描述|说明|介绍)?",
    re.IGNORECASE,
)
"""What catalogues write where nobody wrote a description."""


class NormalizedServer(msgspec.Struct, frozen=True):
    """`server` is None when too few tools are left; then its kept tools are in `rejected` too."""

    server_id: str
    read: int
    server: ToolServer | None
    rejected: list[RejectedTool]

    def reasons(self) -> Counter[str]:
        return Counter(tool.reason for tool in self.rejected)


def normalize(
    document: ServerDocument, *, min_tools: int = 3, max_tools: int = 128, read_only: bool = True,
    allowed: Collection[str] = (),
) -> NormalizedServer:  # fmt: skip
    """The server in normal form. Raises nothing, whatever the document holds.

    Args:
        min_tools: servers with fewer tools are dropped; the paper's value is 3.
        max_tools: servers with more are dropped; 128 is what OpenAI's interface takes in one request.
        read_only: keep of running servers only tools that they declare read-only: runs share those servers, and a tool
            without `readOnlyHint` may write (MCP specification, annotations of tools: the hint defaults to false).
        allowed: names, as the server has them, of tools that are kept whatever it declares.
    """
    raw_names = [raw_name(tool) for tool in document.tools]
    names = fix_names(raw_names, document.id)
    kept: list[ToolSpec] = []
    rejected = list(document.rejected)
    seen: set[str] = set()
    for raw, original, name in zip(document.tools, raw_names, names, strict=True):
        try:
            if original and original in seen:
                raise Unmappable("duplicate_name", f"the server has two tools of the name {brief(original):.80}")
            seen.add(original)
            if name is None:
                raise Unmappable("bad_name", "the name is missing, has no usable character, or is used twice")
            if read_only and isinstance(document.execution, McpExecution) and original not in allowed:
                _check_read_only(raw.get("read_only"))
            kept.append(_tool(raw, name, document.language))
        except Unmappable as problem:
            rejected.append(RejectedTool(name or original, problem.reason, problem.detail))
    server: ToolServer | None = None
    if min_tools <= len(kept) <= max_tools:
        server = ToolServer(
            document.id,
            document.title,
            document.description,
            document.domain,
            document.language,
            kept,
            document.execution,
            document.licence,
            document.resources or msgspec.UNSET,
            document.prompts or msgspec.UNSET,
        )
    else:
        small = len(kept) < min_tools
        limit = f"min_tools is {min_tools}" if small else f"max_tools is {max_tools}"
        detail = f"server {document.id} has {len(kept)} usable tools, {limit}"
        reason = "server_too_small" if small else "server_too_large"
        rejected += [RejectedTool(tool.name, reason, detail) for tool in kept]
    return NormalizedServer(document.id, len(document.tools) + len(document.rejected), server, rejected)


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


def fix_names(names: Sequence[str], server_id: str) -> list[str | None]:
    """Names in `[a-zA-Z0-9_-]{1,64}`, each used once; None where there is none to be had.

    Letters lose their accents; other characters become `_`; a name that is taken gets the server's id in front. Names
    that need no change keep it whatever stands before them, so a running server's tools are found
    again by the same function.
    """
    plain = [re.sub(r"[\u0300-\u036f]", "", normalized("NFKD", name)) for name in names]
    cleaned = [re.sub(r"_{2,}", "_", re.sub(r"[^a-zA-Z0-9_-]", "_", name)).strip("_")[:_NAME_LENGTH] for name in plain]
    cleaned = [
        name if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) else new for name, new in zip(names, cleaned, strict=True)
    ]
    fixed: list[str | None] = [None] * len(names)
    taken: set[str] = set()
    for unchanged in (True, False):
        for index, (name, new) in enumerate(zip(names, cleaned, strict=True)):
            if fixed[index] is not None or (unchanged and new != name):
                continue
            if new in taken and not unchanged:
                new = f"{re.sub(r'[^a-zA-Z0-9_-]', '_', server_id)}_{new}"[:_NAME_LENGTH]
            if new and new not in taken:
                fixed[index] = new
                taken.add(new)
    return fixed


def raw_name(raw: Any) -> str:
    """A tool's name as its document has it; "" where it has none."""
    function = _function(raw)
    name = function.get("name") if function else None
    return name if isinstance(name, str) else ""


def _function(raw: Any) -> Mapping[str, Any] | None:
    """The `function` of OpenAI's form, or the object itself where the wrapper is missing."""
    if not isinstance(raw, Mapping):
        return None
    function = raw.get("function", raw)
    return function if isinstance(function, Mapping) else None


def _tool(raw: Any, name: str, language: Language) -> ToolSpec:
    function = _function(raw)
    assert function is not None  # it has a name
    description = function.get("description")
    description = " ".join(description.split()) if isinstance(description, str) else ""
    if not description:
        raise Unmappable("no_description", "the description is missing or empty")
    if _is_vague(description, name):
        raise Unmappable("vague_description", f"the description says no more than the name: {description!r}")
    if (other := strays(description, language)) not in (None, "en"):  # all the world documents its tools in English
        raise Unmappable("other_language", f"the description is in {NAMES[other]}: {description:.80}")
    schema = next((function[key] for key in ("parameters", "input_schema", "inputSchema") if key in function), None)
    return ToolSpec(name, description, object_schema(schema))


def _is_vague(description: str, name: str) -> bool:
    if _PLACEHOLDERS.fullmatch(description.strip(" .。!！-")):
        return True
    letters = re.sub(r"[\W_]+", "", description).casefold()
    if letters == re.sub(r"[\W_]+", "", name).casefold():
        return True
    chinese = len(re.findall(r"[\u4e00-\u9fff]", description))
    return len(description.split()) < 3 and chinese < 4


def served(server: ToolServer) -> str:
    """What a running server offers, in a line for a person; "" of any other."""
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
