"""Numbers that a text spells out: "thirty", "twenty-one", 两颗, vingt et un.

`unicode-rbnf` (MIT) spells the number that is looked for, in the language of the text, by the rules of Unicode's CLDR.
It knows 58 of the languages of `synthesis.pipeline.languages`. Roman numerals are not read: "Louis XIV" counts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

from unicode_rbnf import FormatPurpose, RbnfEngine
from unicode_rbnf.engine import RbnfError

from synthesis.core.normal_text import normalized
from synthesis.core.quantities import CJK
from synthesis.core.records import Language
from synthesis.pipeline.clause_words import own_words_in

SMALL: Final = 13
"""Below it, a number word often counts something else than what is asked for: "which of the two cities"."""
_MOST: Final = 10**12
_MARKS: Final = r"\u0300-\u036f\u0591-\u05c7\u0610-\u065f\u0900-\u0dff"
"""Vowels and accents of Indic and Semitic scripts, which Python counts to no word."""
_TOKEN: Final = re.compile(rf"[{CJK}]|(?:[^\W{CJK}]|[{_MARKS}])+|[^\w\s]")
_RANK_IN_DIGITS: Final = re.compile(r"(\d{1,3})(?:st|nd|rd|th)|第(\d{1,3})", re.IGNORECASE)
_HAS_WORD: Final = re.compile(r"[^\W\d_]")
_RANK: Final = re.compile(r"\b(?:rank(?:s|ed)?|position|place|order|which number|what number)\b|第几|排名|名次|排第")
_FRACTIONS: Final = {0.5: ("half", "一半"), 0.25: ("quarter", "四分之一"), 0.75: ("three quarters", "四分之三")}
_PERCENT: Final = (("percent",), ("per", "cent"), ("pct",), ("%",))
_NO_NUMBER_AFTER: Final = frozenset({"pour", "por", "per", "第"})
"""Words that make a percent sign of a hundred ("pour cent"), and a rank of a number."""
_NOUNS_AFTER: Final = 4
"""Tokens after a number word among which the thing is that it counts."""
_FEWEST_LETTERS: Final = 3
_LONG_NOUN: Final = 6
"""Letters of a noun that may lose two in another form."""


def spells(text: str, number: float, language: Language, *, asked: str | None = None, unit: str = "") -> bool:
    """Return whether a text states a number in words.

    A number below 13 must count what is asked for: "How many moons has Mars, the planet with two moons?" states 2,
    "Which two cities are named?" does not.

    Args:
        asked: the question that the number answers; None: the text itself. Nothing is asked for where it is empty.
        unit: of the number; only "%" matters.
    """
    tokens = _tokens(text, language)
    question = None if asked is None else _tokens(asked, language)
    for phrase in _cardinals(number, language) if _HAS_WORD.search(text) else ():
        for start, end in _places(tokens, phrase, language):
            if unit == "%" and any(tuple(tokens[end : end + len(one)]) == one for one in _PERCENT):
                return True
            if number >= SMALL or number % 1 or _counts(tokens, start, end, question, language):
                return True
    return bool(_RANK.search(text if asked is None else asked)) and has_rank(text, number, language)


def has_number(text: str, number: float, language: Language) -> bool:
    """Return whether a text has a number in words, whatever it counts."""
    tokens = _tokens(text, language)
    return any(_places(tokens, phrase, language) for phrase in _cardinals(number, language))


def with_day_in_digits(text: str, day: int, language: Language) -> str:
    """Return a text in which the rank of a day is in digits: "fourth of July" as "4 of July"."""
    tokens = _tokens(text, language)
    for phrase in _ordinals(day, language):
        for start, end in reversed(_places(tokens, phrase, language)):
            tokens[start:end] = [str(day)]
    return " ".join(tokens)


def has_rank(text: str, number: float, language: Language) -> bool:
    """Return whether a text has the rank of a number: "second", "2nd", 第二."""
    if number % 1 or not 0 < number < _MOST:
        return False
    tokens = _tokens(text, language)
    if any(_places(tokens, phrase, language) for phrase in _ordinals(int(number), language)):
        return True
    digits = str(int(number))
    return any(one[: len(digits)] == digits and one[len(digits) :] in ("st", "nd", "rd", "th") for one in tokens)


def rank_of(text: str, language: Language) -> int | None:
    """Return the rank up to 100 that a text is: 2 of "second" and "2nd"."""
    if digits := _RANK_IN_DIGITS.fullmatch(text.strip()):
        return int(digits[1] or digits[2])
    tokens = tuple(_tokens(text, language))
    return next((number for number in range(1, 101) if tokens in _ordinals(number, language)), None)


def number_of(text: str, language: Language) -> int | None:
    """Return the number up to 100 that a text is, in letters: 2 of "two"."""
    tokens = tuple(_tokens(text, language))
    return next((number for number in range(101) if tokens in _cardinals(number, language)), None)


def _tokens(text: str, language: Language) -> list[str]:
    text = normalized("NFKC", text).replace("\u00ad", "").casefold()
    tokens = [one for one in _TOKEN.findall(text) if one not in "-‐–"]
    if language == "en" and tokens:  # two hundred and fifty; a hundred
        tens = ("hundred", "thousand", "million", "billion")
        tokens = [one for place, one in enumerate(tokens) if one != "and" or tokens[max(0, place - 1)] not in tens]
        after = [*tokens[1:], ""]
        tokens = ["one" if one == "a" and two in tens else one for one, two in zip(tokens, after, strict=True)]
    return tokens


def _places(tokens: Sequence[str], phrase: Sequence[str], language: Language) -> list[tuple[int, int]]:
    """Return where a phrase is among tokens, and is no part of a longer number."""
    found, length, parts = [], len(phrase), _parts(language)
    for start in range(len(tokens) - length + 1):
        if tokens[start] != phrase[0] or tuple(tokens[start : start + length]) != tuple(phrase):
            continue
        before, after = tokens[max(0, start - 1) : start], tokens[start + length : start + length + 1]
        if not {*before} & (parts | _NO_NUMBER_AFTER) and not {*after} & parts:
            found.append((start, start + length))
    return found


def _counts(tokens: Sequence[str], start: int, end: int, asked: Sequence[str] | None, language: Language) -> bool:
    """Return whether a number word counts what is asked for, or stands as an answer does: "(two)", "Two."."""
    after = list(_until_mark(tokens[end : end + _NOUNS_AFTER]))
    elsewhere = asked if asked is not None else [*tokens[:start], *tokens[end + len(after) :]]
    if not after:
        before = tokens[start - 1] if start else "."
        return bool(elsewhere) and (not before[0].isalnum() or before in ("is", "are", "has", "have", "是", "有"))
    if re.match(rf"[{CJK}]", after[0]):
        pairs = {"".join(after[place : place + 2]) for place in range(len(after) - 1)}
        return any(pair in "".join(elsewhere) for pair in pairs if len(pair) > 1)
    nouns = [one for one in after if len(one) >= _FEWEST_LETTERS and not own_words_in(one, [one], [language])]
    return any(_is_form(noun, one) for noun in nouns[:2] for one in elsewhere)


def _until_mark(tokens: Sequence[str]) -> Iterator[str]:
    for one in tokens:
        if not one[0].isalnum():
            return
        yield one


def _is_form(first: str, second: str) -> bool:
    """Return whether two words are forms of one: moon and moons, city and cities."""
    shorter, longer = sorted((len(first), len(second)))
    common = max(_FEWEST_LETTERS, shorter - (2 if shorter >= _LONG_NOUN else 1))
    return shorter >= _FEWEST_LETTERS >= longer - shorter and first[:common] == second[:common]


# ---------------------------------------------------------------------------------------------------------------------
# Spellings


@lru_cache(maxsize=64)
def _engine(language: Language) -> RbnfEngine | None:
    return RbnfEngine.for_language(language) if language in RbnfEngine.get_supported_languages() else None


@lru_cache(maxsize=4096)
def _cardinals(number: float, language: Language) -> frozenset[tuple[str, ...]]:
    """Return the ways to spell a number out, as tokens."""
    if number == 1 and language != "en":  # an article, or a part of words
        return frozenset()
    number = int(number) if number % 1 == 0 else number
    purposes = [FormatPurpose.CARDINAL, *([FormatPurpose.YEAR] if language == "en" and 1000 < number < 2100 else [])]
    found = {form for purpose in purposes for form in _spelled(number, language, purpose)}
    return frozenset(found.union(tuple(_tokens(one, language)) for one in _FRACTIONS.get(number, ())))


@lru_cache(maxsize=4096)
def _ordinals(number: int, language: Language) -> frozenset[tuple[str, ...]]:
    return frozenset(_spelled(number, language, FormatPurpose.ORDINAL))


def _spelled(number: float, language: Language, purpose: FormatPurpose) -> set[tuple[str, ...]]:
    engine: RbnfEngine | None = _engine(language)
    found: set[tuple[str, ...]] = set()
    if engine is not None and 0 <= number < _MOST:
        with suppress(RbnfError, ValueError):
            forms = engine.format_number(number, purpose).text_by_ruleset.values()
            found = {tuple(_tokens(form, language)) for form in forms}
    return {one for one in found if one and not any(token.isdigit() for token in one)}


@lru_cache(maxsize=64)
def _parts(language: Language) -> frozenset[str]:
    """Return the words of which a language makes numbers."""
    numbers = [*range(21), *range(30, 100, 10), 100, 1000, 10**6]
    return frozenset(token for one in numbers for phrase in _cardinals(one, language) for token in phrase)
