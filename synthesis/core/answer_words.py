"""Patterns of the words that commit a final answer to a value, or take it back, in the languages of `READ`.

`final_answers` reads with them. The words are those of `language_words`. English and Chinese count in every language,
since answers mix them in.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from unicode_rbnf import FormatPurpose, RbnfEngine

from synthesis.core.language_words import READ, answer_words
from synthesis.core.locales import locale_of
from synthesis.core.normal_text import normalized


class ReadWords:
    """The words of a language, with the English and the Chinese ones, as patterns. Get one with `words_of`."""

    def __init__(self, language: str) -> None:
        locale = locale_of(language)
        signs = str.maketrans(locale.words.signs) if locale else {}
        self.is_spaced = language not in _TOUCHING
        known = {one: answer_words(one) for one in (language, "en", "zh")}

        def words(name: str, *, starts: bool = True, ends: bool = True) -> str:
            """Return the pattern of a field. Words between spaces stand alone, others may touch what is beside them."""
            spaced = [getattr(one, name) for key, one in known.items() if key not in _TOUCHING]
            touching = [getattr(one, name) for key, one in known.items() if key in _TOUCHING]
            alone = _START * starts + rf"(?:{'|'.join(spaced)})" + _END * ends
            return normalized("NFKC", f"(?:{alone}|{'|'.join(touching)})").translate(signs)

        def pattern(form: str) -> re.Pattern[str]:
            return re.compile(form, re.IGNORECASE)

        self.negation = pattern(words("negation", ends=False))
        self.negated = pattern(r"\s{0,2}" + words("negated", starts=False, ends=False))
        self.contrast = pattern(words("contrast"))
        self.corrects = pattern(r"\W{0,4}" + words("corrects", starts=False))
        self.reports = pattern(words("reports"))
        self.unsure = pattern(r"\W{0,4}" + words("unsure", starts=False))
        self.mark = pattern(words("mark", ends=False))
        self.generic = pattern(rf"(?=[^\W\d_]){words('generic')}")
        slot, around = "[\ue000-\ue0ff]", r"[\s$€£:*]*(?:(?:about|around|roughly|some|a total of)\s)?"
        # What bounds a value, or gives it as an example; ">" alone starts a quotation.
        self.bounded = pattern(
            rf"{words('bounds', ends=False)}{around}{slot}"
            rf"|(?:[≥≤≧≦⩾⩽]|(?:(?<=\s)|^)[<>]=?|\\(?:geq?|leq?|gt|lt)\b){around}{slot}"
            rf"|{slot}[\s%°*]{{0,3}}(?:\w{{1,12}}\s)?{words('bounded', starts=False, ends=False)}"
            rf"|{slot}\s?(?:[≥≤≧≦⩾⩽]|\s[<>]=?\s|,\s?\+?(?:∞|\\infty))|(?:∞|\\infty)\s?,\s?{slot}"
            rf"|{slot}\s?(?:±|\+\s?/?\s?[-−]|\\pm\b|\+(?!\s?[\d\ue000-\ue0ff]))"
        )
        self._numbers = {form: number for one in known for form, number in _number_words(one).items()}
        longest = sorted(self._numbers, key=len, reverse=True)
        self._number = pattern(_START + r"(?=[^\W\d_])" + f"(?:{'|'.join(map(re.escape, longest))})" + _END)
        joins = "|".join([known["en"].joins, known["zh"].joins, *([locale.words.joins] if locale else [])])
        listed = "" if language == "ja" else "、|"
        # What parts clauses, each kind in a group of its own.
        self.parts = pattern(
            r"(?P<semicolon>;)|(?P<stop>[。।!?]|\.(?=\s|$)|\.{3,})|(?P<line>\n)"
            rf"|(?P<listed>{listed}\s?[|→⇒]\s?|\s?[-=]>\s?|(?<=[\ue000-\ue0ff])\s?/\s?|\s?/\s?(?=[\ue000-\ue0ff])|\s/\s)"
            r"|(?P<comma>、|(?<!\d),|,(?!\d{3}(?!\d))|:\s?$)|(?P<dash>\s[-–—]{1,2}\s|—)"
            rf"|(?P<either>{words('either')})|(?P<range>{words('ranges')}(?=\s?[\d\ue000-\ue0ff])|~)"
            rf"|(?P<contrast>{words('contrast')})|(?P<than>{words('than')})|(?P<and>{joins})"
        )

    def in_digits(self, text: str) -> str:
        """Return the text with its number words from 13 to 100 in digits; smaller ones often count something else."""
        return self._number.sub(lambda one: str(self._numbers.get(_joined(one[0]), one[0])), text)


@lru_cache(maxsize=32)
def _number_words(language: str) -> dict[str, int]:
    """Return the numbers from 13 to 100 by their words; none where a language has no rules for them."""
    if language not in RbnfEngine.get_supported_languages():
        return {}
    engine, found = RbnfEngine.for_language(language), dict[str, int]()
    for number in range(_FIRST_WORD, 101):
        forms = map(_joined, engine.format_number(number, FormatPurpose.CARDINAL).text_by_ruleset.values())
        found |= {form: number for one in forms for form in (one, one.replace("-", " ")) if not re.search(r"\d", one)}
    return found


def _joined(text: str) -> str:
    return normalized("NFKC", text).replace("\u00ad", "").replace("\u200b", "").casefold()


_FIRST_WORD: Final = 13
_TOUCHING: Final = ("zh", "ja", "th")
"""Languages whose words touch."""
_START: Final = r"(?:(?<![^\W\d_])|(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]))"
_END: Final = r"(?:(?![^\W\d_])|(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]))"


@lru_cache(maxsize=32)
def words_of(language: str) -> ReadWords:
    """Return the patterns of a language; of English where it has none."""
    return ReadWords(language if language in READ else "en")
