"""Numbers and units in free text: the part of `matching` that reads `$1,234.5`, `15 km` and `三百二十万`.

Every pattern here starts with a plain character class, so that `re` skips quickly over text without digits. A
lookbehind follows that first character. No pattern can backtrack over more than one number.
"""

from __future__ import annotations

import heapq
import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Final, TypeAlias

from synthesis.core.normal_text import normalized
from synthesis.core.units import CURRENCIES, MULTIPLIERS, NAMES, Quantity, any_of, steps_between, unit_named

CJK: Final = r"\u3400-\u4dbf\u4e00-\u9fff\u3040-\u30ff"


def quantities(text: str) -> list[Quantity]:
    """Return the numbers of a text, each with its unit if it is a known one."""
    return list(each_quantity(plain(text)))


def each_quantity(text: str) -> Iterator[Quantity]:
    """Yield the numbers of a text that is already `plain`, in order."""
    if (ordinal := _ORDINAL.fullmatch(text.strip())) and (number := _ordinal(ordinal)) is not None:
        yield Quantity(number)
        return
    yield from (quantity for _, _, _, quantity, _ in _joined(_numbers(text), text))


def whole_quantity(text: str) -> Quantity | None:
    """Return the quantity that a whole `plain` text is: `5 km`, `$5`, `14亿人`; None for `5 apples` and `Apollo 11`."""
    if not _HAS_DIGIT.search(text) or len(found := list(_joined(_numbers(text), text))) != 1:
        return None
    start, end, _, quantity, _ = found[0]
    before = text[:start]
    is_whole = not text[end:].strip() and (before in _SIGNS or _CURRENCY_BEFORE.fullmatch(before))
    return quantity if is_whole else None


def numerals(text: str) -> list[str]:
    """Return the numbers of a text as written, without those with a multiplier."""
    return [written for _, _, written, _, _ in _arabic(plain(text))]


def each_numeral(text: str) -> Iterator[str]:
    """Yield the numbers of a `plain` text as written, but not the 5 of 5 million or of 5 ft 10 in."""
    return (written for _, _, written, _, factor in _joined(_arabic(text), text) if factor == 1 and written)


def is_in_longer(text: str, start: int, end: int) -> bool:
    """Return whether digits of a `plain` text between commas or brackets belong to more: to `(555) 123-4567`, `May 5,
    2026`, `12,34,567` or `1 234,5`."""
    near = max(0, start - _LONGEST_TOKEN)
    for one in _TOKEN.finditer(text[near : end + _LONGEST_TOKEN]):
        if near + one.start() <= start and end <= near + one.end():
            return one["rest"] is None or _PARTED.search(one[0]) is not None
    return False


def is_multiplied(text: str, end: int) -> bool:
    """Return whether a multiplier follows the number that ends there: 5 million, 14亿."""
    return _MULTIPLIER_AFTER.match(text, end) is not None


_LONGEST_TOKEN: Final = 40
_PARTED = re.compile(r",(?!\d{3}(?!\d))")
_ONE_NUMBER = re.compile(r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?")


def written_number(text: str) -> int | float | None:
    """Return the one number that a string is in plain digits, with or without thousands separators; else None.

    `02` and `5 km` are none, nor is a number of more digits than any answer has.
    """
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not _ONE_NUMBER.fullmatch(text):
        return None
    number = text.replace(",", "")
    return float(number) if "." in number else int(number)


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


_HOURS_AND_HALF = re.compile(
    r"(?:(\d{1,3}|(?<![第一二三四五六七八九十百])[一二两三四五六七八九])个|(?<!个))半个?(?:小时|钟头)"
)
_COUNTED_HOURS = re.compile(r"(?<=[\d一二两三四五六七八九十百])个(?=小时)")
_MINUTES = re.compile(r"(?<=小时\d)分(?!钟)|(?<=小时\d\d)分(?!钟)")
_SPEED = re.compile(r"(?:时速|每小时)([^\d\s]{0,4})(\d[\d.,]{0,9})\s?(?:公里|千米|km)(?![/每])")


def _small(digits: str | None) -> int:
    return int(digits) if digits and digits.isdecimal() else _DIGITS.get(digits or "零", 0)


def plain(text: str) -> str:
    """Return the text without differences of width, quotes, hyphens and minus signs, and without invisible
    characters."""
    if text.isascii():
        return text
    text = _POWER.sub(lambda one: "^" + normalized("NFKC", one[0]), text)  # NFKC would make 103 of 10³
    text = _PART.sub(lambda one: f"{int(one[1] or 0) + unicodedata.numeric(one[2]):.16g}", text)
    text = _WIDE_COMMA.sub(", ", text).replace("º", "°")
    if "时" in text:
        text = _HOURS_AND_HALF.sub(lambda one: f"{_small(one[1])}.5小时", text)
        text = _MINUTES.sub("分钟", _COUNTED_HOURS.sub("", text))
        text = _SPEED.sub(r"\1\2 km/h", text)
    return _EN_DASH.sub("-", normalized("NFKC", text).translate(_SAME))


# ---------------------------------------------------------------------------------------------------------------------
# Units


# One letter is a unit in its own case only: 5 g, not 5 G; inches are "in" where it touches. NFKC writes km² as km2.
# What follows "/" or "per" makes another unit of it: 100 km/h is no length.
_UNIT_AFTER = re.compile(
    rf"[^\S\n]?-?((?:(?:(?i:{any_of(n for n in NAMES if n.isascii() and (len(n) > 1 or not n.isalpha()))})"
    rf"|[mgstluhLKVWJ]|(?<=\d)in)(?![A-Za-z0-9])|(?i:{any_of(n for n in NAMES if not n.isascii())})(?![A-Za-z]))"
    r"(?:(?:/| per )[A-Za-z][A-Za-z0-9]*)?)"
)
# 5k, 5K and 5B touch the number (300 K are kelvins); 5M may stand apart; a small m or b is a multiplier of money only.
_MULTIPLIER_AFTER = re.compile(
    rf"(?:[^\S\n]?-?((?i:{any_of(n for n in MULTIPLIERS if len(n) > 1 and n.isascii())})|M)|([kKB]))(?![A-Za-z0-9])"
    rf"|[^\S\n]?(?!千[米克瓦赫卡])({any_of(n for n in MULTIPLIERS if not n.isascii())})"
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

# Digits that are not a number are matched first and skipped: telephone numbers, days of a month. A number is not
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
        \d{{0,2}}(?P<separator>[,'_])\d{{3}}(?!\d)(?>(?:(?P=separator)\d{{3}}(?!\d))*)(?>(?:\.\d+)?)
      | (?<!\d[ ]\d)\d{{0,2}}(?>(?:[ ]\d{{3}}(?!\d))+)(?![ ]\d)(?>(?P<c1>,\d{{1,2}}(?!\d)|\.\d+)?)
      | \d?(?>(?:,\d\d(?!\d))+),\d{{3}}(?!\d)(?>(?:\.\d+)?)
      | \d{{0,2}}(?>(?:\.\d{{3}}(?!\d)){{2,}})(?>(?P<c2>,\d{{1,2}})?)
      | \d{{0,2}}(?>(?:\.\d{{3}}(?!\d))+)(?P<c3>,\d{{1,2}})(?!\d)
      | \d*+(?>(?:\.\d+)?)
      )(?>(?P<exponent>[eE][-+]?\d{{1,3}}|\s?[x×*·]\s?10\^[-+]?\d{{1,3}}|\^[-+]?\d{{1,3}})?))
      (?![0-9_^])(?![.,:/~'-]\d)(?![ ]?年[ ]?\d|[ ]?[月日号]|点[\d半钟]|时(?!间)|°\d)(?![ ]?[aApP]\.?[mM]\b)
    )""",
    re.VERBOSE,
)
_FIRST_OF_UNITS: Final = frozenset(case for name in [*NAMES, *MULTIPLIERS] for case in (name[0], name[0].upper()))
_HAS_DIGIT = re.compile(r"\d")
_CURRENCY_SIGNS: Final = "$€£¥₩₹₺₽฿₫"
_CURRENCY_BEFORE = re.compile(
    rf"(-?)((?:(?<![A-Za-z])[A-Za-z]{{1,2}})?[{_CURRENCY_SIGNS}]"
    rf"|(?<![A-Za-z])(?:{'|'.join(['RMB', *map(str.upper, CURRENCIES)])}))[ ]?(-?)$"
)
_CURRENCY_ENDS: Final = frozenset(f" {_CURRENCY_SIGNS}B") | {code[-1].upper() for code in CURRENCIES}
_SIGNS: Final = ("", "-", "+")
_MARKS_BEFORE: Final = _CURRENCY_ENDS | frozenset("-+.负下s")
_MINUS = re.compile(r"(?<!\d )\b[Mm]inus $")  # 5 minus 3 is a difference


_Number: TypeAlias = tuple[int, int, str, Quantity, int]
"""A number of a text: start of its digits, end of its unit or multiplier, its digits and sign as written, its quantity,
and the factor of its multiplier. The digits are "" if several numbers are one. A tuple, as a long text makes very
many."""


def _numbers(text: str) -> Iterator[_Number]:
    """Yield all numbers in their order."""
    if not _HAS_CHINESE.search(text):
        return _arabic(text)
    return heapq.merge(_arabic(text), _chinese(text))


def _joined(numbers: Iterator[_Number], text: str) -> Iterator[_Number]:
    """Yield the numbers; parts of one quantity are joined: 14亿1178万, 12万3456, 2 h 30 min, 5 ft 10 in."""
    waiting = next(numbers, None)
    if waiting is None:
        return
    for one in numbers:
        # Most numbers are far from the next, or have neither a multiplier nor a unit.
        if (waiting[4] > 1 or waiting[3].unit) and one[0] - waiting[1] <= _FARTHEST:
            whole = _sum(text, waiting, one)
            if whole:
                waiting = whole
                continue
        yield waiting
        waiting = one
    yield waiting


_FARTHEST: Final = 6
_NEXT_TO: Final = ("", " ")
_AND: Final = (", ", " and ", ", and ", "零", "又", "和")
_SPLIT: Final = frozenset({"h", "min", "day", "week", "year", "ft", "lb"})
"""Units of quantities that are given in two units joined by "and"; 5 km and 300 m are mostly two lengths."""


def _sum(text: str, first: _Number, second: _Number) -> _Number | None:
    """Return two neighbours as one quantity, if they are one."""
    start, after, _, (value, unit), factor = first
    before, end, written, (rest, rest_unit), rest_factor = second
    between = text[after:before]
    if factor > 1 and (not unit or (unit in CURRENCIES and rest_unit in ("", unit))):
        # 14亿1178万, 5 million 300 thousand, and 12万3456; 3万5 is 35,000.
        steps, is_near = 1, between == "" or (between == " " and rest_factor > 1)
        if not is_near or factor <= rest_factor or (rest_factor == 1 and rest_unit == "year"):
            return None
        if rest_factor == 1 and len(written) == 1:
            rest *= factor // 10
        if abs(rest) >= factor:
            return None
        rest_unit = rest_unit or unit
    else:
        if unit == "h" and rest_unit == "m":  # 2h 30m
            rest_unit = "min"
        elif unit == "ft" and not rest_unit and (inches := _INCHES.match(text, end)):
            rest_unit, end = "inch", inches.end()
        steps = steps_between(unit, rest_unit) or 0
        is_near = between in _NEXT_TO or (between in _AND and unit in _SPLIT)
        if not is_near or not 0 <= rest < steps or value % 1:
            return None
    try:
        total = value * steps + (rest if value >= 0 else -rest)
    except OverflowError:  # 10^400亿 1.5万: beyond every float, they stay two numbers
        return None
    return start, end, "", Quantity(total, rest_unit), rest_factor


_INCHES = re.compile(r" ?in(?![A-Za-z0-9])")


def _arabic(text: str) -> Iterator[_Number]:
    """Yield the numbers written in digits, each by itself."""
    if not _HAS_DIGIT.search(text):
        return
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
                factor, end = MULTIPLIERS[multiplier[multiplier.lastindex or 0].casefold()], multiplier.end()
            found = _UNIT_AFTER.match(text, end)
            if found:
                named = unit_named(found[1])
                # "$350 pesos", "¥980 JPY": the sign is one of several currencies, and the name says which.
                unit = named if money in ("usd", "¥") and named in CURRENCIES else money or named
                end = found.end()
            if text.startswith(" below zero", end):
                sign, end = -1, end + len(" below zero")
            known = bool(multiplier or found)
        # Letters that touch the digits are a known unit, or it is a name: 5km, but not 5G and not 3-D.
        hyphenated = after == "-" and text[one.end() + 1 : one.end() + 2].isalpha()
        if value is None or ((glued or hyphenated) and not known):
            continue
        written = ("-" if sign < 0 else "+" if text[start - 1 : start] == "+" else "") + text[start : one.end()]
        yield start, end, written, Quantity(sign * value * factor, unit), factor


def _before(text: str, start: int) -> tuple[int, str, str | None]:
    """Return sign, currency and a leading "." of the number that starts there; None for the "." if it is no number."""
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
    elif head.rstrip().endswith(("负", "零下")) or _MINUS.search(head):
        sign = -1
    money = ""
    if head[-1:] in _CURRENCY_ENDS and (found := _CURRENCY_BEFORE.search(head)):
        money = unit_named(found[2])
        sign = -1 if found[1] or found[3] else sign
    return sign, money, fraction


def _value(one: re.Match[str], fraction: str) -> int | float | None:
    """Return the number of a token, or None if it is implausibly long."""
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
    rf"[{_N}](?<![第0-9{_N}].)(?<!\d[点.].)(?P<rest>[{_N}]*+(?>(?:点[零〇一二三四五六七八九]+)?))"
    rf"(?![月日号点时]|分(?!钟)|年[{_N}])"
)
_MEASURE_AFTER = re.compile(
    "[个名座种条次家项届所只本张件位年岁人台辆艘架部套支枝把块片颗棵根匹间栋层楼封册篇首幅顶双组批列门]"
)
_ORDINAL = re.compile(rf"(\d{{1,9}})(?:st|nd|rd|th)|第\s?(?:(\d{{1,9}})|([{_N}]{{1,9}}))[名位个]?", re.IGNORECASE)


def _ordinal(found: re.Match[str]) -> int | None:
    """Return the rank that a whole text is: 5th, 第五名. Within a text a rank is no number."""
    return chinese_number(found[3]) if found[3] else int(found[1] or found[2])


def _chinese(text: str) -> Iterator[_Number]:
    """Yield the numbers written in Chinese characters, each by itself."""
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
        quantity = Quantity(-number if negative else number, unit_named(unit[1]) if unit else "")
        factor = MULTIPLIERS.get(whole[-1], 1) if not fraction else 1
        yield one.start(), unit.end() if unit else one.end(), one[0], quantity, factor


def _is_counted(text: str, numeral: str, end: int) -> bool:
    """Return whether Chinese digits in running text are a number: 一 is mostly a part of a word, 三五 is a guess."""
    if any(c in _TENS or c in _MYRIADS for c in numeral):
        return len(numeral) > 1
    return len(numeral) > 2 or (numeral in "二两三四五六七八九" and _MEASURE_AFTER.match(text, end) is not None)


def _digits(text: str) -> str:
    return "".join(str(_DIGITS[c]) for c in text)


def chinese_number(text: str) -> int | None:
    """Return 3200000 for 三百二十万, 2026 for 二〇二六; None for anything that is not one number, such as 七八百."""
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
