"""Currencies, languages and scripts (Unicode CLDR through Babel)."""

from __future__ import annotations

from babel import Locale
from babel.core import get_global
from babel.numbers import get_currency_precision, get_territory_currencies

from synthesis.offline.facts.entities import country_names, country_rows, language_names
from synthesis.offline.facts.names import canonical, functional, inverse
from synthesis.offline.facts.relations import Relation
from synthesis.offline.facts.tables import relation


def build() -> list[Relation]:
    return [*_currencies(), *_languages()]


def _currencies() -> list[Relation]:
    users: dict[str, list[str]] = {}
    since: dict[str, int] = {}
    for country, row in country_rows().items():
        code = row["currencycode"]
        if not code:
            continue
        users.setdefault(code, []).append(country)
        for record in get_territory_currencies(row["iso"], include_details=True):
            if record["currency"] == code and record["from"] is not None:
                since[country] = record["from"].year
    names = Locale("en").currencies
    name = {code: text for code in sorted(users) if (text := canonical(names.get(code, ""))) is not None}
    return [
        relation(
            "name_of_currency", "currencies", ("currency_code", "currency_name"), name,
            ("the currency name of", "the full name of"), ("货币名称",),
            about=("Look up the English name of a currency by its code.", "根据代码查询货币的英文名称。"),
        ),
        relation(
            "code_of_currency_name", "currencies", ("currency_name", "currency_code"), inverse(name),
            ("the ISO code of", "the ISO currency code of"), ("ISO货币代码",),
            about=("Look up the ISO 4217 code of a currency by its name.", "根据名称查询货币的 ISO 4217 代码。"),
        ),
        relation(
            "issuer_of_currency", "currencies", ("currency_code", "country"),
            {code: countries[0] for code, countries in sorted(users.items()) if len(countries) == 1},
            ("the only country using", "the sole user of"), ("货币使用国",),
            about=("Find the only country that uses a currency.", "查询使用某种货币的唯一国家。"),
        ),
        relation(
            "decimals_of_currency", "currencies", ("currency_code", "number"),
            {code: get_currency_precision(code) for code in sorted(users)},
            ("the decimal digits of", "the number of decimals of"), ("货币小数位数",),
            about=("Count the decimal digits of amounts in a currency.", "查询一种货币金额的小数位数。"), unit="digits",
        ),
        relation(
            "currency_year_of_country", "currencies", ("country", "year"), since,
            ("the currency introduction year of", "the start year of currency in"), ("现行货币启用年份",),
            about=("Look up the year in which a country introduced its currency.", "查询一个国家启用现行货币的年份。"),
        ),
    ]  # fmt: skip


def _languages() -> list[Relation]:
    names, countries = language_names(), country_names()
    scripts = Locale("en").scripts
    script_names = inverse(functional((canonical(text), code) for code, text in sorted(scripts.items())))
    script: dict[str, str] = {}
    home: dict[str, str] = {}
    for code, name in names.items():
        for part in get_global("likely_subtags")[code].split("_")[1:]:
            if part in script_names:
                script[name] = script_names[part]
            elif part in countries:
                home[name] = countries[part]
    code_of = inverse(names)
    return [
        relation(
            "code_of_language", "languages", ("language", "language_code"), code_of,
            ("the language code of", "the ISO 639 code of"), ("语言代码",),
            about=("Look up the ISO 639 code of a language.", "查询一种语言的 ISO 639 代码。"),
        ),
        relation(
            "language_of_code", "languages", ("language_code", "language"), names,
            ("the language with code", "the language with ISO 639 code"), ("代码对应语言",),
            about=("Find the language that has an ISO 639 code.", "根据 ISO 639 代码查询语言。"),
        ),
        relation(
            "script_of_language", "languages", ("language", "script"), script,
            ("the script of", "the writing system of"), ("书写文字",),
            about=("Look up the script in which a language is usually written.", "查询一种语言通常使用的文字。"),
        ),
        relation(
            "main_country_of_language", "languages", ("language", "country"), home,
            ("the main country speaking", "the main country using"), ("主要使用国家",),
            about=("Look up the country in which a language is used most (CLDR).",
                   "查询一种语言最主要的使用国家（CLDR）。"),
        ),
        relation(
            "code_of_script", "languages", ("script", "script_code"), inverse(script_names),
            ("the script code of", "the ISO 15924 code of"), ("文字代码",),
            about=("Look up the ISO 15924 code of a script.", "查询一种文字的 ISO 15924 代码。"),
        ),
        relation(
            "script_of_code", "languages", ("script_code", "script"), script_names,
            ("the script with code", "the script with ISO 15924 code"), ("代码对应文字",),
            about=("Find the script that has an ISO 15924 code.", "根据 ISO 15924 代码查询文字。"),
        ),
    ]  # fmt: skip
