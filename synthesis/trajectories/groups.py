"""Groups of servers, for tasks whose tools are of several: a group is a server whose tools have an origin each.

The paper has none (section 2.1.1: no composition across servers). What is done with a server is done with a group: it
is asked for chains, tasks are about it, its document stands in prompts. Only what is about one of its servers alone is
left out: chains and tasks that need no second one.
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
"""How often two servers that have no word in common are taken together, beside those that have all."""
_WORD = re.compile(r"[\u3400-\u9fff]|[a-z]{3,}")


def is_group(server: ToolServer) -> bool:
    return isinstance(server.execution, GroupExecution)


def crosses(server: ToolServer, tools: Iterable[str]) -> bool:
    """Whether the tools are what tasks of the server are about: of a group's, those of two servers at least."""
    return not is_group(server) or len({server.origin(tool).server_id for tool in tools}) > 1


def several(server: ToolServer) -> list[str] | msgspec.UnsetType:
    """What records of a server have in their field `servers`."""
    return server.servers if is_group(server) else msgspec.UNSET


def grouped(servers: Sequence[ToolServer], config: TrajectoriesConfig, seed: int) -> list[ToolServer]:
    """Different groups, at most `config.groups` in each language.

    The first server is drawn by its weight, the others by how many words their documents share with those before:
    people bring to several tools what these are about together. More groups change none of those that were drawn.

    Args:
        servers: those that tasks may be about.
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
                    found[ids] = group_of(members, licence=config.licence)
                    break
    return list(found.values())


def _members(
    servers: Sequence[ToolServer], words: Mapping[str, frozenset[str]], lengths: Mapping[str, int],
    config: TrajectoriesConfig, rng: random.Random,
) -> list[ToolServer]:  # fmt: skip
    """Servers of one group; fewer than were drawn where no more have room for their tools in one request, or in half of
    `max_tokens`.

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
    """By a server's id the words of its tools' documents, without those that most of the servers have."""
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


def group_of(members: Sequence[ToolServer], *, licence: str = "") -> ToolServer:
    """The members as one server, which offers the tools of all.

    A tool keeps its name where no other member has one of that name; where one has, both have their server's id in
    front, as MCP's clients do it.

    Args:
        licence: of members that name none.
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
    licences = [one.licence or licence for one in members]
    return ToolServer(
        id=group_id([one.id for one in members]),
        title=", ".join(one.title for one in members),
        description=" ".join(f"{one.title}: {one.description}" for one in members),
        domain=" + ".join(sorted({one.domain for one in members})),
        language=members[0].language,
        tools=tools,
        execution=GroupExecution(origins),
        licence=" AND ".join(dict.fromkeys(licences)) if all(licences) else "",
    )


def group_id(members: Sequence[str]) -> str:
    """The members' ids in one; cut, and told apart by a number, where it would be too long for a file's name."""
    whole = "+".join(members)
    if len(whole) <= _ID_LENGTH:
        return whole
    return f"{whole[:_ID_LENGTH]}+{rng_for(0, 'group_id', *members).getrandbits(32):08x}"


def _free(name: str, taken: Collection[str]) -> str:
    """A name of the length that is allowed and that is not taken: numbered where it would be."""
    cut, number = name[:_NAME_LENGTH], 1
    while cut in taken:
        number += 1
        cut = f"{name[: _NAME_LENGTH - len(str(number)) - 1]}_{number}"
    return cut
