"""State of a run, read from its workdir: running, finished, failed, exhausted or killed, and its numbers.

Nothing is written or locked, and the run is not asked. Files are read while they are written, and again only when they
have changed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
import time
from collections import Counter
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
from launch.viewer import stages
from launch.viewer.workdirs import InBucket, OnDisk, RunFolder, newest_pages
from synthesis.core.compat import todays_reason
from synthesis.core.datasets import CARD_FILE
from synthesis.core.journal import open_to_read
from synthesis.core.workdir import ENDING, LOCK, RunEnding, read_ending

T = TypeVar("T")
Curves = Mapping[str, Sequence[tuple[float, float | None]]]

CURVES: Mapping[str, tuple[str, ...]] = {
    "Held-out reward": ("eval/greedy/reward", "eval/sampled/reward"),
    "Rollouts": ("rollout/reward", "train/reward", "rollout/recall", "rollout/precision"),
    "Loss": ("train/loss", "eval/loss"),
    "Valid groups, masked episodes": ("filling/valid_share", "filling/masked_share"),
    "Entropy, nats": ("train/entropy",),
    "Sampler against trainer, nats": ("train/mismatch_kl", "train/mismatch_abs"),
    "Lengths, tokens": ("rollout/sampled_tokens", "rollout/total_tokens"),
    "Calls and turns": ("rollout/turns", "rollout/calls", "rollout/failed_calls"),
    "Gradient norm": ("train/grad_norm",),
    "Learning rate": ("train/learning_rate",),
    "Tokens a second": ("perf/tokens_per_second", "rollout/tokens_per_second"),
    "Seconds": ("seconds/rollout", "seconds/update", "seconds/sync", "seconds/wait"),
}
"""Charts of a training and the metrics on each, where a run has them."""
STORED_PAGES = ("report.html", "table.html")
"""Pages of a quickstart and of an evaluation."""
_MAX_CHARACTERS, _MAX_EXAMPLE = 6_000, 300
_PAUSE = 20
"""A file that takes long to read is read again after so many times as long."""
_FOLDERS = ("", "*/", "*/*/")
"""Patterns of a training's folder in a workdir."""
_WRITTEN = (
    *("run.json", ENDING, "*.sqlite", "*.sqlite-wal", "journals/*.sqlite", "journals/*.sqlite-wal"),
    *(f"{folder}{name}" for folder in _FOLDERS for name in (f"metrics/{METRICS}", f"{ROLLOUTS}/*", f"{HELD_OUT}/*")),
    *(f"{folder}{name}" for folder in _FOLDERS for name in (CARD_FILE, LOCK)),
)
"""Files whose newest write is the run's."""


@dataclass(frozen=True)
class Stage:
    """A stage of a synthesis, or a suite of an evaluation.

    Attributes:
        passed: inputs that were not rejected.
        rejected: the other inputs, by reason.
        example: what one of the most frequent reason's inputs was rejected for; "" where that is unknown.
    """

    name: str
    passed: int
    rejected: Mapping[str, int]
    example: str = ""

    @property
    def seen(self) -> int:
        """All inputs that are finished."""
        return self.passed + sum(self.rejected.values())


@dataclass(frozen=True)
class Spending:
    """Requests of a stage to a teacher's endpoint."""

    model: str
    stage: str
    requests: int
    tokens: int
    money: float


def step_of(row: Mapping[str, Any]) -> float:
    """Return the step of a row of metrics."""
    return float(row["step"])


def seconds_of(row: Mapping[str, Any]) -> float | None:
    """Return the training time at a row of metrics, in seconds; None in a row without it."""
    return 0.0 if row["step"] == 0 else row.get("goodput/kept_seconds")


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

    def curves(self, across: Callable[[Mapping[str, Any]], float | None] = step_of) -> dict[str, Curves]:
        """Return the metrics that `CURVES` names, as {title: {metric: [(place, value)]}}.

        Args:
            across: returns a row's place on the horizontal axis, or None if the row has none.
        """
        placed = [(at, row) for row in self.rows if (at := across(row)) is not None]
        found = {
            title: {
                name: [(at, row[name]) for at, row in placed if name in row]
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
        state: `running`; `elsewhere` (its lock is held on another machine, if it still is); `empty`; `killed` (its
            process ended without a message); `finished`, `failed`, `interrupted`, `preempted` or `exhausted`, see
            `RunEnding`; `stopped`: the same, or not finished in a workdir of an earlier version.
        ending: how the last program that worked there ended; None in a workdir of an earlier version.
        holder: the process that works on it, as its lock says.
        command: of its last start, "" where no record says.
        started: when, ISO 8601.
        written: seconds since its newest write.
        datasets: records by folder, None where the card does not say.
        wanted: records that a synthesis is to make, by folder.
        held_out: results of a quickstart's models on held-out environments, by model.
        scores: results of an evaluation in percent, by title.
        pages: the `STORED_PAGES` that it has.
        unread: files that could not be read, and why.
    """

    folder: str
    state: str
    ending: RunEnding | None
    holder: str
    command: str
    started: str
    written: float
    trainings: Sequence[Training]
    stages: Sequence[Stage]
    datasets: Mapping[str, int | None]
    wanted: Mapping[str, int]
    held_out: Mapping[str, Mapping[str, float]]
    scores: Mapping[str, float]
    pages: Sequence[str]
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
        has_files = run.trainings or run.stages or run.datasets or run.command or run.ending or run.pages
        if not (has_files or run.state in ("running", "elsewhere", "empty")):
            raise InputError(
                f"{self.name} has no files of a run; give the --workdir of sft, grpo, trajectories, environments, "
                "evaluate or quickstart"
            )

    def look(self) -> Watched:
        """Return the run as it is now."""
        self._unread = list(self._place.look())
        trainings = [self._training(folder) for folder in self._training_folders()]
        journals = sorted([*self.workdir.glob("*.sqlite"), *self.workdir.glob("journals/*.sqlite")])
        nothing: _Counts = ([], [])
        counts = [self._fresh(path, _journal_counts, nothing) for path in journals]
        found = [stage for one, _ in counts for stage in one]
        cards = sorted([*self.workdir.glob(f"*/{CARD_FILE}"), *self.workdir.glob(f"*/*/{CARD_FILE}")])
        counts_by_folder = {str(one.parent.relative_to(self.workdir)): self._json(one).get("count") for one in cards}
        datasets = {name: count if isinstance(count, int) else None for name, count in counts_by_folder.items()}
        wanted = {
            name: count for card in cards for name, count in _wanted(self._json(card)).items() if name in datasets
        }
        starts = self._json(self.workdir / "run.json").get("starts")
        start = starts[-1] if isinstance(starts, list) and starts and isinstance(starts[-1], dict) else {}
        held, holder = self._place.holder()
        ending = read_ending(self.workdir)
        has_ended = ending is not None and ending.state != "working"  # where /proc/locks has nothing, a lock is a guess
        state = "" if has_ended else held
        state = state or self._state_at_rest(ending, trainings, datasets)
        newest = max((_changed(path) for pattern in _WRITTEN for path in self.workdir.glob(pattern)), default=0.0)
        written = max(0.0, time.time() - newest) if newest else 0.0
        return Watched(
            folder=self.name,
            state=state,
            ending=ending,
            holder=holder,
            command=str(start.get("command", "")),
            started=str(start.get("time", "")),
            written=written,
            trainings=trainings,
            stages=found,
            datasets=datasets,
            wanted=wanted,
            held_out=_held_out(self._json(self.workdir / "summary.json")),
            scores=_scores(self._json(self.workdir / "table.json")),
            pages=[name for name in STORED_PAGES if (self.workdir / name).is_file()],
            spending=[spent for _, one in counts for spent in one],
            unread=list(self._unread),
        )

    def _state_at_rest(
        self, ending: RunEnding | None, trainings: Sequence[Training], datasets: Mapping[str, Any]
    ) -> str:
        """Return the state of a run that no process works on."""
        summary = (self.workdir / "summary.json").exists()  # the quickstart's end
        if any(one.exhausted for one in trainings) and not summary:
            return "exhausted"
        if ending is not None and ending.state != "working":
            return ending.state
        if isinstance(self._place, OnDisk) and not any(self.workdir.iterdir()):
            return "empty"
        ended = [one.total is not None and one.step >= one.total and one.evaluation is None for one in trainings]
        is_done = summary if (self.workdir / "stages").is_dir() else all(ended) and bool(trainings or datasets)
        if ending is not None:
            return "finished" if is_done and trainings else "killed"
        return "finished" if is_done else "stopped"

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
    passed: Counter[str] = Counter()
    rejected: dict[str, Counter[str]] = {}
    examples: dict[tuple[str, str], str] = {}
    spending = []
    with contextlib.closing(open_to_read(path)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "done" in tables:
            counts = (
                "SELECT stage, outputs IS NULL, reason, COUNT(*), MIN(detail) FROM done "
                "GROUP BY stage, outputs IS NULL, reason"
            )
            for key, without, reason, count, detail in database.execute(counts):
                name = stages.name_of(key)
                passed[name] += 0 if without else count
                if without:
                    reason = todays_reason(reason or "rejected")
                    rejected.setdefault(name, Counter())[reason] += count
                    examples[name, reason] = str(detail or "")[:_MAX_EXAMPLE]
        if "spent_by_stage" in tables:
            spent = "SELECT model, stage, requests, prompt_tokens + completion_tokens, money FROM spent_by_stage"
            spending = [Spending(*row) for row in database.execute(spent)]
    found = []
    for name in stages.in_order(passed):
        reasons = rejected.get(name, Counter()).most_common()
        example = examples[name, reasons[0][0]] if reasons else ""
        found.append(Stage(name, passed[name], dict(reasons), example))
    return found, spending


def _wanted(card: Mapping[str, Any]) -> dict[str, int]:
    """Return how many records a synthesis is to make, by folder, from a dataset's card."""
    config = card.get("config")
    if not isinstance(config, Mapping):
        return {}
    if isinstance(count := config.get("trajectories"), int):
        return {"trajectories": count}
    count, share = config.get("count"), config.get("held_out_fraction")
    if not isinstance(count, int) or not isinstance(share, (int, float)):
        return {}
    held_out = round(count * share)
    return {name: of for name, of in {"train": count - held_out, "held_out": held_out}.items() if of}


def _held_out(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of a quickstart's `summary.json` on held-out environments, by model."""
    models = summary.get("held_out")
    return {
        model: {name: value for name, value in result.items() if isinstance(value, (int, float))}
        for model, result in (models.items() if isinstance(models, Mapping) else ())
        if isinstance(result, Mapping)
    }


def _scores(table: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of an evaluation's `table.json` in percent: the headlines of each suite, or its categories."""
    found: dict[str, float] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
        for suite in table["table"]["suites"]:
            for one in suite["headlines"] or suite["categories"]:
                found[f"{suite['info']['title']}: {one['title']}"] = float(one["score"]["mean"])
    return found


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


def lasted(seconds: float) -> str:
    """Write a span of time: 42 s, 7 min, 3 h 20 min, 2 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds / 86400:.0f} days"
