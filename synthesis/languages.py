"""Which of the two languages a text is in."""

from __future__ import annotations

import re

from synthesis.records import Language

_CHINESE = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_LATIN_WORD = re.compile(r"[A-Za-zÀ-ɏ]+")


def language_of(text: str) -> Language:
    """The language of most of a text. A Chinese character counts as a Latin word; without either it is English."""
    return "zh" if len(_CHINESE.findall(text)) > len(_LATIN_WORD.findall(text)) else "en"
