"""The catalogue: which kinds of entities and which tool servers exist. The facts themselves are in `tables/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


KINDS: Mapping[str, Kind] = {
    "country": Kind("country", "English name of the country.", "国家的英文名称。"),
    "alpha_two": Kind("country_code", "ISO 3166-1 alpha-2 code, for example NO.", "ISO 3166-1 两字母代码，例如 NO。"),
    "alpha_three": Kind(
        "country_code", "ISO 3166-1 alpha-3 code, for example NOR.", "ISO 3166-1 三字母代码，例如 NOR。"
    ),
    "top_level_domain": Kind("domain", "Internet country domain, for example .no.", "互联网国家域名，例如 .no。"),
    "calling_code": Kind(
        "calling_code", "Calling code with a plus sign, for example +47.", "带加号的国际区号，例如 +47。"
    ),
    "city": Kind("city", "English name of the city.", "城市的英文名称。"),
    "us_state": Kind("state", "Name of the US state.", "美国州的英文名称。"),
    "us_state_code": Kind("state_code", "Two-letter postal code, for example TX.", "两字母邮政代码，例如 TX。"),
    "us_state_fips": Kind("fips", "Two-digit FIPS code, for example 48.", "两位 FIPS 代码，例如 48。"),
    "us_county": Kind("county", "Name of the US county.", "美国县的英文名称。"),
    "us_county_fips": Kind("fips", "Five-digit FIPS code.", "五位 FIPS 代码。"),
    "airport_code": Kind("airport", "IATA code of the airport, for example OSL.", "机场的 IATA 代码，例如 OSL。"),
    "airport_icao": Kind("icao", "ICAO code of the airport, for example ENGM.", "机场的 ICAO 代码，例如 ENGM。"),
    "airport_name": Kind("airport_name", "Full name of the airport.", "机场的完整英文名称。"),
    "currency_code": Kind("currency", "ISO 4217 code, for example NOK.", "ISO 4217 货币代码，例如 NOK。"),
    "currency_name": Kind("currency_name", "English name of the currency.", "货币的英文名称。"),
    "language": Kind("language", "English name of the language.", "语言的英文名称。"),
    "language_code": Kind("language_code", "ISO 639 code, for example nb.", "ISO 639 语言代码，例如 nb。"),
    "script": Kind("script", "English name of the writing system.", "文字系统的英文名称。"),
    "script_code": Kind("script_code", "ISO 15924 code, for example Latn.", "ISO 15924 文字代码，例如 Latn。"),
    "element": Kind("element", "English name of the chemical element.", "化学元素的英文名称。"),
    "element_symbol": Kind("symbol", "Chemical symbol, for example Fe.", "元素符号，例如 Fe。"),
    "atomic_number": Kind("number", "Atomic number.", "原子序数。", integer=True),
    "isotope": Kind("isotope", "Isotope, for example carbon-14.", "同位素，例如 carbon-14。"),
    "unit": Kind("unit", "English name of the unit.", "单位的英文名称。"),
    "unit_symbol": Kind("symbol", "Symbol of the unit, for example km.", "单位符号，例如 km。"),
    "timezone": Kind("timezone", "IANA time zone, for example Europe/Oslo.", "IANA 时区，例如 Europe/Oslo。"),
    "day": Kind("date", "Gregorian date, YYYY-MM-DD.", "公历日期，格式为 YYYY-MM-DD。"),
    "year": Kind("year", "Gregorian year, for example 2026.", "公历年份，例如 2026。", integer=True),
    "julian_day": Kind("number", "Julian day number.", "儒略日数。", integer=True),
    "color": Kind("color", "CSS colour name.", "CSS 颜色名称。"),
    "hex_color": Kind("hex", "Colour as #rrggbb.", "颜色，格式为 #rrggbb。"),
    "status_code": Kind("status", "HTTP status code.", "HTTP 状态码。", integer=True),
    "status_phrase": Kind("phrase", "Reason phrase of an HTTP status.", "HTTP 状态的原因短语。"),
    "file_extension": Kind("extension", "File extension without the dot.", "不带点的文件扩展名。"),
    "mime_type": Kind("mime_type", "MIME type, for example image/png.", "MIME 类型，例如 image/png。"),
    "character": Kind("name", "Unicode name of the character, lower case.", "字符的 Unicode 英文名称（小写）。"),
    "code_point": Kind("code_point", "Code point, for example U+03B1.", "码位，例如 U+03B1。"),
    "integer": Kind("number", "A positive integer.", "一个正整数。", integer=True),
    "roman": Kind("numeral", "Roman numeral in capitals.", "大写罗马数字。"),
    "binary": Kind("digits", "Binary digits.", "二进制数字。"),
}
"""Entity kinds by name. A relation whose value is one of them can be chained."""


@dataclass(frozen=True)
class FactServer:
    """A tool server's description of itself."""

    domain: str
    title: Mapping[Language, str]
    description: Mapping[Language, str]


def _server(domain: str, title_en: str, title_zh: str, description_en: str, description_zh: str) -> FactServer:
    return FactServer(domain, {"en": title_en, "zh": title_zh}, {"en": description_en, "zh": description_zh})


SERVERS: Mapping[str, FactServer] = {
    "countries": _server(
        "geography", "Countries", "国家资料",
        "Capital, area, population, neighbours, currency and main official language of the world's countries.",
        "查询世界各国的首都、面积、人口、邻国、货币和主要官方语言。",
    ),
    "country_codes": _server(
        "geography", "Country codes", "国家代码",
        "ISO 3166 codes and internet domains of countries, and the way back.",
        "查询国家的 ISO 3166 代码和互联网域名，也可反向查询。",
    ),
    "cities": _server(
        "geography", "Cities", "城市资料",
        "Country, population, position and time zone of large cities.",
        "查询大城市所属国家、人口、位置和时区。",
    ),
    "us_states": _server(
        "us_government", "US states", "美国各州",
        "Postal and FIPS codes of US states, and facts about their counties and airports.",
        "查询美国各州的邮政代码和 FIPS 代码，以及各县和机场的情况。",
    ),
    "us_counties": _server(
        "us_government", "US counties", "美国各县",
        "States and FIPS codes of US counties.",
        "查询美国各县所属的州和 FIPS 代码。",
    ),
    "airports": _server(
        "travel", "Airports", "机场资料",
        "City, country, elevation and time zone of airports by IATA code.",
        "按 IATA 代码查询机场所在的城市、国家、海拔和时区。",
    ),
    "airport_codes": _server(
        "travel", "Airport codes", "机场代码",
        "Names, IATA codes and ICAO codes of airports.",
        "查询机场的名称、IATA 代码和 ICAO 代码。",
    ),
    "phones": _server(
        "communication", "Telephone numbering", "电话编号",
        "Calling codes, dialling prefixes and number lengths of countries.",
        "查询各国的国际区号、拨号前缀和号码长度。",
    ),
    "currencies": _server(
        "finance", "Currencies", "货币资料",
        "Names, codes, users and decimal digits of the world's currencies.",
        "查询世界货币的名称、代码、使用国和小数位数。",
    ),
    "languages": _server(
        "language", "Languages and scripts", "语言与文字",
        "Codes, writing systems and home countries of languages.",
        "查询语言的代码、文字系统和主要使用国。",
    ),
    "elements": _server(
        "chemistry", "Chemical elements", "化学元素",
        "Symbols, atomic numbers, masses and densities of the chemical elements.",
        "查询化学元素的符号、原子序数、原子量和密度。",
    ),
    "isotopes": _server(
        "chemistry", "Isotopes", "同位素",
        "Masses, neutrons and abundances of isotopes.",
        "查询同位素的质量、中子数和丰度。",
    ),
    "units": _server(
        "measurement", "Units of measurement", "计量单位",
        "Symbols, dimensions and SI values of units of measurement.",
        "查询计量单位的符号、量纲和国际单位制数值。",
    ),
    "timezones": _server(
        "time", "Time zones", "时区",
        "UTC offsets, abbreviations, countries and cities of IANA time zones.",
        "查询 IANA 时区的 UTC 偏移、缩写、国家和城市。",
    ),
    "holidays": _server(
        "time", "Holidays", "节假日",
        "Dates of holidays by year or country, and their weekdays.",
        "按年份或国家查询节日日期及其星期。",
    ),
    "calendars": _server(
        "time", "Calendars of the world", "世界历法",
        "A Gregorian date in the Hebrew, Islamic and Julian calendars, its ISO week and Julian day.",
        "把公历日期换算为希伯来历、伊斯兰历和儒略历，并查询其 ISO 周和儒略日。",
    ),
    "colors": _server(
        "design", "Colours", "颜色",
        "Hex values and red, green and blue shares of CSS colours.",
        "查询 CSS 颜色的十六进制值和红绿蓝分量。",
    ),
    "http": _server(
        "web", "HTTP status codes", "HTTP 状态码",
        "Reason phrases, classes and constant names of HTTP status codes.",
        "查询 HTTP 状态码的原因短语、类别和常量名。",
    ),
    "mime": _server(
        "web", "MIME types", "MIME 类型",
        "MIME types of file extensions, and the way back.",
        "查询文件扩展名的 MIME 类型，也可反向查询。",
    ),
    "unicode": _server(
        "computing", "Unicode characters", "Unicode 字符",
        "Names, code points, categories and encodings of Unicode characters.",
        "查询 Unicode 字符的名称、码位、类别和编码。",
    ),
    "numbers": _server(
        "mathematics", "Whole numbers", "整数",
        "Roman and binary forms, primes and divisors of whole numbers.",
        "查询整数的罗马数字、二进制形式、素数和约数。",
    ),
}  # fmt: skip
"""Tool servers by id; `synthesis.offline.facts.servers` makes `ToolServer` records of them."""

RELATIONS: tuple[str, ...] = (
    "capital_of_country", "area_of_country", "population_of_country", "continent_of_country", "currency_of_country",
    "language_of_country", "largest_neighbor_of_country", "short_code_of_country", "long_code_of_country",
    "country_of_short_code", "country_of_long_code", "domain_of_country", "country_of_domain", "country_of_city",
    "population_of_city", "timezone_of_city", "latitude_of_city", "longitude_of_city", "largest_city_of_country",
    "postal_code_of_state", "state_of_postal_code", "fips_of_state", "state_of_fips", "county_count_of_state",
    "state_of_airport", "state_of_county", "fips_of_county", "county_of_fips", "state_of_county_fips",
    "city_of_airport", "country_of_airport", "elevation_of_airport", "timezone_of_airport", "airport_of_city",
    "icao_of_airport", "airport_of_icao", "airport_name_of_icao", "airport_of_airport_name",
    "calling_code_of_country", "country_of_calling_code", "exit_code_of_country", "trunk_prefix_of_country",
    "mobile_digits_of_country", "name_of_currency", "code_of_currency_name", "issuer_of_currency",
    "decimals_of_currency", "currency_year_of_country", "code_of_language", "language_of_code",
    "script_of_language", "main_country_of_language", "code_of_script", "script_of_code", "symbol_of_element",
    "element_of_symbol", "atomic_number_of_element", "element_of_atomic_number", "atomic_mass_of_element",
    "density_of_element", "element_of_isotope", "neutrons_of_isotope", "mass_of_isotope", "abundance_of_isotope",
    "main_isotope_of_element", "isotope_count_of_element", "symbol_of_unit", "unit_of_symbol", "si_value_of_unit",
    "base_unit_of_unit", "dimension_of_unit", "winter_offset_of_timezone", "summer_offset_of_timezone",
    "abbreviation_of_timezone", "country_of_timezone", "timezone_of_country", "city_of_timezone", "easter_of_year",
    "thanksgiving_of_year", "hebrew_new_year_of_year", "hanukkah_of_year", "independence_day_of_country",
    "weekday_of_date", "hebrew_date_of_date", "islamic_date_of_date", "iso_week_of_date", "julian_date_of_date",
    "julian_day_of_date", "date_of_julian_day", "hex_of_color", "color_of_hex", "complement_of_hex", "red_of_hex",
    "green_of_hex", "blue_of_hex", "phrase_of_status", "status_of_phrase", "status_class_of_status",
    "constant_of_status", "mime_type_of_extension", "extension_of_mime_type", "family_of_mime_type",
    "extension_count_of_mime_type", "code_point_of_character", "character_of_code_point", "category_of_code_point",
    "utf_bytes_of_code_point", "uppercase_of_code_point", "roman_numeral_of_number", "number_of_roman_numeral",
    "binary_form_of_number", "next_prime_of_number", "divisor_count_of_number", "top_prime_factor_of_number",
)  # fmt: skip
"""All relations, in the order of `relations.all_relations`, whose tables take two seconds to read."""
