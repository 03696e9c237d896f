"""Numbers, dates and times of other languages, rewritten in the notation that `quantities` and `dates` read.

Number signs, multipliers, units, currencies and months are those of the Unicode CLDR (through Babel); all else is in
`language_words`. A language is loaded when it is first asked for, Babel with the first. English needs neither; Chinese
needs Babel's names of places, when a Chinese name is first found within a text. Every rewriting is one pass over the
text.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from synthesis.core.language_words import Half, Words, has_text_words, text_words
from synthesis.core.normal_text import bare, fold, normalized
from synthesis.core.quantities import plain
from synthesis.core.units import CURRENCIES, UNITS, any_of
from synthesis.core.word_forms import WordForms

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_UNITS: Final = {
    "length-kilometer": "km", "length-meter": "m", "length-decimeter": "dm", "length-centimeter": "cm",
    "length-millimeter": "mm", "length-micrometer": "μm", "length-nanometer": "nm", "length-mile": "mi",
    "length-yard": "yd", "length-foot": "ft", "length-inch": "inch", "length-light-year": "ly",
    "length-nautical-mile": "nmi", "length-astronomical-unit": "au", "area-square-kilometer": "km2",
    "area-square-meter": "m2", "area-square-centimeter": "cm2", "area-square-mile": "mi2", "area-square-foot": "ft2",
    "area-hectare": "ha", "area-acre": "acre", "mass-tonne": "t", "mass-kilogram": "kg", "mass-gram": "g",
    "mass-milligram": "mg", "mass-microgram": "μg", "mass-pound": "lb", "mass-ounce": "oz",
    "duration-century": "century", "duration-decade": "decade", "duration-year": "year", "duration-month": "month",
    "duration-week": "week", "duration-day": "day", "duration-hour": "h", "duration-minute": "min",
    "duration-second": "s", "duration-millisecond": "ms", "speed-kilometer-per-hour": "km/h",
    "speed-meter-per-second": "m/s", "speed-mile-per-hour": "mph", "speed-knot": "knot", "temperature-celsius": "°c",
    "temperature-fahrenheit": "°f", "temperature-kelvin": "K", "volume-liter": "l", "volume-milliliter": "ml",
    "volume-centiliter": "cl", "volume-cubic-meter": "m3", "volume-cubic-kilometer": "km3",
    "volume-cubic-centimeter": "cm3", "volume-gallon": "gal", "digital-byte": "byte", "digital-kilobyte": "kb",
    "digital-megabyte": "mb", "digital-gigabyte": "gb", "digital-terabyte": "tb", "power-watt": "W",
    "power-kilowatt": "kw", "power-megawatt": "MW", "power-gigawatt": "gw", "power-horsepower": "hp",
    "energy-joule": "J", "energy-kilojoule": "kj", "energy-kilocalorie": "kcal", "energy-kilowatt-hour": "kwh",
    "frequency-hertz": "hz", "frequency-kilohertz": "khz", "frequency-megahertz": "MHz", "frequency-gigahertz": "ghz",
    "electric-volt": "V", "electric-ampere": "amp", "pressure-pascal": "pa", "pressure-hectopascal": "hpa",
    "pressure-bar": "bar", "pressure-millibar": "mbar", "pressure-atmosphere": "atm", "concentr-percent": "%",
    "angle-degree": "degrees",
}  # fmt: skip
"""CLDR's unit identifiers and the names that `quantities` reads."""
_MULTIPLIERS: Final = {
    10**2: "百", 10**3: "thousand", 10**4: "万", 10**5: "lakh", 10**6: "million", 10**7: "crore", 10**8: "亿",
    10**9: "billion", 10**10: "百亿", 10**11: "千亿", 10**12: "trillion",
}  # fmt: skip
_TENS: Final = {"ko": "십백천", "ja": "十百千"}
_MYRIADS: Final = {"ko": {"만": "万", "억": "亿", "조": "万亿"}, "ja": {"万": "万", "億": "亿", "兆": "万亿"}}
"""In Korean and Japanese tens, hundreds and thousands multiply these: 5천만."""
_OF_DATES: Final = ("年", "月", "日")
"""Units that `quantities` reads by itself, since they also make dates."""
_ERAS: Final = {"令和": 2018, "平成": 1988, "昭和": 1925, "大正": 1911, "明治": 1867}
_BUDDHIST: Final = 543
_BUDDHIST_YEAR = re.compile(r"พ\.ศ\.[ ]?(\d{4})(?!\d)")
_LONGEST_PREFIX: Final = 16
"""Longest unit before its number: 时速 120km."""
_AND_HALF = re.compile(r"(\d)[ ]?(時間|年|か月|ヶ月|カ月|시간|년|개월)[ ]?[半반]")
_CENTS = re.compile(r"(?<![\d.,])(\d{1,6})[ ]?([€£$])(\d\d)(?!\d|[.,]\d)")
_NO_CENTS = re.compile(r"(?<=\d),-{1,2}(?![\w-])")
_DIGIT = re.compile(r"\d")
_NATIVE_DIGIT = re.compile(r"[^\D0-9]")
_NUMERIC_DATE = re.compile(r"(?<![\w./-])(\d{1,2})([./-])[ ]?(\d{1,2})\2[ ]?(\d{4})(?![\d/-]|\.\d)")
_KOREAN_DATE = re.compile(
    r"(?<!\d)(?:(\d{4})\s?년\s?)?(\d{1,2})\s?월\s?(\d{1,2})\s?일|(?<![\d.])(\d{4})\.\s(\d{1,2})\.\s(\d{1,2})(?!\d)"
)
_KOREAN_MONTH = re.compile(r"(\d{1,2})월")
_THOUSANDS = re.compile(
    r"(?<!\d)(?=\d[천백십千百十]\d)(?:(\d)[천千])?(?:(\d)[백百])?(?:(\d)[십十])?(\d)?(?=[만억조万億兆])"
)
_ERA_YEAR = re.compile(rf"({'|'.join(_ERAS)})\s?(\d{{1,2}}|元)\s?年")
_BESIDE_LATIN = re.compile(r"[A-Za-zÀ-ɏ0-9_]")


class Locale:
    """A language as answers in it are read. Get one with `locale_of`."""

    def __init__(self, language: str) -> None:
        self.language = language
        words = self.words = text_words(language)
        self._signs = str.maketrans(words.signs)
        data = _cldr(language)
        symbols = data["number_symbols"]["latn"]
        self.has_decimal_comma = symbols["decimal"] == ","
        group = r"\.\d{3}" if symbols["group"] == "." else r"(?!)"
        self._written = (
            re.compile(rf"(?<!\d)(?:[1-9]\d{{0,2}}(?:{group})+(?:,\d+)?|\d++,\d+)") if self.has_decimal_comma else None
        )
        short = data["date_formats"]["short"].pattern
        self._is_day_first = short.index("d") < short.index("M") < short.index("y")
        self.yes = frozenset(fold(self.spelled(one)) for one in words.yes.split("|"))
        self.no = frozenset(fold(self.spelled(one)) for one in words.no.split("|"))
        self._judged = self._pattern(rf"^(?:(?:{words.regret}),?[ ]?)?(?:{words.judged})?[ ]?|(?:{words.polite})$")
        self.joins = self._pattern(words.joins)
        self._sentence = self._pattern(words.sentence)
        self.forms = WordForms(language, words, self._pattern)
        self._read_dates(data, words)
        self._read_clock(words)
        self._read_numbers(data, words)

    # -----------------------------------------------------------------------------------------------------------------
    # Text

    def plain(self, text: str) -> str:
        """Return a `quantities.plain` text with the digits 0 to 9 and with Latin punctuation."""
        text = _NATIVE_DIGIT.sub(lambda one: str(int(one[0])), text)
        return text.translate(self._signs) if self._signs else text

    def spelled(self, text: str) -> str:
        """Any text in the spelling that is searched."""
        return self.plain(plain(text))

    def _pattern(self, pattern: str) -> re.Pattern[str]:
        return re.compile(normalized("NFKC", pattern).translate(self._signs), re.IGNORECASE)

    def judgement(self, part: str) -> str:
        """Return a folded part of a text without what it judges: "nicht korrekt" of "das ist leider nicht korrekt"."""
        return self._judged.sub("", part)

    def is_sentence(self, text: str) -> bool:
        """Return whether a `plain` text is a sentence, not a name or a value."""
        words = text.split()
        if len(words) >= self.words.fewest and self._sentence.search(text):
            return True
        return len(words) > 5 or (len(words) >= 3 and text.rstrip().endswith((".", "!", "?")))

    # -----------------------------------------------------------------------------------------------------------------
    # Dates

    def _read_dates(self, data: Any, words: Words) -> None:
        self._months: dict[str, int] = {}
        if self.language in ("ko", "ja"):
            return
        for months in (data["months"], *(_cldr(region)["months"] for region in words.regions)):
            for context in ("format", "stand-alone"):
                for width in ("wide", "abbreviated"):
                    for number, name in months[context][width].items():
                        self._add_month(name, number)
        for number, names in words.months.items():
            for name in names.split():
                self._add_month(name, number)
        month = any_of(self._months)
        links = rf"(?:(?:{words.links})[ ]?)"
        self._day_month = self._pattern(
            r"(?<![A-Za-z0-9_./-])(?P<d>\d{1,2})(?:\.?°|\.|er|re|o|a|-?(?:е|го))?[ -]?"
            rf"{links}?(?P<mo>{month})(?![^\W\d_])\.?"
            rf"(?:,?[ -]?{links}?{links}?(?P<y>\d{{4}})(?!\d))?"
        )
        self._month_day = self._pattern(
            rf"(?<![^\W\d_])(?P<mo>{month})\.?[ ](?P<d>\d{{1,2}})\.?,?[ ]{links}?(?P<y>\d{{4}})(?!\d)"
        )

    def _add_month(self, name: str, number: int) -> None:
        name = self.spelled(name).rstrip(".").casefold()
        if not name.isdecimal():
            self._months.update({name: number, bare(name): number})

    def dates(self, text: str) -> str:
        """Return a `plain` text with its dates as 2026-05-03, and days without a year as 3 May."""
        if not _DIGIT.search(text):
            return text
        if self.language == "ko":
            return _KOREAN_MONTH.sub(r"\1月", _KOREAN_DATE.sub(_korean_date, text))
        if self.language == "ja":
            return _ERA_YEAR.sub(lambda one: f"{_ERAS[one[1]] + int(one[2].replace('元', '1'))}年", text)
        text = self._day_month.sub(self._named_date, text)
        text = self._month_day.sub(self._named_date, text)
        return _NUMERIC_DATE.sub(self._numeric_date, text) if self._is_day_first else text

    def _named_date(self, one: re.Match[str]) -> str:
        name = one["mo"].casefold()
        number = self._months.get(name) or self._months[bare(name)]
        if one["y"] is None:
            return f"{int(one['d'])} {_MONTHS[number - 1]} " if len(name) > 3 and 1 <= int(one["d"]) <= 31 else one[0]
        return self._iso(one["y"], number, one["d"]) or one[0]

    def _numeric_date(self, one: re.Match[str]) -> str:
        return self._iso(one[4], int(one[3]), one[1]) or one[0]

    def _iso(self, year: str, month: int, day: str) -> str:
        of = int(year)
        if self.language == "th" and of > 2400:
            of -= _BUDDHIST
        try:
            return datetime.date(of, month, int(day)).isoformat()
        except ValueError:
            return ""

    # -----------------------------------------------------------------------------------------------------------------
    # Times

    def _read_clock(self, words: Words) -> None:
        clock = words.clock
        self._halves_before = [(half, self._pattern(f"(?:{one})[ ]?$")) for half, one in clock.before.items()]
        self._halves_after = [(half, self._pattern(one)) for half, one in clock.after.items()]
        self._at = self._pattern(f"(?:{clock.at})[ ]?$")
        self._time = self._pattern(
            r"(?<![\d.,:/+-])(?<![A-Za-z_])(?P<h>\d{1,2})(?:"
            rf":(?P<m>\d\d)(?::(?P<s>\d\d))?(?![:\d]|-\d)(?P<colon>{clock.hour})?"
            rf"|\.(?P<m1>\d\d)(?!\.?\d)(?P<dot>{clock.hour})?|(?P<mark>{clock.hour})(?:{clock.minutes})?"
            # What has no mark is one by the word for its half: 2 de la tarde, 2 ทุ่ม.
            rf"|(?={'|'.join(clock.after.values()) or '(?!)'}))"
        )

    def clock(self, text: str) -> str:
        """Return a text of `dates` with its times as 14:30."""
        return self._times(text, durations=False)

    def _times(self, text: str, *, durations: bool) -> str:
        """Args: durations: whether 14h30, which is both, becomes a duration."""
        made: list[str] = []
        at = 0
        for one in self._time.finditer(text):
            if one.start() < at:
                continue
            found = self._one_time(text, one, durations=durations)
            if found is not None:
                written, end = found
                made += [text[at : one.start()], written]
                at = end
        return "".join([*made, text[at:]]) if made else text

    def _one_time(self, text: str, one: re.Match[str], *, durations: bool) -> tuple[str, int] | None:
        before = text[max(0, one.start() - 24) : one.start()]
        half: Half | None = next((half for half, pattern in self._halves_before if pattern.search(before)), None)
        end = one.end()
        for name, pattern in self._halves_after if half is None else ():
            if after := pattern.match(text, end):
                half, end = name, after.end()
                break
        is_said = half is not None or self._at.search(before) is not None
        minute = one["m"] or one["m1"] or one["m2"] or "00"
        minute = minute if minute.isdecimal() else "30"
        if one["m"] is not None:
            if half is None and one["colon"] is None:
                return None
        elif one["m1"] is not None:
            if not (is_said or one["dot"]):
                return None
        elif one["mark"] is None and self.words.clock.lasts and not self._at.search(before):
            return None  # 2 дня are two days
        elif self.words.clock.lasts and not is_said:
            if one["m2"] is None:
                return None
            if durations:
                return f"{one['h']} h {minute} min", end
        hour = _hour(int(one["h"]), half)
        if hour is None or int(minute) > 59:
            return None
        seconds = f":{one['s']}" if one["s"] else ""
        return f"{hour:02}:{minute:0>2}{seconds}" + " " * text[end : end + 1].isalnum(), end

    # -----------------------------------------------------------------------------------------------------------------
    # Numbers

    def _read_numbers(self, data: Any, words: Words) -> None:
        self._multipliers = self._multiplier_words(data, words)
        self._units: dict[str, str] = {}
        self._around: list[tuple[str, str, str]] = []
        for unit, name in _UNITS.items():
            widths = data["unit_patterns"].get(unit) or {}
            for width in ("long", "short"):
                for form, pattern in (widths.get(width) or {}).items():
                    if form != "per" and "{0}" in pattern:
                        self._add_unit(name, *map(self.spelled, pattern.split("{0}")))
        for code in CURRENCIES:
            for name in (data["currency_names"].get(code), *data["currency_names_plural"].get(code, {}).values()):
                if name:
                    self._add_unit(code, "", self.spelled(name))
        for name, unit in words.units.items():
            before, _, after = self.spelled(name).rpartition("{0}")
            if before:
                self._add_unit(unit, before, after)
            else:
                self._units[after.casefold()] = unit
        marks = r"\u0900-\u0963\u064b-\u0652"
        after = f"(?:{words.after})?" if words.after and not words.beside else ""
        edge = "" if self.language in ("ko", "ja", "th") else rf"{after}(?![^\W\d_]|[{marks}])"
        links = rf"(?:[ ](?:{words.links})[ ]?)?"
        self._number = self._pattern(
            r"(?<![0-9A-Za-z_.,:/^#])(?P<n>\d++(?>(?:[.,]\d+)*))"
            rf"(?:[ ]?-?(?P<mult>{any_of(self._multipliers)}){edge}(?P<join>[ ](?=\d))?)?"
            rf"(?:{links}[ ]?-?(?P<unit>{any_of(self._units)}){edge}(?![ ]?/))?"
        )
        self._between = self._pattern(rf"( (?:h|min|day|week|year|month))(?:{words.joins})(?=\d)")
        self._minus = self._pattern(rf"(?:{words.minus})[ ]?(?=\d)")
        # What is below zero has at most two words behind its number: 5 grados centígrados bajo cero.
        self._below = self._pattern(
            rf"(?<![\d.,-])(\d++(?:[.,]\d++)?(?:[ ]?[^\W\d_°]{{1,20}}|[ ]?°C?){{0,2}}[ ](?:{words.below}))"
        )
        self._ordinal = self._pattern(words.ordinals)

    def unit(self, name: str) -> str:
        """Return the name in `units` of a unit that is spelled in the language."""
        return self._units.get(self.spelled(name).casefold(), name)

    def _add_unit(self, name: str, before: str, after: str) -> None:
        before, after = before.strip().casefold(), after.strip().casefold()
        if before:
            self._around.append((before, after, name))
            if after:
                self._units.setdefault(after, after)
            return
        # One letter is mostly another word: в is a volt and "in".
        if after in _OF_DATES:
            return
        if after and after not in UNITS and (len(after.rstrip(".")) > 1 or "\u3040" <= after <= "\ud7af"):
            self._units.setdefault(after, name)

    def _multiplier_words(self, data: Any, words: Words) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.language in _MYRIADS:
            tens = {"": "", **dict(zip(_TENS[self.language], "十百千", strict=True))}
            for ten, chinese in tens.items():
                for myriad, written in _MYRIADS[self.language].items():
                    if len(written) + len(chinese) < 3:
                        found[ten + myriad] = chinese + written
            return found | {_TENS[self.language][-1]: "千", _TENS[self.language][1]: "百"}
        factors: dict[str, int] = {}
        for forms in data["compact_decimal_formats"].values():
            for patterns in forms.values():
                for magnitude, pattern in patterns.items():
                    # "00 Millionen" is how 10,000,000 starts.
                    word = self.spelled(pattern.pattern.replace("'", "")).replace("0", "").strip().casefold()
                    factors[word] = int(magnitude) // 10 ** (max(pattern.pattern.count("0"), 1) - 1)
        factors |= {self.spelled(word).casefold(): factor for word, factor in words.multipliers.items()}
        for word, factor in factors.items():
            if (len(word.rstrip(".")) > 1 or not word.isascii()) and word and factor in _MULTIPLIERS:
                found[word] = found[word.rstrip(".")] = _MULTIPLIERS[factor]
        return found

    def numbers(self, text: str) -> str:
        """Return a text of `dates` with numbers as 1234.5, multipliers as million or 万, and units as km."""
        if not _DIGIT.search(text):
            return text
        text = self._times(text, durations=True)
        if self.language == "th":
            text = _BUDDHIST_YEAR.sub(lambda one: f"{one[1]} ({int(one[1]) - _BUDDHIST})", text)
        text = self._ordinal.sub(_ranked, text)
        if self.language in _TENS:
            text = _AND_HALF.sub(r"\1.5\2", _THOUSANDS.sub(_summed, text))
        if self.has_decimal_comma:  # 12€90, and 1299,- Euro
            text = _NO_CENTS.sub("", _CENTS.sub(r"\1,\3 \2", text))
        text = self._minus.sub(" -", text)
        text = self._below.sub(r"-\1", text)
        text = self._number.sub(lambda one: self._one_number(text, one), text)
        return self._between.sub(r"\1 and ", text)

    def _one_number(self, text: str, one: re.Match[str]) -> str:
        number, multiplier, unit = one["n"], one["mult"], one["unit"]
        if self._written and self._written.fullmatch(number):
            number = number.replace(".", "").replace(",", ".")
        made = number
        if multiplier:
            written = self._multipliers.get(multiplier.casefold(), multiplier)
            made += written if not written.isascii() else f" {written}"
        unit = (unit or "").casefold()
        name = self._units.get(unit, unit)
        if self._around:
            head = text[max(0, one.start() - _LONGEST_PREFIX) : one.start()].rstrip().casefold()
            name = next((of for before, after, of in self._around if unit == after and head.endswith(before)), name)
        if name:
            made += f" {name}"
        elif one["join"] and made[-1].isascii():
            made += " "  # but 12만 3456 is one number
        behind = text[one.end() : one.end() + 1]
        if name or multiplier:
            # 12万8000 is one number.
            return made + " " * (
                (behind.isalnum() if name or made[-1].isascii() else behind.isalpha()) and not one["join"]
            )
        # Letters touch digits: 5명. Latin letters behind a digit make a name: 5G.
        return made + " " * (self.words.touches and behind.isalpha() and not _BESIDE_LATIN.match(behind))


def _ranked(one: re.Match[str]) -> str:
    """The rank with a mark by which `quantities` passes over its number."""
    names = [name for name, number in one.groupdict().items() if number is not None]
    start = one.start(names[0]) - one.start() if names else 0
    return f"{one[0][:start]}#{one[0][start:]}"


def _summed(one: re.Match[str]) -> str:
    """5100 of 5천1백."""
    return str(sum(int(digit or 0) * 10**power for digit, power in zip(one.groups(), (3, 2, 1, 0), strict=True)))


def _korean_date(one: re.Match[str]) -> str:
    year, month, day = (one[1], one[2], one[3]) if one[2] else (one[4], one[5], one[6])
    try:
        whole = datetime.date(int(year or 2000), int(month), int(day))
    except ValueError:
        return one[0]
    return whole.isoformat() if year else f"{whole.month}月{whole.day}日"


def _hour(hour: int, half: Half | None) -> int | None:
    """Return the hour of 24, or None where there is none such."""
    if half == "evening":
        return hour + 18 if 1 <= hour <= 5 else None
    if half is not None and hour <= 12:
        late = half == "pm" or (half == "night" and 6 <= hour < 12)
        hour = hour % 12 + 12 * late
    return hour if hour < 24 else None


def _cldr(locale: str) -> Any:
    """Return the CLDR's data of a locale, as Babel names its parts."""
    from babel import localedata

    data: Any = localedata.load(locale)
    return localedata.LocaleDataDict(data)


_KINDS: Final = re.compile(
    r"[()（） ]|中国|中國|香港|澳门|澳門|共和国|共和國|王国|王國|联邦|聯邦|特别行政区|特別行政區|"
    "群岛|群島|诸岛|諸島|[岛島市州省县縣区區]"
)
"""Additions to a Chinese place name that do not change the place: 法罗群岛 is 法罗."""


_LONGEST_PLACE: Final = 12
"""Characters; the CLDR's few longer names are titles."""


@cache
def _chinese_places() -> frozenset[str]:
    """Names of territories and of the cities of time zones, in both scripts, from the CLDR."""
    found: set[str] = set()
    for script in ("zh_Hans", "zh_Hant"):
        data = _cldr(script)
        found.update(map(str, data["territories"].values()))
        found.update(zone["city"] for zone in data["time_zones"].values() if "city" in zone)
    return frozenset(found)


def chinese_places_around(text: str, start: int, end: int) -> Iterator[str]:
    """Names of other places that a part of a Chinese text is cut from: 都柏林 for the 柏林 in it.

    Chinese has no spaces, so that a name is found in another one wherever their characters meet.
    """
    known, part = _chinese_places(), text[start:end]
    for first in range(max(0, start - _LONGEST_PLACE), start + 1):
        for last in range(end, min(len(text), first + _LONGEST_PLACE) + 1):
            name = text[first:last]
            if name in known and _KINDS.sub("", name.replace(part, "", 1)):
                yield name


@cache
def _loaded(language: str) -> Locale:
    return Locale(language)


def locale_of(language: str) -> Locale | None:
    """Return the tables of a language; None for English and Chinese, which need none, and where there are none."""
    return _loaded(language) if has_text_words(language) else None
