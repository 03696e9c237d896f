"""Time zones (tzdata), holidays (holidays, dateutil, pyluach) and calendars (pyluach, hijridate)."""

from __future__ import annotations

import datetime
import functools
import importlib.resources
import zoneinfo
from collections import defaultdict
from collections.abc import Mapping

import holidays
from dateutil import easter
from hijridate import Gregorian
from pyluach.dates import HebrewDate

from synthesis.offline.facts.entities import cities, country_names
from synthesis.offline.facts.names import functional, inverse
from synthesis.offline.facts.relations import Relation
from synthesis.offline.facts.tables import relation

OFFSET_YEAR = 2026
_YEARS = range(1950, 2050)
_DAY_STEP = 37  # days between two dates of the calendar tables: about 1,000 over the century

_JULIAN_LAG = datetime.timedelta(days=13)
"""Lag of the Julian calendar from March 1900 to February 2100, when both calendars have the same leap years."""


def build() -> list[Relation]:
    return [*_timezones(), *_holidays(), *_calendars()]


def _offset(zone: zoneinfo.ZoneInfo, month: int) -> str:
    delta = datetime.datetime(OFFSET_YEAR, month, 1, 12, tzinfo=zone).utcoffset() or datetime.timedelta()
    minutes = int(delta.total_seconds()) // 60
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"


def _timezones() -> list[Relation]:
    # The package's own files, not the operating system's: the same answers on every machine.
    root = importlib.resources.files("tzdata") / "zoneinfo"
    countries, places = country_names(), cities()
    country: dict[str, str] = {}
    winter: dict[str, str] = {}
    summer: dict[str, str] = {}
    short: dict[str, str] = {}
    city: dict[str, str] = {}
    zones: dict[str, list[str]] = defaultdict(list)
    for line in (root / "zone.tab").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        iso, _, name = line.split("\t")[:3]
        with (root / name).open("rb") as file:
            zone = zoneinfo.ZoneInfo.from_file(file, key=name)
        winter[name], summer[name] = _offset(zone, 1), _offset(zone, 7)
        short[name] = datetime.datetime(OFFSET_YEAR, 1, 1, 12, tzinfo=zone).tzname() or ""
        if iso in countries:
            country[name] = countries[iso]
            zones[countries[iso]].append(name)
        place = name.rpartition("/")[2].replace("_", " ")
        if place in places and places[place].timezone == name:
            city[name] = place
    only = {name: names[0] for name, names in zones.items() if len(names) == 1}
    return [
        relation(
            "winter_offset_of_timezone", "timezones", ("timezone", "text"), winter,
            ("the January UTC offset of", "the UTC offset in January of"), ("一月UTC偏移",),
            about=(f"Look up a time zone's UTC offset on 1 January {OFFSET_YEAR}.",
                   f"查询一个时区在 {OFFSET_YEAR} 年 1 月 1 日的 UTC 偏移。"),
        ),
        relation(
            "summer_offset_of_timezone", "timezones", ("timezone", "text"), summer,
            ("the July UTC offset of", "the UTC offset in July of"), ("七月UTC偏移",),
            about=(f"Look up a time zone's UTC offset on 1 July {OFFSET_YEAR}.",
                   f"查询一个时区在 {OFFSET_YEAR} 年 7 月 1 日的 UTC 偏移。"),
        ),
        relation(
            "abbreviation_of_timezone", "timezones", ("timezone", "text"), short,
            ("the January abbreviation of", "the time zone abbreviation of"), ("时区缩写",),
            about=("Look up the abbreviation that a time zone uses in January.", "查询一个时区在一月使用的缩写。"),
        ),
        relation(
            "country_of_timezone", "timezones", ("timezone", "country"), country,
            ("the time zone country of", "the zone country of"), ("时区所属国家",),
            about=("Look up the country to which a time zone belongs.", "查询一个时区所属的国家。"),
        ),
        relation(
            "timezone_of_country", "timezones", ("country", "timezone"), only,
            ("the national time zone of", "the only time zone of"), ("全国统一时区",),
            about=("Look up the time zone of a country that has only one.", "查询只有一个时区的国家的时区。"),
        ),
        relation(
            "city_of_timezone", "timezones", ("timezone", "city"), city,
            ("the reference city of", "the naming city of"), ("时区代表城市",),
            about=("Look up the city after which a time zone is named.", "查询一个时区以之命名的城市。"),
        ),
    ]  # fmt: skip


def _thanksgiving(year: int) -> datetime.date:
    """The fourth Thursday of November."""
    first = datetime.date(year, 11, 1)
    return first + datetime.timedelta(days=(3 - first.weekday()) % 7 + 21)


def _hebrew(month: int, day: int, year: int) -> datetime.date:
    """A day of the autumn or winter part of the Hebrew year that begins in the Gregorian `year`."""
    return HebrewDate(year + 3761, month, day).to_pydate()


def _festivals() -> dict[str, dict[str, str]]:
    """Festival → year → ISO date."""
    find = {
        "easter": easter.easter,
        "thanksgiving": _thanksgiving,
        "hebrew_new_year": functools.partial(_hebrew, 7, 1),
        "hanukkah": functools.partial(_hebrew, 9, 25),
    }
    return {name: {str(year): function(year).isoformat() for year in _YEARS} for name, function in find.items()}


def _days() -> list[str]:
    """The dates of the calendar tables: every festival and national day, and an even spread over the century."""
    first, last = datetime.date(_YEARS[0], 1, 1), datetime.date(_YEARS[-1], 12, 31)
    spread = {first + datetime.timedelta(days=n) for n in range(0, (last - first).days + 1, _DAY_STEP)}
    festivals = {day for dates in _festivals().values() for day in dates.values()}
    return sorted({day.isoformat() for day in spread} | festivals | set(_independence_days().values()))


def _independence_days() -> dict[str, str]:
    rows: list[tuple[str | None, str | None]] = []
    for iso, country in country_names().items():
        if iso not in _SUPPORTED:
            continue
        days = holidays.country_holidays(iso, years=OFFSET_YEAR, observed=False, language="en_US")
        rows += [(country, day.isoformat()) for day, name in sorted(days.items()) if name == "Independence Day"]
    return functional(rows)


_SUPPORTED = frozenset(holidays.list_supported_countries())


def _holidays() -> list[Relation]:
    festivals = _festivals()
    weekday = {day: f"{datetime.date.fromisoformat(day):%A}" for day in _days()}

    def yearly(name: str, en: tuple[str, ...], zh: str) -> Relation:
        title = name.replace("_", " ").title()
        return relation(
            f"{name}_of_year", "holidays", ("year", "day"), festivals[name], en, (zh,),
            about=(f"Look up the date of {title} in a year.", f"查询某一年的{zh}。"),
        )  # fmt: skip

    return [
        yearly("easter", ("the date of Easter in", "the Easter date of"), "复活节日期"),
        yearly("thanksgiving", ("the date of Thanksgiving in", "the US Thanksgiving date of"), "美国感恩节日期"),
        yearly("hebrew_new_year", ("the date of Rosh Hashanah in", "the Rosh Hashanah date of"), "犹太新年日期"),
        yearly("hanukkah", ("the first day of Hanukkah in", "the Hanukkah date of"), "光明节首日日期"),
        relation(
            "independence_day_of_country", "holidays", ("country", "day"), _independence_days(),
            (f"the {OFFSET_YEAR} Independence Day of", f"the Independence Day {OFFSET_YEAR} in"),
            (f"{OFFSET_YEAR}年独立日",),
            about=(f"Look up the date of a country's Independence Day in {OFFSET_YEAR}.",
                   f"查询一个国家 {OFFSET_YEAR} 年独立日的日期。"),
        ),
        relation(
            "weekday_of_date", "holidays", ("day", "text"), weekday,
            ("the weekday of", "the day of the week of"), ("星期",),
            about=("Look up the weekday of a date.", "查询某个日期是星期几。"),
        ),
    ]  # fmt: skip


def _calendars() -> list[Relation]:
    days = {text: datetime.date.fromisoformat(text) for text in _days()}

    def hebrew(day: datetime.date) -> str:
        date = HebrewDate.from_pydate(day)
        return f"{date.day} {date.month_name()} {date.year}"

    def islamic(day: datetime.date) -> str:
        date = Gregorian(day.year, day.month, day.day).to_hijri()
        return f"{date.day} {date.month_name()} {date.year}"

    def iso_week(day: datetime.date) -> str:
        year, week, _ = day.isocalendar()
        return f"{year}-W{week:02d}"

    number = {text: day.toordinal() + 1_721_425 for text, day in days.items()}  # at noon; 2000-01-01 is 2,451,545

    def table(
        name: str, rows: Mapping[str, str | int], en: tuple[str, ...], zh: str, about: tuple[str, str]
    ) -> Relation:
        kind = "julian_day" if name == "julian_day" else "text"
        return relation(f"{name}_of_date", "calendars", ("day", kind), rows, en, (zh,), about=about)

    return [
        table(
            "hebrew_date", {t: hebrew(d) for t, d in days.items()},
            ("the Hebrew date of", "the Hebrew calendar date of"), "希伯来历日期",
            ("Convert a Gregorian date to the Hebrew calendar.", "把公历日期换算为希伯来历。"),
        ),
        table(
            "islamic_date", {t: islamic(d) for t, d in days.items()},
            ("the Islamic date of", "the Islamic calendar date of"), "伊斯兰历日期",
            ("Convert a Gregorian date to the Umm al-Qura Islamic calendar.",
             "把公历日期换算为伊斯兰历（乌姆库拉历）。"),
        ),
        table(
            "iso_week", {t: iso_week(d) for t, d in days.items()},
            ("the ISO week of", "the calendar week of"), "ISO周",
            ("Look up the ISO 8601 week of a date.", "查询某个日期所在的 ISO 8601 周。"),
        ),
        table(
            "julian_date",
            {t: (d - _JULIAN_LAG).isoformat() for t, d in days.items()},
            ("the Julian calendar date of", "the old style date of"), "儒略历日期",
            ("Convert a Gregorian date to the Julian calendar.", "把公历日期换算为儒略历。"),
        ),
        table(
            "julian_day", number, ("the Julian day number of", "the Julian day of"), "儒略日数",
            ("Compute the Julian day number of a date at noon.", "计算某个日期正午的儒略日数。"),
        ),
        relation(
            "date_of_julian_day", "calendars", ("julian_day", "day"), inverse(number),
            ("the date with Julian day", "the Gregorian date of"), ("对应公历日期",),
            about=("Find the Gregorian date of a Julian day number.", "根据儒略日数查询公历日期。"),
        ),
    ]  # fmt: skip
