"""The relations as tool servers: what a collector of tool documents would find, with code that runs in the sandbox."""

from __future__ import annotations

from collections.abc import Collection

from synthesis.core.records import CodeExecution, Language, ToolServer, ToolSpec
from synthesis.offline.facts.catalog import KINDS, LICENSE, SERVERS
from synthesis.offline.facts.code import module_source
from synthesis.offline.facts.relations import Relation, all_relations


def tool_spec(relation: Relation, language: Language = "en", *, name: str | None = None) -> ToolSpec:
    """The relation's tool: one required argument, `relation.parameter`."""
    argument = {"type": relation.parameter_type, "description": KINDS[relation.subject].description(language)}
    return ToolSpec(
        name=name or relation.id,
        description=relation.description[language],
        parameters={
            "type": "object",
            "properties": {relation.parameter: argument},
            "required": [relation.parameter],
            "additionalProperties": False,
        },
    )


def fact_servers(language: Language = "en", only: Collection[str] | None = None) -> list[ToolServer]:
    """One server per entry of the catalogue, in its order. Chinese ids end in `_zh`: both fit in one dataset.

    Args:
        only: ids in the catalogue of those to make; the others' code is not written; None: all.
    """
    if only is not None and not only:
        return []
    relations = list(all_relations().values())
    servers: list[ToolServer] = []
    for id_, server in SERVERS.items():
        if only is not None and id_ not in only:
            continue
        own = [relation for relation in relations if relation.server == id_]
        servers.append(
            ToolServer(
                id=id_ if language == "en" else f"{id_}_{language}",
                title=server.title[language],
                description=server.description[language],
                domain=server.domain,
                language=language,
                tools=[tool_spec(relation, language) for relation in own],
                execution=CodeExecution(module_source(own)),
                license=LICENSE,
            )
        )
    return servers
