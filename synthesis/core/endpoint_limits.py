"""Limits for the requests of one endpoint: how many at once, how many a minute, and their total cost."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.rate_limits import Budget, Prices, TokenBucket, Usage

BYTES_PER_TOKEN = 4
"""Bytes of JSON in UTF-8 per token, to estimate a request before the endpoint has counted it."""


@dataclass(frozen=True)
class TokenEstimate:
    """Expected cost of a request, before it is sent.

    Attributes:
        kind: of its answer; answers of a kind have similar lengths.
        size: of its body, bytes.
        stage: of the run for which it is made.
    """

    kind: str
    size: int
    stage: str


@dataclass
class Permit:
    """Tokens and money set aside for a request; returned by `EndpointLimits.settle`."""

    estimate: TokenEstimate
    reserved: Usage = Usage()
    tokens: float = 0.0


class AnswerLengths:
    """Mean answer length of each kind, from which a request's cost is estimated."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._mean: dict[str, float] = {}

    def expected(self, estimate: TokenEstimate) -> Usage:
        """Return the expected usage; before any answer of its kind, the maximum length counts."""
        written = round(self._mean.get(estimate.kind, self._longest))
        return Usage(estimate.size // BYTES_PER_TOKEN, written)

    def note(self, kind: str, written: int) -> None:
        """Record the length of one more answer, in tokens."""
        seen = self._mean.get(kind, float(written))
        self._mean[kind] = seen + (written - seen) / 32


class EndpointLimits:
    """Decides when the next request may be made, on the event loop that runs."""

    def __init__(self, config: OpenAITeacherConfig, budget: Budget, lengths: AnswerLengths) -> None:
        self._budget, self._lengths = budget, lengths
        self._prices = Prices(config.price_prompt, config.price_completion)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._clock = clock = asyncio.get_running_loop().time
        self._paused_until = 0.0

        def bucket(per_minute: float | None) -> TokenBucket | None:
            return TokenBucket(per_minute, clock, self.paused) if per_minute else None

        self._requests, self._tokens = bucket(config.requests_per_minute), bucket(config.tokens_per_minute)

    def slot(self) -> AbstractAsyncContextManager[object]:
        """Return a context that holds a slot for a request in flight; entering it waits for a free one."""
        return self._slots

    async def reserve(self, estimate: TokenEstimate) -> Permit:
        """Set aside what a request is expected to cost. Raises `BudgetSpent`.

        The first answer of a kind tells, while others wait, how long they will be.
        """
        reserved = await self._budget.reserve(lambda: self._lengths.expected(estimate), self._prices)
        return Permit(estimate, reserved)

    async def take(self, permit: Permit) -> None:
        """Wait until one more request, and its tokens, fit into this minute."""
        if self._requests is not None:
            await self._requests.take(lambda: 1)
        if self._tokens is not None:
            permit.tokens = await self._tokens.take(lambda: self._lengths.expected(permit.estimate).tokens)

    def settle(self, permit: Permit, used: Usage | None, *, answered: bool) -> None:
        """The request is over, and what it used is booked; None: nothing."""
        if self._tokens is not None and permit.tokens:
            self._tokens.give_back(permit.tokens - (used.tokens if used else 0))
        if used is not None and answered:
            self._lengths.note(permit.estimate.kind, used.completion)
        self._budget.settle(permit.reserved, self._prices)

    def pause(self, seconds: float) -> None:
        """Nobody asks for so long: the endpoint wants it so."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def paused(self) -> float:
        """For how many more seconds nobody asks."""
        return max(0.0, self._paused_until - self._clock())
