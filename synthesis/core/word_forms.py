"""Search for a name in a text of another language: with particles, clitics and case endings, but not in another word.

Works on folded text without accents (`matching`). The work is linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Final

from synthesis.core.language_words import Words
from synthesis.core.normal_text import bare

_LONGEST_ENDING: Final = 16
"""Letters before or after a name in its word that are read."""
MOST_PLACES: Final = 1_000
"""Maximum number of checked positions of a name in a text. A name that is more often a part of longer words is not
found."""
_LATIN = re.compile(r"[A-Za-zÀ-ɏ0-9_]")
_RUSSIAN: Final = {
    # By the end of the base form, which they replace; adjectives first.
    "ий": "ий|его|ого|ему|ому|им|ем|ом|ие|их|ими", "ый": "ый|ого|ому|ым|ом|ые|ых|ыми",
    "ой": "ой|ого|ому|ым|ом|ые|ых|ыми",
    "ая": "ая|ой|ую|ою", "яя": "яя|ей|юю|ею", "ое": "ое|ого|ому|ым|ом", "ее": "ее|его|ему|им|ем",
    "ые": "ые|ых|ым|ыми", "ие": "ие|их|им|ими|ия|ию|ием|ии", "ия": "ия|ии|ию|ией|ие",
    "а": "а|ы|и|е|у|ой|ою|ей", "я": "я|и|е|ю|ей|ею|ой", "й": "й|я|ю|ем|е|и", "ь": "ь|и|я|ю|ем|ью|е",
    "ы": "ы|ов|ам|ами|ах", "": "|а|у|ом|ем|е|ы|и|ов|ым",
}  # fmt: skip
_GRADES: Final = (
    ("nk", "ng"), ("nt", "nn"), ("mp", "mm"), ("lt", "ll"), ("rt", "rr"), ("kk", "k"), ("pp", "p"), ("tt", "t"),
    ("t", "d"), ("p", "v"), ("k", ""),
)  # fmt: skip
"""Finnish consonants before the last vowel: strong, and weak before most case endings."""


class WordForms:
    """The forms of names in a language.

    Args:
        language: ISO 639-1 code.
        words: of the language.
        pattern: compiles one of the patterns in `words`.
    """

    def __init__(self, language: str, words: Words, pattern: Callable[[str], re.Pattern[str]]) -> None:
        self._language = language
        self.beside = words.beside
        self._before = pattern(f"(?:{bare(words.before)})" + "$" * words.beside)
        self._after = pattern(bare(words.after))
        self._russian = {end: pattern(cases) for end, cases in _RUSSIAN.items()} if language == "ru" else {}

    def may_start(self, text: str, start: int) -> bool:
        """Return whether a name that starts there starts its word, apart from clitics."""
        if self.beside:
            if start == 0 or (_LATIN.match(text, start) and not _LATIN.match(text, start - 1)):
                return True
            return self._before.search(text, max(0, start - _LONGEST_ENDING), start) is not None
        first = start
        while first > max(0, start - _LONGEST_ENDING) and (text[first - 1] == "'" or is_letter(text[first - 1])):
            first -= 1
        while first < start and text[first] == "'":
            first += 1
        return first == start or self._before.fullmatch(text, first, start) is not None

    def end_of_word(self, text: str, end: int) -> int | None:
        """Return the end of the word of a name that ends at `end`, with particles or case ending; None within a longer
        word."""
        if self.beside:
            is_apart = end == len(text) or (_LATIN.match(text, end - 1) and not _LATIN.match(text, end))
            return end if is_apart or self._after.match(text, end) else None
        return self._end(text, end, self._after)

    def _end(self, text: str, end: int, endings: re.Pattern[str]) -> int | None:
        last = end
        while last < min(len(text), end + _LONGEST_ENDING) and (text[last] == "'" or is_letter(text[last])):
            last += 1
        while last > end and text[last - 1] == "'":
            last -= 1
        return last if last == end or endings.fullmatch(text, end, last) else None

    def inflected(self, text: str, phrase: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each occurrence of a folded phrase in an inflected form."""
        words = phrase.split(" ")
        of_each = [list(self._stems(word)) for word in words]
        for first, _ in of_each[0] if all(of_each) else ():
            start = -1
            for _ in range(MOST_PLACES):
                start = text.find(first, start + 1)
                if start < 0:
                    break
                if (end := self._end_of_forms(text, start, of_each)) is not None:
                    yield start, end

    def _end_of_forms(self, text: str, start: int, of_each: list[list[tuple[str, re.Pattern[str]]]]) -> int | None:
        end = start
        for at, stems in enumerate(of_each):
            if at and text[end : end + 1] != " ":
                return None
            found = self._end_of_form(text, end + bool(at), stems)
            if found is None:
                return None
            end = found
        return end

    def _end_of_form(self, text: str, start: int, stems: list[tuple[str, re.Pattern[str]]]) -> int | None:
        ends = (self._end(text, start + len(stem), cases) for stem, cases in stems if text.startswith(stem, start))
        return next((end for end in ends if end is not None), None)

    def may_hold(self, keys: str, wanted: str) -> bool:
        """Return whether a phrase, in any form, may be in texts with these keys; used for a quick rejection."""
        return any(stem in keys for stem, _ in self._stems(wanted.split(" ")[0]))

    def _stems(self, word: str) -> Iterator[tuple[str, re.Pattern[str]]]:
        """Yield the stems to which case endings are added, each with its endings."""
        if self._language == "ar" and word.startswith("ال") and len(word) > 4:
            yield "لل" + word[2:], self._after
        if self._language == "ru" and len(word) > 2 and "а" <= word[-1] <= "я":
            end = next((end for end in self._russian if word.endswith(end) and len(word) - len(end) > 2), "")
            if end or word[-1] not in "оуэюиеё":
                yield word[: len(word) - len(end)], self._russian[end]
                return
        if self._language == "fi" and len(word) > 3 and word[-1] in "aeiouy":
            for stem in _finnish_stems(word):
                yield stem, self._after
        if self._language in ("fi", "ru"):
            yield word, self._after


def _finnish_stems(word: str) -> Iterator[str]:
    """Yield weak grade and other vowels: Helsinki and Helsingi-, Suomi and Suome-, Tampere and Tamperee-."""
    head, vowel = word[:-1], word[-1]
    weak = next((head.removesuffix(strong) + weak for strong, weak in _GRADES if head.endswith(strong)), None)
    if weak is not None:
        yield weak + vowel
    if vowel == "i":
        yield head + "e"
    if vowel == "e":
        yield word + "e"


def is_letter(character: str) -> bool:
    """Return whether a character is part of a word: a letter, a digit, or a mark on a letter."""
    if character.isascii():
        return character.isalnum() or character == "_"
    return character.isalnum() or unicodedata.category(character)[0] == "M"
