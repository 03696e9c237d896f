"""State of a run, read from its workdir: running, finished, exhausted or killed, and its numbers.

Nothing is written or locked, and the run is not asked. Files are read while they are written, and again only when they
have changed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from etils import epath

from astra_jax.base.errors import InputError
from astra_jax.base.files import in_bucket
from astra_jax.grpo.held_out import FOLDER as HELD_OUT
from astra_jax.grpo.journal import FOLDER as ROLLOUTS
from astra_jax.grpo.journal import BatchUnderWay, JournalReader
from astra_jax.run.metrics import EXHAUSTED, is_exhausted, read_metrics
from astra_jax.run.metrics import FILE as METRICS
from launch.viewer.workdirs import InBucket, OnDisk, RunFolder, newest_pages
from synthesis.core.datasets import CARD_FILE
from synthesis.core.journal import open_to_read
from synthesis.core.workdir import LOCK

T = TypeVar("T")
Curves = Mapping[str, Sequence[tuple[float, float | None]]]

CURVES: Mapping[str, tuple[str, ...]] = {
    "Loss": ("train/loss", "eval/loss"),
    "Rollouts": ("rollout/reward", "train/reward", "rollout/recall", "rollout/precision"),
    "Held-out reward": ("eval/greedy/reward", "eval/sampled/reward"),
    "Gradient norm": ("train/grad_norm",),
    "Sampler and trainer": ("train/mismatch_kl",),
    "Tokens a second": ("perf/tokens_per_second", "rollout/tokens_per_second"),
    "Seconds": ("seconds/rollout", "seconds/update", "seconds/sync", "seconds/wait"),
}
"""Charts of a training and the metrics on each, where a run has them."""
_SILENT_SECONDS = 300.0
"""Without a write, after which a run is said to wait for something."""
_MAX_CHARACTERS = 6_000
_PAUSE = 20
"""A file that takes long to read is read again after so many times as long."""
_FOLDERS = ("", "*/", "*/*/")
"""Patterns of a training's folder in a workdir."""
_WRITTEN = (
    *("run.json", "*.sqlite", "*.sqlite-wal", "journals/*.sqlite", "journals/*.sqlite-wal"),
    *(f"{folder}{name}" for folder in _FOLDERS for name in (f"metrics/{METRICS}", f"{ROLLOUTS}/*", f"{HELD_OUT}/*")),
    *(f"{folder}{name}" for folder in _FOLDERS for name in (CARD_FILE, LOCK)),
)
"""Files whose newest write is the run's."""


@dataclass(frozen=True)
class Stage:
    """A stage of a synthesis: how many inputs passed, and how many were rejected by reason."""

    name: str
    passed: int
    rejected: Mapping[str, int]


@dataclass(frozen=True)
class Spending:
    """Requests of a stage to a teacher's endpoint."""

    model: str
    stage: str
    requests: int
    tokens: int
    money: float


@dataclass(frozen=True)
class Training:
    """A training run.

    Attributes:
        name: of its folder, "" where that is the workdir.
        kind: `SFT`, `GRPO`, or `training` where nothing says.
        rows: of its metrics, by step.
        total: steps that it is to make; None: its configuration leaves that to the data.
        sample: the newest samples, and of which step; "": there are none.
        episodes: pages of sampled episodes, the newest first.
        batch: what is finished of GRPO's current batch.
        evaluation: what is finished of a current evaluation on held-out environments.
        exhausted: what GRPO logged of a batch that it could not sample; empty where that is not how it ended.
    """

    name: str
    kind: str
    rows: Sequence[Mapping[str, Any]]
    total: int | None
    sample: str
    sample_step: str
    episodes: Sequence[Path]
    batch: BatchUnderWay | None
    evaluation: BatchUnderWay | None
    exhausted: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last logged step, 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def curves(self) -> dict[str, Curves]:
        """The metrics that `CURVES` names, as {title: {metric: [(step, value)]}}."""
        found = {
            title: {
                name: [(float(row["step"]), row[name]) for row in self.rows if name in row]
                for name in names
                if any(row.get(name) is not None for row in self.rows)
            }
            for title, names in CURVES.items()
        }
        return {title: lines for title, lines in found.items() if lines}

    @property
    def latest(self) -> dict[str, float | None]:
        """The newest value of each metric but the servers'."""
        found: dict[str, float | None] = {}
        for row in self.rows[-50:]:
            found |= {name: value for name, value in row.items() if name != "step" and not name.startswith("servers/")}
        return dict(sorted(found.items()))

    @property
    def servers(self) -> dict[str, dict[str, float | None]]:
        """The rollout servers of the newest row: their metrics by name."""
        servers: dict[str, dict[str, float | None]] = {}
        for name, value in (self.rows[-1] if self.rows else {}).items():
            if name.startswith("servers/"):
                server, _, metric = name.removeprefix("servers/").partition("/")
                servers.setdefault(server, {})[metric] = value
        return dict(sorted(servers.items()))


@dataclass(frozen=True)
class Watched:
    """A run at a moment.

    Attributes:
        folder: of the run, as the user knows it.
        state: `running`, `finished`, `exhausted` (GRPO found no further batch), `stopped` (no process works on it, and
            it is not finished) or `elsewhere` (its lock is held on another machine, if it still is).
        holder: the process that works on it, as its lock says.
        command: of its last start, "" where no record says.
        started: when, ISO 8601.
        written: seconds since its newest write.
        waits: what it does or waits for, in a sentence.
        datasets: records by folder, None where the card does not say.
        unread: files that could not be read, and why.
    """

    folder: str
    state: str
    holder: str
    command: str
    started: str
    written: float
    waits: str
    trainings: Sequence[Training]
    stages: Sequence[Stage]
    datasets: Mapping[str, int | None]
    spending: Sequence[Spending]
    unread: Sequence[str]

    @property
    def name(self) -> str:
        """The last part of the folder."""
        return PurePosixPath(self.folder).name

    @property
    def facts(self) -> dict[str, str]:
        """State, times and holder of the run, for people."""
        found = {"state": self.state, "last write": f"{lasted(self.written)} ago" if self.written else ""}
        with contextlib.suppress(ValueError):
            found["started"] = f"{datetime.datetime.fromisoformat(self.started):%Y-%m-%d %H:%M %Z}".strip()
        found["held by" if self.state in ("running", "elsewhere") else "last held by"] = self.holder
        return {name: value for name, value in found.items() if value}


class Watcher:
    """Reads a workdir again and again.

    Args:
        workdir: a folder of this machine, or in a bucket.

    Raises:
        InputError: the folder has nothing of a run.
        StorageError: the bucket cannot be read.
    """

    def __init__(self, workdir: Path | epath.Path) -> None:
        self._place: RunFolder = InBucket(epath.Path(workdir)) if in_bucket(workdir) else OnDisk(Path(workdir))
        self.name, self.workdir = self._place.name, self._place.files
        self._read: dict[Path, _Read] = {}
        self._journal_readers: dict[Path, JournalReader] = {}
        self._unread: list[str] = []
        run = self.look()
        if not (run.trainings or run.stages or run.datasets or run.command or run.state in ("running", "elsewhere")):
            raise InputError(
                f"{self.name} has no files of a run; give the --workdir of launch.sft, launch.grpo, "
                "launch.trajectories, launch.environments or launch.quickstart"
            )

    def look(self) -> Watched:
        """Return the run as it is now."""
        self._unread = list(self._place.look())
        trainings = [self._training(folder) for folder in self._training_folders()]
        journals = sorted([*self.workdir.glob("*.sqlite"), *self.workdir.glob("journals/*.sqlite")])
        nothing: _Counts = ([], [])
        counts = [self._fresh(path, _journal_counts, nothing) for path in journals]
        stages = [stage for one, _ in counts for stage in one]
        cards = sorted([*self.workdir.glob(f"*/{CARD_FILE}"), *self.workdir.glob(f"*/*/{CARD_FILE}")])
        datasets = {str(card.parent.relative_to(self.workdir)): self._json(card).get("count") for card in cards}
        starts = self._json(self.workdir / "run.json").get("starts")
        start = starts[-1] if isinstance(starts, list) and starts and isinstance(starts[-1], dict) else {}
        held, holder = self._place.holder()
        state = held or self._state_at_rest(trainings, datasets)
        newest = max((_changed(path) for pattern in _WRITTEN for path in self.workdir.glob(pattern)), default=0.0)
        written = max(0.0, time.time() - newest) if newest else 0.0
        return Watched(
            folder=self.name,
            state=state,
            holder=holder,
            command=str(start.get("command", "")),
            started=str(start.get("time", "")),
            written=written,
            waits=_waits(state, written, trainings, stages),
            trainings=trainings,
            stages=stages,
            datasets=datasets,
            spending=[spent for _, one in counts for spent in one],
            unread=list(self._unread),
        )

    def _state_at_rest(self, trainings: Sequence[Training], datasets: Mapping[str, Any]) -> str:
        summary = (self.workdir / "summary.json").exists()  # the quickstart's end
        if any(one.exhausted for one in trainings) and not summary:
            return "exhausted"
        if (self.workdir / "stages").is_dir():
            return "finished" if summary else "stopped"
        ended = [one.total is not None and one.step >= one.total and one.evaluation is None for one in trainings]
        return "finished" if all(ended) and (trainings or datasets) else "stopped"

    def _training_folders(self) -> list[Path]:
        below = [self.workdir, *self.workdir.glob("*/"), *self.workdir.glob("*/*/")]
        marked = [one for one in below if (one / "metrics" / METRICS).is_file()]
        own = [self.workdir] if self.workdir not in marked and self._kind(self.workdir) else []
        return own + sorted(marked, key=lambda one: (one / "metrics" / METRICS).stat().st_mtime)

    def _config(self, folder: Path) -> Mapping[str, Any]:
        config = self._json(folder / "run.json").get("config")
        return config if isinstance(config, Mapping) else {}

    def _kind(self, folder: Path) -> str:
        config = self._config(folder)
        return next((name.upper() for name in ("sft", "grpo") if isinstance(config.get(name), Mapping)), "")

    def _training(self, folder: Path) -> Training:
        every: list[dict[str, Any]] = self._fresh(folder / "metrics" / METRICS, _metrics, [])
        rows = [row for row in every if not is_exhausted(row)]
        last = every[-1] if every and is_exhausted(every[-1]) else {}
        kind = self._kind(folder)
        if not kind:  # a part of the quickstart
            is_grpo = last or any("rollout/reward" in row for row in rows[:3])
            kind = "GRPO" if is_grpo else "SFT" if rows else "training"
        settings = self._config(folder).get(kind.lower())
        if not isinstance(settings, Mapping):
            settings = self._config(self.workdir).get(folder.name if kind == "SFT" else kind.lower())
        total = settings.get("steps") if isinstance(settings, Mapping) else None
        samples = sorted(folder.glob("samples/*.txt"))
        text = self._fresh(samples[-1], _text, "") if samples else ""
        pages = newest_pages(path.name for path in folder.glob("episodes/*.html"))
        return Training(
            name=str(folder.relative_to(self.workdir)) if folder != self.workdir else "",
            kind=kind,
            rows=rows,
            total=total if isinstance(total, int) else None,
            sample=text[:_MAX_CHARACTERS],
            sample_step=samples[-1].stem.lstrip("0") if samples else "",
            episodes=[folder / "episodes" / name for name in pages],
            batch=None if last else self._batch(folder / ROLLOUTS),
            evaluation=self._batch(folder / HELD_OUT),
            exhausted={name.removeprefix(EXHAUSTED): last[name] for name in last if name.startswith(EXHAUSTED)},
        )

    def _batch(self, folder: Path) -> BatchUnderWay | None:
        if not folder.is_dir():
            return None
        with contextlib.suppress(OSError, ValueError):  # finished and removed meanwhile, or damaged
            return self._journal_readers.setdefault(folder, JournalReader(folder)).look()
        return None

    def _json(self, path: Path) -> Mapping[str, Any]:
        found: Any = self._fresh(path, lambda one: json.loads(one.read_bytes()), {})
        return found if isinstance(found, Mapping) else {}

    def _fresh(self, path: Path, read: Callable[[Path], T], otherwise: T) -> T:
        """Read a file where it has changed; `otherwise` where it is not there or was never readable."""
        stamp = [_stamp(path), _stamp(path.with_name(f"{path.name}-wal"))]  # SQLite's log beside a journal
        if stamp[0] is None:
            return otherwise
        before = self._read.get(path)
        if before is not None and (before.stamp == stamp or time.monotonic() < before.again):
            return before.content
        started = time.monotonic()
        try:
            content = read(path)
        except (OSError, ValueError, InputError, RecursionError, sqlite3.Error) as error:
            self._unread.append(f"{path.relative_to(self.workdir)}: {error}")
            return otherwise if before is None else before.content
        took = time.monotonic() - started
        self._read[path] = _Read(stamp, content, started + _PAUSE * took if took > 0.1 else 0.0)
        return content


@dataclass(frozen=True)
class _Read:
    """Content of a file, its state then, and the earliest time of the next reading."""

    stamp: Sequence[Any]
    content: Any
    again: float


_Counts = tuple[list[Stage], list[Spending]]


def _journal_counts(path: Path) -> _Counts:
    """Count what a synthesis journal has."""
    passed: dict[str, int] = {}
    rejected: dict[str, dict[str, int]] = {}
    spending = []
    with contextlib.closing(open_to_read(path)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "done" in tables:
            counts = "SELECT stage, outputs IS NULL, reason, COUNT(*) FROM done GROUP BY stage, outputs IS NULL, reason"
            for stage, without, reason, count in database.execute(counts):
                passed[stage] = passed.get(stage, 0) + (0 if without else count)
                if without:
                    rejected.setdefault(stage, {})[reason or "rejected"] = count
        if "spent_by_stage" in tables:
            spent = "SELECT model, stage, requests, prompt_tokens + completion_tokens, money FROM spent_by_stage"
            spending = [Spending(*row) for row in database.execute(spent)]
    return [Stage(name, count, rejected.get(name, {})) for name, count in passed.items()], spending


def _metrics(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path.parent)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _stamp(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return None


def _changed(path: Path) -> float:
    stamp = _stamp(path)
    return stamp[0] / 1e9 if stamp else 0.0


def _waits(state: str, written: float, trainings: Sequence[Training], stages: Sequence[Stage]) -> str:
    if state == "finished":
        return "Finished."
    if state == "exhausted":
        return _exhausted(next(one for one in trainings if one.exhausted))
    ago = f"the last write was {lasted(written)} ago"
    if state == "stopped":
        known = not trainings or any(one.total is not None for one in trainings)
        resume = "The same command resumes it." if known else "If it is not done, the same command resumes it."
        return f"No process works on it; {ago}. {resume}"
    current = trainings[-1] if trainings else None
    if current is not None and (current.evaluation or current.total is None or current.step < current.total):
        text = _training_waits(current)
    elif stages:
        total = sum(one.passed + sum(one.rejected.values()) for one in stages)
        text = f"Synthesis: {total:,} inputs of {len(stages)} stages are finished."
    else:
        text = "It has started."
    if written > _SILENT_SECONDS:
        text += f" {ago.capitalize()}: it may wait for servers, a sandbox or a teacher, or compile."
    return text


def _training_waits(one: Training) -> str:
    name, of = f"{one.kind}{f' ({one.name})' if one.name else ''}", f" of {one.total:,}" if one.total else ""
    if one.evaluation is not None:
        played = f"{one.evaluation.episodes:,} episodes are finished"
        return f"{name} evaluates held-out environments after step {one.evaluation.update:,}: {played}."
    if one.batch is not None:
        return (
            f"{name} samples the batch of step {one.batch.update:,}{of}: {one.batch.episodes:,} episodes are finished."
        )
    if one.rows:
        return f"{name} works on step {one.step + 1:,}{of}."
    return f"{name} is before its first step: it reads weights, compiles or makes the first batch."


def _exhausted(training: Training) -> str:
    found = {name: value for name, value in training.exhausted.items() if value is not None}
    rewards = ""
    if "reward_mean" in found:
        mean, low, high = (f"{found[f'reward_{name}']:.3g}" for name in ("mean", "min", "max"))
        rewards = f" Rewards: mean {mean}, min {low}, max {high}."
    masked = f" {found['masked_episodes']:,.0f} episodes were masked." if found.get("masked_episodes") else ""
    return (
        f"Exhausted: {found.get('groups_sampled', 0):,.0f} groups were sampled after step {training.step:,}, and too "
        f"few were valid.{rewards}{masked} The newest page of sampled episodes says what to try."
    )


def lasted(seconds: float) -> str:
    """Write a span of time: 42 s, 7 min, 3 h 20 min, 2 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds / 86400:.0f} days"
