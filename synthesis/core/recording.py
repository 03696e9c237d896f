"""Recording of a teacher's answers, by the digest of their request, and of its costs.

It is one SQLite file beside a run's journal.
"""

from __future__ import annotations

from dataclasses import astuple, fields, replace
from pathlib import Path

from synthesis.core.journal import Store
from synthesis.core.rate_limits import Spent
from synthesis.core.stages import AbortRun

_COUNTS = tuple(field.name for field in fields(Spent))


class NotRecorded(AbortRun):
    """A replayed run made a request that was never recorded."""


class Recording(Store):
    """Answers by the digest of their request, and what was spent on each model.

    An answer is committed before any result made from it. Costs are committed with the answers, so a kill loses at most
    `COMMIT_SECONDS` of both. Several runs may share a recording: each adds its own costs, and reads the others' with
    each commit. No run locks the file between commits.

    Raises:
        ValueError: the file is not a recording.
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
        self._kept: dict[bytes, tuple[str, str]] = {}
        self._spent: dict[str, Spent] = {}
        self._by_stage: dict[str, dict[str, Spent]] = {}
        self._booked: dict[tuple[str, ...], Spent] = {}
        """Costs of each account (of a model, or of a model's stage) that the file already has."""

    def answer(self, digest: bytes) -> tuple[str, str] | None:
        """Return the answer's text and "", or "" and why no answer was valid; None if it was not recorded."""
        if (kept := self._kept.get(digest)) is not None:
            return kept
        with self._naming("read"):
            return self._db.execute("SELECT answer, problem FROM answers WHERE digest = ?", (digest,)).fetchone()

    def keep(self, digest: bytes, answer: str, problem: str = "") -> None:
        """Record an answer, or why there is none."""
        self._kept[digest] = answer, problem
        self._written()

    def spent(self, model: str) -> Spent:
        """Return the account of a model, over this run and earlier ones; its users increase it."""
        if model not in self._spent:
            self._spent[model] = self._opened(model)
        return self._spent[model]

    def spent_by_stage(self, model: str) -> dict[str, Spent]:
        """Return the account by stage, as far as it is known; recordings of older versions do not have it."""
        if model not in self._by_stage:
            with self._naming("read"):
                asked = self._db.execute("SELECT stage FROM spent_by_stage WHERE model = ?", (model,)).fetchall()
            self._by_stage[model] = {stage: self._opened(model, stage) for (stage,) in asked}
        return self._by_stage[model]

    def touch(self) -> None:
        """Schedule a commit after something was spent."""
        self._written()

    def _flush(self) -> None:
        """Write in a separate transaction: a failed write is repeated, and must not be added twice."""
        accounts: dict[tuple[str, ...], Spent] = {(model,): spent for model, spent in self._spent.items()}
        for model, stages in self._by_stage.items():
            accounts |= {(model, stage): spent for stage, spent in stages.items()}
        grown = {key: spent for key, spent in accounts.items() if spent != self._booked.get(key, Spent())}
        if not self._kept and not grown:
            return
        try:
            answers = [(digest, *kept) for digest, kept in self._kept.items()]
            self._db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", answers)
            there = {key: self._added(key, spent) for key, spent in grown.items()}
            self._db.commit()
        except BaseException:
            self._db.rollback()
            raise
        self._kept.clear()
        for key, total in there.items():
            self._booked[key] = total
            grown[key].take_over(total)

    def _opened(self, *key: str) -> Spent:
        """Return an account, of a model or a model's stage, as the file has it."""
        with self._naming("read"):
            self._booked[key] = self._read(key)
        return replace(self._booked[key])

    def _added(self, key: tuple[str, ...], spent: Spent) -> Spent:
        """Add the costs since the last commit; return the file's new total, with the costs of other runs."""
        table, names = _table(key)
        before = astuple(self._booked.get(key, Spent()))
        more = [now - then for now, then in zip(astuple(spent), before, strict=True)]
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS)
        self._db.execute(
            f"INSERT INTO {table} VALUES ({', '.join('?' * (len(key) + len(more)))}) "
            f"ON CONFLICT ({', '.join(names)}) DO UPDATE SET {sums}",
            (*key, *more),
        )
        return self._read(key)

    def _read(self, key: tuple[str, ...]) -> Spent:
        table, names = _table(key)
        where = " AND ".join(f"{name} = ?" for name in names)
        return Spent(
            *(self._db.execute(f"SELECT {', '.join(_COUNTS)} FROM {table} WHERE {where}", key).fetchone() or ())
        )


def _table(key: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the table of an account, and its key columns."""
    return ("spent", ("model",)) if len(key) == 1 else ("spent_by_stage", ("model", "stage"))
