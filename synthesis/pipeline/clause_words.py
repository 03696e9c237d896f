"""Words by which a sentence of a language differs from a name, a title or an address in it.

They are pronouns, auxiliaries, negations, conjunctions and question words: the `clauses` of a language in
`languages.toml`. A hyphen stands before an ending of words, in languages that express the same by endings. `short` has
articles, prepositions and conjunctions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from synthesis.core.records import Language

LANGUAGES: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("languages.toml").read_text("utf-8"))
_ENGLISH: Final = frozenset(("the", "of", "to", "with", "by", "from", "and", "for", "in"))
"""Words that English sentences have, and English names too."""


def clause_words_in(sentence: str, words: Sequence[str], languages: Collection[Language]) -> set[str]:
    """Return the words and endings of clauses in some languages that a sentence has.

    Args:
        words: words of the sentence. Empty in scripts without spaces, in which the sentence is searched.
        languages: one language, and all languages that cannot be distinguished from it in a short text.
    """
    whole, endings = _clause_words(frozenset(languages))
    if not words:
        return {one for one in whole if one in sentence}
    present = {word for word in words if word in whole or (word.endswith(endings) and word not in endings)}
    return present | ({words[0].lower()} & whole)


def own_words_in(sentence: str, words: Sequence[str], languages: Collection[Language]) -> set[str]:
    """Return the words that speak for a sentence being in one of some languages, though names may have them too."""
    found = clause_words_in(sentence, words, languages)
    return found | _ENGLISH.intersection(words) if "en" in languages else found


@cache
def words_of_both(found: frozenset[Language], wanted: frozenset[Language]) -> frozenset[str]:
    """Return the short words of some languages that do not speak for others, though sentences of those have them."""
    short = {word for one in found - wanted for word in LANGUAGES["languages"][one].get("short", "").split()}
    return frozenset(short | {word.capitalize() for word in short})


@cache
def _clause_words(languages: frozenset[Language]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the words of clauses of some languages: whole words, and endings of words."""
    every = [word for language in languages for word in LANGUAGES["languages"][language]["clauses"].split()]
    return frozenset(one for one in every if one[0] != "-"), tuple(one[1:] for one in every if one[0] == "-")
