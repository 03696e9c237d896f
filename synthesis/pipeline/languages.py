"""Detection of a text's language, to check that it is the requested one.

Scripts of a single language identify it: kana, Hangul, Thai. Languages with a common script are distinguished by
`py3langid` (BSD-3-Clause, a naive Bayes over bytes, 4.6 MB in its package), deterministically, in 0.1 ms a text. Only
sentences are judged: they are recognized by words that names do not have, or by their final punctuation. Names, titles,
addresses and short values have no language, and neither has a quotation or code.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args

from synthesis.core.chat_format import parse_json
from synthesis.core.records import Language
from synthesis.core.stages import Rejected
from synthesis.pipeline.clause_words import LANGUAGES, clause_words_in, own_words_in, words_of_both

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

NAMES: Final[Mapping[Language, str]] = {code: one["name"] for code, one in LANGUAGES["languages"].items()}
"""By ISO 639-1 code, all that can be asked for."""
PACKAGED_LANGUAGES: Final[tuple[Language, ...]] = ("en", "zh")
"""Languages that packaged tools are documented in and that the offline teacher writes."""

Script = str
_RANGES: Final[Mapping[Script, str]] = {script: one["letters"] for script, one in LANGUAGES["scripts"].items()}
_WRITES: Final[Mapping[Script, tuple[Language, ...]]] = {
    script: tuple(one["languages"]) for script, one in LANGUAGES["scripts"].items() if one["languages"]
}
"""Languages by the script that writes them; all others, and Serbian too, are written in Latin letters."""
_LATIN: Final = tuple(code for code in get_args(Language) if not any(code in of for of in _WRITES.values())) + ("sr",)
_CHARACTERS_OF_A_WORD: Final = {"han": 2, "kana": 2, "thai": 5, "lao": 5, "burmese": 5, "khmer": 5}
"""About how many characters a word has in scripts that are written without spaces."""
_UNSPACED: Final = frozenset(_CHARACTERS_OF_A_WORD)
_ALIKE: Final[tuple[frozenset[Language], ...]] = tuple(map(frozenset, LANGUAGES["alike"]))
"""Languages that a short text does not tell apart."""

_SHARE: Final = 0.3
"""Least share of Chinese or Japanese characters in a text of that language; the rest may be names and code."""
_KANA: Final = 0.1
"""Least share of kana in a Japanese text."""
_MOST: Final = 2_000
"""Maximum characters that are examined; fewer already show the language."""
_FEWEST_WORDS: Final = 3
"""Fewest words of a text whose language is judged."""
_FEWEST_OF_A_SENTENCE: Final = 7
"""Fewest words of one sentence among others that is judged; a shorter one may be only lists and names."""
_FEWEST_CHARACTERS: Final = {"han": 3, "kana": 6}
"""Fewest characters of a judged sentence with final punctuation in Chinese or Japanese; eight in other scripts without
spaces."""
_FEWEST_UNENDED: Final = {1: 4, 2: 5, 3: 6}
"""Words of a sentence without such a mark: with two words of clauses, with one long one, with one."""
_WITHOUT_ENDS: Final = frozenset({"thai", "lao"})
"""Scripts whose sentences have no such mark; they need a word less."""
_FEWEST_EMBEDDED: Final = 7
"""Words of a sentence in another script within a sentence of the wanted language."""
_LONG_WORD: Final = 4
"""Letters of a long word. Titles have short words of clauses: "ne", "que", "som"."""
_MOST_FOR_A_CLAUSE_WORD: Final = 7
"""Words without such a mark for each word of a clause: a list of names has one at times."""
_FEWEST_SMALL: Final = 3
"""Words without a capital of a sentence that only the mark at its end shows; its first word counts as one."""
_FEWEST_LONG: Final = 2
"""Long words among these: addresses have abbreviations."""
_SMALL_SHARE: Final = 0.6
"""Share of such words in it: names of companies may end in a period too."""
_FEWEST_ALIKE: Final = 12
"""Fewest words of a text that is distinguished from one in a similar language."""
_DOUBT: Final = 0.05
"""Probability at which a text may still be in the language that is wanted, or in none."""
_DOUBT_OF_FEW: Final = 0.02
"""The same, of a few words."""
_DOUBT_WITHOUT_OWN: Final = 0.1
"""The same, of words among which none speaks for the wanted language."""
_NO_LANGUAGE: Final = ("zxx",)

_WORDS: Final = {script: re.compile(f"[{ranges}]+") for script, ranges in _RANGES.items()}
_NOT_SAID: Final = re.compile(
    r"`[^`]{1,400}`|\"[^\"]{1,400}\"|„[^„“”]{1,400}[“”]|“[^”]{1,400}”|«[^»]{1,400}»|»[^«»]{1,400}«|「[^」]{1,400}」|『[^』]{1,400}』|《[^》]{1,400}》"
    r"|\((?:e\.g\.|i\.e\.|such as)[^)]{1,400}\)|https?://[^\s]{1,400}|[^\s]{0,80}@[^\s]{1,80}"
)
"""Quotations, code and addresses."""
_NAMELIKE: Final = re.compile(
    r"[A-Za-z0-9]{0,60}[_/\\$#=<>{}\[\]][^\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\uffef]{0,200}(?<![.!?])|[A-Za-z]{0,30}[0-9][A-Za-z0-9]{0,60}|[A-Z]{2,30}\b"
)
"""Identifiers, paths, codes. The mark behind one is the sentence's, and so is text of scripts without spaces."""
_KEY_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_NAMING: Final = frozenset(
    ("title", "name", "song", "track", "album", "film", "movie", "book", "work", "show", "episode")
)
"""Words of keys of titles, which may be whole sentences: "Non, je ne regrette rien"."""
_LONGEST_TITLE: Final = 8
"""Words of one that is not judged."""
_JSON_STARTS: Final = ("{", "[", '"')
_SENTENCES: Final = re.compile(
    r"[!?؟]\)?(?=\s)|(?<!\W\d)(?<!\W\d\d)\.\)?(?=\s{1,4}[^\sa-z\d])|[。！？;；।۔։။។\n]"
    rf"|(?<=[^\W\d_])\.(?=[{_RANGES['han']}{_RANGES['kana']}])"
)
"""Marks at the end of a sentence. No sentence starts with a small letter or a digit: "apto. 52", "S.A. de C.V.".

None starts behind a number of one or two digits: "3. November". Chinese and Japanese may follow a period without a
space.
"""
_ENDS: Final = (".", "!", "?", "。", "！", "？", "؟", "।", "۔", "։", "။", "។", "…")
_FEWEST_WITHOUT_CLAUSE_WORDS: Final = 4
"""Words of such a sentence in the script of the wanted language: "A positive integer." could be Danish."""
_LABELLED_LIST: Final = re.compile(r":\s[^:]*?,\s")
"""An order or a list of parts: "Order 88: two cappuccini, one panino."."""
_ABBREVIATED: Final = re.compile(r"(?:[.(]\w{1,3}|\b[A-Za-zА-Яа-я])\.$")
"""The end of a name or a number in place of a sentence: S.A., (ca. 1050)."""


def named(language: Language) -> str:
    """Return a language's name for a prompt, in English; in Chinese for Chinese."""
    return "中文" if language == "zh" else NAMES[language]


def language_of(text: str, likely: Sequence[Language] = ("en", "zh")) -> Language:
    """Return the language of a text. If it cannot be determined, as for a few words, return the first of the likely
    ones that is possible."""
    script, words = _script(text := text[:_MOST])
    found = _most_probable(text, script)[0] if script else "en"
    if found in likely:
        return found
    may_be = (one for one in likely if words < _FEWEST_WORDS or one in _WRITES.get(script, _LATIN))
    return next((one for one in may_be if strays(text, one) is None), found)


def strays(text: str, language: Language) -> Language | None:
    """Return the other language that a sentence of a text is clearly written in; see `stray_text`."""
    found = stray_text(text, language)
    return found[1] if found else None


def stray_text(text: str, language: Language, *others: Language) -> tuple[str, Language] | None:
    """Find a text with a sentence in none of some languages.

    Only running text is judged. Names, titles, addresses, codes and short values have no language, so "Katarzyna Nowak"
    and "Calle de Alcalá 45, Madrid" are accepted in an English text. Each string of a JSON text is judged separately: a
    list of names is not a text.

    Returns:
        The text (or the string in JSON) and its language; None if there is none.
    """
    for one, key in _strings(text):
        is_name = any(word.casefold().removesuffix("s") in _NAMING for word in _KEY_WORD.findall(key))
        if is_name and len(one.split()) <= _LONGEST_TITLE:
            continue
        found = _strays(one, language)
        if found and found not in others and all(_strays(one, other) for other in others):
            return one, found
    return None


def _strings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the strings of a JSON text, each with its key or ""; any other text unchanged.

    Strings that contain JSON are decoded too.
    """
    waiting: list[tuple[Any, str]] = [(text, "")]
    while waiting:
        value, key = waiting.pop()
        if isinstance(value, dict):
            waiting += reversed([(one, str(name)) for name, one in value.items()])
        elif isinstance(value, list):
            waiting += reversed([(one, key) for one in value])
        elif isinstance(value, str):
            opened: Any = None
            if value.lstrip()[:1] in _JSON_STARTS:
                with suppress(ValueError, RecursionError):
                    opened = parse_json(value)
            if opened is None:
                yield value, key
            else:
                waiting.append((opened, key))


def _strays(text: str, language: Language) -> Language | None:
    said = _NOT_SAID.sub(" ", text[: 4 * _MOST].replace("**", ""))
    whole = _other_language(said, language)
    for sentence in _sentences(said):
        found = _other_language(sentence, language)
        if found is None or not _is_running_text(sentence, found, language):
            continue
        script, words = _script(sentence)
        # A short sentence counts where the rest of the text is not in the wanted language either.
        if whole is not None or words >= _FEWEST_OF_A_SENTENCE or language not in _WRITES.get(script, _LATIN):
            return found
    return None


def as_prose(text: str) -> str:
    """Return a text that is known to be running text with a mark at its end, so that it is judged as a sentence.

    Questions and descriptions of tools often lack it: "Listar todas as cidades".
    """
    text = text.rstrip()
    return text if text.endswith(_ENDS) else f"{text}."


def words_without_spaces(text: str) -> int:
    """Return about how many words of a text are in scripts that are written without spaces."""
    return sum(_size(script, sum(map(len, _WORDS[script].findall(text)))) for script in _UNSPACED)


def check_language(texts: Iterable[str], language: Language, what: str) -> None:
    """Refuse running text that is not in a language.

    Args:
        what: they are, for the message.

    Raises:
        Rejected: `wrong_language`; the detail names the language and the text.
    """
    for text in texts:
        if found := stray_text(as_prose(text), language):
            stray, other = found
            raise Rejected(
                "wrong_language",
                f"{what} is in {NAMES[other]}, not in {NAMES[language]}: {stray!r:.200}; write it in {NAMES[language]}",
            )


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each with the mark that ends it, and its lines."""
    start = 0
    for mark in _SENTENCES.finditer(text):
        yield text[start : mark.end()]
        start = mark.end()
    yield text[start:]


def _is_running_text(sentence: str, found: Language, wanted: Language) -> bool:
    """Return whether a text is a sentence of the language that it was found to be in.

    A name, a title or an address may be long, but it has no verbs, pronouns or conjunctions, or it does not end as a
    sentence does. Names in a sentence of the wanted language do not make it one of theirs.
    """
    sentence = _NAMELIKE.sub(" ", sentence[:_MOST]).strip().rstrip(")")
    script, number = _script(sentence)
    if not script:
        return False
    words = _WORDS[script].findall(sentence)
    size = _size(script, number)
    spaced = [] if script in _UNSPACED else words
    clause_words, own, around = clause_words_in(sentence, spaced, _like(found)), set(), 0
    if wanted in _WRITES.get(script, _LATIN):
        own = own_words_in(sentence, spaced, _like(wanted)) - words_of_both(_like(found), _like(wanted))
    else:
        around, is_sentence = _around(sentence, wanted)
        if 2 * around >= size and (is_sentence or around >= size) and size < _FEWEST_EMBEDDED:
            return False
    ends = sentence.endswith(_ENDS) or (script == "greek" and sentence.endswith(";"))
    ends = ends and not _ABBREVIATED.search(sentence) and 2 * around < size
    if len(clause_words) < len(own):
        return False
    if clause_words and ends:
        if script in _UNSPACED:
            return number >= _FEWEST_CHARACTERS.get(script, 8)
        return number >= _FEWEST_WORDS - (script != "latin")
    if clause_words:
        longest = max(map(len, clause_words))
        fewest = _FEWEST_UNENDED[1 if len(clause_words) > 1 else 2 if longest >= _LONG_WORD else 3]
        fewest -= script in _WITHOUT_ENDS
        dense = fewest <= size <= _MOST_FOR_A_CLAUSE_WORD * len(clause_words)
        return dense and len(clause_words) > len(own - clause_words)
    if not ends or own or 4 * around >= size or _LABELLED_LIST.search(sentence):
        return False
    if script in _UNSPACED:
        return script == "han" and number > _FEWEST_CHARACTERS["han"]
    if wanted in _WRITES.get(script, _LATIN) and number < _FEWEST_WITHOUT_CLAUSE_WORDS:
        return False
    small = _small(words)
    long = sum(len(one) >= _LONG_WORD for one in small)
    return len(small) >= max(_FEWEST_SMALL, _SMALL_SHARE * number) and long >= _FEWEST_LONG


def _around(sentence: str, language: Language) -> tuple[int, bool]:
    """Return about how many words of a sentence are in the scripts of a language, and whether some are of clauses.

    Words with a capital are names, which sentences of every language have.
    """
    scripts = [one for one, languages in _WRITES.items() if language in languages] or ["latin"]
    found = [word for one in scripts for word in _WORDS[one].findall(sentence) if not word[0].isupper()]
    spaced = [] if _UNSPACED.intersection(scripts) else found
    is_sentence = bool(found and own_words_in(" ".join(found), spaced, [language]))
    return (len(found) if spaced else _size(scripts[0], sum(map(len, found)))), is_sentence


def _size(script: Script, number: int) -> int:
    """Return about how many words a number of words, or of characters of a script without spaces, is."""
    return number // _CHARACTERS_OF_A_WORD.get(script, 1)


def _small(words: Sequence[str]) -> list[str]:
    """Return the words without a capital. The first word of a sentence has one anyway."""
    return [word for word in (*(word.lower() for word in words[:1]), *words[1:]) if not word[0].isupper()]


@cache
def _like(language: Language) -> frozenset[Language]:
    """Return a language and all languages that cannot be distinguished from it in a short text."""
    return frozenset({language}).union(*(group for group in _ALIKE if language in group))


def _other_language(text: str, language: Language) -> Language | None:
    """Return the language that the words of a text are in, where that is clearly not `language`."""
    script, words = _script(text := _NAMELIKE.sub(" ", text[:_MOST]))
    candidates = _WRITES.get(script, _LATIN)
    if language not in candidates and words > 1:
        return _most_probable(text, script)[0]
    if not script or words < _FEWEST_WORDS:
        return None
    alike = _like(language) if words < _FEWEST_ALIKE else frozenset({language})
    found, shares = _most_probable(text, script)
    # A language that is like both, as Galician is like Portuguese and Spanish, speaks for neither.
    own = sum(shares.get(one, 0.0) for one in (language, *(alike - _like(found) - {language}), *_NO_LANGUAGE))
    doubt = _DOUBT if words >= _FEWEST_OF_A_SENTENCE else _DOUBT_OF_FEW
    if not own_words_in(text, _WORDS[script].findall(text), _like(language)):
        doubt = _DOUBT_WITHOUT_OWN
    return found if found not in alike and own <= doubt else None


def _script(text: str) -> tuple[Script, int]:
    """Return the script of most of a text, and its number of words in that script; "" if it has no script."""
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
    """Return the most probable language of a script, and the probability of each language and of no language."""
    candidates = _WRITES.get(script, _LATIN)
    if len(candidates) == 1 or script == "han":
        return candidates[0], {candidates[0]: 1.0}
    with _CLASSIFYING:
        ranked = dict(_identifier().rank(" ".join(_telling(_WORDS[script].findall(text)))))
    of = {one: float(ranked[one]) for one in (*candidates, *_NO_LANGUAGE)}
    total = sum(of.values()) or 1.0
    return max(candidates, key=lambda one: of[one]), {one: share / total for one, share in of.items()}


def _telling(words: list[str]) -> list[str]:
    """Return the words without capitalized ones, which are names in most languages; all words if few remain."""
    small = [word for word in words if word[0].islower()]
    return small if len(small) >= _FEWEST_WORDS else words


_CLASSIFYING = threading.Lock()


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # half a second, and English alone needs it too

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([*get_args(Language), *_NO_LANGUAGE])
    return identifier
