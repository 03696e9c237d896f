"""Near-duplicates among texts: MinHash over word shingles finds candidates, their exact Jaccard similarity decides."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable

from synthesis.core.normal_text import normalized

SHINGLE = 3
"""Words in a row. The text's ends count as words, so a change of the last word weighs as much as any other."""
_PERMUTATIONS = 128
_RECALL = 0.99
"""Least share of the pairs at the threshold that become candidates."""
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")


def normal_text(text: str) -> str:
    """The text without differences of case, width, spaces and final punctuation."""
    return re.sub(r"[\s?!.,。？！，、]+", " ", normalized("NFKC", text).casefold()).strip()


def shingles(text: str) -> frozenset[str]:
    """Every `SHINGLE` words in a row of the normal text; a Chinese character is a word."""
    ends = [""] * (SHINGLE - 1)
    words = [*ends, *_WORD.findall(normal_text(text)), *ends]
    return frozenset("\x1f".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))


def near_duplicates(texts: Iterable[tuple[Hashable, str]], threshold: float) -> list[int | None]:
    """For each (group, text): the index of the first kept text of its group that it nearly repeats, else None.

    Args:
        threshold: least Jaccard similarity of the shingles, above 0 to 1. At 1 only the same words repeat a text.
            Pairs a little below it are always told apart; of those above, candidates miss at most one in a hundred
            right at the threshold, and the fewer the closer two texts are.

    Raises:
        ValueError: the threshold is out of bounds.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"near_duplicate: {threshold} is no similarity; use a number above 0, up to 1")
    from datasketch import MinHash, MinHashLSH  # half a second, and only this stage needs it

    rows, bands = _bands(threshold)
    blank = MinHash(num_perm=_PERMUTATIONS)
    groups: dict[Hashable, list[tuple[int, str]]] = defaultdict(list)
    for index, (group, text) in enumerate(texts):
        groups[group].append((index, text))
    found: list[int | None] = [None] * sum(map(len, groups.values()))
    for members in groups.values():  # one index at a time: it takes 15 KB a text
        lsh = MinHashLSH(num_perm=_PERMUTATIONS, params=(bands, rows))
        exact: dict[str, int] = {}
        kept: dict[int, frozenset[str]] = {}
        for index, text in members:
            earlier = exact.setdefault(normal_text(text), index)
            if earlier < index:  # a text of the same words, or what that one repeats
                found[index] = earlier if found[earlier] is None else found[earlier]
                continue
            mine = shingles(text)
            sketch = blank.copy()
            sketch.update_batch([one.encode() for one in mine])
            candidates = sorted(lsh.query(sketch))
            found[index] = next((one for one in candidates if _jaccard(kept[one], mine) >= threshold), None)
            if found[index] is None:
                lsh.insert(index, sketch, check_duplication=False)
                kept[index] = mine
    return found


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def _bands(threshold: float) -> tuple[int, int]:
    """The longest bands, so the fewest candidates, that still find nearly all pairs at the threshold."""
    fitting = [
        (rows, _PERMUTATIONS // rows)
        for rows in (1, 2, 4, 8, 16, 32)
        if 1 - (1 - threshold**rows) ** (_PERMUTATIONS // rows) >= _RECALL
    ]
    return fitting[-1] if fitting else (1, _PERMUTATIONS)
