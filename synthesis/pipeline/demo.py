"""Load parts of the demo package `synthesis.offline` on demand: facts as tools and servers, and a git repository.

No other module of `synthesis` imports the demo. Each function imports its part when it is called. `launch` imports the
offline teacher itself, if there is no `--teacher_url`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from synthesis.core.records import CodeTool, Language, ToolServer


def fact_server_ids() -> tuple[str, ...]:
    """Ids of the packaged fact servers, without a language's suffix."""
    from synthesis.offline.facts.catalog import SERVERS

    return tuple(SERVERS)


def relation_ids() -> tuple[str, ...]:
    """Ids of the relations that the offline teacher knows."""
    from synthesis.offline.facts.catalog import RELATIONS

    return RELATIONS


def license_of_facts() -> str:
    """Return the SPDX expression for data that is computed from the facts."""
    from synthesis.offline.facts.catalog import LICENSE

    return LICENSE


def fact_servers(language: Language, only: Collection[str] | None) -> list[ToolServer]:
    """Return the packaged fact servers; see `synthesis.offline.facts.servers.fact_servers`."""
    from synthesis.offline.facts.servers import fact_servers

    return fact_servers(language, only)


def fact_tools(language: Language, rows: int, seed: int, *, but: Collection[str]) -> Iterator[tuple[str, CodeTool]]:
    """Yield the domain and the tool of each relation; see `synthesis.offline.facts.tools.sampled_tools`."""
    from synthesis.offline.facts.tools import sampled_tools

    return sampled_tools(language, rows, seed, but=but)


def make_repository(path: Path) -> None:
    """Make the packaged git server's repository; see `synthesis.offline.facts.repository.make_repository`."""
    from synthesis.offline.facts.repository import make_repository

    make_repository(path)
