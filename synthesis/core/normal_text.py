"""Text that others wrote in one form, in time that grows as the text does."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Literal

QUOTES: Final = " \"'`“”"
_ENDINGS: Final = " 。.!?"
_LONGEST_RUN: Final = 30
"""Marks on one letter that are kept: UAX #15's Stream-Safe Text Format, which no language comes near."""
_LATIN_ACCENTS = re.compile(r"(?<=[A-Za-z])[\u0300-\u036f]+")
_WORD = re.compile(r"\w+")
# All combining marks are among what Python calls no part of a word, but for two that are made of half-width letters.
_MAYBE_MARKS = re.compile(rf"(?:[^\w\s\x00-\x7f]|[\uff9e\uff9f]){{{_LONGEST_RUN + 1},}}+")


def normalized(form: Literal["NFC", "NFD", "NFKC", "NFKD"], text: str) -> str:
    """Return the text in a normal form of Unicode (UAX #15), with at most 30 combining marks in a row.

    `unicodedata.normalize` sorts the marks of one letter by insertion: 24,000 of two kinds in turn hold it for half a
    second, 64,000 for three.
    """
    if text.isascii():
        return text
    return unicodedata.normalize(form, _MAYBE_MARKS.sub(_cut, text))


def _cut(run: re.Match[str]) -> str:
    kept: list[str] = []
    marks = 0
    for character in run[0]:
        marks = marks + 1 if unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) else 0
        if marks <= _LONGEST_RUN:
            kept.append(character)
    return "".join(kept)


def fold(text: str) -> str:
    """Return the text without differences of width, case, spacing, quotes and final punctuation."""
    text = normalized("NFKC", text).replace("’", "'").casefold()
    return " ".join(text.split()).strip(QUOTES).rstrip(_ENDINGS)


def bare(text: str) -> str:
    """Return the text without the accents of its Latin letters."""
    if text.isascii():
        return text
    return normalized("NFC", _LATIN_ACCENTS.sub("", normalized("NFD", text)))


def with_tones(text: str) -> str:
    """The words of a text between spaces, of each its letters and then its accents, so that hoà equals hòa and Du is
    not Dữ."""
    return "".join(f" {_with_tones(word)}" for word in _WORD.findall(normalized("NFC", text))) + " "


def _with_tones(word: str) -> str:
    marks = [one for one in normalized("NFD", word) if unicodedata.combining(one)]
    return bare(word) + "".join(sorted(marks))
