"""Groups of servers, for tasks over several servers. A group is itself a server, and each of its tools has an origin.

The paper has none (section 2.1.1: no composition across servers). A group is handled like a server: the teacher
proposes chains for it, tasks are about it, and its document stands in prompts. Only chains and tasks that need just one
of its servers are left out.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from synthesis.core.openai_messages import estimated_tokens
from synthesis.core.records import GroupExecution, Language, ToolOrigin, ToolServer
from synthesis.core.stages import rng_for
from synthesis.trajectories.config import TrajectoriesConfig

_NAME_LENGTH = 64
_ID_LENGTH = 120
_TRIES = 20
_STRANGERS = 0.02
"""Weight of a server without common words, relative to a server that has all words of the group."""
_WORD = re.compile(r"[\u3400-\u9fff]|[a-z]{3,}")


def is_group(server: ToolServer) -> bool:
    return isinstance(server.execution, GroupExecution)


def crosses(server: ToolServer, tools: Iterable[str]) -> bool:
    """Return whether tasks of the server may be about these tools: a group's must be of two servers at least."""
    return not is_group(server) or len({server.origin(tool).server_id for tool in tools}) > 1


def several(server: ToolServer) -> list[str] | msgspec.UnsetType:
    """Return the field `servers` of records about a server."""
    return server.servers if is_group(server) else msgspec.UNSET


def grouped(servers: Sequence[ToolServer], config: TrajectoriesConfig, seed: int) -> list[ToolServer]:
    """Sample different groups, at most `config.groups` in each language.

    The first server is sampled by its weight, the others by the number of words that their documents share with the
    earlier ones: people use tools on one topic together. More groups leave the earlier ones unchanged.

    Args:
        servers: servers that tasks may be about.
    """
    by_language: dict[Language, list[ToolServer]] = defaultdict(list)
    for server in servers:
        by_language[server.language].append(server)
    found: dict[frozenset[str], ToolServer] = {}
    for language, own in by_language.items():
        words, lengths = _words(own), {one.id: estimated_tokens([], one.tools) for one in own}
        for index in range(config.groups):
            for attempt in range(_TRIES):
                members = _members(own, words, lengths, config, rng_for(seed, "group", language, index, attempt))
                ids = frozenset(one.id for one in members)
                if len(members) > 1 and ids not in found:
                    found[ids] = group_of(members, license=config.license)
                    break
    return list(found.values())


def _members(
    servers: Sequence[ToolServer], words: Mapping[str, frozenset[str]], lengths: Mapping[str, int],
    config: TrajectoriesConfig, rng: random.Random,
) -> list[ToolServer]:  # fmt: skip
    """Sample the servers of one group.

    There are fewer if no other server's tools fit in one request, or in half of `max_tokens`.

    Args:
        lengths: tokens of the servers' tool documents, by id.
    """
    size = rng.choice(config.group_sizes)
    members = rng.choices(servers, [config.weight_of(one.id) for one in servers])
    while len(members) < size:
        ids = {one.id for one in members}
        room = config.max_tools - sum(len(one.tools) for one in members)
        tokens = config.max_tokens // 2 - sum(lengths[one.id] for one in members)
        left = [one for one in servers if one.id not in ids and len(one.tools) <= room and lengths[one.id] <= tokens]
        if not left:
            break
        known = frozenset[str]().union(*(words[one.id] for one in members))
        members += rng.choices(left, [_STRANGERS + _in_common(known, words[one.id]) for one in left])
    return members


def _in_common(one: Collection[str], other: frozenset[str]) -> float:
    return len(other.intersection(one)) / max(1, min(len(one), len(other)))


def _words(servers: Sequence[ToolServer]) -> dict[str, frozenset[str]]:
    """Return server id → words of its tools' documents, without words that most of the servers have."""
    own = {
        one.id: frozenset(
            _WORD.findall(
                " ".join(
                    text.replace("_", " ")
                    for tool in one.tools
                    for text in (tool.name, tool.description, *tool.parameters.get("properties", {}))
                ).casefold()
            )
        )
        for one in servers
    }
    often = Counter(word for every in own.values() for word in every)
    return {id: frozenset(word for word in every if 2 * often[word] <= len(own)) for id, every in own.items()}


def group_of(members: Sequence[ToolServer], *, license: str = "") -> ToolServer:
    """Merge the members into one server, which offers the tools of all.

    A tool keeps its name if no other member has a tool of that name. Otherwise each gets its server's id as a prefix,
    as in MCP clients.

    Args:
        license: license of members that name none.
    """
    shared = Counter(tool.name for one in members for tool in one.tools)
    taken = {name for name, times in shared.items() if times == 1}
    tools, origins = [], {}
    for one in members:
        for tool in one.tools:
            name = tool.name
            if shared[name] > 1:
                name = _free(f"{re.sub(r'[^a-zA-Z0-9_-]', '_', one.id)}_{name}", taken)
                taken.add(name)
            tools.append(msgspec.structs.replace(tool, name=name))
            origins[name] = ToolOrigin(one.id, tool.name)
    licenses = [one.license or license for one in members]
    return ToolServer(
        id=group_id([one.id for one in members]),
        title=", ".join(one.title for one in members),
        description=" ".join(f"{one.title}: {one.description}" for one in members),
        domain=" + ".join(sorted({one.domain for one in members})),
        language=members[0].language,
        tools=tools,
        execution=GroupExecution(origins),
        license=" AND ".join(dict.fromkeys(licenses)) if all(licenses) else "",
    )


def group_id(members: Sequence[str]) -> str:
    """Join the members' ids; if that is too long for a file name, cut it and append a number that makes it unique."""
    whole = "+".join(members)
    if len(whole) <= _ID_LENGTH:
        return whole
    return f"{whole[:_ID_LENGTH]}+{rng_for(0, 'group_id', *members).getrandbits(32):08x}"


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name of the allowed length that is not taken; a number is appended if needed."""
    cut, number = name[:_NAME_LENGTH], 1
    while cut in taken:
        number += 1
        cut = f"{name[: _NAME_LENGTH - len(str(number)) - 1]}_{number}"
    return cut
