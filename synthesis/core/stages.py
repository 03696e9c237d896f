"""Execution of a synthesis stage: bounded concurrency, retries, a journal, and rejected records with their reason.

A stage is an async function `record -> records` that raises `Rejected` to drop a record; `run_stage` feeds it. Each
finished input is written to an SQLite journal, so a killed run resumes where it stopped, and every input counts exactly
once. Inputs that failed by no fault of their own (`INFRASTRUCTURE`) are retried by the next run. Outputs come in the
order of the inputs, whatever the order of completion: same seed, same bytes.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from astra_jax.base.errors import UserError
from astra_jax.base.progress import Progress
from synthesis.core.journal import Journal, Row
from synthesis.core.stored import JournalView, Keys, outputs_of

__all__ = ["Journal", "Rejected", "StageResult", "AbortRun", "Transient", "rng_for", "run_stage"]

GC_THRESHOLDS = (50_000, 20, 100)
"""New objects before a garbage collection, and young and middle collections before older objects are checked."""

INFRASTRUCTURE = ("transient_failure", "mcp_server_unavailable")
"""Reasons of rejections that are not the record's fault. They are counted. The next run retries these inputs:
meanwhile somebody may have done what the `detail` says."""

In = TypeVar("In")
Out = TypeVar("Out")


class Rejected(Exception):
    """Raised by a stage to drop its record.

    Attributes:
        reason: a short snake_case code that is counted, e.g. `no_tools`.
        detail: one line for a person.
        record: what was rejected, for people; None: the stage's input.
    """

    def __init__(self, reason: str, detail: str = "", record: msgspec.Struct | None = None) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.record = record

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Transient(Exception):
    """Raised by a stage for a failure that a retry may resolve (a busy endpoint, a dropped connection)."""


class AbortRun(UserError):
    """Raised by a stage to end the whole run, without fault of its record: it is neither finished nor rejected.

    Attributes:
        problem: why the run cannot continue.
        remedy: steps before the same command is repeated.
        finished: the finished work and its location; the runner fills it in.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy
        self.finished = ""

    def __str__(self) -> str:
        return "; ".join(part for part in (self.problem, self.finished, self.remedy) if part)


class NothingAccepted(AbortRun):
    """Nearly all outputs of a step were rejected; the message has the most common reasons."""


@dataclass
class Acceptance:
    """Counts of a step's accepted and rejected results; they stop a run that would waste money.

    Attributes:
        what: name of the things counted, for the message.
        stop_after: number of results before the first verdict; 0: the run never stops.
        setting: setting of `stop_after`, as the user wrote it.
    """

    MIN_SHARE: ClassVar[float] = 0.01
    """Below this share of accepted things the run stops."""
    REASONS: ClassVar[int] = 3
    """Number of reasons in the message."""

    what: str
    stop_after: int
    setting: str
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def accept(self) -> None:
        """Count an accepted result."""
        self.accepted += 1

    def reject(self, reason: str, example: str) -> None:
        """Count a rejected result.

        Raises:
            NothingAccepted: too few were accepted.
        """
        if not self.stop_after:
            return
        self.reasons[reason] += 1
        self.examples.setdefault(reason, example)
        total = self.accepted + self.reasons.total()
        if total < self.stop_after or self.accepted >= self.MIN_SHARE * total:
            return
        common = "; ".join(
            f"{count} times {one}" + (f", such as: {self.examples[one]:.300}" if self.examples[one] else "")
            for one, count in self.reasons.most_common(self.REASONS)
        )
        accepted = f"only {self.accepted}" if self.accepted else "none"
        raise NothingAccepted(
            f"{self.what}: {accepted} of {total} accepted. Most common reasons: {common}",
            f"fix what the reasons name, or raise {self.setting}, and run the same command again to resume",
        )


@dataclass
class StageResult(Generic[Out]):
    """Result of a stage.

    Attributes:
        outputs: in the order of the inputs; a `JournalView` if that was requested; empty if a sink took them.
        rejected: how many inputs were dropped, by reason.
        details: one example detail for each reason.
        resumed: how many inputs were taken from the journal.
    """

    outputs: Sequence[Out]
    rejected: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    resumed: int = 0

    def reject(self, reason: str, detail: str) -> None:
        """Count a rejected input."""
        self.rejected[reason] += 1
        self.details.setdefault(reason, detail)


def rng_for(seed: int, *parts: object) -> random.Random:
    """Return a random generator that depends on the seed and the parts alone, never on the order of work."""
    material = "\x1f".join(str(part) for part in (seed, *parts))
    return random.Random(int.from_bytes(hashlib.sha256(material.encode()).digest()[:8], "big"))


async def run_stage(
    name: str,
    function: Callable[[In], Awaitable[Sequence[Out]]],
    inputs: Iterable[In],
    *,
    key: Callable[[In], str],
    out: type[Out],
    journal: Journal,
    concurrency: int = 32,
    retries: int = 3,
    backoff_seconds: float = 0.5,
    description: str = "",
    sink: Callable[[Out], object] | None = None,
    stored: bool = False,
    stop_after: int = 0,
) -> StageResult[Out]:
    """Run one stage over all its inputs.

    Encoded outputs are kept in the journal only. Inputs may be a generator, or a `JournalView` that is read on demand.
    With these, and `sink` or `stored`, memory holds only the keys and the inputs in work.

    Args:
        name: the stage's name in the journal; unique in a run.
        function: `input -> outputs`; raises `Rejected` to drop the input, `Transient` to be retried, `AbortRun` to end
            the run. It may wait long inside (a rate limit, an outage of the endpoint); its time is not limited here.
        inputs: a sequence, or any iterable, which is taken from only as work begins.
        key: names an input; must be unique and the same in every run.
        out: the type of the outputs, to read them back from the journal.
        retries: how often a `Transient` failure is retried before the input is rejected as `transient_failure`.
        backoff_seconds: the first pause; doubles with each try, with seeded jitter.
        description: the progress bar's label; the name when empty.
        sink: takes the outputs in order, one by one, when all inputs are finished; then the result has no outputs.
        stop_after: inputs after which the run stops if less than one in a hundred is accepted; 0: never. Failures of
            the infrastructure (`INFRASTRUCTURE`) do not count, nor do inputs of earlier runs.
        stored: the result's outputs are read from the journal on demand, while it is open.

    Raises:
        ValueError: two inputs have the same key; for a sequence before any work.
        AbortRun: a stage ended the run; no further input was started, and inputs in work were finished if possible.
        Exception: whatever else `function` raises; finished inputs stay in the journal.
    """
    work = _StageWork(name, function, inputs, key, journal, retries, backoff_seconds)
    work.acceptance = Acceptance(f"stage {name}", stop_after, f"--config.stop_after={stop_after}")
    work.progress = Progress(description or name, work.total, work.resumed)
    ticking = asyncio.create_task(work.progress.ticking())
    try:
        async with _fewer_collections(), asyncio.TaskGroup() as group:
            for _ in range(concurrency if work.total is None else min(concurrency, max(1, work.total))):
                group.create_task(work.work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        ticking.cancel()
        journal.commit()
        work.progress.close()
    if work.stopped is not None:
        work.stopped.finished = work.summary
        raise work.stopped

    work.keys.close()
    result: StageResult[Any] = StageResult(outputs=[], resumed=work.resumed)
    if stored:
        result.outputs = JournalView(journal, name, work.keys, out, result.reject)
        return result
    made: list[Any] = []
    take = made.append if sink is None else sink
    for _, outputs in outputs_of(journal, name, work.keys, out, result.reject):
        for output in outputs:
            take(output)
    result.outputs = made
    return result


class _StageWork(Generic[In, Out]):
    """The work of one stage that is not in its journal yet, shared by its workers.

    Attributes:
        total: number of inputs; None if they are made as they are taken.
        keys: of all inputs.
        resumed: number of inputs that were in the journal.
        stopped: why the run ends, once a worker found out.
    """

    acceptance: Acceptance
    progress: Progress

    def __init__(
        self,
        name: str,
        function: Callable[[In], Awaitable[Sequence[Out]]],
        inputs: Iterable[In],
        key: Callable[[In], str],
        journal: Journal,
        retries: int,
        backoff_seconds: float,
    ) -> None:
        self._name, self._function, self._inputs, self._key, self._journal = name, function, inputs, key, journal
        self._retries, self._backoff_seconds = retries, backoff_seconds
        self._encoder = msgspec.json.Encoder()
        self.keys = Keys(name)
        self._known = bytearray()  # of a sequence: whether each input is finished
        self.total: int | None = None
        if isinstance(inputs, Sequence):
            self.total = len(inputs)
            for item in inputs:
                self.keys.add(key(item))
            self.keys.close()
            self._known.extend(journal.finished(name, self.keys, but=INFRASTRUCTURE))
        self.resumed = sum(self._known)
        self._finished, self._dropped = self.resumed, 0
        self.stopped: AbortRun | None = None
        self._queue = self._unfinished()

    @property
    def summary(self) -> str:
        """Return what is finished and kept, for the message of a run that stops."""
        of = "" if self.total is None else f" of {self.total}"
        rejections = f" ({self._dropped} rejected since it began)" if self._dropped else ""
        return (
            f"stage {self._name}: {self._finished}{of} inputs are finished{rejections} and kept in {self._journal.path}"
        )

    async def work(self) -> None:
        """Process inputs until there are none left, or the run stops."""
        for item_key, item in self._queue:  # a shared iterator is the queue: each input is taken once
            try:
                row = await self._attempt(item_key, item)
            except AbortRun as stop:
                self.stopped = self.stopped or stop
                return
            self._journal.add(self._name, item_key, *row)
            self._finished, self._dropped = self._finished + 1, self._dropped + (row[0] is None)
            self.progress.count(rejected=row[0] is None)
            try:
                if row[0] is not None:
                    self.acceptance.accept()
                elif row[1] not in INFRASTRUCTURE:
                    self.acceptance.reject(row[1], row[2])
            except NothingAccepted as stop:
                self.stopped = self.stopped or stop
            await asyncio.sleep(0)  # a stage that asks nobody would hold the loop, and Ctrl-C, to its end
            if self.stopped is not None:  # others still finish what they have started: it may be paid for
                return

    def _unfinished(self) -> Iterator[tuple[str, In]]:
        for index, item in enumerate(self._inputs):
            if self.total is not None:
                item_key, is_known = self.keys[index], bool(self._known[index])
            else:
                item_key = self.keys.add(self._key(item))
                is_known = next(self._journal.finished(self._name, (item_key,), but=INFRASTRUCTURE))
            if not is_known:
                yield item_key, item
            elif self.total is None:
                self.resumed, self._finished = self.resumed + 1, self._finished + 1
                self.progress.count(rejected=False)

    async def _attempt(self, item_key: str, item: In) -> Row:
        """Call the stage on an input, and retry transient failures; return the row for the journal."""
        for attempt in range(self._retries + 1):
            try:
                return self._encoder.encode(list(await self._function(item))), "", ""
            except Rejected as rejection:
                record = rejection.record or item
                if isinstance(record, msgspec.Struct):
                    encoded = self._encoder.encode(record)
                    self._journal.add_rejected(self._name, item_key, type(record).__name__, encoded)
                return None, rejection.reason, rejection.detail
            except Transient as failure:
                last = str(failure)
                jitter = rng_for(attempt, self._name, item_key).uniform(0.5, 1.5)
                if attempt < self._retries:
                    await asyncio.sleep(self._backoff_seconds * 2**attempt * jitter)
        return None, "transient_failure", last


@asynccontextmanager
async def _fewer_collections() -> AsyncIterator[None]:
    """Search for reference cycles less often than after every 700 objects.

    A stage makes thousands of objects for each record and hardly a cycle. The search takes an eighth to a sixth of the
    processor time of a stage that asks an endpoint (`benchmarks/teacher.py`).
    """
    before = gc.get_threshold()
    if before[0]:  # else nobody looks at all
        gc.set_threshold(*map(max, before, GC_THRESHOLDS))
    try:
        yield
    finally:
        gc.set_threshold(*before)
