"""Days and times of the day in free text: the part of `matching` that reads "5 January 2026" and "14点30分"."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from functools import lru_cache

from synthesis.core.quantities import CJK, chinese_number, plain

_MONTHS = {
    name: number
    for number, names in enumerate(
        ("january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
         "september sep sept", "october oct", "november nov", "december dec"), start=1
    )
    for name in names.split()
}  # fmt: skip
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_DATE = re.compile(
    rf"""(?<![A-Za-z0-9_-])(?:
      (?P<y1>\d{{4}})(?P<separator>[-/.])(?P<m1>\d{{1,2}})(?P=separator)(?P<d1>\d{{1,2}})(?=$|[^\d/.-]|[.-](?!\d))
    | (?P<d2>\d{{1,2}})(?:st|nd|rd|th)?[\s-](?:of\s)?(?P<m2>{_MONTH})\.?,?[\s-](?P<y2>\d{{4}})(?!\d)
    | (?P<m3>{_MONTH})\.?[\s-](?P<d3>\d{{1,2}})(?:st|nd|rd|th)?,?[\s-](?P<y3>\d{{4}})(?!\d)
    | (?P<y5>\d{{4}})[\s-](?P<m5>{_MONTH})\.?[\s-](?P<d5>\d{{1,2}})(?!\d)
    | (?P<d6>\d{{1,2}})(?P<slash>[-/.])(?P<m6>\d{{1,2}})(?P=slash)(?P<y6>\d{{4}})(?![\d/-]|\.\d)
    )|(?<!\d)(?P<y4>\d{{4}})\s?年\s?(?P<m4>\d{{1,2}})\s?月\s?(?P<d4>\d{{1,2}})\s?[日号]""",
    re.VERBOSE | re.IGNORECASE,
)
_CHINESE_DATE_PART = re.compile(r"[零〇一二三四五六七八九十]{1,4}(?=[年月日号])")
_LONGEST_DATE = 26
"""Characters of `30th of september., 2026`, and of the two after it that are read."""


def digits_in_dates(text: str) -> str:
    """Return a `plain` text with 二〇二六年五月一日 as 2026年5月1日, on one line, each space single."""
    if "月" in text:
        text = _CHINESE_DATE_PART.sub(lambda one: _in_digits(one[0]), text)
    return " ".join(text.split())


@lru_cache(maxsize=1024)  # a text names the same years, months and days again and again
def _in_digits(part: str) -> str:
    return str(chinese_number(part))


def dates_of_year(text: str, year: int) -> set[datetime.date]:
    """Return every calendar day of a year that a text, which `digits_in_dates` made, names in full."""
    found: set[datetime.date] = set()
    # Only the surroundings of the year are read: an output may be long. To a pattern the end of what it reads is the
    # text's, where 2026-01-15 may be cut to 2026-01-1. So it reads on from where no date counts any more.
    at = text.find(f"{year:04}")
    while at >= 0:
        behind = at + _LONGEST_DATE // 2
        for one in _DATE.finditer(text, max(0, at - _LONGEST_DATE + 4), behind + _LONGEST_DATE):
            if one.start() >= behind:
                break
            found.update(_days(one))
        at = text.find(f"{year:04}", behind)
    return found


def dates_in(text: str) -> Iterator[tuple[str, datetime.date]]:
    """Yield every calendar day that a text names in full, with how it is written there."""
    for one in _DATE.finditer(text):
        for day in _days(one):
            yield one[0], day


def _days(one: re.Match[str]) -> Iterator[datetime.date]:
    form = next(form for form in "123456" if one[f"y{form}"])
    year, month, day = int(one[f"y{form}"]), one[f"m{form}"].casefold(), int(one[f"d{form}"])
    number = _MONTHS[month] if month in _MONTHS else int(month)
    if form == "6":
        if day <= 12 and number <= 12 and day != number:
            return  # 05/01/2026: nobody can say which of the two is the month
        day, number = max(day, number), min(day, number)
    try:
        yield datetime.date(year, number, day)
    except ValueError:
        return  # 2026-02-30 is no day


def whole_date(value: str) -> datetime.date | None:
    """Return the day of a text that is only a day, else None."""
    whole = _DATE.fullmatch(digits_in_dates(plain(value)))
    return next(_days(whole), None) if whole else None


_EVENING = ("下午", "傍晚", "晚上", "今晚", "明晚", "当晚")
_NIGHT = ("夜里", "深夜")
_HALF = "|".join((*_EVENING, *_NIGHT, "上午", "早上", "早晨", "清晨", "凌晨", "中午"))
_TIME = re.compile(
    rf"(?<![^\W{CJK}])(?<![:.,/+-])(?P<half>{_HALF})?(?P<h>\d{{1,2}})"
    r"(?::(?P<m>\d\d)(?::(?P<s>\d\d))?(?![:\d]|-\d)|(?=\s?[aApP]\.?[mM]\b))(?:\s?(?P<noon>[aApP])\.?[mM]\b)?"
)
_NUMERAL = "零〇一二两三四五六七八九十"
_CHINESE_TIME = re.compile(
    rf"(?P<half>{_HALF})?(?<![\d第{_NUMERAL}])(?P<h>\d{{1,2}}|[{_NUMERAL}]{{1,3}})(?P<mark>[点时])(?!间)"
    rf"(?P<rest>半|一刻|三刻|整|钟|(?P<m>\d{{1,2}}|[{_NUMERAL}]{{1,3}})分(?!之))?"
)


def times_in(text: str) -> set[tuple[int, int, int]]:
    """Return every time of the day that a `plain` text names: hour, minute and second."""
    return {time for one in _TIME.finditer(_clock(text)) if (time := _time(one))}


def whole_time(value: str) -> tuple[int, int, int] | None:
    """Return the time of a text that is only a time, else None."""
    whole = _TIME.fullmatch(_clock(plain(value)).strip())
    return _time(whole) if whole else None


def _clock(text: str) -> str:
    """A `plain` text with 晚上七点半 as 晚上7:30. Where neither minutes nor a part of the day say that it is one, as in
    3点建议, nothing is a time."""
    return _CHINESE_TIME.sub(_in_clock_digits, text) if "点" in text or "时" in text else text


def _in_clock_digits(one: re.Match[str]) -> str:
    if not (one["half"] or one["rest"] or one["mark"] == "时"):
        return one[0]
    quarters = {"半": 30, "一刻": 15, "三刻": 45}
    minute = quarters.get(one["rest"] or "", _number(one["m"] or "0"))
    return f"{one['half'] or ' '}{_number(one['h'])}:{minute:02} "


def _number(digits: str) -> int:
    return int(digits) if digits.isdecimal() else chinese_number(digits) or 0


def _time(one: re.Match[str]) -> tuple[int, int, int] | None:
    """Hour, minute and second of the day."""
    hour, minute, second = int(one["h"]), int(one["m"] or 0), int(one["s"] or 0)
    if one["noon"]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + 12 * (one["noon"].lower() == "p")
    elif one["half"] and hour <= 12:
        hour = _hour_of(one["half"], hour)
    return (hour, minute, second) if hour < 24 and minute < 60 and second < 60 else None


def _hour_of(half: str, hour: int) -> int:
    """Return the hour of the day of one of up to 12 in a part of the day: 晚上12点 is midnight, 中午12点 noon."""
    if half == "中午":
        return hour + 12 if hour < 11 else hour
    if half in _NIGHT and hour < 6:
        return hour
    late = half in _EVENING or half in _NIGHT
    return hour % 12 + 12 * (late and (hour < 12 or half == "下午"))
