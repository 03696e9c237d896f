"""Canonical entity strings: one short ASCII spelling per entity, equal in every table, so that joins truly match."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from synthesis.core.normal_text import normalized

Value = TypeVar("Value")

MAX_WORDS = 4

# Letters that Unicode does not decompose into a base letter and a mark.
_FOLDED = str.maketrans(
    {
        "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th",
        "ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ı": "i", "ə": "a", "Ə": "A", "ħ": "h", "Ħ": "H",
        "–": "-", "‑": "-",
    }
)  # fmt: skip

# No comma, bracket or quote (they would need escaping in questions and code); no final full stop (it ends a sentence).
_ALLOWED = re.compile(r"[A-Za-z0-9+#.][A-Za-z0-9 .\-+#/&:_]*(?<![ .\-/&:_])")


def canonical(name: str) -> str | None:
    """The canonical spelling of `name`, or None when it has none (non-Latin, too long, brackets, quotes, commas).

    Accents are folded (`Bogotá` → `Bogota`) and a leading article is dropped (`The Bahamas` → `Bahamas`).
    """
    folded = normalized("NFKD", name.translate(_FOLDED))
    folded = " ".join("".join(c for c in folded if not unicodedata.combining(c)).split())
    if folded.casefold().startswith("the "):
        folded = folded[4:]
    if len(folded.split()) > MAX_WORDS or " and the " in folded.casefold() or not _ALLOWED.fullmatch(folded):
        return None
    return folded


def functional(pairs: Iterable[tuple[str | None, Value | None]]) -> dict[str, Value]:
    """The pairs as a mapping, without nameless entries and without subjects that occur twice, ignoring case."""
    kept = [(subject, value) for subject, value in pairs if subject is not None and value is not None]
    counts = Counter(subject.casefold() for subject, _ in kept)
    return {subject: value for subject, value in kept if counts[subject.casefold()] == 1}


def inverse(rows: Mapping[str, str | int]) -> dict[str, str]:
    """value → subject, for the values that exactly one subject has."""
    return functional((str(value), subject) for subject, value in rows.items())


def picks(names: Iterable[str], limit: int) -> list[str]:
    """At most `limit` names, spread evenly over the given order, so that the choice does not depend on a seed."""
    every = list(names)
    if len(every) <= limit:
        return every
    return [every[i * len(every) // limit] for i in range(limit)]
