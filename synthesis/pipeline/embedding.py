"""Embeddings of tool documents: which irrelevant tools are close to a needed one, and which tools may become one.

`SentenceEmbedder` is the embedded default, a small model that ships in the package `wordllama`; `EndpointEmbedder` asks
an OpenAI-compatible endpoint, such as vLLM with Qwen3-Embedding-8B (the paper's).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sandbox.access import keyless
from sandbox.answers import without_keys
from sandbox.settings import Count, Seconds, Settings
from synthesis.core.records import ToolSpec
from synthesis.core.refusals import Refusal


class EmbeddingError(Refusal):
    """No embeddings, or none that can be used; the message names the endpoint and what was wrong."""


class Embedder(Protocol):
    """Whoever turns texts into vectors."""

    name: str
    """Which model; part of a run's identity and of the dataset's card."""

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 [texts, width], which depend on the texts alone.

        Raises:
            EmbeddingError: there are none.
        """
        ...


def document_text(spec: ToolSpec) -> str:
    """What of a tool is embedded: its name, description, and its parameters' names and descriptions (paper §3.2)."""
    parameters = spec.parameters.get("properties", {})
    words = " ".join(f"{name}: {schema.get('description', '')}" for name, schema in parameters.items())
    return f"{spec.name.replace('_', ' ')}\n{spec.description}\n{words}"


class SentenceEmbedder:
    """WordLlama: the mean of a text's token vectors, 256 wide, distilled from the token tables of large models.

    English and Chinese; about 19,000 tool documents a second on one core; nothing is downloaded.
    """

    name = "wordllama-l2-supercat-256"

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """See `Embedder.embed`."""
        if not texts:
            return np.zeros((0, 256), np.float32)
        return _unit(_sentence_model().embed(list(texts)))


@functools.cache
def _sentence_model() -> Any:
    # The package configures the root logger when it is imported; whoever uses us has done so for himself.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    import wordllama

    root.handlers[:], root.level = handlers, level
    # Told to look in its own folder: by default it looks for its tokenizer in a folder that is not there, then
    # downloads.
    folder = Path(wordllama.__file__).parent
    return wordllama.WordLlama.load(dim=256, cache_dir=folder, disable_download=True)


@dataclass(frozen=True)
class EndpointConfig(Settings):
    """An OpenAI-compatible embeddings endpoint.

    Attributes:
        base_url: ends in `/v1`.
        model: the served model's name.
        api_key: sent as a bearer token; local servers take any.
        batch: texts of one request.
        timeout_seconds: of one request.
        tries: how often a request is made before `EmbeddingError`.
    """

    base_url: str
    model: str
    api_key: str = field(default="EMPTY", repr=False)
    batch: Count = 256
    timeout_seconds: Seconds = 300.0
    tries: Count = 4


class EndpointEmbedder:
    """Embeddings of an OpenAI-compatible endpoint."""

    def __init__(self, config: EndpointConfig) -> None:
        import openai  # half a second, and the embedded default needs none of it

        keyless(config.base_url, "EndpointConfig.base_url")
        self.config = config
        self.name = config.model
        self._passing = (openai.RateLimitError, openai.APIConnectionError, openai.InternalServerError)
        self._refused = openai.OpenAIError
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key,
            timeout=config.timeout_seconds,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),  # with the key in hand
        )

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """See `Embedder.embed`."""
        rows: list[list[float]] = []
        for start in range(0, len(texts), self.config.batch):
            rows += await self._batch(list(texts[start : start + self.config.batch]))
        if len({len(row) for row in rows}) > 1:
            raise EmbeddingError(f"{self.config.base_url}: {self.name} gave vectors of different widths")
        return _unit(np.array(rows, np.float32))

    def _shown(self, error: Exception) -> str:
        return without_keys(str(error).encode(), {"Authorization": self.config.api_key}).decode()

    async def _batch(self, texts: list[str]) -> list[list[float]]:
        where, problem = f"{self.config.base_url}: {self.name}", ""
        for attempt in range(self.config.tries):
            try:
                given = await self._client.embeddings.create(model=self.name, input=texts, encoding_format="float")
            except self._passing as error:
                problem = self._shown(error)
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
                continue
            except self._refused as error:
                raise EmbeddingError(f"{where} refused the request: {self._shown(error)}") from None
            rows = [one.embedding for one in sorted(given.data, key=lambda one: one.index)]
            if len(rows) != len(texts):
                raise EmbeddingError(f"{where} gave {len(rows)} vectors for {len(texts)} texts")
            return rows
        raise EmbeddingError(f"{where} gave no embeddings in {self.config.tries} tries: {problem}")


def _unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors at length 1, float32; one of zeros stays, and is as far from all as can be.

    Raises:
        EmbeddingError: a number is not finite.
    """
    if not np.isfinite(vectors).all():
        raise EmbeddingError("an embedding holds a number that is not finite; look at the model that is served")
    return (vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)).astype(np.float32)
