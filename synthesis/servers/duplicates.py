"""Servers that are there twice: crawled twice, forked, or published again under another name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.records import Language, ToolServer, ToolSpec
from synthesis.servers.collect import RejectedTool, ServerDocument
from synthesis.servers.normalize import NormalizedServer, normalize, raw_name

_Signature = tuple[str, ...]


def normalize_all(
    documents: Sequence[ServerDocument],
    *,
    min_tools: int = 3,
    max_tools: int = 128,
    max_tokens: int = 58_000,
    read_only: bool = True,
    allowed_tools: Mapping[str, Collection[str]] = {},
    similarity: float = 0.7,
) -> list[NormalizedServer]:
    """Return all servers in normal form, in their order, without duplicates.

    Two servers of one language are the same if their tools have the same names, descriptions and parameters
    (`duplicate_server`). They are nearly the same if a large share of tools has the same name and parameter names
    (`near_duplicate_server`). The first is kept, so pass running servers before mere documents.

    Args:
        documents: their ids may clash: a later one then gets a number behind it.
        allowed_tools: by a server's id, the tools that are kept whatever it declares, as it names them.
        similarity: least Jaccard similarity of near duplicates, 0 to 1, over tools; above 1: none are looked for.
    """
    options: dict[str, Any] = {
        "min_tools": min_tools, "max_tools": max_tools, "max_tokens": max_tokens, "read_only": read_only,
    }  # fmt: skip
    servers = [
        normalize(document, allowed=allowed_tools.get(document.id, ()), **options)
        for document in with_own_ids(documents)
    ]
    seen: dict[tuple[Language, frozenset[Any]], str] = {}
    # Candidates share a signature; a signature that half the servers have (`search(query)`) costs no more than a count.
    holders: dict[tuple[Language, _Signature], list[int]] = defaultdict(list)
    sizes: list[int] = []
    ids: list[str] = []
    for index, one in enumerate(servers):
        for server in one.servers:
            whole = (server.language, frozenset(_document(tool) for tool in server.tools))
            signatures = {signature(tool) for tool in server.tools}
            if whole in seen:
                servers[index] = _rejected(
                    servers[index], server, "duplicate_server", f"has the tools of {seen[whole]}"
                )
                continue
            shared = Counter(earlier for key in signatures for earlier in holders[server.language, key])
            close = {earlier: count / (len(signatures) + sizes[earlier] - count) for earlier, count in shared.items()}
            nearest = max(close, key=lambda earlier: (close[earlier], -earlier), default=None)
            if nearest is not None and close[nearest] >= similarity:
                detail = f"shares {close[nearest]:.0%} of its tools with {ids[nearest]}"
                servers[index] = _rejected(servers[index], server, "near_duplicate_server", detail)
                continue
            seen[whole] = server.id
            for key in signatures:
                holders[server.language, key].append(len(ids))
            ids.append(server.id)
            sizes.append(len(signatures))
    return servers


def with_own_ids(documents: Sequence[ServerDocument]) -> list[ServerDocument]:
    """Give each document a unique id: `weather`, `weather_2`. Case is ignored, as ids become file names."""
    taken: set[str] = set()
    own: list[ServerDocument] = []
    numbers: Counter[str] = Counter()
    for document in documents:
        name = document.id
        while name.casefold() in taken:
            numbers[document.id.casefold()] += 1
            name = f"{document.id}_{numbers[document.id.casefold()] + 1}"
        taken.add(name.casefold())
        own.append(document if name == document.id else msgspec.structs.replace(document, id=name))
    return own


def signature(tool: ToolSpec) -> _Signature:
    """Return the features that near duplicates share: name and parameter names, without case and order."""
    return (tool.name.casefold(), *sorted(name.casefold() for name in tool.parameters["properties"]))


def _document(tool: ToolSpec) -> tuple[str, str, bytes]:
    return tool.name, tool.description, msgspec.json.encode(tool.parameters, order="deterministic")


def check_allowed(documents: Sequence[ServerDocument], allowed_tools: Mapping[str, Collection[str]]) -> None:
    """See that each tool of the list is there; a server that could not be read is left out as it is.

    Raises:
        InputError: a server was read and has no such tool.
    """
    for document in documents:
        names = [raw_name(tool) for tool in document.tools]
        if unknown := [name for name in allowed_tools.get(document.id, ()) if name not in names]:
            raise InputError(
                f"allowed_tools: server {document.id} has no tool {unknown[0]!r:.80}; it has "
                f"{', '.join(names):.1000}; name it as the server does"
            )


def _rejected(one: NormalizedServer, server: ToolServer, reason: str, detail: str) -> NormalizedServer:
    line = f"server {server.id} {detail}"
    more = [RejectedTool(tool.name, reason, line) for tool in server.tools]
    names = {tool.name for tool in server.tools}
    return msgspec.structs.replace(
        one,
        servers=[other for other in one.servers if other is not server],
        rejected=one.rejected + more,
        changed=[tool for tool in one.changed if tool.name not in names],
    )
