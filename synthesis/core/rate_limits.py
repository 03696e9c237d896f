"""What an endpoint may be asked: so much a minute, so much in all; and how long to wait after a failure."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from synthesis.core.stages import Stopped

STAGE: ContextVar[str] = ContextVar("stage", default="")
"""For which stage of a run a request is made: what is spent is also counted by it. "" where no stage is."""


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

    def take_over(self, other: Spent) -> None:
        """Be what the other is, for whoever counts by this one."""
        self.requests, self.money = other.requests, other.money
        self.prompt_tokens, self.completion_tokens = other.prompt_tokens, other.completion_tokens


def summed(accounts: Iterable[Spent]) -> Spent:
    """All of it."""
    every = Spent()
    for one in accounts:
        every.requests += one.requests
        every.prompt_tokens += one.prompt_tokens
        every.completion_tokens += one.completion_tokens
        every.money += one.money
    return every


@dataclass(frozen=True)
class Prices:
    """Of a million prompt tokens, and of a million completion tokens, in any one currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def of(self, usage: Usage) -> float:
        """What it costs."""
        return (usage.prompt * self.prompt + usage.completion * self.completion) / 1e6


class BudgetSpent(Stopped):
    """The teacher's budget is used up; the message says what was spent, what is finished, and how to go on."""


class TokenBucket:
    """A rate limit (token bucket): refilled evenly, and holds a second's worth, at least one.

    Whoever takes more than it holds waits until it is full and leaves it in debt, so any minute sees at most
    `per_minute` and what it holds. First come, first served.

    Args:
        paused: for how many more seconds nobody takes anything; who waits in that time keeps its turn, so that those
            who waited do not come all at once.
    """

    NAP_SECONDS = 0.25
    """Longest sleep at a time: what is given back shortens the wait."""

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
        """Wait for one's turn and take what `amount` says then; it is given back."""
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
        """Correct an estimate: what was taken and not used, or (negative) was used beyond it."""
        self._level = min(self._now() + amount, self._holds)

    def _now(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._then) * self._rate, self._holds)
        self._then = now
        return self._level


class Budget:
    """A cap on all that is spent, requests in flight counted as expected; several endpoints may share one.

    It is overrun by at most one request and what those in flight cost above what was expected. A request whose answer
    was lost on its way is taken to have cost what it can have: its prompt and its `max_tokens`.

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
        """Count what an account holds, now and whenever it grows; each once."""
        if not any(one is spent for one in self._counted):
            self._counted.append(spent)

    @property
    def spent(self) -> Spent:
        """Of all accounts."""
        return summed(self._counted)

    async def reserve(self, expected: Callable[[], Usage], prices: Prices) -> Usage:
        """Set aside what a request is expected to cost; waits while requests in flight may leave too little for it.

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
        """The request is over; what it used is in its account."""
        self._flying -= 1
        self._flying_tokens -= reserved.tokens
        self._flying_money -= prices.of(reserved)
        self._landed.set()
        self._landed = asyncio.Event()  # whoever waits from now on waits for the next

    def _exhausted(self) -> BudgetSpent:
        spent = self.spent
        return BudgetSpent(
            f"the teacher's budget ({', '.join(self._written)}) is spent: {spent.tokens:,} tokens "
            f"({spent.prompt_tokens:,} of prompts, {spent.completion_tokens:,} of answers) and {spent.money:,.2f} in "
            f"money, in {spent.requests:,} requests",
            "raise the budget and run the same command again to resume",
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
