"""Host-side state of the engine: shapes, counters, requests and slots."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from astra_jax.base.settings import Length, OneOf, Settings, Slots
from astra_jax.models.matmuls import WEIGHT_QUANTIZATIONS
from astra_jax.rollout.sampler import Alternatives, Sampling

_LARGE = 1 << 25
"""Model size in weights above which a CPU step is so slow that compiling programs for more row counts pays off."""


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Sizes of the engine.

    Attributes:
        slots: sequences that decode at the same time. More are faster in total and need more memory.
        max_length: longest sequence in tokens, prompt and response together. The KV cache has slots x max_length
            positions.
        prefill_chunk: maximum prompt tokens that one prefill call adds to each row. Short prompts use smaller programs,
            of a quarter, a sixteenth and so on. None: 64 on CPUs, else 2,048.
        decode_chunk: tokens that one decode call samples for each row. New requests wait for its end, so lower it for
            latency. None: 16 on CPUs, else 32.
        weight_quantization: number format of the layers' matrices: the model's dtype (`none`), or 8 bits with a scale
            for each output (`int8`), with which each step reads half as many bytes. Sampled tokens and logprobs then
            follow the rounded weights.
        min_window: attention reads the first 1, 1.5, 2, 3, 4, ... times this many cache positions, the least that holds
            the longest row. Each window is compiled once. None: 128 on CPUs, else 1,024. This is not
            sliding-window attention: every position up to the length is read.
    """

    slots: Slots = 64
    max_length: Length = 2048
    prefill_chunk: Length | None = None
    decode_chunk: Length | None = None
    min_window: Length | None = None
    weight_quantization: Annotated[str, OneOf(WEIGHT_QUANTIZATIONS)] = "none"

    def on(self, platform: str, *, weights: int = 0) -> Shapes:
        """Return the shapes on this platform, with a number for each.

        Args:
            weights: number of the model's weights that multiply each token.
        """
        on_cpu = platform == "cpu"
        # In sixteenths of the slots; 0 is one row. Decoding all rows is faster than half of them off CPUs, since a
        # subset is gathered first.
        decode: tuple[int, ...] = (0, 1, 4, 8, 16) if on_cpu else (0, 1, 4, 16)
        prefill: tuple[int, ...] = (1, 2, 4) if on_cpu else (1, 4)
        if on_cpu and weights >= _LARGE:
            # With SmolLM2-135M on CPU, more row counts save a tenth of decoding and a sixth of prefilling in GRPO
            # updates.
            decode, prefill = (0, 1, 4, 6, 8, 12, 16), (0, 1, 2, 4)

        def rows(sixteenths: Sequence[int]) -> tuple[int, ...]:
            return tuple(sorted({max(1, math.ceil(self.slots * n / 16)) for n in sixteenths}))

        return Shapes(
            slots=self.slots,
            max_length=self.max_length,
            prefill_chunk=self.prefill_chunk or (64 if on_cpu else 2_048),
            decode_chunk=self.decode_chunk or (16 if on_cpu else 32),
            min_window=self.min_window or (128 if on_cpu else 1_024),
            decode_rows=rows(decode),
            prefill_rows=rows(prefill),
            call_tokens=32 if on_cpu else 256,
        )


@dataclass(frozen=True)
class Shapes:
    """`EngineConfig` with all numbers resolved for its platform.

    Attributes, beside the configuration's:
        decode_rows: row counts for decoding: one, fractions of the slots, or all, ascending.
        prefill_rows: row counts for prefilling: few for a single long prompt, more for the turns of many episodes,
            ascending. Padding costs as much as tokens.
        call_tokens: fixed cost of a prefill call in tokens, for reading all weights: 150 to 600 tokens in bfloat16 on
            accelerators, 25 on two CPU cores.
    """

    slots: int
    max_length: int
    prefill_chunk: int
    decode_chunk: int
    min_window: int
    decode_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    call_tokens: int

    def window_for(self, length: int) -> int:
        """Return the smallest allowed window of at least `length` positions."""
        window = self.min_window
        while window < length:
            window *= 2
        if window > self.min_window and window * 3 // 4 >= length:  # intermediate sizes reduce needless reads
            window = window * 3 // 4
        return min(window, self.max_length)

    @property
    def windows(self) -> list[int]:
        """All possible windows, ascending."""
        return sorted({self.window_for(length) for length in range(1, self.max_length + 1)})

    @property
    def prefill_chunks(self) -> list[int]:
        """All chunk sizes: `prefill_chunk`, and a quarter, a sixteenth, … of it, at least 64."""
        chunks = [self.prefill_chunk]
        while chunks[0] // 4 >= 64:
            chunks.insert(0, chunks[0] // 4)
        return chunks

    def decode_rows_for(self, rows: int) -> int:
        """Return the smallest sufficient row count; decoding costs rows x window."""
        return next(count for count in self.decode_rows if count >= rows)

    def prefill_shape_for(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return (rows, chunk) of the prefill call with the most tokens per cost.

        Args:
            tokens: remaining tokens of each waiting row; a call takes the first rows.
        """

        def gain(shape: tuple[int, int]) -> float:
            rows, chunk = shape
            return sum(min(n, chunk) for n in tokens[:rows]) / (rows * chunk + self.call_tokens)

        return max(((self._prefill_rows_for(len(tokens), chunk), chunk) for chunk in self.prefill_chunks), key=gain)

    def _prefill_rows_for(self, waiting: int, chunk: int) -> int:
        """Return the rows of the next call that minimise the total cost of all calls."""
        counts = self.prefill_rows

        def cost(waiting: int) -> float:
            return min(following(count, waiting) for count in counts) if waiting > 0 else 0.0

        def following(count: int, waiting: int) -> float:
            return count + self.call_tokens / chunk + cost(waiting - count)

        return counts[-1] if waiting >= counts[-1] else min(counts, key=lambda count: following(count, waiting))


@dataclass
class EngineStats:
    """Running totals; take a `snapshot` and subtract it to measure a phase. `failed` counts aborted requests."""

    requests: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    copied_tokens: int = 0
    decoded_tokens: int = 0
    evictions: int = 0
    failed: int = 0
    failed_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def since(self, earlier: EngineStats) -> EngineStats:
        return EngineStats(**{name: value - getattr(earlier, name) for name, value in vars(self).items()})

    def snapshot(self) -> EngineStats:
        return EngineStats(**vars(self))


class PromptScores:
    """Logprobs of a prompt's tokens from the second on, filled in by prefilling.

    Attributes:
        logps: [n - 1] float32.
        likeliest: ids and logprobs of the likeliest tokens at each position, both [n - 1, k]; k is 0 if none are
            requested.
    """

    def __init__(self, prompt_length: int, alternatives: int) -> None:
        self.logps = np.zeros(prompt_length - 1, np.float32)
        shape = (prompt_length - 1, alternatives)
        self.likeliest = np.zeros(shape, np.int32), np.zeros(shape, np.float32)

    def put(self, start: int, logps: np.ndarray, likeliest: Any) -> None:
        """Store the scores that follow the positions from `start`, ignoring those beyond the prompt."""
        n = max(0, min(len(logps), len(self.logps) - start))
        self.logps[start : start + n] = logps[:n]
        for kept, new in zip(self.likeliest, likeliest or (), strict=False):
            kept[start : start + n] = new[:n, : kept.shape[1]]

    def alternatives(self) -> list[Alternatives]:
        """Return the alternatives in the form of `TokenChunk`; empty if none are requested."""
        ids, values = self.likeliest
        places = zip(ids.tolist(), values.tolist(), strict=True) if ids.shape[1] else ()
        return [tuple(zip(*place, strict=True)) for place in places]


@dataclass(eq=False)
class Request:
    """A running completion. A device step's thread appends to `tokens` and `logprobs`; waiters for `news` may read the
    first `delivered` of them.

    Attributes:
        alternatives: for each token, if requested.
        scores: of the prompt, if requested.
        reused: prompt tokens whose keys and values were reused.
        versions: of the weights that sampled each delivered token.
        finish: set with the last delivery.
        failure: the error that ended it.
        dropped: the caller no longer waits.
    """

    prompt: np.ndarray
    sampling: Sampling
    session: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    scores: PromptScores | None = None
    reused: int = 0
    delivered: int = 0
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    failure: Exception | None = None
    dropped: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.sampling.prompt_logprobs:
            self.scores = PromptScores(len(self.prompt), self.sampling.alternatives)

    @property
    def stopped(self) -> bool:
        """True if its last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.sampling.stop_ids

    @property
    def ended(self) -> bool:
        """True if it needs no more tokens."""
        return self.stopped or len(self.tokens) >= self.sampling.max_tokens


@dataclass(eq=False)
class CacheSlot:
    """Slot of the KV cache. `ids[:length]` is the sequence; `ids[:cached]` has its keys and values in the cache. The
    last token of an active sequence is not cached yet: decoding feeds it to get the next one."""

    index: int
    ids: np.ndarray
    length: int = 0
    cached: int = 0
    session: str = ""
    request: Request | None = None
    donor: CacheSlot | None = None
    used: int = 0

    @property
    def prefilling(self) -> bool:
        return self.request is not None and self.cached < self.length - 1

    @property
    def scores(self) -> PromptScores | None:
        """Scores of its request. If set, the whole prompt is prefilled and nothing is reused."""
        return None if self.request is None else self.request.scores


def padded(values: Sequence[int], length: int, fill: int) -> np.ndarray:
    """Return int32 [length]: the values, then `fill`."""
    return np.asarray([*values, *[fill] * (length - len(values))], np.int32)


def common_prefix(held: np.ndarray, prompt: np.ndarray) -> int:
    """Return the number of leading tokens that both share."""
    n = min(len(held), len(prompt))
    different = np.flatnonzero(held[:n] != prompt[:n])
    return int(different[0]) if len(different) else n
