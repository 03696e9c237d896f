"""Language data beyond the Unicode CLDR, from one file for each language: `languages/NAME.toml`.

The table `text` has what `locales` reads: yes and no, sentences, word forms, the clock. English and Chinese have none,
since all texts are read in them. The table `answers` has the words that commit a final answer to a value, or take it
back; `answer_words` makes patterns of them. All but single words are parts of regular expressions, matched without heed
of case against text that `Locale.spelled` made. A pattern may be wrapped: its lines are joined with nothing between.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

_FOLDER: Final = Path(__file__).with_name("languages")
READ: Final = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The languages whose answers are read, by ISO 639-1 code."""

Half = Literal["am", "pm", "night", "evening"]
"""Part of the day. `night` is before midnight from six o'clock on, `evening` counts hours from six p.m. (Thai)."""


@dataclass(frozen=True)
class Clock:
    """Notation of the time of day in a language.

    Attributes:
        hour: pattern of the mark behind the hour.
        minutes: pattern of the minutes behind that mark; its group `m2` is the number, or the word for half an hour.
        lasts: whether the mark also says how long something takes (14h30, 2 часа 30 минут).
        at: pattern that ends where the time starts and says that it is one.
        before: patterns that end where the time starts, by the half of the day that they say.
        after: the same behind the time.
    """

    hour: str = r"(?!)"
    minutes: str = r"(?P<m2>(?!))"
    lasts: bool = False
    at: str = r"(?!)"
    before: dict[Half, str] = field(default_factory=dict)
    after: dict[Half, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Words:
    """The words of one language.

    Attributes:
        yes: what says true when it is all of a sentence, or all before a comma; separated by "|".
        no: the same for false.
        regret: pattern of what politeness puts before a judgement: "unfortunately".
        judged: pattern of what is said to be true or false, before a word of `yes` or `no`: "das ist leider".
        polite: pattern of what politeness adds behind such a word.
        sentence: pattern found in a sentence and not in a name or value.
        fewest: words that a sentence has at least.
        joins: pattern of "and" between two elements of a list.
        before: pattern of all letters that may stand before a name in its word (Arabic clitics, French elision).
        after: pattern of all letters that may stand behind a name in its word (particles, case endings).
        beside: whether words touch: then `before` and `after` match next to the name, not up to the end of a word.
        links: pattern of the words between day, month and year, and between a number and its unit.
        minus: pattern of the words for a minus sign before a number.
        below: pattern of what says "below zero" behind a number and its unit.
        ordinals: pattern of ranks, days of a month and the like, which are no numbers; it starts with what they have
            before the number, if anything, and its group `n` is the number.
        touches: whether words of the language touch digits.
        tonal: whether words that differ in accents alone are different words: Du and Dữ.
        clock: its times of the day.
        months: more names of months, by number.
        units: more spellings of units.
        multipliers: more spellings of multipliers.
        regions: CLDR locales whose names of months count too.
        signs: characters and what they are replaced with before anything is read.
    """

    yes: str
    no: str
    sentence: str
    joins: str
    regret: str = r"(?!)"
    judged: str = r"(?!)"
    polite: str = r"(?!)"
    fewest: int = 2
    before: str = ""
    after: str = ""
    beside: bool = False
    links: str = r"(?!)"
    minus: str = r"(?!)"
    below: str = r"(?!)"
    ordinals: str = r"(?P<n>(?!))"
    touches: bool = False
    tonal: bool = False
    clock: Clock = Clock()
    months: dict[int, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    multipliers: dict[str, int] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    signs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerWords:
    """The words of one language.

    Attributes:
        negation: negates the value behind it: "not", "neither".
        negated: negates the value before it: "is wrong", 不对.
        contrast: between what is rejected and what is stated: "but", "rather".
        either: "or".
        ranges: "to", between the ends of a range.
        than: before a value that the answer is only compared with.
        corrects: at the start of a clause, takes back what was said before.
        reports: the writer's own earlier opinion: "I thought".
        unsure: at the start of a clause that supposes something: "if", "whether".
        mark: "the answer is".
        generic: words that say nothing of a value: "it is", "maybe".
        bounds: before a value that only bounds the answer or is an example of it: "at least", "up to", "such as".
        bounded: behind such a value: "or more", "is one of the options".
        joins: "and"; languages with a `Locale` have it there.
    """

    negation: str
    negated: str
    contrast: str
    either: str
    ranges: str
    than: str
    corrects: str
    reports: str
    unsure: str
    mark: str
    generic: str
    bounds: str
    bounded: str
    joins: str = r"(?!)"


@cache
def text_words(language: str) -> Words:
    """Return how texts of a language are read; `KeyError` where its file has no table `text`."""
    table = _tables(language)["text"]
    months = {int(number): names for number, names in table.get("months", {}).items()}
    regions = tuple(table.get("regions", ()))
    return Words(**{**table, "clock": Clock(**table.get("clock", {})), "months": months, "regions": regions})


@cache
def answer_words(language: str) -> AnswerWords:
    """Return the words of final answers in a language of `READ`."""
    return AnswerWords(**_tables(language)["answers"])


@cache
def has_text_words(language: str) -> bool:
    """Return whether a language has words of its own in which texts are read."""
    return language in READ and "text" in _tables(language)


@cache
def _tables(language: str) -> dict[str, Any]:
    found: dict[str, Any] = _unwrapped(tomllib.loads((_FOLDER / f"{language}.toml").read_text("utf-8")))
    return found


def _unwrapped(value: Any) -> Any:
    """Return a value in which each text is one line."""
    if isinstance(value, dict):
        return {name: _unwrapped(one) for name, one in value.items()}
    return value.replace("\n", "") if isinstance(value, str) else value
