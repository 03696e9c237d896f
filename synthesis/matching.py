"""Does a tool's output contain the expected answer? Decided by typed rules, never by substring.

Both synthesis (is this tool right?) and the RL reward (is this sub-task solved?) ask `contains`; `match` names the rule
that decided. An output is any JSON value; its leaves are searched, and a string that holds JSON is opened first. A
leaf is either a *value* (short: it must equal the answer as a whole, or one of its comma-separated parts must) or a
*text* (a sentence: the answer may also be a whole-word phrase of it).

Rules, by the answer's type:
  number    equal within `tolerance`; thousands separators, full-width and Chinese numerals, multipliers (million, 万),
            and units that convert ("1.5 km" is 1500 m). "5" is not in "15", in "2026-05-01" nor in "A5".
  date      an ISO date answer equals the same day in another notation ("5 January 2026", "2026年1月5日").
  boolean   JSON booleans and the words for them.
  string    equal after folding width, case, spaces and final punctuation. Identifiers stay whole: "Guinea" is not in
            "Guinea-Bissau", "02" is not 2.
  list      every element is found, in any order.
Aliases count like the value. Anything else, an empty answer too, does not match: fail closed.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from synthesis.quantities import Quantity, numerals, quantities, same_quantity
from synthesis.records import Answer

_TRUE, _FALSE = frozenset({"true", "yes", "是", "对"}), frozenset({"false", "no", "否", "不是"})
_CJK = r"\u3400-\u4dbf\u4e00-\u9fff\u3040-\u30ff"
_WORD = re.compile(rf"[^\W{_CJK}]")  # a word character that is not Chinese: Chinese words touch their neighbours
_CHINESE = re.compile(rf"[{_CJK}]")
_GLUE = frozenset("-+/#@&_.")
"""What makes one identifier of two words: Guinea-Bissau, Europe/Oslo, +47, #f0f8ff, .no, GMT+1."""
_PARTS = re.compile(r"[,;|\n()\[\]\"“”，；、（）]+|:\s|：")
_QUOTES, _ENDINGS = " \"'`“”", " 。.!?"
_MAX_VALUE_WORDS = 5
_SHORT = 3
"""A Latin answer this short is searched in texts with its case: the code "NO" is not the word "no"."""


def contains(output: Any, answer: Answer) -> bool:
    """Whether a tool's JSON output contains the answer."""
    return match(output, answer) is not None


def match(output: Any, answer: Answer) -> str | None:
    """The name of the rule by which the output contains the answer (`number`, `date`, …, `alias`), or None."""
    leaves = list(_leaves(output))
    value = answer.value
    if isinstance(value, list):
        wanted = [Answer(one, tolerance=answer.tolerance, unit=answer.unit) for one in value]
        if wanted and all(_match_one(leaves, one) for one in wanted):
            return "list"
    elif rule := _match_one(leaves, answer):
        return rule
    return "alias" if any(_match_one(leaves, Answer(alias)) for alias in answer.aliases) else None


def same(first: Answer, second: Answer) -> bool:
    """Whether two answers say the same."""
    return contains(first.value, second) and contains(second.value, first)


def _match_one(leaves: list[Quantity | str | bool], answer: Answer) -> str | None:
    value = answer.value
    if isinstance(value, bool):
        words = _TRUE if value else _FALSE
        found = any(leaf is value or (isinstance(leaf, str) and fold(leaf) in words) for leaf in leaves)
        return "boolean" if found else None
    if isinstance(value, int | float):
        wanted = Quantity(value, answer.unit)
        found = any(same_quantity(one, wanted, answer.tolerance) for leaf in leaves for one in _numbers(leaf))
        return "number" if math.isfinite(value) and found else None
    if not isinstance(value, str) or not fold(value):
        return None
    if (day := _whole_date(value)) and any(day in _dates(leaf) for leaf in leaves if isinstance(leaf, str)):
        return "date"
    if any(_string_in(leaf, value) for leaf in leaves):
        return "string"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Leaves


def _leaves(output: Any) -> Iterator[Quantity | str | bool]:
    """Strings, booleans and numbers of a JSON value; a number takes the unit beside it (`{"n": 5, "unit": "km"}`)."""
    if isinstance(output, dict):
        unit = next((output[key] for key in ("unit", "units", "单位") if isinstance(output.get(key), str)), "")
        for value in output.values():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield Quantity(value, unit)
            else:
                yield from _leaves(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _leaves(value)
    elif isinstance(output, str):
        opened = _opened(output)
        if opened is None:
            yield output
        else:
            yield from _leaves(opened)
    elif isinstance(output, bool):
        yield output
    elif isinstance(output, int | float) and math.isfinite(output):
        yield Quantity(output, "")


def _opened(text: str) -> Any:
    """The object or list that a string holds as JSON, else None."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


# ---------------------------------------------------------------------------------------------------------------------
# Strings


def fold(text: str) -> str:
    """The text without differences of width, case, spacing, quotes and final punctuation."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'").casefold()
    return " ".join(text.split()).strip(_QUOTES).rstrip(_ENDINGS)


def is_text(leaf: str) -> bool:
    """Whether a string is a sentence, in which a phrase may be searched, and not a bare value."""
    words = leaf.split()
    chinese = len(_CHINESE.findall(leaf))
    if chinese:
        return chinese >= 12 or bool(re.search(r"[。！？，：；]", leaf))
    return len(words) > _MAX_VALUE_WORDS or (len(words) >= 3 and leaf.rstrip().endswith((".", "!", "?")))


def _string_in(leaf: Quantity | str | bool, value: str) -> bool:
    if isinstance(leaf, Quantity):
        # Only the number's own notation: the string "02" is an identifier, not the number 2.
        return fold(value) == str(leaf.value) or (isinstance(leaf.value, float) and fold(value) == f"{leaf.value:g}")
    if not isinstance(leaf, str):
        return False
    wanted = fold(value)
    if fold(leaf) == wanted or any(fold(part) == wanted for part in _PARTS.split(leaf)):
        return True
    if not is_text(leaf):
        return False
    text, phrase = unicodedata.normalize("NFKC", leaf), unicodedata.normalize("NFKC", value).strip()
    if len(phrase) > _SHORT or _CHINESE.search(phrase):
        text, phrase = text.casefold(), phrase.casefold()
    if re.fullmatch(r"[\d.,]+", phrase):  # bare digits follow the rule for numbers: not a part of a date or of 1,234
        return any(phrase == token for token in numerals(text))
    return _phrase_in(" ".join(text.split()), " ".join(phrase.split()))


def _phrase_in(text: str, phrase: str) -> bool:
    """Whether the phrase stands in the text as whole words. (No pattern is compiled: the RL reward asks this often.)"""
    start = text.find(phrase)
    while start >= 0:
        end = start + len(phrase)
        before, after, beyond = text[max(0, start - 1) : start], text[end : end + 1], text[end + 1 : end + 2]
        glued_before = before and (_WORD.match(before) or before in _GLUE)
        # "Oslo." and "Oslo: …" end a phrase; "Oslo.no" and "12:30" go on.
        joins = (after in _GLUE or after == ":") and beyond and _WORD.match(beyond)
        glued_after = after and (_WORD.match(after) or joins)
        if not glued_before and not glued_after:
            return True
        start = text.find(phrase, start + 1)
    return False


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
# 05/01/2026 is left out: nobody can say which of the two is the month.
_DATE = re.compile(
    rf"""(?<![\w-])(?:
      (?P<y1>\d{{4}})(?P<separator>[-/.])(?P<m1>\d{{1,2}})(?P=separator)(?P<d1>\d{{1,2}})(?=$|[^\d/.-]|[.-](?!\d))
    | (?P<d2>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<m2>{_MONTH})\.?,?\s+(?P<y2>\d{{4}})(?!\d)
    | (?P<m3>{_MONTH})\.?\s+(?P<d3>\d{{1,2}})(?:st|nd|rd|th)?,?\s+(?P<y3>\d{{4}})(?!\d)
    )|(?<!\d)(?P<y4>\d{{4}})\s*年\s*(?P<m4>\d{{1,2}})\s*月\s*(?P<d4>\d{{1,2}})\s*[日号]""",
    re.VERBOSE | re.IGNORECASE,
)


def _dates(text: str) -> set[datetime.date]:
    """Every calendar day that the text names in full."""
    found: set[datetime.date] = set()
    for one in _DATE.finditer(unicodedata.normalize("NFKC", text)):
        for form in "1234":
            if one[f"y{form}"]:
                month = one[f"m{form}"]
                number = _MONTHS[month.casefold()] if month.casefold() in _MONTHS else int(month)
                try:
                    found.add(datetime.date(int(one[f"y{form}"]), number, int(one[f"d{form}"])))
                except ValueError:
                    continue  # 2026-02-30 is no day
    return found


def _whole_date(value: str) -> datetime.date | None:
    """The day that an answer is, when it is nothing but a day."""
    text = unicodedata.normalize("NFKC", value).strip()
    whole = _DATE.fullmatch(text)
    days = _dates(text) if whole else set()
    return next(iter(days), None)
