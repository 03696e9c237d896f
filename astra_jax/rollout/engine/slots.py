"""What the engine keeps on the host: its shapes, its counters, its requests and slots."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from astra_jax.models.matmuls import STORED
from astra_jax.rollout.policy import Alternatives, Sampling
from sandbox.settings import Length, OneOf, Settings, Slots

_LARGE = 1 << 25
"""Weights of a model of which a CPU's step takes so long that programs for more numbers of rows are worth compiling."""


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Shapes of the engine.

    Attributes:
        slots: sequences that decode together.
        max_length: longest sequence, prompt and response; the cache holds slots x max_length positions.
        prefill_chunk: tokens that one prefill call adds to each of its rows at most; of a few, a smaller program adds
            a quarter, a sixteenth … of it. None: 64 on CPUs, else 2,048.
        decode_chunk: tokens that one decode call draws for each of its rows; new requests wait for its end. None: 16 on
            CPUs, else 32.
        stored: how the layers' matrices are kept, and read in each step: in the model's dtype (`none`), or in 8 bits
            with a scale for each output (`int8`), half of the bytes. What is drawn, and its logprobs, are of those.
        min_window: attention reads the first 1, 1.5, 2, 3, 4, ... x this many cache positions: the least that holds the
            longest row. None: 128 on CPUs, else 1,024.
    """

    slots: Slots = 64
    max_length: Length = 2048
    prefill_chunk: Length | None = None
    decode_chunk: Length | None = None
    min_window: Length | None = None
    stored: Annotated[str, OneOf(STORED)] = "none"

    def on(self, platform: str, *, weights: int = 0) -> Shapes:
        """With a number for each.

        Args:
            weights: of the model, that each token is multiplied with.
        """
        on_cpu = platform == "cpu"
        # In sixteenths of the slots; 0 is one row. Elsewhere than on CPUs some rows are read, written and read again
        # where all are read: half cost more.
        decode: tuple[int, ...] = (0, 1, 4, 8, 16) if on_cpu else (0, 1, 4, 16)
        prefill: tuple[int, ...] = (1, 2, 4) if on_cpu else (1, 4)
        if on_cpu and weights >= _LARGE:
            # SmolLM2-135M, two cores, 768 places: 16 tokens each of 12 rows in 1.06 s, of 16 in 1.50; of 24 in 1.97, of
            # 32 in 2.27. Of the calls of some GRPO updates a tenth less decoding, a sixth less prefilling.
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
    """An `EngineConfig` on its platform.

    Attributes, beside the configuration's:
        decode_rows: that decoding may take: one, parts of the slots, or all, ascending.
        prefill_rows: that prefilling may: few for a lone long prompt, more for the turns of many episodes, ascending.
            What is computed of padding costs as much as what is not.
        call_tokens: so many tokens more a prefill costs than it computes: it reads all weights, which takes
            accelerators as long as 150 to 600 tokens in bfloat16 do, and two cores as long as 25.
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
        """The smallest allowed window that holds `length` positions."""
        window = self.min_window
        while window < length:
            window *= 2
        if window > self.min_window and window * 3 // 4 >= length:  # the steps between keep what is read in vain low
            window = window * 3 // 4
        return min(window, self.max_length)

    @property
    def windows(self) -> list[int]:
        """All that there are."""
        return sorted({self.window_for(length) for length in range(1, self.max_length + 1)})

    @property
    def prefill_chunks(self) -> list[int]:
        """All that there are: `prefill_chunk`, and a quarter, a sixteenth … of it, of 64 at least."""
        chunks = [self.prefill_chunk]
        while chunks[0] // 4 >= 64:
            chunks.insert(0, chunks[0] // 4)
        return chunks

    def decode_rows_for(self, rows: int) -> int:
        """The fewest that hold these: decoding costs rows x window."""
        return next(count for count in self.decode_rows if count >= rows)

    def prefill_shape_for(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(rows, chunk) of the call that adds the most tokens for what it costs.

        Args:
            tokens: how many each row that waits is to get yet; a call takes the first ones.
        """

        def gain(shape: tuple[int, int]) -> float:
            rows, chunk = shape
            return sum(min(n, chunk) for n in tokens[:rows]) / (rows * chunk + self.call_tokens)

        return max(((self._prefill_rows_for(len(tokens), chunk), chunk) for chunk in self.prefill_chunks), key=gain)

    def _prefill_rows_for(self, waiting: int, chunk: int) -> int:
        """Of the next call, so that all calls for those that wait cost least."""
        counts = self.prefill_rows

        def cost(waiting: int) -> float:
            return min(following(count, waiting) for count in counts) if waiting > 0 else 0.0

        def following(count: int, waiting: int) -> float:
            return count + self.call_tokens / chunk + cost(waiting - count)

        return counts[-1] if waiting >= counts[-1] else min(counts, key=lambda count: following(count, waiting))


@dataclass
class EngineStats:
    """Running totals; `snapshot` and subtract for a phase. `failed` counts requests that were given up."""

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
    """Logprobs of a prompt's tokens from the second on, which prefilling fills in.

    Attributes:
        logps: [n - 1] float32.
        likeliest: ids and logprobs of the likeliest tokens at each place, both [n - 1, k]; k is 0 when none are asked
            for.
    """

    def __init__(self, prompt_length: int, alternatives: int) -> None:
        self.logps = np.zeros(prompt_length - 1, np.float32)
        shape = (prompt_length - 1, alternatives)
        self.likeliest = np.zeros(shape, np.int32), np.zeros(shape, np.float32)

    def put(self, start: int, logps: np.ndarray, likeliest: Any) -> None:
        """Keep what follows the positions from `start` on, as far as it is the prompt's."""
        n = max(0, min(len(logps), len(self.logps) - start))
        self.logps[start : start + n] = logps[:n]
        for kept, new in zip(self.likeliest, likeliest or (), strict=False):
            kept[start : start + n] = new[:n, : kept.shape[1]]

    def alternatives(self) -> list[Alternatives]:
        """As in `Drawn`; empty when none are asked for."""
        ids, values = self.likeliest
        places = zip(ids.tolist(), values.tolist(), strict=True) if ids.shape[1] else ()
        return [tuple(zip(*place, strict=True)) for place in places]


@dataclass(eq=False)
class Request:
    """One completion under way. A device step's thread appends to `tokens` and `logprobs`; the first `delivered` of
    them may be read by whoever waits for `news`.

    Attributes:
        alternatives: of each token, when some are asked for.
        scores: of the prompt, when asked for.
        reused: prompt tokens whose keys and values were taken over.
        versions: of the weights that drew each token that is delivered.
        finish: set with the last delivery.
        failure: why no more will come.
        dropped: nobody waits any more.
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
        """Whether its last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.sampling.stop_ids

    @property
    def ended(self) -> bool:
        """Whether no more tokens are wanted."""
        return self.stopped or len(self.tokens) >= self.sampling.max_tokens


@dataclass(eq=False)
class CacheSlot:
    """`ids[:length]` is the sequence; `ids[:cached]` has its K/V in the cache. The last token of an active sequence is
    never cached yet: decoding feeds it to get the next one."""

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
        """Those of its request: then all of the prompt is prefilled, and nothing taken over."""
        return None if self.request is None else self.request.scores


def padded(values: Sequence[int], length: int, fill: int) -> np.ndarray:
    """int32 [length]: the values, then `fill`."""
    return np.asarray([*values, *[fill] * (length - len(values))], np.int32)


def common_prefix(held: np.ndarray, prompt: np.ndarray) -> int:
    """How many tokens both begin with."""
    n = min(len(held), len(prompt))
    different = np.flatnonzero(held[:n] != prompt[:n])
    return int(different[0]) if len(different) else n
