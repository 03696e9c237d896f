"""What benchmarks train on."""

from __future__ import annotations

import random

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "ai", "or")]


def words(count: int = 5_000) -> list[str]:
    """Made-up words of two to four syllables: enough different ones that no tokenizer has all of them cached."""
    rng = random.Random(0)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(count)]
