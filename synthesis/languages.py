"""Which of the two languages a text is in."""

from __future__ import annotations

import re

from synthesis.records import Language

_CHINESE = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_LATIN_WORD = re.compile(r"[A-Za-zÀ-ɏ][\w]*")


def language_of(text: str) -> Language:
    """The language of most of a text. A Chinese character counts as a Latin word; a text without any is English."""
    chinese = len(_CHINESE.findall(text))
    return "zh" if chinese and chinese >= len(_LATIN_WORD.findall(_CHINESE.sub(" ", text))) else "en"
