"""Run a few records through every stage before a run is paid for: shows requests, answers, rejections and a forecast.

The forecast is a simulation. The share of records that pass a stage is sampled from a beta distribution with Jeffreys'
prior, given the few records seen. The cost of a record is sampled from theirs. So few records give wide bounds.
"""

from __future__ import annotations

import random
import time
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
    """

    totals: Mapping[str, Bounds]
    records: Bounds
    unseen: Sequence[str]


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

    def forecast(
        self, expected: Callable[[Mapping[str, float], Mapping[str, int]], Mapping[str, float]], *, concurrency: int
    ) -> Forecast:
        """Return the forecast of the whole run.

        Args:
            expected: computes the inputs of each stage in the whole run, and its final records under the name "". Its
                arguments are the shares that pass, and the numbers of inputs in the preview.
            concurrency: records processed at the same time.
        """
        rng = rng_for(0, "forecast")
        inputs = {name: stage.inputs for name, stage in self.stages.items()}
        drawn: dict[str, list[float]] = {measure: [] for measure in (*MEASURES, "records")}
        unseen: set[str] = set()
        for _ in range(_DRAWS):
            rates = {name: _rate(stage, rng) for name, stage in self.stages.items()}
            alone = dict(rates)
            own = [name for name in self.stages if "+" in name]
            for name in own:  # a stage of the user's own; the forecast knows the one that it follows
                rates[name.partition("+")[0]] *= rates[name]
            counts = dict(expected(rates, inputs))
            passed: dict[str, float] = {}
            for name in own:
                after = name.partition("+")[0]
                counts[name] = passed.get(after, counts.get(after, 0.0) * alone[after])
                passed[after] = counts[name] * alone[name]
            totals = dict.fromkeys(MEASURES, 0.0)
            for name, count in counts.items():
                stage = self.stages.get(name)
                if not name:
                    continue
                if stage is None or not stage.seen:
                    unseen.add(name)
                    continue
                costs = [one.cost() for one in rng.choices(stage.seen, k=len(stage.seen))]
                for measure in MEASURES:
                    each = sum(one[measure] for one in costs) / len(costs)
                    at_once = max(1.0, min(concurrency, count)) if measure == "seconds" else 1.0
                    totals[measure] += each * count / at_once
            for measure in MEASURES:
                drawn[measure].append(totals[measure])
            drawn["records"].append(counts[""])
        bounds = {measure: _bounds(values) for measure, values in drawn.items()}
        return Forecast({one: bounds[one] for one in MEASURES}, bounds["records"], sorted(unseen))


def _rate(stage: StageSeen, rng: random.Random) -> float:
    return rng.betavariate(stage.passed + 0.5, len(stage.seen) - stage.passed + 0.5)


def _bounds(values: Sequence[float]) -> Bounds:
    ordered = sorted(values)
    return Bounds(sum(ordered) / len(ordered), ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20])
