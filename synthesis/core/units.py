"""Units and multipliers: their spellings, conversions, and the unit that a JSON key gives its number.

A number with an unknown unit counts as one without a unit, which equals any. So the tables hold more units than answers
use: an unknown `5 MW` would be 5 kW.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from synthesis.core.normal_text import normalized


class Quantity(NamedTuple):
    """A number and its unit; "" where none is given. (A tuple: a long output makes very many.)

    The unit of a number in JSON may have a multiplier (`million usd`), and may be uncertain (`min?` of `temp_min`).
    """

    value: int | float
    unit: str = ""


def same_quantity(found: Quantity, wanted: Quantity, tolerance: float) -> bool:
    """Return whether two quantities are equal within an absolute tolerance, in the wanted one's unit.

    A missing unit on either side makes no difference, nor does an uncertain unit of another dimension. Units that do
    not convert do.
    """
    (value, unit), (goal, goal_unit) = found, wanted
    try:
        if not unit or not goal_unit:
            if _close(value, goal, tolerance):
                return True
            if _meaning(unit or goal_unit).multiplier == 1:
                return False
        have, want = _meaning(unit), _meaning(goal_unit)
        if not have.is_sure and have.dimension != want.dimension:
            have = _Meaning("", "", multiplier=have.multiplier)
        value = value * have.multiplier
        if want.multiplier != 1:
            value = value / want.multiplier
        if not (have.name and want.name):
            return _close(value, goal, tolerance)
        if have.name == want.name or want.name in _LOOSE.get(have.name, ()):
            return _close(value, goal, tolerance)
        if have.dimension != want.dimension:
            return False
        value = (value + have.zero) * have.factor / want.factor
        # The slack is of the size before the zero of the scale is taken off: 32 °F is 0 °C.
        return _close(value - want.zero, goal, tolerance, size=abs(value))
    except OverflowError:  # an integer beyond every float is equal to none
        return False


def _close(value: float, wanted: float, tolerance: float, size: float = 0.0) -> bool:
    if isinstance(value, int) and isinstance(wanted, int):
        return abs(value - wanted) <= tolerance
    return abs(value - wanted) <= tolerance + 1e-9 * max(size, abs(wanted))


def steps_between(larger: str, smaller: str) -> int | None:
    """Return how many of the smaller unit make the larger one, if people count in both: 60 of `h` and `min`; else
    None."""
    have, want = UNITS.get(larger), UNITS.get(smaller)
    if have is None or want is None or have[0] != want[0] or have[0] not in _COUNTED_IN_TWO:
        return None
    ratio = have[1] / want[1]
    steps = round(ratio)
    return steps if steps > 1 and abs(ratio - steps) < 1e-6 * ratio else None


# ---------------------------------------------------------------------------------------------------------------------
# Tables


_PREFIXES: Final = {
    "n": ("nano", 1e-9), "μ": ("micro", 1e-6), "m": ("milli", 1e-3), "c": ("centi", 1e-2), "d": ("deci", 0.1),
    "h": ("hecto", 1e2), "k": ("kilo", 1e3), "M": ("mega", 1e6), "G": ("giga", 1e9), "T": ("tera", 1e12),
}  # fmt: skip
_KWH_OF_JOULE: Final = 1 / 3.6e6
# symbol, words, dimension, factor to its base, prefixes
_METRIC: Final = (
    ("m", "meter metre", "length", 1.0, "nμmcdk"), ("g", "gram gramme", "mass", 1.0, "nμmk"),
    ("l", "liter litre", "volume", 1.0, "μmcd"), ("s", "second", "time", 1.0, "nμm"),
    ("hz", "hertz", "frequency", 1.0, "kMGT"), ("byte", "byte", "data", 1.0, "kMGT"),
    ("w", "watt", "power", 1.0, "kMGT"), ("wh", "watt-hour", "energy", 1e-3, "kMGT"),
    ("j", "joule", "energy", _KWH_OF_JOULE, "kMG"), ("v", "volt", "voltage", 1.0, "mk"),
    ("pa", "pascal", "pressure", 1.0, "hkM"), ("sv", "sievert", "dose of radiation", 1.0, "μm"),
    ("amp", "ampere amp", "current", 1.0, ""), ("tonne", "tonne", "mass", 1e6, ""),
    ("ev", "electronvolt", "energy", 1.602176634e-19 * _KWH_OF_JOULE, "kMG"),
)  # fmt: skip
CURRENCIES: Final = (
    "usd", "eur", "gbp", "cny", "jpy", "hkd", "chf", "cad", "aud", "inr", "krw", "nzd", "sgd", "twd", "sek", "nok",
    "dkk", "pln", "czk", "huf", "brl", "mxn", "rub", "zar", "thb", "idr", "vnd", "aed", "try",
)  # fmt: skip
UNITS: Final[dict[str, tuple[str, float]]] = {
    "ft": ("length", 0.3048), "inch": ("length", 0.0254), "mi": ("length", 1609.344), "yd": ("length", 0.9144),
    "nmi": ("length", 1852.0), "au": ("length", 1.495978707e11), "ly": ("length", 9.4607304725808e15),
    "ha": ("area", 1e4), "acre": ("area", 4046.8564224), "亩": ("area", 1e4 / 15),
    "oz": ("mass", 28.349523125), "lb": ("mass", 453.59237), "stone": ("mass", 6350.29318), "t": ("mass", 1e6),
    "斤": ("mass", 500.0),
    "min": ("time", 60.0), "h": ("time", 3600.0), "day": ("time", 86400.0), "week": ("time", 604800.0),
    "month": ("months", 1.0), "year": ("months", 12.0), "decade": ("months", 120.0), "century": ("months", 1200.0),
    "gal": ("volume", 3.785411784), "imperial gallon": ("volume", 4.54609), "fl oz": ("volume", 0.0295735295625),
    "barrel": ("volume", 158.987294928),
    "km/h": ("speed", 1.0), "m/s": ("speed", 3.6), "mph": ("speed", 1.609344), "knot": ("speed", 1.852),
    "ft/s": ("speed", 1.09728),
    "°c": ("temperature", 1.0), "°f": ("temperature", 5 / 9), "k": ("temperature", 1.0),
    "kb": ("data", 1e3), "mb": ("data", 1e6), "gb": ("data", 1e9), "tb": ("data", 1e12), "pb": ("data", 1e15),
    "kib": ("data", 1024.0), "mib": ("data", 1024.0**2), "gib": ("data", 1024.0**3), "px": ("pixels", 1.0),
    "kbps": ("data rate", 1e3), "mbps": ("data rate", 1e6), "gbps": ("data rate", 1e9),
    "bar": ("pressure", 1e5), "mbar": ("pressure", 1e2), "atm": ("pressure", 101325.0),
    "psi": ("pressure", 6894.757293168), "mmhg": ("pressure", 133.322387415),
    "kcal": ("energy", 4184 * _KWH_OF_JOULE), "calorie": ("calories", 1.0), "hp": ("power", 745.69987158227022),
    "%": ("ratio", 1.0), "degrees": ("angle", 1.0), "u": ("atomic mass", 1.0), "g/cm3": ("density", 1.0),
    "kg/m3": ("density", 1e-3), "people": ("people", 1.0), "digits": ("digits", 1.0), "neutrons": ("neutrons", 1.0),
    "¥": ("yuan or yen", 1.0), "cent": ("cents", 1.0),
    # Of one spelling and several meanings: they equal nothing else.
    "kt": ("knots or kilotonnes", 1.0), "mt": ("metric tons or megatonnes", 1.0),
} | {code: (code, 1.0) for code in CURRENCIES}  # fmt: skip
_ZERO: Final = {"°c": 273.15, "°f": 459.67}  # the scales of temperature that do not start at absolute zero
_LOOSE: Final = {"¥": ("cny", "jpy"), "degrees": ("°c", "°f")}  # a unit that may mean another, number unchanged
_COUNTED_IN_TWO: Final = frozenset({"time", "months", "length", "mass", "volume"})
"""2 h 30 min, 5 ft 10 in, 1 lb 4 oz: one quantity in two numbers."""
_SPELLINGS: Final = {
    "米": "m", "公里": "km", "千米": "km", "厘米": "cm", "毫米": "mm", "微米": "μm", "纳米": "nm", "um": "μm",
    "英尺": "ft", "英寸": "inch", "英里": "mi", "mile": "mi", "yard": "yd", "海里": "nmi", "光年": "ly",
    "light year": "ly", "light-year": "ly", "nautical mile": "nmi", "astronomical unit": "au", "平方公里": "km2",
    "平方米": "m2", "平方千米": "km2", "平方厘米": "cm2", "平方英里": "mi2", "平方英尺": "ft2", "hectare": "ha",
    "公顷": "ha", "英亩": "acre", "立方米": "m3", "立方厘米": "cm3", "cc": "cm3", "升": "l", "毫升": "ml",
    "加仑": "gal", "gallon": "gal", "us gallon": "gal", "fluid ounce": "fl oz", "克": "g", "毫克": "mg", "微克": "μg",
    "ug": "μg", "mcg": "μg", "公斤": "kg", "千克": "kg", "kilo": "kg", "kgs": "kg", "吨": "t", "ton": "t",
    "metric ton": "t", "tonne": "t", "pound": "lb", "lbs": "lb", "磅": "lb", "ounce": "oz", "盎司": "oz", "秒": "s",
    "sec": "s", "secs": "s", "毫秒": "ms", "分钟": "min", "minute": "min", "mins": "min", "小时": "h", "hour": "h",
    "hr": "h", "hrs": "h", "天": "day", "周": "week", "星期": "week", "个月": "month", "年": "year", "岁": "year",
    "yr": "year", "yrs": "year", "centuries": "century", "世纪": "century", "percent": "%", "pct": "%",
    "degree": "degrees", "°": "degrees", "度": "degrees", "kmh": "km/h", "kph": "km/h", "kilometers per hour": "km/h",
    "kilometres per hour": "km/h", "公里/小时": "km/h", "千米/小时": "km/h", "meters per second": "m/s",
    "metres per second": "m/s", "米/秒": "m/s", "miles per hour": "mph", "mi/h": "mph", "kn": "knot", "kts": "knot",
    "celsius": "°c", "degrees celsius": "°c", "degree celsius": "°c", "摄氏度": "°c", "fahrenheit": "°f",
    "degrees fahrenheit": "°f", "degree fahrenheit": "°f", "华氏度": "°f", "kelvin": "k", "瓦": "w", "千瓦": "kw",
    "兆瓦": "mw", "瓦时": "wh", "千瓦时": "kwh", "兆瓦时": "mwh", "kilocalorie": "kcal", "千卡": "kcal",
    "horsepower": "hp", "赫兹": "hz", "千赫": "khz", "兆赫": "mhz", "吉赫": "ghz", "伏": "v", "伏特": "v",
    "millibar": "mbar", "pixel": "px", "kilobyte": "kb", "megabyte": "mb", "gigabyte": "gb", "terabyte": "tb",
    "petabyte": "pb", "人": "people", "person": "people", "inhabitant": "people", "digit": "digits", "位": "digits",
    "neutron": "neutrons", "美元": "usd", "dollar": "usd", "us dollar": "usd", "欧元": "eur", "euro": "eur",
    "元": "cny", "人民币": "cny", "rmb": "cny", "yuan": "cny", "日元": "jpy", "yen": "jpy", "円": "jpy", "英镑": "gbp",
    "rupee": "inr", "$": "usd", "us$": "usd", "€": "eur", "£": "gbp", "港元": "hkd", "hk$": "hkd",
    "r$": "brl", "₩": "krw", "₹": "inr", "₺": "try", "₽": "rub", "฿": "thb", "₫": "vnd", "c$": "cad",
    "ca$": "cad", "a$": "aud", "au$": "aud", "mx$": "mxn", "s$": "sgd", "nz$": "nzd", "nt$": "twd", "新台币": "twd",
    "g/cm^3": "g/cm3", "kg/m^3": "kg/m3",
}  # fmt: skip
_CASED: Final = {"mW": "milliwatt", "mWh": "milliwatt-hour", "mHz": "millihertz", "mJ": "millijoule", "MV": "megavolt"}
"""Symbols that mean another unit in another case. The other one is meant where case is ignored."""
_COUNTS: Final = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MULTIPLIERS: Final = (
    _COUNTS
    | {f"{name}s": value for name, value in _COUNTS.items()}
    | {
        "dozen": 12, "dozens": 12, "mn": 10**6, "mln": 10**6, "mio": 10**6, "bn": 10**9, "mrd": 10**9, "tn": 10**12,
        "lakh": 10**5, "crore": 10**7, "k": 10**3, "m": 10**6, "b": 10**9, "百": 100, "千": 10**3, "万": 10**4,
        "十万": 10**5, "百万": 10**6, "千万": 10**7, "亿": 10**8, "十亿": 10**9, "百亿": 10**10, "千亿": 10**11,
        "万亿": 10**12,
    }
)  # fmt: skip
"""Words behind a number that multiply it. `k`, `m` and `b` do only directly after it (see `quantities`)."""


def _fill_in() -> None:
    """Add the derived entries: prefixes, squares and cubes, and the plurals of words."""

    def put(name: str, dimension: str, factor: float, spellings: Iterable[str]) -> None:
        UNITS.setdefault(name, (dimension, factor))
        for spelling in spellings:
            _SPELLINGS.setdefault(spelling, name)

    for symbol, words, dimension, factor, prefixes in _METRIC:
        put(symbol, dimension, factor, words.split())
        for prefix, (long, times) in _PREFIXES.items():
            name = f"{prefix}{symbol}".casefold() if prefix in prefixes else long + words.split()[0]
            put(name, dimension, factor * times, [long + word for word in words.split()])
    for word in [*_SPELLINGS, *UNITS]:
        if (len(word) > 3 or word in ("day", "ton", "bar", "amp")) and word.isascii() and word[-1].isalpha():
            _SPELLINGS.setdefault(word.removesuffix("s") + "s", _SPELLINGS.get(word, word))
    _SPELLINGS.update({"foot": "ft", "feet": "ft", "inches": "inch", "in": "inch"})
    _SPELLINGS.update({one.replace("-", " "): name for one, name in _SPELLINGS.items() if "watt-hour" in one})
    for length in ("m", "km", "cm", "mm", "ft", "inch", "mi", "yd"):
        factor = UNITS[length][1]
        own = [length, *(word for word, name in _SPELLINGS.items() if name == length and word.isascii())]
        put(f"{length}2", "area", factor**2, _powers(own, "2", ("square", "sq", "sq."), "squared"))
        put(f"{length}3", "volume", factor**3 * 1e3, _powers(own, "3", ("cubic", "cu", "cu."), "cubed"))


def _powers(words: list[str], power: str, before: tuple[str, ...], after: str) -> list[str]:
    found = [f"{word}{sign}{power}" for word in words for sign in ("", "^")]
    found += [f"{word} {after}" for word in words] + [f"{one} {word}" for word in words for one in before]
    return found + [f"{before[1]}{word}" for word in words]  # sqft


_fill_in()
NAMES: Final = frozenset([*UNITS, *_SPELLINGS]) - {"in"}
"""Every spelling, in lower case, that is no other word."""


def unit_named(name: str) -> str:
    """Return a unit's canonical name: `km` for `Kilometers`; the lower-case name itself if the unit is unknown."""
    name = normalized("NFKC", name.replace("º", "°")).strip().rstrip(".")
    if name in _CASED:
        return _CASED[name]
    name = name.casefold()
    return _SPELLINGS.get(name, name)


def any_of(words: Iterable[str]) -> str:
    """Return a pattern for any of the words, the longest first. It is a tree: `re` tries the words of a list one by
    one."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    options = [re.escape(character) + _branches(rest) for character, rest in node.items() if character]
    return f"(?:{'|'.join(options)})" + ("?" if "" in node else "") if options else ""


# ---------------------------------------------------------------------------------------------------------------------
# Units beside a number


class _Meaning(NamedTuple):
    """Parsed unit of a `Quantity`; name and dimension are "" for a mere multiplier or no unit."""

    name: str
    dimension: str
    factor: float = 1.0
    zero: float = 0.0
    multiplier: int = 1
    is_sure: bool = True


_LONG_MULTIPLIERS: Final = {name: value for name, value in MULTIPLIERS.items() if len(name) > 1 or not name.isascii()}
_MULTIPLIERS_IN_KEYS: Final = frozenset(_LONG_MULTIPLIERS) - {"mn", "tn"}
"""Minnesota and Tennessee."""
_CHINESE_MULTIPLIER = re.compile(rf"({any_of(name for name in MULTIPLIERS if not name.isascii())})(.*)")
_IN_KEYS: Final = {
    "c": "°c", "f": "°f", "in": "inch", "min": "min", "day": "day", "month": "month", "year": "year", "second": "s",
    "t": "t", "s": "s", "h": "h", "l": "l", "g": "g", "u": "u", "k": "k", "v": "v", "w": "w", "bar": "bar", "au": "au",
    "stone": "stone", "knot": "knot", "atm": "atm",
}  # fmt: skip
"""Units, and parts of other names: `temp_min` gives no minutes, `wait_min` may."""
LONGEST_UNIT: Final = 40
"""Characters of the longest unit; of a key only its end is read."""
_BETWEEN = re.compile(r"[\s_.,:;()\[\]{}-]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@lru_cache(maxsize=1024)
def _meaning(unit: str) -> _Meaning:
    """Parse a unit as people and `unit_of_key` write it: `km`, `million usd`, `USD (millions)`, `万人`, `min?`."""
    is_sure = not unit.endswith("?")
    name, multiplier = unit_named(unit.rstrip("?")), 1
    if name not in UNITS:
        words = [word for word in _BETWEEN.split(name) if word]
        place = next((at for at in (0, -1) if words and words[at] in _LONG_MULTIPLIERS), None)
        if place is not None:
            multiplier = _LONG_MULTIPLIERS[words.pop(place)]
            name = unit_named(" ".join(words))
        elif (chinese := _CHINESE_MULTIPLIER.fullmatch(name)) and (rest := unit_named(chinese[2])) in UNITS:
            multiplier, name = _LONG_MULTIPLIERS[chinese[1]], rest
    dimension, factor = UNITS.get(name, (name, 1.0))
    return _Meaning(name, dimension, factor, _ZERO.get(name, 0.0), multiplier, is_sure)


def unit_of_key(key: str) -> str:
    """Return the unit that a JSON key gives its number: `ft` for `elevation_ft`, `km2` for `area (km2)` and `areaSqKm`,
    `billion usd` for `gdp_billion_usd`; "" for none, as for `price_per_kg`. `min?` may be one.
    """
    key = normalized("NFKC", key[-LONGEST_UNIT:])
    words = [word for word in _BETWEEN.split(key) if word]
    if not words:
        return ""
    # As it stands first, for kWh; then areaKm2.
    return _unit_at_end(words) or _unit_at_end([part for word in words for part in _CAMEL.split(word)])


def _unit_at_end(words: list[str]) -> str:
    multiplier = ""
    head = list(words)
    if head[-1].casefold() in _MULTIPLIERS_IN_KEYS:
        multiplier = head.pop().casefold()
    size, unit = next(((size, unit) for size in (3, 2, 1) if (unit := _known(head[-size:], size))), (0, ""))
    if size:
        head = head[:-size]
        if not multiplier and head and head[-1].casefold() in _MULTIPLIERS_IN_KEYS:
            multiplier = head.pop().casefold()
        # One word that is all of a key, as `people`, may be what is counted.
        unit += "?" if not unit.endswith("?") and size == len(words) == 1 else ""
    if head and head[-1].casefold() == "per":
        before = _unit_at_end(head[:-1]).rstrip("?") if len(head) > 1 else ""
        rate = unit_named(f"{before}/{unit.rstrip('?')}")
        # What a thing costs is in the currency, whatever it is counted by; people per km2 are no people.
        return before if not before or (before in CURRENCIES and rate not in UNITS) else rate
    return f"{multiplier} {unit}".strip()


def _known(words: list[str], size: int) -> str:
    """Return the unit that these words of a key spell."""
    if len(words) != size:
        return ""
    if size == 1 and (name := words[0].casefold()) in _IN_KEYS:
        return _IN_KEYS[name] + "?"
    for joint in " /":  # square km, and km_h
        if (unit := unit_named(joint.join(words))) in UNITS:
            return unit
    if size == 1 and (chinese := _CHINESE_MULTIPLIER.fullmatch(words[0])) and unit_named(chinese[2]) in UNITS:
        return words[0]
    return ""
