"""Near-duplicates among texts: MinHash over word shingles finds candidates, their exact Jaccard similarity decides."""

from __future__ import annotations

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from synthesis.core.normal_text import normalized

SHINGLE = 3
"""Words in a row. The text's ends count as words, so a change of the last word weighs as much as any other."""
_PERMUTATIONS = 128
_RECALL = 0.99
"""Least share of the pairs at the threshold that become candidates."""
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
            Pairs below it are always told apart. Right at the threshold, candidates miss at most one pair in a hundred;
            the closer the texts, the fewer.

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
        first: dict[bytes, int] = {}
        fresh = []
        again = []
        for index, text in members:
            earlier = first.setdefault(_digest(normal_text(text).encode(), 16), index)
            if earlier == index:
                fresh.append((index, text))
            else:
                again.append((index, earlier))
        holders: dict[int, list[int]] = defaultdict(list)
        """The kept texts of each bucket, as indices into `fresh`."""
        for position, ((index, text), buckets) in enumerate(
            zip(fresh, _shared_buckets([text for _, text in fresh], threshold), strict=True)
        ):
            candidates = sorted({one for bucket in buckets for one in holders.get(bucket, ())})
            near = (one for one in candidates if _jaccard(shingles(fresh[one][1]), shingles(text)) >= threshold)
            if (one := next(near, None)) is not None:
                found[index] = fresh[one][0]
            else:
                for bucket in buckets:
                    holders[bucket].append(position)
        for index, earlier in again:  # a text of the same words, or what that one repeats
            found[index] = earlier if found[earlier] is None else found[earlier]
    return found


def _shared_buckets(texts: Sequence[str], threshold: float) -> Iterator[list[int]]:
    """Yield for each text the buckets of MinHash's bands that it shares with another; without any, skip comparison.

    8 bytes for each band of a text (256, for 32 bands), where an index that grows text by text takes 15 KB.
    """
    from datasketch import MinHash  # half a second, and only this stage needs it

    rows, bands = _bands(threshold)
    blank = MinHash(num_perm=_PERMUTATIONS)
    buckets_tb = np.empty((len(texts), bands), np.int64)
    for position, text in enumerate(texts):
        sketch = blank.copy()
        sketch.update_batch([one.encode() for one in shingles(text)])
        values = sketch.hashvalues[: rows * bands].reshape(bands, rows)
        buckets_tb[position] = [int.from_bytes(_digest(band.tobytes(), 8), "big", signed=True) for band in values]
    for band in range(bands):
        _, whose, counts = np.unique(buckets_tb[:, band], return_inverse=True, return_counts=True)
        buckets_tb[:, band] = np.where(counts[whose] > 1, whose * bands + band, -1)
    for row in buckets_tb:
        yield row[row >= 0].tolist()


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def _bands(threshold: float) -> tuple[int, int]:
    """Return the longest bands, so the fewest candidates, that still find nearly all pairs at the threshold."""
    fitting = [
        (rows, _PERMUTATIONS // rows)
        for rows in (1, 2, 4, 8, 16, 32)
        if 1 - (1 - threshold**rows) ** (_PERMUTATIONS // rows) >= _RECALL
    ]
    return fitting[-1] if fitting else (1, _PERMUTATIONS)
