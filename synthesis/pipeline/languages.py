"""Which language a text is in, and whether it is in the one that was asked for.

Scripts that one language writes tell it by themselves: kana, Hangul, Thai. Of those that share a script
`py3langid` (BSD-3-Clause, a naive Bayes over bytes, 4.6 MB in its package) tells which. It is deterministic, takes
0.1 ms a text, and says of names, codes and numbers that they are in no language. What a text quotes, code and addresses
do not count: an English question may ask about 北京大学.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, get_args

from synthesis.core.records import Language
from synthesis.core.stages import Rejected

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

NAMES: Final[Mapping[Language, str]] = {
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali",
    "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German", "el": "Greek",
    "en": "English", "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish",
    "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian",
    "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese",
    "ka": "Georgian", "kk": "Kazakh", "km": "Khmer", "kn": "Kannada", "ko": "Korean", "ky": "Kyrgyz", "lo": "Lao",
    "lt": "Lithuanian", "lv": "Latvian", "mk": "Macedonian", "ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi",
    "ms": "Malay", "my": "Burmese", "ne": "Nepali", "nl": "Dutch", "no": "Norwegian", "pa": "Punjabi", "pl": "Polish",
    "ps": "Pashto", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "si": "Sinhala", "sk": "Slovak",
    "sl": "Slovenian", "sq": "Albanian", "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil",
    "te": "Telugu", "th": "Thai", "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek",
    "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
"""By ISO 639-1 code, all that can be asked for."""

Script = str
_RANGES: Final[Mapping[Script, str]] = {
    "latin": "A-Za-z\u00aa\u00ba\u00c0-\u024f\u1e00-\u1eff",
    "han": "\u3400-\u4dbf\u4e00-\u9fff",
    "kana": "\u3041-\u30ff",
    "hangul": "\u1100-\u11ff\uac00-\ud7af",
    "cyrillic": "\u0400-\u052f",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "arabic": "\u0600-\u06ff\u0750-\u077f",
    "hebrew": "\u0590-\u05ff",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "gurmukhi": "\u0a00-\u0a7f",
    "gujarati": "\u0a80-\u0aff",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
    "sinhala": "\u0d80-\u0dff",
    "thai": "\u0e00-\u0e7f",
    "lao": "\u0e80-\u0eff",
    "burmese": "\u1000-\u109f",
    "georgian": "\u10a0-\u10ff",
    "armenian": "\u0530-\u058f",
    "khmer": "\u1780-\u17ff",
}
_WRITES: Final[Mapping[Script, tuple[Language, ...]]] = {
    "han": ("zh", "ja"),
    "kana": ("ja",),
    "hangul": ("ko",),
    "cyrillic": ("be", "bg", "kk", "ky", "mk", "mn", "ru", "sr", "uk"),
    "greek": ("el",),
    "arabic": ("ar", "fa", "ps", "ur"),
    "hebrew": ("he",),
    "devanagari": ("hi", "mr", "ne"),
    "bengali": ("bn",),
    "gurmukhi": ("pa",),
    "gujarati": ("gu",),
    "tamil": ("ta",),
    "telugu": ("te",),
    "kannada": ("kn",),
    "malayalam": ("ml",),
    "sinhala": ("si",),
    "thai": ("th",),
    "lao": ("lo",),
    "burmese": ("my",),
    "georgian": ("ka",),
    "armenian": ("hy",),
    "khmer": ("km",),
}
"""Languages by the script that writes them; all others, and Serbian too, are written in Latin letters."""
_LATIN: Final = tuple(code for code in get_args(Language) if not any(code in of for of in _WRITES.values())) + ("sr",)
_UNSPACED: Final = frozenset({"han", "kana", "thai", "lao", "burmese", "khmer"})
"""Written without spaces: each character counts as a word."""
_ALIKE: Final[tuple[frozenset[Language], ...]] = (
    frozenset({"da", "no", "sv"}),
    frozenset({"id", "ms"}),
    frozenset({"bs", "hr", "sr", "sl"}),
    frozenset({"gl", "pt"}),
    frozenset({"ca", "es", "gl"}),
    frozenset({"cs", "sk"}),
    frozenset({"be", "ru"}),
    frozenset({"be", "uk"}),
    frozenset({"bg", "mk", "sr"}),
    frozenset({"hi", "mr", "ne"}),
    frozenset({"az", "tr", "uz"}),
    frozenset({"kk", "ky"}),
    frozenset({"fa", "ps", "ur", "ar"}),
    frozenset({"af", "nl"}),
)
"""Languages that a short text does not tell apart."""

_SHARE: Final = 0.3
"""Of a text's words in Chinese or Japanese characters; the others may be names and code."""
_KANA: Final = 0.1
"""Of the characters of a Japanese text."""
_MOST: Final = 2_000
"""Characters that are looked at: a language shows in fewer."""
_FEWEST_WORDS: Final = 3
"""Of a text whose language counts."""
_FEWEST_OF_A_SENTENCE: Final = 7
"""Of one sentence among others: what lists and names it has may be all it has."""
_FEWEST_LATIN: Final = 4
"""Of one in Latin letters where another script is wanted: three may be a name."""
_FEWEST_CHARACTERS: Final = 3
"""Of one in Chinese or Japanese characters, likewise."""
_FEWEST_ALIKE: Final = 12
"""Of a text that is told from one in a language alike."""
_DOUBT: Final = 0.05
"""Probability at which a text may still be in the language that is wanted, or in none."""
_DOUBT_OF_FEW: Final = 0.02
"""The same, of a few words."""
_NO_LANGUAGE: Final = ("zxx",)

_WORDS: Final = {script: re.compile(f"[{ranges}]+") for script, ranges in _RANGES.items()}
_NOT_SAID: Final = re.compile(
    r"`[^`]{1,400}`|\"[^\"]{1,400}\"|“[^”]{1,400}”|«[^»]{1,400}»|「[^」]{1,400}」|『[^』]{1,400}』|《[^》]{1,400}》"
    r"|\((?:e\.g\.|i\.e\.|such as)[^)]{1,400}\)|https?://[^\s]{1,400}|[^\s]{0,80}@[^\s]{1,80}"
)
"""Quotations, code and addresses."""
_NAMELIKE: Final = re.compile(
    r"[A-Za-z0-9]{0,60}[_/\\$#=<>{}\[\]][^\s]{0,200}|[A-Za-z]{0,30}[0-9][A-Za-z0-9]{0,60}|[A-Z]{2,30}\b"
)
"""Identifiers, paths, codes."""
_SENTENCES: Final = re.compile(r"[.!?](?=\s)|[。！？;；\n]")


def named(language: Language) -> str:
    """A language's name, as a prompt in English, or in Chinese of Chinese, says it."""
    return "中文" if language == "zh" else NAMES[language]


def language_of(text: str, likely: Sequence[Language] = ("en", "zh")) -> Language:
    """The language of a text; where it cannot be told, as of a few words, the first of the likely ones that it may be
    in."""
    script, _ = _script(text[:_MOST])
    found = _most_probable(text[:_MOST], script)[0] if script else "en"
    return found if found in likely else next((one for one in likely if strays(text, one) is None), found)


def strays(text: str, language: Language) -> Language | None:
    """The other language that a text, or a sentence of it, is clearly in; None where it is in `language`, or cannot be
    told: names, codes, a few words."""
    said = _NOT_SAID.sub(" ", text[: 4 * _MOST])
    if (found := _strays(said, language, _FEWEST_WORDS)) is not None:
        return found
    sentences = _SENTENCES.split(said)
    of_each = (_strays(one, language, _FEWEST_OF_A_SENTENCE) for one in sentences if len(sentences) > 1)
    return next((found for found in of_each if found is not None), None)


def check_language(texts: Iterable[str], language: Language, what: str) -> None:
    """Refuse texts that are not in a language.

    Args:
        what: they are, for the message.

    Raises:
        Rejected: `wrong_language`; the detail names the language and the text.
    """
    for text in texts:
        if (found := strays(text, language)) is not None:
            raise Rejected(
                "wrong_language",
                f"{what} is in {NAMES[found]}, not in {NAMES[language]}: {text[:200]!r}; write it in {NAMES[language]}",
            )


def _strays(text: str, language: Language, fewest: int) -> Language | None:
    script, words = _script(text := _NAMELIKE.sub(" ", text[:_MOST]))
    if not script:
        return None
    candidates = _WRITES.get(script, _LATIN)
    if language not in candidates:
        # Another script says it alone; but names in Latin letters stand in texts of every language.
        if words < (_FEWEST_LATIN if script == "latin" else _FEWEST_CHARACTERS if script in _UNSPACED else 2):
            return None
        return _most_probable(text, script)[0]
    if words < fewest:
        return None
    alike = {language}.union(*(group for group in _ALIKE if language in group and words < _FEWEST_ALIKE))
    found, shares = _most_probable(text, script)
    own = sum(shares.get(one, 0.0) for one in (*alike, *_NO_LANGUAGE))
    doubt = _DOUBT if words >= _FEWEST_OF_A_SENTENCE else _DOUBT_OF_FEW
    return found if found not in alike and own <= doubt else None


def _script(text: str) -> tuple[Script, int]:
    """The script that most of a text is in, and how many words are; "" where it has none."""
    words: Counter[Script] = Counter()
    for script, pattern in _WORDS.items():
        found = pattern.findall(text)
        words[script] = sum(map(len, found)) if script in _UNSPACED else len(found)
    total, characters = sum(words.values()), words["han"] + words["kana"]
    if not total:
        return "", 0
    if characters >= _SHARE * total:
        return ("kana" if words["kana"] >= _KANA * characters else "han"), characters
    most = max(words, key=lambda one: words[one])
    return most, words[most]


def _most_probable(text: str, script: Script) -> tuple[Language, Mapping[str, float]]:
    """Of the languages of a script the most probable, and the share of each, and of what is no language at all."""
    candidates = _WRITES.get(script, _LATIN)
    if len(candidates) == 1 or script == "han":
        return candidates[0], {candidates[0]: 1.0}
    with _CLASSIFYING:
        ranked = dict(_identifier().rank(" ".join(_telling(_WORDS[script].findall(text)))))
    of = {one: float(ranked[one]) for one in (*candidates, *_NO_LANGUAGE)}
    total = sum(of.values()) or 1.0
    return max(candidates, key=lambda one: of[one]), {one: share / total for one, share in of.items()}


def _telling(words: list[str]) -> list[str]:
    """The words without those that begin with a capital, which are names in most languages; all where few are left."""
    small = [word for word in words if word[0].islower()]
    return small if len(small) >= _FEWEST_WORDS else words


_CLASSIFYING = threading.Lock()


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # half a second, and English alone needs it too

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([*get_args(Language), *_NO_LANGUAGE])
    return identifier
