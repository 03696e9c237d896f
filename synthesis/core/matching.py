"""Does a tool's output contain the expected answer? Decided by typed rules, never by substring.

Both synthesis (is this tool right?) and the RL reward (is this sub-task solved?) ask `contains`; `match` names the rule
that decided. An output is any JSON value; its leaves are searched, and a string that holds JSON is opened first. Keys
are no values, neither of JSON nor of JSON quoted in a text; of a key only the unit counts (`elevation_ft`). A leaf is
either a *value* (short: it must equal the answer as a whole, or one of its comma-separated parts must) or a *text* (a
sentence: the answer may also be a whole-word phrase of it).

Rules, by the answer's type:
  number    equal within `tolerance`; thousands separators, signs, full-width and Chinese numerals, multipliers
            (million, k, 万, 亿), powers of ten, currencies before and after, and units that convert ("1.5 km" is
            1500 m, 68 °F is 20 °C). "5" is not in "15", "A5", "5G", "5-10", "5th", nor in a date, time, version or
            telephone number.
  date      an ISO date answer equals the same day in another notation ("5 January 2026", "2026年1月5日"). Where day and
            month could change places (05/01/2026) nothing matches.
  time      an answer such as "14:30" equals the same time in another notation ("2:30 PM", "14点30分").
  boolean   JSON booleans and the words for them, alone or as a part ("Yes, it is").
  string    equal after folding width, case, spaces, quotes, brackets, accents, "&", a leading "the" and final
            punctuation. Identifiers stay whole: "Guinea" is not in "Guinea-Bissau", nor "Mexico" in "New Mexico", and
            "02" is not 2. A Latin answer of up to three letters keeps its case in a text: "NO" is not "no".
  list      every element is found, in any order; "and" parts elements too.
Aliases count like the value, and the alias of a number may be a number ("1.5 km"). Anything else, an empty answer too,
does not match: fail closed.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from synthesis.core.quantities import (
    CJK,
    Quantity,
    chinese_number,
    is_number,
    numerals,
    plain,
    quantities,
    same_quantity,
    unit_of_key,
)
from synthesis.core.records import Answer

_TRUE = frozenset({"true", "yes", "是", "是的", "对", "真"})
_FALSE = frozenset({"false", "no", "否", "不是", "不", "不对", "假"})
_WORD = re.compile(rf"[^\W{CJK}]")  # a word character that is not Chinese: Chinese words touch their neighbours
_CHINESE = re.compile(rf"[{CJK}]")
_GLUE = frozenset("-+/#@&_.")
"""What makes one identifier of two words: Guinea-Bissau, Europe/Oslo, +47, #f0f8ff, .no, GMT+1."""
# A comma before three digits is a thousands separator and parts nothing.
_PARTS = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))|[;|\n()\[\]{}\"，；、「」『』《》【】«»]+|:\s|：| = | – | — |——|→| -> ")
_AND = re.compile(r" and | & |(?<=[\u3400-\u9fff])[和与及](?=[\u3400-\u9fff])")
_CHINESE_IS = re.compile(r"是|(?<=..)为(?=..)")
_VERB = re.compile(r"\b(?:is|are|was|were)\b")
_KEY_IN_TEXT = re.compile(r"""(?:"[^"\n]{0,80}"|'[^'\n]{0,80}')\s{0,3}:""")
_QUOTES, _ENDINGS, _BRACKETS = " \"'`“”", " 。.!?", "「」『』《》【】«»*"
_MAX_VALUE_WORDS = 5
_SHORT = 3
"""A Latin answer this short is searched in texts with its case: the code "NO" is not the word "no"."""
_LONGER_BEFORE = frozenset(
    {"New", "North", "South", "East", "West", "Northern", "Southern", "Eastern", "Western", "Equatorial", "Papua"}
)
_LONGER_AFTER = frozenset({"City", "State", "Island", "Islands"})
"""Capitalised words that make another name of the name beside them: New Mexico, Mexico City."""


def contains(output: Any, answer: Answer) -> bool:
    """Whether a tool's JSON output contains the answer."""
    return match(output, answer) is not None


def match(output: Any, answer: Answer) -> str | None:
    """The name of the rule by which the output contains the answer (`number`, `date`, …, `alias`), or None."""
    leaves = list(_leaves(output))
    value = answer.value
    if isinstance(value, list):
        wanted = [Answer(one, tolerance=answer.tolerance, unit=answer.unit) for one in value]
        pieces = [*leaves, *_pieces(leaves)] if len(value) > 1 else leaves
        if wanted and all(_match_one(pieces, one) for one in wanted):
            return "list"
    elif rule := _match_one(leaves, answer):
        return rule
    return (
        "alias"
        if any(_match_one(leaves, one) for alias in answer.aliases for one in _meanings(alias, answer))
        else None
    )


def same(first: Answer, second: Answer) -> bool:
    """Whether two answers say the same."""
    return contains(_as_output(first), second) and contains(_as_output(second), first)


def _as_output(answer: Answer) -> Any:
    return {"value": answer.value, "unit": answer.unit} if answer.unit else answer.value


def _meanings(alias: str, answer: Answer) -> Iterator[Answer]:
    """An alias as it stands and, for a number, as the one number that it is."""
    yield Answer(alias)
    if isinstance(answer.value, int | float) and not isinstance(answer.value, bool):
        numbers = quantities(alias)
        if len(numbers) == 1 and len(alias.split()) <= _SHORT:
            unit = numbers[0].unit or answer.unit
            tolerance = answer.tolerance if unit == answer.unit else 0.0
            yield Answer(numbers[0].value, unit=unit, tolerance=tolerance)


def _match_one(leaves: list[Quantity | str | bool], answer: Answer) -> str | None:
    value = answer.value
    if isinstance(value, bool):
        words = _TRUE if value else _FALSE
        return (
            "boolean"
            if any(leaf is value or (isinstance(leaf, str) and _says(leaf, words)) for leaf in leaves)
            else None
        )
    if isinstance(value, int | float):
        if not isinstance(value, int) and not math.isfinite(value):
            return None
        wanted = Quantity(value, answer.unit)
        found = any(same_quantity(one, wanted, answer.tolerance) for leaf in leaves for one in _numbers(leaf))
        return "number" if found else None
    if not isinstance(value, str) or not _key(value):
        return None
    texts = [leaf for leaf in leaves if isinstance(leaf, str)]
    if (day := whole_date(value)) and any(day in _dates(leaf, day.year) for leaf in texts):
        return "date"
    if any(_string_in(leaf, value) for leaf in leaves):
        return "string"
    if (time := _TIME.fullmatch(plain(value).strip())) and (wanted_time := _time(time)):
        return "time" if any(wanted_time in map(_time, _TIME.finditer(plain(leaf))) for leaf in texts) else None
    return None


def _says(leaf: str, words: frozenset[str]) -> bool:
    # A word of agreement far inside a text agrees with something else.
    return any(fold(part) in words for part in _PARTS.split(plain(leaf[:200])) if len(part) < 20)


# ---------------------------------------------------------------------------------------------------------------------
# Leaves


def _leaves(output: Any) -> Iterator[Quantity | str | bool]:
    """Strings, booleans and numbers of a JSON value; a number takes the unit beside it (`{"n": 5, "unit": "km"}`)."""
    waiting = [(output, "")]  # no recursion: an output may be nested deeper than Python calls
    while waiting:
        value, unit = waiting.pop()
        if isinstance(value, dict):
            beside = next((value[key] for key in ("unit", "units", "单位") if isinstance(value.get(key), str)), "")
            waiting += [(one, unit_of_key(str(key)) or beside) for key, one in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(one, unit) for one in value]
        elif isinstance(value, bool):
            yield value
        elif isinstance(value, int | float):
            if isinstance(value, int) or math.isfinite(value):
                yield Quantity(value, unit)
        elif isinstance(value, str):
            opened = _opened(value)
            if opened is not None:
                waiting.append((opened, unit))
            elif unit and is_number(value):
                number = value.replace(",", "")
                yield Quantity(float(number) if "." in number else int(number), unit)
            else:
                yield _KEY_IN_TEXT.sub(" ", value) if ":" in value else value


def _opened(text: str) -> Any:
    """The object or list that a string holds as JSON, else None."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _pieces(leaves: list[Quantity | str | bool]) -> Iterator[str]:
    """The elements that "and" parts in leaves that are no texts."""
    for leaf in leaves:
        if isinstance(leaf, str) and len(leaf) < 10_000:
            yield from (piece for part in _PARTS.split(plain(leaf)) for piece in _AND.split(part) if piece != leaf)


# ---------------------------------------------------------------------------------------------------------------------
# Strings


def fold(text: str) -> str:
    """The text without differences of width, case, spacing, quotes and final punctuation."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'").casefold()
    return " ".join(text.split()).strip(_QUOTES).rstrip(_ENDINGS)


def _key(text: str) -> str:
    """`fold`, and also without differences of accents, brackets, "&", hyphens between letters, and a leading "the"."""
    folded = fold(_bare(plain(text)).strip(_BRACKETS + " ")).strip(_BRACKETS).replace(" & ", " and ")
    return re.sub(r"(?<=[a-z])-(?=[a-z])", " ", folded).removeprefix("the ")


def _bare(text: str) -> str:
    """The text without the accents of its Latin letters."""
    if text.isascii():
        return text
    apart = re.sub(r"(?<=[A-Za-z])[\u0300-\u036f]+", "", unicodedata.normalize("NFD", text))
    return unicodedata.normalize("NFC", apart)


def is_text(leaf: str) -> bool:
    """Whether a string is a sentence, in which a phrase may be searched, and not a bare value."""
    if len(leaf) > 1000:
        return True
    words = leaf.split()
    chinese = len(_CHINESE.findall(leaf))
    if chinese:
        return chinese >= 12 or bool(re.search(r"[。！？，：；]", leaf) or _CHINESE_IS.search(leaf))
    if len(words) > _MAX_VALUE_WORDS or (len(words) >= 3 and leaf.rstrip().endswith((".", "!", "?"))):
        return True
    return len(words) >= 3 and bool(_VERB.search(leaf))


def _string_in(leaf: Quantity | str | bool, value: str) -> bool:
    if isinstance(leaf, Quantity):
        # Only the number's own notation: the string "02" is an identifier, not the number 2.
        whole_float = isinstance(leaf.value, float) and leaf.value.is_integer() and abs(leaf.value) < 1e15
        try:
            return fold(value) in (str(leaf.value), str(int(leaf.value)) if whole_float else "")
        except ValueError:  # Python writes no integer of more than 4300 digits
            return False
    if not isinstance(leaf, str):
        return False
    wanted, whole = _key(value), _key(leaf)
    if wanted not in whole:  # the quick no, also for long outputs
        return False
    if whole == wanted:
        return True
    in_text = is_text(leaf)
    text, phrase = _bare(plain(leaf)), _bare(plain(value)).strip(_QUOTES + _BRACKETS)
    short = in_text and len(phrase) <= _SHORT and not _CHINESE.search(phrase)
    parts = set(_PARTS.split(text))
    if in_text and _CHINESE.search(phrase):
        parts |= set(_CHINESE_IS.split(text))
    for part in parts:
        if len(part) < 4 * len(value) + 20 and _key(part) == wanted and (not short or phrase in part):
            return True
    if not in_text:
        return False
    if re.fullmatch(r"\d+(?:\.\d+)?|\d{1,3}(?:,\d{3})+", phrase):
        # Bare digits follow the rule for numbers: not a part of a date or of 1,234.
        return any(phrase == token for token in numerals(text))
    return _phrase_in(" ".join(text.split()), " ".join(phrase.split()), cased=short)


def _phrase_in(text: str, phrase: str, *, cased: bool) -> bool:
    """Whether the phrase stands in the text as whole words. (No pattern is compiled: the RL reward asks this often.)"""
    if phrase.casefold().startswith("the ") and not cased:
        phrase = phrase[4:]
    folded, phrase = (text, phrase) if cased else (text.casefold(), phrase.casefold())
    if len(folded) != len(text):
        text = folded  # capitals are lost where folding changes lengths, as ß does
    one_character = len(phrase) == 1 and _CHINESE.match(phrase)
    start = folded.find(phrase)
    while start >= 0:
        end = start + len(phrase)
        before, after = folded[max(0, start - 1) : start], folded[end : end + 1]
        glued_before = before in _GLUE or _is_word(before)
        if before == "'":
            glued_before = _is_word(folded[max(0, start - 2) : start - 1])  # O'Brien is not Brien
        glued_after = _is_word(after)
        # "Oslo." and "Oslo: …" end a phrase; "Oslo.no" and "12:30" go on, and so does O'Brien, but not Oslo's.
        if after in _GLUE or after == ":":
            glued_after = after in "+#" or _is_word(folded[end + 1 : end + 2])  # C++ and C# are not C
        elif after == "'":
            possessive = folded[end + 1 : end + 2] == "s" and not _is_word(folded[end + 2 : end + 3])
            glued_after = _is_word(folded[end + 1 : end + 2]) and not possessive
        if one_character:  # one Chinese character is mostly a part of a word
            glued_before, glued_after = _CHINESE.match(before) is not None, _CHINESE.match(after) is not None
        if not glued_before and not glued_after and not _in_longer_name(text, start, end):
            return True
        start = folded.find(phrase, start + 1)
    return False


def _is_word(character: str) -> bool:
    return _WORD.match(character) is not None


def _in_longer_name(text: str, start: int, end: int) -> bool:
    before, after = text[max(0, start - 12) : start].split(), text[end : end + 9]
    if before and before[-1] in _LONGER_BEFORE and text[start - 1] == " ":
        return True
    return after.startswith(" ") and re.split(r"\W", after[1:], maxsplit=1)[0] in _LONGER_AFTER


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and dates


def _numbers(leaf: Quantity | str | bool) -> list[Quantity]:
    if isinstance(leaf, Quantity):
        return [leaf]
    return quantities(leaf) if isinstance(leaf, str) else []


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
_LONGEST_DATE = 30


def _digits_in_dates(text: str) -> str:
    """The text with 二〇二六年五月一日 as 2026年5月1日, on one line, each space single."""
    text = plain(text)
    if "月" in text:
        text = _CHINESE_DATE_PART.sub(lambda one: str(chinese_number(one[0])), text)
    return " ".join(text.split())


def _dates(text: str, year: int) -> set[datetime.date]:
    """Every calendar day of a year that the text names in full."""
    text = _digits_in_dates(text)
    found: set[datetime.date] = set()
    # Only the surroundings of the year are read: an output may be long.
    at = text.find(f"{year:04}")
    while at >= 0:
        for one in _DATE.finditer(text, max(0, at - _LONGEST_DATE), at + _LONGEST_DATE):
            found.update(_days(one))
        at = text.find(f"{year:04}", at + _LONGEST_DATE // 2)
    return found


def dates_in(text: str) -> Iterator[tuple[str, datetime.date]]:
    """Every calendar day that a text names in full, with how it is written there."""
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
    """The day that a text is, when it is nothing but a day."""
    whole = _DATE.fullmatch(_digits_in_dates(value))
    return next(_days(whole), None) if whole else None


_TIME = re.compile(
    rf"(?<![^\W{CJK}])(?<![:.,/+-])(?P<half>上午|下午|晚上)?(?P<h>\d{{1,2}})(?::(?P<m>\d\d)(?::(?P<s>\d\d))?|[点时](?P<m2>\d{{1,2}})分)"
    r"(?![:\d]|-\d)(?:\s?(?P<noon>[aApP])\.?[mM]\b)?"
)


def _time(one: re.Match[str]) -> tuple[int, int, int] | None:
    """Hour, minute and second of the day."""
    hour, minute, second = int(one["h"]), int(one["m"] or one["m2"]), int(one["s"] or 0)
    if one["noon"] or one["half"]:
        if not 1 <= hour <= 12 and one["noon"]:
            return None
        late = (one["noon"] or "").lower() == "p" or one["half"] in ("下午", "晚上")
        hour = hour % 12 + 12 * late if hour <= 12 else hour
    return (hour, minute, second) if hour < 24 and minute < 60 and second < 60 else None
