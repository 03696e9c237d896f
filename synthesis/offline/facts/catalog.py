"""The catalogue of `catalog.toml`: kinds of entities and tool servers. The facts themselves are in `tables/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synthesis.core.records import Language

LICENSE = "MIT AND Apache-2.0 AND BSD-3-Clause AND CC-BY-4.0 AND LicenseRef-public-domain"
"""Licences of the packages that the tables are read from, and of GeoNames' data in one of them."""


@dataclass(frozen=True)
class Kind:
    """A kind of entity: how a tool calls its argument and says what it expects."""

    parameter: str
    en: str
    zh: str
    integer: bool = False

    def description(self, language: Language) -> str:
        return self.en if language == "en" else self.zh


@dataclass(frozen=True)
class FactServer:
    """A tool server's description of itself."""

    domain: str
    title: Mapping[Language, str]
    description: Mapping[Language, str]


_CATALOG: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
KINDS: Mapping[str, Kind] = {name: Kind(**given) for name, given in _CATALOG["kinds"].items()}
"""Entity kinds by name. A relation whose value is one of them can be chained."""
SERVERS: Mapping[str, FactServer] = {name: FactServer(**given) for name, given in _CATALOG["servers"].items()}
"""Tool servers by id; `synthesis.offline.facts.servers` makes `ToolServer` records of them."""
RELATIONS: tuple[str, ...] = tuple(_CATALOG["relations"])
"""All relations, in the order of `relations.all_relations`."""
