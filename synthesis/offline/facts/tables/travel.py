"""Airports (airportsdata) and telephone numbering (libphonenumber's metadata through phonenumbers)."""

from __future__ import annotations

from collections import Counter

import airportsdata
import phonenumbers
from phonenumbers import PhoneMetadata

from synthesis.offline.facts.entities import airports, country_names
from synthesis.offline.facts.names import canonical, functional, inverse
from synthesis.offline.facts.relations import Relation
from synthesis.offline.facts.tables import relation


def build() -> list[Relation]:
    return [*_airports(), *_airport_codes(), *_phones()]


def _airports() -> list[Relation]:
    ports, countries = airports(), country_names()
    # Counted over all airports, also those that are not in the tables: "the airport of" has to mean the only one.
    of_city = Counter((canonical(row["city"]), row["country"]) for row in airportsdata.load("IATA").values())
    only = {a.city: code for code, a in ports.items() if a.city and of_city[a.city, a.country] == 1}
    return [
        relation(
            "city_of_airport", "airports", ("airport_code", "city"), {c: a.city for c, a in ports.items() if a.city},
            ("the airport city of", "the city served by"), ("机场所在城市",),
            about=("Look up the city that an airport serves.", "查询一座机场所在的城市。"),
        ),
        relation(
            "country_of_airport", "airports", ("airport_code", "country"),
            {c: countries[a.country] for c, a in ports.items()},
            ("the airport country of", "the host country of"), ("机场所在国家",),
            about=("Look up the country in which an airport lies.", "查询一座机场所在的国家。"),
        ),
        relation(
            "elevation_of_airport", "airports", ("airport_code", "number"), {c: a.elevation for c, a in ports.items()},
            ("the airport elevation of", "the field elevation of"), ("机场海拔",),
            about=("Look up the elevation of an airport in feet.", "查询一座机场的海拔（英尺）。"), unit="ft",
        ),
        relation(
            "timezone_of_airport", "airports", ("airport_code", "timezone"), {c: a.timezone for c, a in ports.items()},
            ("the airport time zone of", "the time zone at"), ("机场时区",),
            about=("Look up the IANA time zone of an airport.", "查询一座机场的 IANA 时区。"),
        ),
        relation(
            "airport_of_city", "airports", ("city", "airport_code"), only,
            ("the airport of", "the IATA airport of"), ("机场代码",),
            about=("Look up the IATA code of a city's airport.", "查询一座城市机场的 IATA 代码。"),
        ),
    ]  # fmt: skip


def _airport_codes() -> list[Relation]:
    ports = airports()
    icao = {code: a.icao for code, a in ports.items()}
    name = functional((a.name, code) for code, a in ports.items())
    icao_names = {ports[code].icao: text for text, code in name.items()}
    return [
        relation(
            "icao_of_airport", "airport_codes", ("airport_code", "airport_icao"), icao,
            ("the ICAO code of", "the ICAO identifier of"), ("ICAO代码",),
            about=("Look up the ICAO code of an airport by its IATA code.", "根据 IATA 代码查询机场的 ICAO 代码。"),
        ),
        relation(
            "airport_of_icao", "airport_codes", ("airport_icao", "airport_code"), inverse(icao),
            ("the IATA equivalent of", "the airport with ICAO code"), ("对应IATA代码",),
            about=("Look up the IATA code of an airport by its ICAO code.", "根据 ICAO 代码查询机场的 IATA 代码。"),
        ),
        relation(
            "airport_name_of_icao", "airport_codes", ("airport_icao", "airport_name"), icao_names,
            ("the airport name of", "the full airport name of"), ("机场全称",),
            about=("Look up the full name of an airport by its ICAO code.", "根据 ICAO 代码查询机场的完整名称。"),
        ),
        relation(
            "airport_of_airport_name", "airport_codes", ("airport_name", "airport_code"), name,
            ("the IATA code of", "the three-letter airport code of"), ("IATA代码",),
            about=("Look up the IATA code of an airport by its full name.", "根据机场全称查询 IATA 代码。"),
        ),
    ]  # fmt: skip


def _phones() -> list[Relation]:
    calling: dict[str, str] = {}
    dialing: dict[str, str] = {}
    trunk: dict[str, str] = {}
    length: dict[str, int] = {}
    users: dict[str, str | None] = {}
    for iso, country in country_names().items():
        data = PhoneMetadata.metadata_for_region(iso, None)
        if data is None or data.country_code is None:
            continue
        code = f"+{data.country_code}"
        calling[country] = code
        users[code] = country if len(phonenumbers.region_codes_for_country_code(data.country_code)) == 1 else None
        prefix = data.preferred_international_prefix or data.international_prefix or ""
        if prefix.isdigit():
            dialing[country] = prefix
        if (trunk_prefix := data.national_prefix or "").isdigit():
            trunk[country] = trunk_prefix
        if data.mobile is not None and data.mobile.example_number:
            lengths = data.mobile.possible_length  # empty where they are those of all numbers
            if not lengths and data.general_desc is not None:
                lengths = data.general_desc.possible_length
            if len(lengths) == 1:  # of others there is no such number
                length[country] = lengths[0]
    return [
        relation(
            "calling_code_of_country", "phones", ("country", "calling_code"), calling,
            ("the calling code of", "the country calling code of"), ("国际区号",),
            about=("Look up the international calling code of a country.", "查询一个国家的国际电话区号。"),
        ),
        relation(
            "country_of_calling_code", "phones", ("calling_code", "country"), functional(users.items()),
            ("the country with calling code", "the country reached by dialling"), ("区号对应国家",),
            about=("Find the only country that uses a calling code.", "查询使用某个国际区号的唯一国家。"),
        ),
        relation(
            "exit_code_of_country", "phones", ("country", "text"), dialing,
            ("the international dialling prefix of", "the exit code of"), ("国际拨号前缀",),
            about=("Look up the prefix for calls abroad from a country.", "查询从一个国家拨打国际电话的前缀。"),
        ),
        relation(
            "trunk_prefix_of_country", "phones", ("country", "text"), trunk,
            ("the trunk prefix of", "the national dialling prefix of"), ("国内长途前缀",),
            about=("Look up the prefix for national calls in a country.", "查询一个国家国内长途电话的前缀。"),
        ),
        relation(
            "mobile_digits_of_country", "phones", ("country", "number"), length,
            ("the mobile number length of", "the mobile digit count of"), ("手机号码位数",),
            about=("Count the digits of a country's mobile numbers.", "查询一个国家手机号码的位数。"), unit="digits",
        ),
    ]  # fmt: skip
