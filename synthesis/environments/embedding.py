"""Embeddings of tool documents, for choosing irrelevant tools by similarity.

`HashedEmbedder` is the embedded default: TF-IDF over words and character n-grams, hashed into a fixed width. It
measures shared wording, not meaning; an embeddings endpoint or a sentence encoder takes its place through the
`Embedder` protocol.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from synthesis.records import ToolSpec


class Embedder(Protocol):
    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 [texts, width]. The same texts in the same order give the same vectors."""
        ...


def document_text(spec: ToolSpec) -> str:
    """What of a tool is embedded: its name, description, and its parameters' names and descriptions."""
    parameters = spec.parameters.get("properties", {})
    words = " ".join(f"{name}: {schema.get('description', '')}" for name, schema in parameters.items())
    return f"{spec.name.replace('_', ' ')}\n{spec.description}\n{words}"


class HashedEmbedder:
    """TF-IDF of hashed words and character n-grams; document frequencies are those of the texts embedded together."""

    def __init__(self, width: int = 1024, ngrams: Sequence[int] = (3, 4)) -> None:
        if width < 16:
            raise ValueError(f"width: {width} gives mostly collisions; use at least 16")
        self._width = width
        self._ngrams = tuple(ngrams)

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """See `Embedder.embed`."""
        counts = np.zeros((len(texts), self._width), np.float32)
        for row, text in enumerate(texts):
            for feature, n in Counter(self._features(text)).items():
                # crc32, because Python's own hash of strings differs between processes.
                counts[row, zlib.crc32(feature.encode()) % self._width] += n
        frequency = np.count_nonzero(counts, axis=0)
        vectors = np.log1p(counts) * np.log((1 + len(texts)) / (1 + frequency) + 1).astype(np.float32)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def _features(self, text: str) -> list[str]:
        text = text.casefold()
        # Chinese has no spaces between words: pairs of characters stand for them.
        words = re.findall(r"[^\W_\u4e00-\u9fff]+", text)
        runs = re.findall(r"[\u4e00-\u9fff]+", text)
        chinese = [run[i : i + 2] for run in runs for i in range(len(run) - 1)]
        grams = [f"#{word}#"[i : i + n] for word in words for n in self._ngrams for i in range(len(word) + 3 - n)]
        return words + chinese + grams
