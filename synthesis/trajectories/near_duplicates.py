"""Near-duplicates among texts, by the Jaccard similarity of their word shingles."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from synthesis.core.normal_text import normalized

SHINGLE = 3
"""Words in a row. The text's ends count as words, so a change of the last word weighs as much as any other."""
_MOST_PAIRS = 1 << 22
"""Pairs of texts that are compared at a time; 50 MB at most."""
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")


def normal_text(text: str) -> str:
    """Return the text without differences of case, width, spaces and final punctuation."""
    return re.sub(r"[\s?!.,。？！，、]+", " ", normalized("NFKC", text).casefold()).strip()


@functools.lru_cache(maxsize=4096)
def shingles(text: str) -> frozenset[str]:
    """Return every run of `SHINGLE` words of the normal text; a Chinese character is a word."""
    ends = [""] * (SHINGLE - 1)
    words = [*ends, *_WORD.findall(normal_text(text)), *ends]
    return frozenset("\x1f".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))


def near_duplicates(texts: Iterable[tuple[Hashable, str]], threshold: float) -> list[int | None]:
    """Return, for each (group, text), the index of the first kept text of its group that it nearly repeats, else None.

    Args:
        threshold: minimum Jaccard similarity of the shingles, above 0 to 1. At 1 only the same words repeat a text.

    Raises:
        ValueError: the threshold is out of bounds.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"near_duplicate: {threshold} is not a similarity; use a number above 0, up to 1")
    groups: dict[Hashable, list[tuple[int, str]]] = defaultdict(list)
    for index, (group, text) in enumerate(texts):
        groups[group].append((index, text))
    found: list[int | None] = [None] * sum(map(len, groups.values()))
    for members in groups.values():
        first: dict[str, int] = {}
        same = [(index, first.setdefault(normal_text(text), index)) for index, text in members]
        fresh = [(index, text) for (index, text), (_, earlier) in zip(members, same, strict=True) if index == earlier]
        for place, earlier in _repeats([text for _, text in fresh], threshold):
            found[fresh[place][0]] = fresh[earlier][0]
        for index, earlier in same:  # a text of the same words repeats that one, or what that one repeats
            if index != earlier:
                found[index] = earlier if found[earlier] is None else found[earlier]
    return found


def _repeats(texts: Sequence[str], threshold: float) -> Iterator[tuple[int, int]]:
    """Yield each text that nearly repeats an earlier one, and the first such text that repeats none itself."""
    import scipy.sparse  # a quarter of a second, and only this stage needs it

    numbers: dict[str, int] = {}
    sets = [[numbers.setdefault(one, len(numbers)) for one in shingles(text)] for text in texts]
    sizes_t = np.array([len(one) for one in sets], np.int64)
    entries = np.concatenate([np.empty(0, np.int64), *(np.array(one) for one in sets)])
    has_ts = scipy.sparse.csr_array(
        (np.ones(len(entries), np.int32), entries, np.concatenate([[0], np.cumsum(sizes_t)])),
        shape=(len(texts), max(1, len(numbers))),
    )
    is_kept_t = np.ones(len(texts), bool)
    rows = max(1, _MOST_PAIRS // max(1, len(texts)))
    for start in range(0, len(texts), rows):
        shared = (has_ts[start : start + rows] @ has_ts[: start + rows].T).tocsr()
        for place in range(start, min(start + rows, len(texts))):
            pairs = slice(*shared.indptr[place - start : place - start + 2])
            others, counts = shared.indices[pairs], shared.data[pairs]
            is_near = counts / (sizes_t[place] + sizes_t[others] - counts) >= threshold
            near = others[is_near & (others < place) & is_kept_t[others]]
            if len(near):
                is_kept_t[place] = False
                yield place, int(near.min())
