"""Limits for the requests of one endpoint: how many at once, how many a minute, and their total cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

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
        most: returns the maximum cost, as far as it is known; called only if the cost must be reported.
        stage: of the run for which it is made.
    """

    kind: str
    size: int
    most: Callable[[], Usage]
    stage: str


@dataclass
class Permit:
    """Tokens and money set aside for a request; returned by `EndpointLimits.settle`."""

    estimate: TokenEstimate
    reserved: Usage = Usage()
    tokens: float = 0.0


class EndpointLimits(Protocol):
    """Decides when the next request may be sent: for this process alone, or for all that share an endpoint."""

    def slot(self) -> AbstractAsyncContextManager[object]:
        """Return a slot among the requests in flight; entering it waits for a free one."""
        ...

    async def reserve(self, estimate: TokenEstimate) -> Permit:
        """Set aside the expected cost of a request. Raises `BudgetSpent`."""
        ...

    async def take(self, permit: Permit) -> None:
        """Wait until one more request, and its tokens, fit into this minute."""
        ...

    def settle(self, permit: Permit, used: Usage | None, *, answered: bool) -> None:
        """Finish a request and book its usage; None: it used nothing."""
        ...

    def pause(self, seconds: float) -> None:
        """Send no request for so long, as the endpoint demands."""
        ...

    def paused(self) -> float:
        """Return for how many more seconds no request is sent."""
        ...


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


class OwnLimits:
    """Limits of an endpoint that this process alone uses, on the running event loop."""

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
        """See `EndpointLimits.slot`."""
        return self._slots

    async def reserve(self, estimate: TokenEstimate) -> Permit:
        """See `EndpointLimits.reserve`. The first answer of a kind gives the length of the others, which wait for
        it."""
        reserved = await self._budget.reserve(lambda: self._lengths.expected(estimate), self._prices)
        return Permit(estimate, reserved)

    async def take(self, permit: Permit) -> None:
        """See `EndpointLimits.take`."""
        if self._requests is not None:
            await self._requests.take(lambda: 1)
        if self._tokens is not None:
            permit.tokens = await self._tokens.take(lambda: self._lengths.expected(permit.estimate).tokens)

    def settle(self, permit: Permit, used: Usage | None, *, answered: bool) -> None:
        """See `EndpointLimits.settle`."""
        if self._tokens is not None and permit.tokens:
            self._tokens.give_back(permit.tokens - (used.tokens if used else 0))
        if used is not None and answered:
            self._lengths.note(permit.estimate.kind, used.completion)
        self._budget.settle(permit.reserved, self._prices)

    def pause(self, seconds: float) -> None:
        """See `EndpointLimits.pause`."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def paused(self) -> float:
        """See `EndpointLimits.paused`."""
        return max(0.0, self._paused_until - self._clock())
