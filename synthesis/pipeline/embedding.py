"""Embeddings of tool documents, to find irrelevant tools close to a needed one, and tools that can be merged.

`SentenceEmbedder` is the embedded default, a small model in the package `wordllama`. `EndpointEmbedder` uses an
OpenAI-compatible endpoint, such as vLLM with Qwen3-Embedding-8B (the paper's model).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from astra_jax.base.access import keyless
from astra_jax.base.errors import UserError
from astra_jax.base.http_responses import without_keys
from astra_jax.base.proxies import via
from astra_jax.base.settings import Count, Seconds, Settings
from synthesis.core.endpoint import Endpoint
from synthesis.core.endpoint_apis import http_client
from synthesis.core.endpoint_replies import UnreadableReply, too_many
from synthesis.core.rate_limits import backoff, retry_after
from synthesis.core.records import ToolSpec

_LONGEST_PAUSE = 60.0
"""Seconds."""


class EmbeddingError(UserError):
    """No embeddings, or unusable ones; the message names the endpoint and the fault."""


class Embedder(Protocol):
    """Converts texts to vectors."""

    name: str
    """Which model; part of a run's identity and of the dataset's card."""

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 [texts, width], which depend on the texts alone.

        Raises:
            EmbeddingError: there are none.
        """
        ...


def document_text(spec: ToolSpec) -> str:
    """Return the text of a tool that is embedded: its name, description, and its parameters' names and descriptions
    (paper §3.2)."""
    parameters = spec.parameters.get("properties", {})
    described = {name: schema if isinstance(schema, Mapping) else {} for name, schema in parameters.items()}  # or true
    words = " ".join(f"{name}: {schema.get('description', '')}" for name, schema in described.items())
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
        base_url: URL of the endpoint; it ends in `/v1`.
        model: name of the served model.
        api_key: API key, sent as a bearer token; local servers accept any.
        batch: number of texts in one request.
        timeout_seconds: time limit of one request, in seconds.
        tries: how often a request is sent before `EmbeddingError`. 429 does not count.
        backoff_seconds: pause after the first failure, in seconds. It doubles with each failure, up to a minute, with
            jitter. `Retry-After` is honored.
        max_unavailable_seconds: how long, in seconds, a request may get 429 or be asked to wait, before
            `EmbeddingError`.
    """

    base_url: str
    model: str
    api_key: str = field(default="EMPTY", repr=False)
    batch: Count = 256
    timeout_seconds: Seconds = 300.0
    tries: Count = 4
    backoff_seconds: Seconds = 0.5
    max_unavailable_seconds: Seconds = 3600.0


class EndpointEmbedder:
    """Embeddings of an OpenAI-compatible endpoint."""

    def __init__(self, config: EndpointConfig) -> None:
        import openai  # half a second, and the embedded default needs none of it

        keyless(config.base_url, "EndpointConfig.base_url")
        self.config = config
        self.name = config.model
        self._passing = (openai.RateLimitError, openai.APIConnectionError, openai.InternalServerError)
        self._refused = openai.OpenAIError
        self._jitter = random.Random()  # pauses change no vector
        self._paused_until = 0.0
        limits, keys = type(openai.DEFAULT_CONNECTION_LIMITS), {"Authorization": f"Bearer {config.api_key}"}
        http = http_client(
            openai.DefaultAsyncHttpxClient,
            openai.Timeout,
            limits,
            config.base_url,
            100,
            keys,
            seconds=config.timeout_seconds,
        )
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url, api_key=config.api_key, max_retries=0, http_client=http
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
        where, trouble = f"{self.config.base_url}{via(self.config.base_url)}: {self.name}", _Trouble(time.monotonic())
        while True:
            while (pause := self._paused_until - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            try:
                given = await self._client.embeddings.create(model=self.name, input=texts, encoding_format="float")
                rows = [one.embedding for one in sorted(given.data, key=lambda one: one.index)]
            except self._passing as error:
                await asyncio.sleep(self._pause(trouble, error))
                continue
            except self._refused as error:
                raise EmbeddingError(f"{where} refused the request: {self._shown(error)}") from None
            except (
                UnreadableReply,
                ValueError,
                AttributeError,
                TypeError,
            ) as error:  # an error with status 200, or a page
                raise EmbeddingError(f"{where} answered without vectors: {self._shown(error)}") from None
            if len(rows) != len(texts):
                raise EmbeddingError(f"{where} gave {len(rows)} vectors for {len(texts)} texts")
            return rows

    def _pause(self, trouble: _Trouble, error: Exception) -> float:
        """Return how long to wait after a failure of a request, in seconds; `Retry-After` applies to all requests.

        Raises:
            EmbeddingError: it has failed too often or for too long, or it exceeds the rate limit of a minute by itself.
        """
        config, problem = self.config, self._shown(error)
        where = f"{config.base_url}{via(config.base_url)}: {self.name}"
        response = getattr(error, "response", None)  # none, where the connection failed
        status = None if response is None else response.status_code
        about = too_many(response.content) if response is not None and status == 429 else "busy"
        if about == "request":
            raise EmbeddingError(f"{where} refused the request: {problem}; give a smaller batch")
        trouble.failures, trouble.faults = trouble.failures + 1, trouble.faults + (status != 429)
        if trouble.faults >= config.tries:
            raise EmbeddingError(f"{where} gave no embeddings in {trouble.faults} tries: {problem}")
        wait = retry_after(None if response is None else response.headers.get("Retry-After")) or 0.0
        put_off, longest, remedy = (
            time.monotonic() - trouble.began,
            config.max_unavailable_seconds,
            "check the endpoint",
        )
        if about == "account":
            longest, remedy = min(longest, Endpoint.EMPTY_SECONDS), "check the account behind the key"
        if max(put_off, wait) > longest:
            asked = f" and asks to wait for {wait:,.0f} s" if wait else ""
            raise EmbeddingError(
                f"{where} has not returned embeddings for {put_off:,.0f} s{asked}: {problem}; {remedy}, and run the "
                "same command again to resume"
            )
        self._paused_until = max(self._paused_until, time.monotonic() + wait)
        return backoff(trouble.failures, first=config.backoff_seconds, longest=_LONGEST_PAUSE, rng=self._jitter)


@dataclass
class _Trouble:
    """Failures of one request: time of the first, their number, and how many were not due to a rate limit."""

    began: float
    failures: int = 0
    faults: int = 0


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return the vectors scaled to length 1, in float32; a zero vector stays zero.

    Raises:
        EmbeddingError: a number is not finite.
    """
    if not np.isfinite(vectors).all():
        raise EmbeddingError("an embedding holds a number that is not finite; look at the model that is served")
    return (vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)).astype(np.float32)
