"""Training texts of the benchmarks."""

from __future__ import annotations

import random

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "ai", "or")]


def words() -> list[str]:
    """5,000 made-up words of two to four syllables: enough different ones that no tokenizer has all of them cached."""
    rng = random.Random(0)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(5_000)]
