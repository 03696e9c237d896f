"""Run a few records through every stage before a run is paid for: shows requests, answers, rejections and a forecast.

The forecast is a simulation. The share of records that pass a stage is sampled from a beta distribution with Jeffreys'
prior, given the few records seen. The cost of a record is sampled from theirs. So few records give wide bounds.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from astra_jax.base.typed import decode_json
from synthesis.core.endpoint_replies import EndpointReply
from synthesis.core.rate_limits import Spent
from synthesis.core.stages import Rejected, rng_for

In = TypeVar("In")
Out = TypeVar("Out")

_ITEM: ContextVar[Seen | None] = ContextVar("previewed", default=None)
_DRAWS = 1_000
MEASURES = ("requests", "tokens", "money", "seconds")


@dataclass
class Exchange:
    """A request and its answer."""

    model: str
    prompt: str
    answer: str
    tokens: int


@dataclass
class Seen:
    """Observation of one record in one stage."""

    exchanges: list[Exchange] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    seconds: float = 0.0
    rejected: str = ""

    def cost(self) -> dict[str, float]:
        """Return the cost by measure."""
        spent = self.spent
        return dict(zip(MEASURES, (spent.requests, spent.tokens, spent.money, self.seconds), strict=True))


@dataclass
class StageSeen:
    """One stage: `inputs` that there were, the records that were taken of them, and how many passed."""

    inputs: int = 0
    seen: list[Seen] = field(default_factory=list)

    @property
    def passed(self) -> int:
        return sum(not one.rejected for one in self.seen)


@dataclass(frozen=True)
class Bounds:
    """An expected value, and the range of nine of ten simulated runs."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """Forecast of a whole run, by measure, and of the number of its records.

    Attributes:
        unseen: stages that no record reached, so that the forecast lacks them.
        blocked: stage that no record passed, and why; or why the preview ended early. Then there is no forecast: the
            bounds are meaningless. "": there is one.
        buys: records of the largest run that the budget pays; None without a budget.
        asks: number of records that a run can ask for, so that the budget pays nine of ten such runs.
    """

    totals: Mapping[str, Bounds]
    records: Bounds
    unseen: Sequence[str]
    blocked: str = ""
    buys: Bounds | None = None
    asks: int = 0


Expected = Callable[[Mapping[str, float], Mapping[str, int]], Mapping[str, float]]
"""Returns the inputs of each stage in a whole run, and its final records under the name "". The arguments are the
shares that pass, and the numbers of inputs in the preview."""


@dataclass(frozen=True)
class Affordable:
    """Search for the number of records that a budget buys.

    Attributes:
        tokens: budget in tokens; infinite without one.
        money: budget in money; infinite without one.
        wanted: records that the run asks for.
        expected: of a run that asks for so many records.
    """

    tokens: float
    money: float
    wanted: int
    expected: Callable[[int], Expected]

    def most(self, cost: Callable[[Expected], Mapping[str, float]]) -> int:
        """Return the largest number of records, up to `wanted`, whose cost is within the budget."""

        def fits(records: int) -> bool:
            spent = cost(self.expected(records))
            return spent["tokens"] <= self.tokens and spent["money"] <= self.money

        low, high = 0, self.wanted
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low


class Preview:
    """Observer that takes at most `most` records through each stage."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.stages: dict[str, StageSeen] = {}
        self.source_notes: list[str] = []
        """Description of its sources, one line each."""
        self.ended = ""
        """Why the preview ended early; "": it did not."""

    def stage(
        self, name: str, function: Callable[[In, Any], Awaitable[Sequence[Out]]], inputs: Sequence[In]
    ) -> tuple[Callable[[In, Any], Awaitable[Sequence[Out]]], Sequence[In]]:
        """Return the stage's function with observation, and a sample of the inputs, evenly over all of them."""
        stage = self.stages.setdefault(name, StageSeen())
        stage.inputs += len(inputs)
        room = max(0, self.most - len(stage.seen)) if name.partition("+")[0] != "verify" else self.most
        taken = [inputs[index * len(inputs) // room] for index in range(room)] if len(inputs) > room else inputs

        async def watched(item: In, context: Any) -> Sequence[Out]:
            seen = Seen()
            stage.seen.append(seen)
            before, began = _ITEM.set(seen), time.monotonic()
            try:
                return await function(item, context)
            except Rejected as rejection:
                seen.rejected = str(rejection)
                raise
            finally:
                _ITEM.reset(before)
                seen.seconds = time.monotonic() - began

        return watched, taken

    def note(self, body: bytes, reply: EndpointReply, money: float) -> None:
        """Record an answered request; see `Endpoint.watch`."""
        seen = _ITEM.get()
        if seen is None:
            return
        seen.spent.add(reply.usage, money)
        request = decode_json(body, dict[str, Any])
        last = request["messages"][-1]
        calls = [reply.message[name] for name in ("tool_calls", "content", "parts") if reply.message.get(name)]
        answer = reply.text or msgspec.json.encode(calls[0] if calls else "").decode()
        seen.exchanges.append(Exchange(request["model"], str(last.get("content") or ""), answer, reply.usage.tokens))

    def forecast(self, expected: Expected, *, concurrency: int, budget: Affordable | None = None) -> Forecast:
        """Return the forecast of the whole run.

        Args:
            concurrency: records processed at the same time.
        """
        rng = rng_for(0, "forecast")
        inputs = {name: stage.inputs for name, stage in self.stages.items()}
        drawn: dict[str, list[float]] = {measure: [] for measure in (*MEASURES, "records", "buys", "asks")}
        unseen: set[str] = set()
        for _ in range(_DRAWS):
            rates = {name: _rate(stage, rng) for name, stage in self.stages.items()}
            each = {name: _mean_cost(stage, rng) for name, stage in self.stages.items() if stage.seen}

            def cost(of: Expected, rates: Mapping[str, float] = rates, each: _Costs = each) -> Mapping[str, float]:
                return _totals(_counts(of, rates, inputs), each, concurrency)

            counts = _counts(expected, rates, inputs)
            unseen |= {name for name in counts if name and name not in each}
            for measure, total in cost(expected).items():
                drawn[measure].append(total)
            drawn["records"].append(counts[""])
            if budget is not None:
                drawn["asks"].append(asks := budget.most(cost))
                drawn["buys"].append(_counts(budget.expected(asks), rates, inputs)[""] if asks else 0.0)
        bounds = {measure: _bounds(values) for measure, values in drawn.items() if values}
        return Forecast(
            {one: bounds[one] for one in MEASURES}, bounds["records"], sorted(unseen), self._blocked(expected, inputs),
            bounds.get("buys"), int(bounds["asks"].low) if budget else 0,
        )  # fmt: skip

    def _blocked(self, expected: Expected, inputs: Mapping[str, int]) -> str:
        """Return why there is no forecast, see `Forecast.blocked`."""
        if self.ended:
            return self.ended
        seen = {name: stage for name, stage in self.stages.items() if stage.seen}
        if _counts(expected, {name: stage.passed / len(stage.seen) for name, stage in seen.items()}, inputs)[""]:
            return ""
        for name, stage in seen.items():
            if not stage.passed:
                [(reason, count)] = Counter(one.rejected.partition(":")[0] for one in stage.seen).most_common(1)
                example = next(one.rejected for one in stage.seen if one.rejected.partition(":")[0] == reason)
                return f"stage {name} passed none of {len(stage.seen)} records, {count} of them for {example}"
        return "there are no records"


_Costs = Mapping[str, Mapping[str, float]]
"""Cost of a record by stage and measure."""


def _counts(expected: Expected, rates: Mapping[str, float], inputs: Mapping[str, int]) -> dict[str, float]:
    """Return the inputs of each stage, the user's own stages among them, and the records under the name ""."""
    after = dict(rates)
    own = [name for name in rates if "+" in name]
    for name in own:  # `expected` knows the stage that it follows
        after[name.partition("+")[0]] *= rates[name]
    counts = dict(expected(after, inputs))
    passed: dict[str, float] = {}
    for name in own:
        before = name.partition("+")[0]
        counts[name] = passed.get(before, counts.get(before, 0.0) * rates[before])
        passed[before] = counts[name] * rates[name]
    return counts


def _totals(counts: Mapping[str, float], each: _Costs, concurrency: int) -> dict[str, float]:
    totals = dict.fromkeys(MEASURES, 0.0)
    for name, costs in each.items():
        count = counts.get(name, 0.0)
        for measure in MEASURES:
            at_once = max(1.0, min(concurrency, count)) if measure == "seconds" else 1.0
            totals[measure] += costs[measure] * count / at_once
    return totals


def _mean_cost(stage: StageSeen, rng: random.Random) -> dict[str, float]:
    """Return the mean cost of as many records as were seen, sampled from them."""
    costs = [one.cost() for one in rng.choices(stage.seen, k=len(stage.seen))]
    return {measure: sum(one[measure] for one in costs) / len(costs) for measure in MEASURES}


def _rate(stage: StageSeen, rng: random.Random) -> float:
    return rng.betavariate(stage.passed + 0.5, len(stage.seen) - stage.passed + 0.5)


def _bounds(values: Sequence[float]) -> Bounds:
    ordered = sorted(values)
    return Bounds(sum(ordered) / len(ordered), ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20])
