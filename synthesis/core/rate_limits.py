"""What an endpoint may be asked: so much a minute, so much in all; and how long to wait after a failure."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from synthesis.core.stages import Stopped


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
    """What was used so far. `money` is in the currency of the prices, at the prices of the time."""

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


class BudgetSpent(Stopped):
    """The teacher's budget is used up; the message says what was spent, what is finished, and how to go on."""


class TokenBucket:
    """A rate limit (token bucket): refilled evenly, and holds a second's worth, at least one.

    Whoever takes more than it holds waits until it is full and leaves it in debt, so any minute sees at most
    `per_minute` and what it holds. First come, first served.
    """

    NAP_SECONDS = 0.25
    """Longest sleep at a time: what is given back shortens the wait."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._holds = max(1.0, self._rate)
        self._level = self._holds
        self._clock = clock
        self._then = clock()
        self._queue = asyncio.Lock()

    async def take(self, amount: Callable[[], float]) -> float:
        """Wait for one's turn and take what `amount` says then; it is given back."""
        async with self._queue:
            while (missing := min(amount(), self._holds) - self._now()) > 1e-9:
                await asyncio.sleep(min(missing / self._rate, self.NAP_SECONDS))
            taken = amount()
            self._level -= taken
            return taken

    def give_back(self, amount: float) -> None:
        """Correct an estimate: what was taken and not used, or (negative) was used beyond it."""
        self._level = min(self._now() + amount, self._holds)

    def _now(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._then) * self._rate, self._holds)
        self._then = now
        return self._level


class Budget:
    """A cap on all that is spent, requests in flight counted as expected.

    It is overrun by at most one request and what those in flight cost above what was expected. A request that failed
    without saying what it used is taken to have cost nothing.

    Args:
        tokens: cap; None is none.
        money: cap, in the currency of the prices; None is none.
        prices: of a million prompt tokens and a million completion tokens.
        spent: what was spent before; is counted up.
    """

    def __init__(self, *, tokens: int | None, money: float | None, prices: tuple[float, float], spent: Spent) -> None:
        self.spent = spent
        self._tokens = float("inf") if tokens is None else tokens
        self._money = float("inf") if money is None else money
        self._prices = prices
        self._flying_tokens, self._flying_money, self._flying = 0, 0.0, 0
        self._landed = asyncio.Event()

    def money(self, usage: Usage) -> float:
        return (usage.prompt * self._prices[0] + usage.completion * self._prices[1]) / 1e6

    async def reserve(self, expected: Callable[[], Usage]) -> Usage:
        """Set aside what a request is expected to cost; waits while requests in flight may leave too little for it.

        Raises:
            BudgetSpent: nothing is left.
        """
        while True:
            # A sum of prices falls short of its cap by a rounding error.
            if self.spent.tokens >= self._tokens or self.spent.money >= self._money * (1 - 1e-9):
                raise self._exhausted()
            usage = expected()
            tokens = self.spent.tokens + self._flying_tokens + usage.tokens
            money = self.spent.money + self._flying_money + self.money(usage)
            if not self._flying or (tokens <= self._tokens and money <= self._money):
                break
            self._landed.clear()
            await self._landed.wait()
        self._flying += 1
        self._flying_tokens += usage.tokens
        self._flying_money += self.money(usage)
        return usage

    def settle(self, reserved: Usage, used: Usage | None) -> None:
        """The request is over: it used so much, or None where that is not known and nothing is counted."""
        self._flying -= 1
        self._flying_tokens -= reserved.tokens
        self._flying_money -= self.money(reserved)
        if used is not None:
            self.spent.add(used, self.money(used))
        self._landed.set()

    def _exhausted(self) -> BudgetSpent:
        spent = self.spent
        caps = []
        if self._tokens != float("inf"):
            caps.append(f"token_budget={self._tokens:,}")
        if self._money != float("inf"):
            caps.append(f"money_budget={self._money:,}")
        return BudgetSpent(
            f"the teacher's budget ({', '.join(caps)}) is spent: {spent.tokens:,} tokens ({spent.prompt_tokens:,} of "
            f"prompts, {spent.completion_tokens:,} of answers) and {spent.money:,.2f} in money, in {spent.requests:,} "
            "requests",
            "raise the budget and run the same command again to go on",
        )


def backoff(failures: int, *, first: float, longest: float, rng: random.Random) -> float:
    """Seconds to wait after so many failures (1, 2, ...): doubling from `first` up to `longest`, within half of it."""
    return min(longest, first * 2.0 ** min(failures - 1, 30)) * rng.uniform(0.5, 1.5)


def retry_after(header: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for (RFC 9110, section 10.2.3): a number or a date; None if neither."""
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
