"""Limits of an endpoint, a minute and in total; and the wait after a failure."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from synthesis.core.stages import AbortRun

STAGE: ContextVar[str] = ContextVar("stage", default="")
"""Stage of the run for which a request is made; costs are also counted by it. "" outside a stage."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one request: `prompt` read, `completion` written."""

    prompt: int = 0
    completion: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


@dataclass
class Spent:
    """Usage so far. `money` is in the currency of the prices, at the prices of the time."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def add(self, usage: Usage, money: float) -> None:
        self.requests += 1
        self.prompt_tokens += usage.prompt
        self.completion_tokens += usage.completion
        self.money += money

    def take_over(self, other: Spent) -> None:
        """Copy the values of another account, for holders of this object."""
        self.requests, self.money = other.requests, other.money
        self.prompt_tokens, self.completion_tokens = other.prompt_tokens, other.completion_tokens


def summed(accounts: Iterable[Spent]) -> Spent:
    """Return the sum of all accounts."""
    every = Spent()
    for one in accounts:
        every.requests += one.requests
        every.prompt_tokens += one.prompt_tokens
        every.completion_tokens += one.completion_tokens
        every.money += one.money
    return every


@dataclass(frozen=True)
class Prices:
    """Prices of a million prompt tokens and of a million completion tokens, in any one currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, usage: Usage) -> float:
        """Return the price of a usage."""
        return (usage.prompt * self.prompt + usage.completion * self.completion) / 1e6


class BudgetSpent(AbortRun):
    """The teacher's budget is used up; the message says what was spent, what is finished, and how to resume."""


class TokenBucket:
    """A rate limit (token bucket), refilled evenly; its capacity is a second's worth, at least one.

    A request for more than its capacity waits until it is full and leaves it in debt. So any minute sees at most
    `per_minute` plus the capacity. First come, first served.

    Args:
        paused: returns for how many more seconds nothing is taken; waiting requests keep their turns, so that they do
            not come all at once.
    """

    NAP_SECONDS = 0.25
    """Longest sleep at a time: returned tokens shorten the wait."""

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        paused: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._rate, self._paused = per_minute / 60, paused
        self._holds = max(1.0, self._rate)
        self._level = self._holds
        self._clock = clock
        self._then = clock()
        self._queue = asyncio.Lock()

    async def take(self, amount: Callable[[], float]) -> float:
        """Wait for one's turn, take the amount that `amount` then returns, and return it."""
        async with self._queue:
            while True:
                missing, pause = min(amount(), self._holds) - self._now(), self._paused()
                if missing <= 1e-9 and pause <= 0:
                    break
                await asyncio.sleep(min(max(missing / self._rate, pause), self.NAP_SECONDS))
            taken = amount()
            self._level -= taken
            return taken

    def give_back(self, amount: float) -> None:
        """Correct an estimate: return tokens that were not used, or (negative) take those used beyond it."""
        self._level = min(self._now() + amount, self._holds)

    def _now(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._then) * self._rate, self._holds)
        self._then = now
        return self._level


class Budget:
    """A cap on total cost, with the expected cost of requests in flight; several endpoints may share one.

    It is overrun by at most one request, plus the unexpected cost of those in flight. A request whose answer was lost
    counts with its maximum: its prompt and its `max_tokens`.

    Args:
        tokens: cap; None is none.
        money: cap, in the currency of the prices; None is none.
        written: the caps as the user wrote them, for messages.
    """

    def __init__(self, *, tokens: int | None, money: float | None, written: Sequence[str] = ()) -> None:
        self._written = written
        self._tokens = float("inf") if tokens is None else tokens
        self._money = float("inf") if money is None else money
        self._counted: list[Spent] = []
        self._flying_tokens, self._flying_money, self._flying = 0, 0.0, 0
        self._landed = asyncio.Event()

    def count(self, spent: Spent) -> None:
        """Count the amounts of an account, now and whenever it grows; each account once."""
        if not any(one is spent for one in self._counted):
            self._counted.append(spent)

    @property
    def spent(self) -> Spent:
        """Return the sum of all accounts."""
        return summed(self._counted)

    async def reserve(self, expected: Callable[[], Usage], prices: Prices) -> Usage:
        """Set aside the expected cost of a request; waits while requests in flight may leave too little for it.

        Raises:
            BudgetSpent: nothing is left.
        """
        while True:
            spent = self.spent
            # A sum of prices falls short of its cap by a rounding error.
            if spent.tokens >= self._tokens or spent.money >= self._money * (1 - 1e-9):
                raise self._exhausted()
            usage = expected()
            tokens = spent.tokens + self._flying_tokens + usage.tokens
            money = spent.money + self._flying_money + prices.of(usage)
            if not self._flying or (tokens <= self._tokens and money <= self._money):
                break
            await self._landed.wait()
        self._flying += 1
        self._flying_tokens += usage.tokens
        self._flying_money += prices.of(usage)
        return usage

    def settle(self, reserved: Usage, prices: Prices) -> None:
        """End the reservation of a request; its usage is in its account."""
        self._flying -= 1
        self._flying_tokens -= reserved.tokens
        self._flying_money -= prices.of(reserved)
        self._landed.set()
        self._landed = asyncio.Event()  # later waiters wait for the next one

    def _exhausted(self) -> BudgetSpent:
        spent = self.spent
        return BudgetSpent(
            f"the teacher's budget ({', '.join(self._written)}) is spent: {spent.tokens:,} tokens "
            f"({spent.prompt_tokens:,} of prompts, {spent.completion_tokens:,} of answers) and {spent.money:,.2f} in "
            f"money, in {spent.requests:,} requests",
            "raise the budget and run the same command again to resume",
        )


def backoff(failures: int, *, first: float, longest: float, rng: random.Random) -> float:
    """Return the seconds to wait after so many failures (1, 2, ...): doubling from `first` to `longest`, within half of
    it."""
    return min(longest, first * 2.0 ** min(failures - 1, 30)) * rng.uniform(0.5, 1.5)


def retry_after(header: str | None) -> float | None:
    """Return the seconds in a `Retry-After` header (RFC 9110, section 10.2.3), a number or a date; None if it is
    neither."""
    if header is None:
        return None
    if header.strip().isdigit():
        return float(header)
    try:
        at = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return None
    if at.tzinfo is None:  # "-0000": a time in UTC without saying where it was made
        at = at.replace(tzinfo=datetime.UTC)
    return max(0.0, (at - datetime.datetime.now(datetime.UTC)).total_seconds())
