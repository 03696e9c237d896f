"""Numbers and units in free text: the part of `matching` that reads `$1,234.5`, `15 km` and `三百二十万`.

Every pattern here starts with a plain character class, so that `re` skips quickly over text without digits, and looks
back with a lookbehind after that first character; none can backtrack over more than one number.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Final, NamedTuple

from synthesis.core.normal_text import normalized

CJK: Final = r"\u3400-\u4dbf\u4e00-\u9fff\u3040-\u30ff"


class Quantity(NamedTuple):
    """A number and its unit; "" where none is given. (A tuple: a long output makes very many.)"""

    value: int | float
    unit: str = ""


def same_quantity(found: Quantity, wanted: Quantity, tolerance: float) -> bool:
    """Whether two quantities are equal within an absolute tolerance, in the wanted one's unit.

    A missing unit on either side is no difference; units that do not convert are.
    """
    value, size = found.value, abs(wanted.value)
    have, want = (_unit(found.unit), _unit(wanted.unit)) if found.unit and wanted.unit else ("", "")
    try:
        if have != want and want not in _LOOSE.get(have, ()):
            one, other = _UNITS.get(have), _UNITS.get(want)
            if one is None or other is None or one[0] != other[0]:
                return False
            value = (value + _ZERO.get(have, 0.0)) * one[1] / other[1]
            size = max(size, abs(value))  # before the zero of the scale is taken off: 32 °F is 0 °C
            value -= _ZERO.get(want, 0.0)
        slack = 0.0 if isinstance(value, int) and isinstance(wanted.value, int) else 1e-9 * size
        return abs(value - wanted.value) <= tolerance + slack
    except OverflowError:  # an integer beyond every float is equal to none
        return False


def quantities(text: str) -> list[Quantity]:
    """The numbers of a text, each with its unit if that is a known one."""
    return list(each_quantity(plain(text)))


def each_quantity(text: str) -> Iterator[Quantity]:
    """The numbers of a text that is `plain` already, one after the other."""
    if (ordinal := _ORDINAL.fullmatch(text.strip())) and (number := _ordinal(ordinal)) is not None:
        yield Quantity(number)
        return
    yield from (quantity for _, quantity in _arabic(text))
    yield from _chinese(text)


def numerals(text: str) -> list[str]:
    """The numbers of a text as they are written."""
    return list(each_numeral(plain(text)))


def each_numeral(text: str) -> Iterator[str]:
    """The numbers of a text that is `plain` already, as they are written."""
    return (written for written, _ in _arabic(text))


_ONE_NUMBER = re.compile(r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?")


def written_number(text: str) -> int | float | None:
    """The one number that a string is in plain digits, with or without thousands separators; else None.

    `02` and `5 km` are none, nor is one of more digits than any answer has.
    """
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not _ONE_NUMBER.fullmatch(text):
        return None
    number = text.replace(",", "")
    return float(number) if "." in number else int(number)


def unit_of_key(key: str) -> str:
    """The unit in which a JSON key says that its number is: `elevation_ft`, `area (km2)`; "" for none."""
    found = _KEY_UNIT.search(key)
    unit = _unit(found[1]) if found else ""
    return unit if unit in _UNITS and unit not in _NOT_IN_KEYS else ""


# ---------------------------------------------------------------------------------------------------------------------
# One notation


_SAME: Final = str.maketrans(
    {"−": "-", "‐": "-", "‑": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "⁄": "/", "〜": "~"}
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad")
)  # fmt: skip
_LONGEST_NUMBER: Final = 300
_SUPERSCRIPTS: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_POWER = re.compile(rf"(?<=\d)[{_SUPERSCRIPTS}]+")
# From a number's first digit on, and not again from each of the others.
_PART = re.compile(rf"(?<!\d)(\d{{1,{_LONGEST_NUMBER}}}+)?[ \u2064]?([¼½¾⅐-⅞])")
_WIDE_COMMA = re.compile(r"，(?!\d{3}(?!\d))")
_EN_DASH = re.compile(r"–(?=\d)|(?<=\w)–(?=\w)")


def plain(text: str) -> str:
    """The text without differences of width, of quotes, hyphens and minus signs, and without invisible characters."""
    if text.isascii():
        return text
    text = _POWER.sub(lambda one: "^" + normalized("NFKC", one[0]), text)  # NFKC would make 103 of 10³
    text = _PART.sub(lambda one: f"{int(one[1] or 0) + unicodedata.numeric(one[2]):.16g}", text)
    text = _WIDE_COMMA.sub(", ", text).replace("º", "°")
    return _EN_DASH.sub("-", normalized("NFKC", text).translate(_SAME))


# ---------------------------------------------------------------------------------------------------------------------
# Units


# unit -> (dimension, factor to the dimension's base unit)
_UNITS: Final[dict[str, tuple[str, float]]] = {
    "m": ("length", 1.0), "km": ("length", 1e3), "cm": ("length", 1e-2), "mm": ("length", 1e-3),
    "ft": ("length", 0.3048), "inch": ("length", 0.0254), "mi": ("length", 1609.344), "yd": ("length", 0.9144),
    "m2": ("area", 1.0), "km2": ("area", 1e6), "ha": ("area", 1e4), "mi2": ("area", 2589988.110336),
    "acre": ("area", 4046.8564224), "oz": ("mass", 28.349523125),
    "g": ("mass", 1.0), "kg": ("mass", 1e3), "mg": ("mass", 1e-3), "t": ("mass", 1e6), "lb": ("mass", 453.59237),
    "s": ("time", 1.0), "ms": ("time", 1e-3), "min": ("time", 60.0), "h": ("time", 3600.0), "day": ("time", 86400.0),
    "week": ("time", 604800.0), "month": ("months", 1.0), "year": ("months", 12.0),
    "l": ("volume", 1.0), "ml": ("volume", 1e-3), "m3": ("volume", 1e3),
    "km/h": ("speed", 1.0), "m/s": ("speed", 3.6), "mph": ("speed", 1.609344),
    "°c": ("temperature", 1.0), "°f": ("temperature", 5 / 9), "k": ("temperature", 1.0),
    "hz": ("frequency", 1.0), "khz": ("frequency", 1e3), "mhz": ("frequency", 1e6), "ghz": ("frequency", 1e9),
    "kb": ("data", 1e3), "mb": ("data", 1e6), "gb": ("data", 1e9), "tb": ("data", 1e12), "px": ("pixels", 1.0),
    "v": ("voltage", 1.0), "w": ("power", 1.0), "kw": ("power", 1e3), "kwh": ("energy", 1.0),
    "%": ("ratio", 1.0), "degrees": ("angle", 1.0), "u": ("atomic mass", 1.0), "g/cm3": ("density", 1.0),
    "people": ("people", 1.0), "digits": ("digits", 1.0), "neutrons": ("neutrons", 1.0),
    "usd": ("usd", 1.0), "eur": ("eur", 1.0), "gbp": ("gbp", 1.0), "cny": ("cny", 1.0), "jpy": ("jpy", 1.0),
    "¥": ("yuan or yen", 1.0), "cad": ("cad", 1.0), "aud": ("aud", 1.0), "chf": ("chf", 1.0), "hkd": ("hkd", 1.0),
    "inr": ("inr", 1.0), "krw": ("krw", 1.0),
}  # fmt: skip
_ZERO: Final = {"°c": 273.15, "°f": 459.67}  # the scales of temperature that do not start at absolute zero
_LOOSE: Final = {"¥": ("cny", "jpy"), "degrees": ("°c", "°f")}  # a unit that may mean another, number unchanged
_SPELLINGS: Final = {
    "meter": "m", "meters": "m", "metre": "m", "metres": "m", "米": "m", "公里": "km", "千米": "km", "kilometers": "km",
    "kilometer": "km", "kilometres": "km", "kilometre": "km", "厘米": "cm", "毫米": "mm", "feet": "ft", "foot": "ft",
    "centimeters": "cm", "centimetres": "cm", "millimeters": "mm",
    "millimetres": "mm", "yards": "yd", "acres": "acre",
    "英尺": "ft", "inches": "inch", "miles": "mi", "mile": "mi", "英里": "mi", "km²": "km2", "m²": "m2", "km^2": "km2",
    "sq km": "km2", "square kilometers": "km2", "square kilometres": "km2", "平方公里": "km2", "平方米": "m2",
    "平方千米": "km2", "square meters": "m2", "square metres": "m2", "sq mi": "mi2", "m^2": "m2", "m³": "m3",
    "square miles": "mi2", "hectares": "ha", "hectare": "ha", "公顷": "ha", "克": "g", "grams": "g", "gram": "g",
    "公斤": "kg", "千克": "kg", "kilograms": "kg", "kilogram": "kg", "kgs": "kg", "吨": "t", "tonnes": "t", "tons": "t",
    "pounds": "lb", "lbs": "lb", "ounces": "oz", "立方米": "m3", "cubic meters": "m3", "cubic metres": "m3",
    "秒": "s", "seconds": "s", "second": "s", "sec": "s", "分钟": "min", "minutes": "min", "minute": "min",
    "mins": "min", "小时": "h", "hours": "h", "hour": "h", "hr": "h", "hrs": "h", "天": "day", "days": "day",
    "weeks": "week", "周": "week", "months": "month", "个月": "month", "years": "year", "年": "year", "岁": "year",
    "升": "l", "liters": "l", "litres": "l", "liter": "l", "litre": "l", "毫升": "ml", "percent": "%",
    "pct": "%", "degree": "degrees", "°": "degrees", "度": "degrees", "kmh": "km/h", "kph": "km/h",
    "miles per hour": "mph", "celsius": "°c", "degrees celsius": "°c", "摄氏度": "°c", "fahrenheit": "°f",
    "degrees fahrenheit": "°f", "华氏度": "°f", "kelvin": "k", "kelvins": "k",
    "人": "people", "person": "people", "persons": "people",
    "inhabitants": "people", "digit": "digits", "位": "digits",
    "neutron": "neutrons", "美元": "usd", "dollars": "usd",
    "欧元": "eur", "euros": "eur", "euro": "eur", "元": "cny", "人民币": "cny", "rmb": "cny", "yuan": "cny",
    "日元": "jpy", "yen": "jpy", "円": "jpy", "英镑": "gbp", "$": "usd", "us$": "usd", "€": "eur", "£": "gbp",
    "g/cm³": "g/cm3", "港元": "hkd", "hk$": "hkd", "c$": "cad", "ca$": "cad", "a$": "aud", "au$": "aud",
}  # fmt: skip
_NOT_IN_KEYS: Final = frozenset({"min", "day", "month", "year", "t", "s", "h", "l", "g", "u", "k", "v", "w"})
"""Also parts of other names: the key `temp_min` gives no minutes."""
_KEY_UNIT = re.compile(r"[_ (\[]([A-Za-z°%$€£¥][A-Za-z0-9²³°/]*)[)\]]?$")


def _unit(name: str) -> str:
    name = normalized("NFC", name).strip().casefold().rstrip(".")
    return _SPELLINGS.get(name, name)


def _union(words: list[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_NAMES: Final = [*_UNITS, *_SPELLINGS]
# One letter is a unit in its own case only: 5 g, not 5 G. NFKC writes km² as km2. What follows "/" or "per" makes
# another unit of it: 100 km/h is no length.
_UNIT_AFTER = re.compile(
    rf"[^\S\n]?-?((?:(?i:{_union([n for n in _NAMES if len(n) > 1 or not n.isascii() or not n.isalpha()])})"
    r"|[mgstluhLKVW])(?![A-Za-z0-9])(?:(?:/| per )[A-Za-z][A-Za-z0-9]*)?)"
)
_MULTIPLIERS: Final = {
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "mn": 10**6, "mln": 10**6, "bn": 10**9,
    "tn": 10**12, "lakh": 10**5, "crore": 10**7, "k": 10**3, "m": 10**6, "b": 10**9, "百": 100, "千": 10**3,
    "万": 10**4, "百万": 10**6, "千万": 10**7, "亿": 10**8, "万亿": 10**12,
}  # fmt: skip
# 5k, 5K and 5B touch the number (300 K are kelvins); 5M may stand apart; a small m or b is a multiplier of money only.
_MULTIPLIER_AFTER = re.compile(
    rf"(?:[^\S\n]?-?((?i:{_union([n for n in _MULTIPLIERS if len(n) > 1 and n.isascii()])})|M)|([kKB]))(?![A-Za-z0-9])"
    rf"|[^\S\n]?({_union([n for n in _MULTIPLIERS if not n.isascii()])})"
)
_MONEY_MULTIPLIER_AFTER = re.compile(r"([mb])(?![A-Za-z0-9])")


# ---------------------------------------------------------------------------------------------------------------------
# Arabic digits


_MONTHS: Final = (
    "January", "Jan", "February", "Feb", "March", "Mar", "April", "Apr", "May", "June", "Jun", "July", "Jul", "August",
    "Aug", "September", "Sept", "Sep", "October", "Oct", "November", "Nov", "December", "Dec",
)  # fmt: skip
_MONTH = "(?=[JFMASOND])(?:" + "|".join(name for month in _MONTHS for name in (month, month.upper())) + ")(?![A-Za-z])"
_MONTH_REST = "(?:" + "|".join(name[1:] for month in _MONTHS for name in (month, month.upper())) + ")"

# What has digits and is no number is read first and passed over: telephone numbers, days of a month. A number is not
# part of a word, of another number, of a date, time or range: not in A5, 2026-05-01, 12:30, 1.2.3, 10/3, 5-10, 2^8.
_TOKEN = re.compile(
    rf"""[+(\dJFMASOND](?:
      (?<=\+)\d{{1,3}}(?:[ .()-]{{1,2}}\d{{1,5}}){{2,8}}(?!\d)
    | (?<=\()\d{{3}}\)[ ]?\d{{3}}[ -]\d{{4}}(?!\d)
    | (?<=\d)(?<!\w\d)\d\d[ ]\d{{3}}[ ]\d{{4}}(?!\d)
    | (?<=[A-Z])(?<![A-Za-z].){_MONTH_REST}\.?[ ]\d{{1,2}}(?!\d)(?:st|nd|rd|th)?(?:,?[ ]\d{{4}}(?!\d))?
    | (?<=\d)(?<![\w.,]\d)\d?(?:st|nd|rd|th)?[ ](?:of[ ])?{_MONTH}(?:\.?,?[ ]\d{{4}}(?!\d))?
    | (?<=\d)(?<![^\W{CJK}]\d)(?<![#^/]\d)(?<!\d[.,:~']\d)(?<![^\W{CJK}]-\d)(?<!\)-\d)(?<!\d[ ]-\d)(?<!第\d)(?<!第[ ]\d)
      (?<!\d[点时]\d)
      (?P<rest>(?:
        \d{{0,2}}(?P<separator>[,'_])\d{{3}}(?!\d)(?:(?P=separator)\d{{3}}(?!\d))*+(?:\.\d++)?+
      | (?<!\d[ ]\d)\d{{0,2}}(?:[ ]\d{{3}}(?!\d))++(?![ ]\d)(?P<c1>,\d{{1,2}}(?!\d)|\.\d++)?+
      | \d?(?:,\d\d(?!\d))++,\d{{3}}(?!\d)(?:\.\d++)?+
      | \d{{0,2}}(?:\.\d{{3}}(?!\d)){{2,}}+(?P<c2>,\d{{1,2}})?+
      | \d{{0,2}}(?:\.\d{{3}}(?!\d))++(?P<c3>,\d{{1,2}})(?!\d)
      | \d*+(?:\.\d++)?+
      )(?P<exponent>[eE][-+]?\d{{1,3}}|\s?[x×*·]\s?10\^[-+]?\d{{1,3}}|\^[-+]?\d{{1,3}})?+)
      (?![0-9_^])(?![.,:/~'-]\d)(?![ ]?年[ ]?\d|[ ]?[月日号]|点[\d半钟]|时(?!间)|°\d)(?![ ]?[aApP]\.?[mM]\b)
    )""",
    re.VERBOSE,
)
_FIRST_OF_UNITS: Final = frozenset(case for name in [*_NAMES, *_MULTIPLIERS] for case in (name[0], name[0].upper()))
_HAS_DIGIT = re.compile(r"\d")
_CURRENCY_BEFORE = re.compile(
    r"(-?)((?:(?<![A-Za-z])[A-Za-z]{1,2})?[$€£¥]"
    r"|(?<![A-Za-z])(?:USD|EUR|GBP|CNY|RMB|JPY|HKD|CHF|CAD|AUD|INR|KRW))[ ]?(-?)$"
)
_CURRENCY_ENDS: Final = frozenset(" $€£¥DRPYBFW")
_MARKS_BEFORE: Final = _CURRENCY_ENDS | frozenset("-+.负下")


def _arabic(text: str) -> Iterator[tuple[str, Quantity]]:
    """The numbers written in digits: as they are written, and what they are."""
    if not _HAS_DIGIT.search(text):
        return
    waiting: tuple[str, Quantity, int, int] | None = None  # 14亿 waits for its 1178万
    for one in _TOKEN.finditer(text):
        if one["rest"] is None:
            continue
        start, end = one.start(), one.end()
        sign, money, fraction = _before(text, start)
        if fraction is None:
            continue
        value = _value(one, fraction)
        factor, unit, known = 1, money, False
        after = text[end : end + 1]
        glued = after.isalpha() and not "\u3040" <= after <= "\u9fff"
        if (text[end + 1 : end + 2] if after in " -\u00a0" else after) in _FIRST_OF_UNITS:
            multiplier = _MULTIPLIER_AFTER.match(text, end) or (
                _MONEY_MULTIPLIER_AFTER.match(text, end) if money else None
            )
            if multiplier:
                factor, end = _MULTIPLIERS[multiplier[multiplier.lastindex or 0].casefold()], multiplier.end()
            found = _UNIT_AFTER.match(text, end)
            unit = money or (_unit(found[1]) if found else "")
            known = bool(multiplier or found)
        # Letters that touch the digits are a known unit, or it is a name: 5km, but not 5G and not 3-D.
        hyphenated = after == "-" and text[one.end() + 1 : one.end() + 2].isalpha()
        if value is None or ((glued or hyphenated) and not known):
            continue
        quantity = Quantity(sign * value * factor, unit)
        if waiting and waiting[3] > factor > 1 and waiting[2] == start:
            try:
                quantity = Quantity(waiting[1].value + quantity.value, unit)
                waiting = None
            except OverflowError:  # 10^400亿 1.5万: beyond every float, they stay two numbers
                pass
        if waiting:
            yield waiting[0], waiting[1]
        written = ("-" if sign < 0 else "+" if text[start - 1 : start] == "+" else "") + text[start : one.end()]
        waiting = (written, quantity, end, factor)
    if waiting:
        yield waiting[0], waiting[1]


def _before(text: str, start: int) -> tuple[int, str, str | None]:
    """Sign, currency and a leading "." of the number that starts there; None for the "." when the number is none."""
    last = text[start - 1 : start]
    if (text[start - 2 : start - 1] if last == " " else last) not in _MARKS_BEFORE:
        return 1, "", ""
    head = text[max(0, start - 8) : start]
    fraction = ""
    if last == ".":  # .5, but not in file.5 or 1.5
        head, fraction = head[:-1], "."
        last = head[-1:]
        if last and not (last.isspace() or last in "-+$€£¥(=:<>"):
            return 1, "", None
    sign = -1 if last == "-" else 1
    if last in "-+" and last:
        head = head[:-1]
    elif head.rstrip().endswith(("负", "零下")):
        sign = -1
    money = ""
    if head[-1:] in _CURRENCY_ENDS and (found := _CURRENCY_BEFORE.search(head)):
        money = _unit(found[2])
        sign = -1 if found[1] or found[3] else sign
    return sign, money, fraction


def _value(one: re.Match[str], fraction: str) -> int | float | None:
    """The number of a token, or None where it is too long to be one that anybody expects."""
    if (digits := one[0]).isdecimal() and not fraction:
        return int(digits) if len(digits) <= _LONGEST_NUMBER else None
    power = one["exponent"] or ""
    digits = digits[: len(digits) - len(power)]
    decimal = one["c1"] or one["c2"] or one["c3"]
    if len(digits) > _LONGEST_NUMBER:
        return None
    if decimal:
        digits = re.sub(r"[. ]", "", digits[: len(digits) - len(decimal)]) + "." + decimal[1:]
    elif digits.count(".") > 1:
        digits = digits.replace(".", "")
    digits = fraction + re.sub(r"[,'_ ]", "", digits)
    value: int | float = int(digits) if digits.isdecimal() else float(digits)
    if power.startswith("^"):
        value = 10 ** int(power[1:]) if value == 10 else math.inf  # no other power is read
    elif power:
        value = float(f"{digits}e{re.split('[eE^]', power)[-1]}")
    return value if isinstance(value, int) or math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------------------------------
# Chinese numerals


_DIGITS: Final = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_TENS: Final = {"十": 10, "百": 100, "千": 1000}
_MYRIADS: Final = {"万": 10**4, "亿": 10**8}
_OTHER_CHARACTERS: Final = str.maketrans("萬億兩壹贰叁肆伍陆柒捌玖拾佰仟", "万亿两一二三四五六七八九十百千")
_HAS_CHINESE = re.compile(r"[零〇一二两三四五六七八九十百千万亿萬億兩壹贰叁肆伍陆柒捌玖拾佰仟]")
_N: Final = "零〇一二两三四五六七八九十百千万亿"
_CHINESE = re.compile(
    rf"[{_N}](?<![第0-9{_N}].)(?<!\d[点.].)(?P<rest>[{_N}]*+(?:点[零〇一二三四五六七八九]++)?+)"
    rf"(?![月日号点时]|分(?!钟)|年[{_N}])"
)
_MEASURE_AFTER = re.compile("[个名座种条次家项届所只本张件位年岁人]")
_ORDINAL = re.compile(rf"(\d{{1,9}})(?:st|nd|rd|th)|第\s?(?:(\d{{1,9}})|([{_N}]{{1,9}}))[名位个]?", re.IGNORECASE)


def _ordinal(found: re.Match[str]) -> int | None:
    """The rank that a whole text is: 5th, 第五名. Within a text a rank is no number."""
    return chinese_number(found[3]) if found[3] else int(found[1] or found[2])


def _chinese(text: str) -> Iterator[Quantity]:
    if not _HAS_CHINESE.search(text):
        return
    text = text.translate(_OTHER_CHARACTERS)
    alone = text.strip()
    for one in _CHINESE.finditer(text):
        whole, _, fraction = one[0].partition("点")
        unit = _UNIT_AFTER.match(text, one.end())
        if not fraction and whole != alone and not unit and not _is_counted(text, whole, one.end()):
            continue
        number: int | float | None = chinese_number(whole)
        if number is None:
            continue
        if fraction:
            number = float(f"{number}.{_digits(fraction)}")
        negative = text[max(0, one.start() - 2) : one.start()].endswith(("负", "零下"))
        yield Quantity(-number if negative else number, _unit(unit[1]) if unit else "")


def _is_counted(text: str, numeral: str, end: int) -> bool:
    """Whether Chinese digits in running text are a number: 一 is mostly a part of a word, 三五 is a guess."""
    if any(c in _TENS or c in _MYRIADS for c in numeral):
        return len(numeral) > 1
    return len(numeral) > 2 or (numeral in "二两三四五六七八九" and _MEASURE_AFTER.match(text, end) is not None)


def _digits(text: str) -> str:
    return "".join(str(_DIGITS[c]) for c in text)


def chinese_number(text: str) -> int | None:
    """三百二十万 → 3200000; 二〇二六 → 2026; None for what is no one number, as 七八百."""
    if len(text) > 40:
        return None
    if not any(c in _TENS or c in _MYRIADS for c in text):
        return int(_digits(text)) if len(text) == 1 or "两" not in text else None
    total = section = 0
    digit: int | None = None
    last = 1  # the unit before, for 一万二: 12000
    for c in text:
        if c in _DIGITS:
            if digit:
                return None
            digit = _DIGITS[c]
            last = 1 if digit == 0 else last
        elif c in _TENS:
            section += (1 if digit is None else digit or 1) * _TENS[c]
            digit, last = None, _TENS[c]
        else:
            section += digit or 0
            total = total + section * 10**4 if c == "万" else (total + section) * 10**8
            section, digit, last = 0, None, _MYRIADS[c]
    return total + section + (digit or 0) * (last // 10 if last >= 100 else 1)
