"""Which of the two languages a text is in."""

from __future__ import annotations

import re

from synthesis.core.records import Language

_CHINESE = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_LATIN_WORD = re.compile(r"[A-Za-zÀ-ɏ][\w]*")


def has_words(text: str) -> bool:
    """Whether there is a word at all: a text of digits and signs is in no language."""
    return bool(_CHINESE.search(text) or _LATIN_WORD.search(text))


_SHARE = 0.3
"""Of a Chinese text's words, a character counted as one: it may quote names and code."""


def language_of(text: str) -> Language:
    """Chinese where at least 30 % of the words are, each Chinese character counted as one; else English."""
    chinese = len(_CHINESE.findall(text))
    latin = len(_LATIN_WORD.findall(_CHINESE.sub(" ", text)))
    return "zh" if chinese and chinese >= _SHARE * (chinese + latin) else "en"
