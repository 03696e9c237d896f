"""Numbers in free text, with their units: the part of `synthesis.matching` that reads `1,234.5 km` and `三百二十万`."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Quantity:
    """A number and its unit; "" where none is given."""

    value: int | float
    unit: str = ""


def same_quantity(found: Quantity, wanted: Quantity, tolerance: float) -> bool:
    """Whether two quantities are equal within an absolute tolerance, in the wanted one's unit.

    A missing unit on either side is no difference; units that do not convert are.
    """
    value = found.value
    if found.unit and wanted.unit and _unit(found.unit) != _unit(wanted.unit):
        one, other = _UNITS.get(_unit(found.unit)), _UNITS.get(_unit(wanted.unit))
        if one is None or other is None or one[0] != other[0]:
            return False
        value = value * one[1] / other[1]
    slack = 0.0 if isinstance(value, int) and isinstance(wanted.value, int) else 1e-9 * abs(wanted.value)
    return abs(value - wanted.value) <= tolerance + slack


def quantities(text: str) -> list[Quantity]:
    """The numbers of a text, each with the unit that follows it if that is a known one."""
    text = unicodedata.normalize("NFKC", text)
    found = [_quantity(one[0], text[one.end() :]) for one in _NUMBER.finditer(text)]
    for one in _CHINESE.finditer(text):
        after = text[one.end() :]
        # A lone 一 is mostly part of a word; it is a number where nothing else stands beside it or a unit follows.
        if len(one[0]) > 1 or one[0] == text.strip() or _UNIT_AFTER.match(after):
            found.append(Quantity(_chinese_number(one[0]), _unit_of(after)))
    return found


def numerals(text: str) -> list[str]:
    """The numbers of a text as they are written."""
    return [one[0] for one in _NUMBER.finditer(unicodedata.normalize("NFKC", text))]


# A number is not part of a word, of another number, of a date or of a time: not in A5, 2026-05-01, 12:30, 1.2.3, 10/3.
_NUMBER = re.compile(
    r"""(?<![A-Za-z0-9_.,:/#])(?<![\w)]-)(?<!\d[ ]-)
    [-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?
    (?![0-9_])(?![.,:/-]\d)(?!-[A-Za-z])(?![A-Za-z]+[0-9_])(?!\s*年\s*\d|\s*[月日号])""",
    re.VERBOSE,
)

_MULTIPLIERS: Final = {
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "千": 10**3, "万": 10**4, "百万": 10**6,
    "千万": 10**7, "亿": 10**8, "万亿": 10**12,
}  # fmt: skip

# unit -> (dimension, factor to the dimension's base unit)
_UNITS: Final[dict[str, tuple[str, float]]] = {
    "m": ("length", 1.0), "km": ("length", 1e3), "cm": ("length", 1e-2), "mm": ("length", 1e-3),
    "ft": ("length", 0.3048), "inch": ("length", 0.0254), "mi": ("length", 1609.344), "yd": ("length", 0.9144),
    "m2": ("area", 1.0), "km2": ("area", 1e6), "ha": ("area", 1e4), "mi2": ("area", 2589988.110336),
    "g": ("mass", 1.0), "kg": ("mass", 1e3), "mg": ("mass", 1e-3), "t": ("mass", 1e6), "lb": ("mass", 453.59237),
    "s": ("time", 1.0), "ms": ("time", 1e-3), "min": ("time", 60.0), "h": ("time", 3600.0), "day": ("time", 86400.0),
    "l": ("volume", 1.0), "ml": ("volume", 1e-3), "m3": ("volume", 1e3),
    "%": ("ratio", 1.0), "degrees": ("angle", 1.0), "u": ("atomic mass", 1.0), "g/cm3": ("density", 1.0),
    "people": ("people", 1.0), "digits": ("digits", 1.0), "neutrons": ("neutrons", 1.0),
    "usd": ("usd", 1.0), "eur": ("eur", 1.0), "gbp": ("gbp", 1.0), "cny": ("cny", 1.0), "jpy": ("jpy", 1.0),
}  # fmt: skip
_SPELLINGS: Final = {
    "meter": "m", "meters": "m", "metre": "m", "metres": "m", "米": "m", "公里": "km", "千米": "km", "kilometers": "km",
    "kilometer": "km", "kilometres": "km", "kilometre": "km", "厘米": "cm", "毫米": "mm", "feet": "ft", "foot": "ft",
    "英尺": "ft", "inches": "inch", "miles": "mi", "mile": "mi", "英里": "mi", "km²": "km2", "m²": "m2",
    "sq km": "km2", "square kilometers": "km2", "square kilometres": "km2", "平方公里": "km2", "平方米": "m2",
    "square miles": "mi2", "hectares": "ha", "公顷": "ha", "克": "g", "grams": "g", "公斤": "kg", "千克": "kg",
    "kilograms": "kg", "吨": "t", "tonnes": "t", "tons": "t", "pounds": "lb", "秒": "s", "seconds": "s", "sec": "s",
    "分钟": "min", "minutes": "min", "minute": "min", "小时": "h", "hours": "h", "hour": "h", "hr": "h", "天": "day",
    "days": "day", "升": "l", "liters": "l", "litres": "l", "毫升": "ml", "percent": "%", "degree": "degrees",
    "°": "degrees", "度": "degrees", "人": "people", "person": "people", "persons": "people", "inhabitants": "people",
    "digit": "digits", "位": "digits", "neutron": "neutrons", "美元": "usd", "dollars": "usd", "欧元": "eur",
    "euros": "eur", "元": "cny", "人民币": "cny", "日元": "jpy", "yen": "jpy", "英镑": "gbp", "g/cm³": "g/cm3",
}  # fmt: skip


def _unit(name: str) -> str:
    name = unicodedata.normalize("NFC", name).strip().casefold().rstrip(".")
    return _SPELLINGS.get(name, name)


def _union(words: list[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


# NFKC writes km² as km2, so the superscript needs no spelling of its own here.
_UNIT_AFTER = re.compile(rf"\s*({_union([*_UNITS, *_SPELLINGS])})(?![A-Za-z0-9])", re.IGNORECASE)
_MULTIPLIER_AFTER = re.compile(rf"\s*({_union(list(_MULTIPLIERS))})(?![A-Za-z])", re.IGNORECASE)


def _unit_of(after: str) -> str:
    found = _UNIT_AFTER.match(after)
    return _unit(found[1]) if found else ""


def _quantity(digits: str, after: str) -> Quantity:
    plain = digits.replace(",", "")
    value: int | float = int(plain) if re.fullmatch(r"[-+]?\d+", plain) else float(plain)
    if multiplier := _MULTIPLIER_AFTER.match(after):
        value *= _MULTIPLIERS[multiplier[1].casefold()]
        after = after[multiplier.end() :]
    return Quantity(value, _unit_of(after))


_DIGITS: Final = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_TENS: Final = {"十": 10, "百": 100, "千": 1000}
_CHINESE = re.compile(r"(?<![第0-9])[零〇一二两三四五六七八九十百千万亿]+(?![年月日号])")


def _chinese_number(text: str) -> int:
    """三百二十万 → 3200000; 二〇二六 → 2026."""
    if not any(c in _TENS or c in "万亿" for c in text):
        return int("".join(str(_DIGITS[c]) for c in text))
    total = section = digit = 0
    for c in text:
        if c in _DIGITS:
            digit = _DIGITS[c]
        elif c in _TENS:
            section += (digit or 1) * _TENS[c]
            digit = 0
        else:
            total = (total + section + digit) * (10**4 if c == "万" else 10**8)
            section = digit = 0
    return total + section + digit
