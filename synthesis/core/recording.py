"""What a teacher was asked, what it answered and what that cost, in one SQLite file beside a run's journal."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Protocol

from synthesis.core.journal import Store
from synthesis.core.rate_limits import Spent
from synthesis.core.stages import Stopped


class NotRecorded(Stopped):
    """A replayed run made a request that was never recorded."""


class Answers(Protocol):
    """Where a teacher finds what was answered before, and keeps what is."""

    @property
    def path(self) -> Path: ...

    async def known(self, digest: bytes) -> tuple[str, str] | None:
        """See `Recording.answer`."""
        ...

    def keep(self, digest: bytes, answer: str, problem: str = "") -> None:
        """See `Recording.keep`."""
        ...


class Recording(Store):
    """Answers by the digest of their request, and what was spent on each model.

    An answer is committed before any result that was made of it; what is spent is committed with the answers, so that
    a kill forgets at most `COMMIT_SECONDS` of both.

    Raises:
        ValueError: the file is no recording.
    """

    NOUN = "recording"
    REMEDY = "name another file, or delete it to record anew"
    TABLES = (
        "answers (digest BLOB PRIMARY KEY, answer TEXT, problem TEXT)",
        "spent (model TEXT PRIMARY KEY, requests INTEGER, prompt_tokens INTEGER, completion_tokens INTEGER, "
        "money REAL)",
        "spent_by_stage (model TEXT, stage TEXT, requests INTEGER, prompt_tokens INTEGER, completion_tokens INTEGER, "
        "money REAL, PRIMARY KEY (model, stage))",
    )
    CAUSE = True

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._spent: dict[str, Spent] = {}
        self._by_stage: dict[str, dict[str, Spent]] = {}

    def answer(self, digest: bytes) -> tuple[str, str] | None:
        """The answer's text and "", or "" and why no answer was valid; None where it was not recorded."""
        asked = self._db.execute("SELECT answer, problem FROM answers WHERE digest = ?", (digest,))
        return asked.fetchone()

    async def known(self, digest: bytes) -> tuple[str, str] | None:
        """`answer`, as others have to be asked for it."""
        return self.answer(digest)

    def keep(self, digest: bytes, answer: str, problem: str = "") -> None:
        """Record an answer, or why there is none."""
        self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (digest, answer, problem))
        self._written()

    def spent(self, model: str) -> Spent:
        """What was spent on a model, in this run and those before it; counted up by whoever spends."""
        if model not in self._spent:
            asked = self._db.execute(
                "SELECT requests, prompt_tokens, completion_tokens, money FROM spent WHERE model = ?", (model,)
            )
            self._spent[model] = Spent(*(asked.fetchone() or ()))
        return self._spent[model]

    def spent_by_stage(self, model: str) -> dict[str, Spent]:
        """The same by stage, as far as it is known; what recordings of older versions hold is not."""
        if model not in self._by_stage:
            asked = self._db.execute(
                "SELECT stage, requests, prompt_tokens, completion_tokens, money FROM spent_by_stage WHERE model = ?",
                (model,),
            )
            self._by_stage[model] = {stage: Spent(*counts) for stage, *counts in asked}
        return self._by_stage[model]

    def touch(self) -> None:
        """Something was spent: see to it that it is committed."""
        self._written()

    def _flush(self) -> None:
        for model, spent in self._spent.items():
            self._db.execute("INSERT OR REPLACE INTO spent VALUES (?, ?, ?, ?, ?)", (model, *astuple(spent)))
        for model, stages in self._by_stage.items():
            rows = [(model, stage, *astuple(spent)) for stage, spent in stages.items()]
            self._db.executemany("INSERT OR REPLACE INTO spent_by_stage VALUES (?, ?, ?, ?, ?, ?)", rows)
