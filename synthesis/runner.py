"""One life for every synthesis stage: bounded concurrency, retries, a journal, rejected records kept with their reason.

A stage is an async function `record -> records` that raises `Rejected` for a record to be dropped. `run_stage` feeds
it; each finished input is written to an SQLite journal, so a killed run goes on where it stopped and every input counts
exactly once. Outputs come back in the order of the inputs, whatever the order of completion: same seed, same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from tqdm import tqdm

In = TypeVar("In")
Out = TypeVar("Out")


class Rejected(Exception):
    """Raised by a stage to drop its record.

    Attributes:
        reason: a short snake_case code that is counted, e.g. `no_tools`.
        detail: one line for a person.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Transient(Exception):
    """Raised by a stage for a failure that another try may mend (a busy endpoint, a dropped connection)."""


@dataclass
class StageResult(Generic[Out]):
    """What a stage made of its inputs.

    Attributes:
        outputs: in the order of the inputs.
        rejected: how many inputs were dropped, by reason.
        details: one example detail for each reason.
        resumed: how many inputs were taken from the journal.
    """

    outputs: list[Out]
    rejected: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    resumed: int = 0


def rng_for(seed: int, *parts: object) -> random.Random:
    """A random generator that depends on the seed and the parts alone, never on the order of work."""
    material = "\x1f".join(str(part) for part in (seed, *parts))
    return random.Random(int.from_bytes(hashlib.sha256(material.encode()).digest()[:8], "big"))


class Journal:
    """The finished inputs of all stages of one run, in one SQLite file.

    Commits are batched (at most `COMMIT_SECONDS` of work is done again after a kill); a transaction is atomic, so what
    is read back is always whole.
    """

    COMMIT_SECONDS = 0.25

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self.path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS done (stage TEXT, key TEXT, outputs BLOB, reason TEXT, detail TEXT, "
                "PRIMARY KEY (stage, key)) WITHOUT ROWID"
            )
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} is not a journal ({error}); delete it to synthesise anew") from None
        self._committed = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, stage: str) -> dict[str, tuple[bytes | None, str, str]]:
        """key -> (encoded outputs or None when rejected, reason, detail) of the stage's finished inputs."""
        rows = self._db.execute("SELECT key, outputs, reason, detail FROM done WHERE stage = ?", (stage,))
        return {key: (outputs, reason, detail) for key, outputs, reason, detail in rows}

    def add(self, stage: str, key: str, outputs: bytes | None, reason: str = "", detail: str = "") -> None:
        self._db.execute("INSERT OR REPLACE INTO done VALUES (?, ?, ?, ?, ?)", (stage, key, outputs, reason, detail))
        if time.monotonic() - self._committed > self.COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        self._db.commit()
        self._committed = time.monotonic()

    def close(self) -> None:
        self.commit()
        self._db.close()


async def run_stage(
    name: str,
    function: Callable[[In], Awaitable[Sequence[Out]]],
    inputs: Sequence[In],
    *,
    key: Callable[[In], str],
    out: type[Out],
    journal: Journal,
    concurrency: int = 32,
    retries: int = 3,
    backoff_seconds: float = 0.5,
    description: str = "",
) -> StageResult[Out]:
    """Run one stage over all its inputs.

    Args:
        name: the stage's name in the journal; unique in a run.
        function: `input -> outputs`; raises `Rejected` to drop the input, `Transient` to be tried again.
        key: names an input; must be unique and the same in every run.
        out: the type of the outputs, to read them back from the journal.
        retries: how often a `Transient` failure is tried again before the input is rejected as `transient_failure`.
        backoff_seconds: the first pause; doubles with each try, with seeded jitter.
        description: the progress bar's label; the name when empty.

    Raises:
        ValueError: two inputs have the same key.
        Exception: whatever else `function` raises; finished inputs stay in the journal.
    """
    keys = [key(item) for item in inputs]
    if len(set(keys)) != len(keys):
        repeated = next(k for k, n in Counter(keys).items() if n > 1)
        raise ValueError(f"stage {name}: two inputs have the key {repeated!r}; keys must be unique")
    decoder = msgspec.json.Decoder(list[out])  # type: ignore[valid-type]
    encoder = msgspec.json.Encoder()
    done = journal.load(name)
    todo = iter([(k, item) for k, item in zip(keys, inputs, strict=True) if k not in done])
    finished = sum(k in done for k in keys)
    bar = tqdm(total=len(inputs), initial=finished, desc=description or name, leave=True)

    async def one(item_key: str, item: In) -> tuple[bytes | None, str, str]:
        for attempt in range(retries + 1):
            try:
                return encoder.encode(list(await function(item))), "", ""
            except Rejected as rejection:
                return None, rejection.reason, rejection.detail
            except Transient as failure:
                last = str(failure)
                jitter = rng_for(attempt, name, item_key).uniform(0.5, 1.5)
                if attempt < retries:
                    await asyncio.sleep(backoff_seconds * 2**attempt * jitter)
        return None, "transient_failure", last

    async def worker() -> None:
        for item_key, item in todo:  # a shared iterator is the queue: each input is taken once
            row = await one(item_key, item)
            done[item_key] = row
            journal.add(name, item_key, *row)
            bar.update()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, max(1, len(inputs)))):
                group.create_task(worker())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        journal.commit()
        bar.close()

    result: StageResult[Any] = StageResult(outputs=[], resumed=finished)
    for item_key in keys:
        outputs, reason, detail = done[item_key]
        if outputs is None:
            result.rejected[reason] += 1
            result.details.setdefault(reason, detail)
        else:
            result.outputs.extend(decoder.decode(outputs))
    return result
