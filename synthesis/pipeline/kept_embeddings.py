"""Cache of an endpoint's embeddings in a file of the run's folder, so that none is paid for twice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from synthesis.core.journal import Store
from synthesis.pipeline.embedding import EmbeddingError, EndpointEmbedder

FILE = "embeddings.sqlite"
"""In a run's folder."""


class VectorStore(Store):
    """Vectors by the digest of their model and text.

    Raises:
        ValueError: the file is none of vectors.
    """

    NOUN = "file of embeddings"
    REMEDY = "delete it to embed anew"
    TABLES = ("vectors (digest BLOB PRIMARY KEY, vector BLOB)",)

    def known(self, digest: bytes) -> np.ndarray | None:
        """Return a stored vector in float32, or None."""
        with self._naming("read"):
            found = self._db.execute("SELECT vector FROM vectors WHERE digest = ?", (digest,)).fetchone()
        return None if found is None else np.frombuffer(found[0], "<f4")

    def keep(self, digest: bytes, vector: np.ndarray) -> None:
        """Keep a vector."""
        with self._naming():
            self._db.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?)", (digest, vector.astype("<f4").tobytes()))


class KeptEmbedder:
    """An `Embedder` that asks an endpoint only for texts that it was not asked for before.

    Args:
        folder: where the vectors are kept, in a file that is made when there are some.
    """

    def __init__(self, asked: EndpointEmbedder, folder: Path) -> None:
        self.name = asked.name
        self._asked, self._path = asked, folder / FILE
        self._store: VectorStore | None = None

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """See `Embedder.embed`. Vectors are kept with each batch, so that an endpoint that fails costs no more.

        Raises:
            EmbeddingError: there are none, or kept ones have another width than the model has now.
            StoreError: they cannot be kept.
        """
        if not texts:
            return await self._asked.embed(texts)
        self._store = store = self._store or VectorStore(self._path)
        digests = {text: hashlib.sha256(f"{self.name}\0{text}".encode()).digest() for text in texts}
        found = {text: vector for text, digest in digests.items() if (vector := store.known(digest)) is not None}
        missing = [text for text in digests if text not in found]
        size = self._asked.config.batch
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            for text, vector in zip(batch, await self._asked.embed(batch), strict=True):
                store.keep(digests[text], vector)
                found[text] = vector
            store.commit()
        if len({len(vector) for vector in found.values()}) > 1:
            raise EmbeddingError(
                f"{self._asked.config.base_url}: {self.name} gave vectors of different widths; serve one model, and "
                f"delete {self._path} if that was another before"
            )
        return np.stack([found[text] for text in texts])

    def close(self) -> None:
        """Close the file."""
        if self._store is not None:
            self._store.close()
            self._store = None
