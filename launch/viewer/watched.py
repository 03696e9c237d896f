"""What the files of a workdir say of its run: whether it goes on, has ended or was killed, and how it is.

Nothing is written, locked or asked of the run: `metrics.jsonl`, journals, `run.json`, cards and the lock's text are
read as they are, also while they are written, and each again only when it has changed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from etils import epath

from astra_jax.grpo.held_out import FOLDER as HELD_OUT
from astra_jax.grpo.journal import FOLDER as ROLLOUTS
from astra_jax.grpo.journal import BatchUnderWay, Onlooker
from astra_jax.run.metrics import EXHAUSTED, is_exhausted, read_metrics
from astra_jax.run.metrics import FILE as METRICS
from launch.viewer.workdirs import InBucket, OnDisk, RunFolder, newest_pages
from synthesis.core.datasets import CARD_FILE
from synthesis.core.files import in_bucket
from synthesis.core.refusals import InputError
from synthesis.core.workdir import LOCK

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss", "held_out_loss")),
    ("Rollouts", ("rollout/reward", "train/reward", "rollout/recall", "rollout/precision")),
    ("Held-out reward", ("eval/greedy/reward", "eval/sampled/reward")),
    ("Gradient norm", ("gradient_norm",)),
    ("Sampler and trainer", ("mismatch_kl",)),
    ("Tokens a second", ("tokens_per_second", "tokens_per_second/rollout", "tokens_per_second/update")),
    ("Seconds", ("seconds/rollout", "seconds/update", "seconds/sync", "seconds/wait")),
)
"""What is drawn of the metrics, where they have it."""
_SILENT = 300.0
"""Seconds without a write after which a run is said to wait for something."""
_SHOWN_CHARACTERS = 6_000
_PAUSE = 20
"""A journal is counted again after so many times as long as that took."""


@dataclass(frozen=True)
class Stage:
    """Of a synthesis: how many of its inputs are finished, and why some were rejected."""

    name: str
    passed: int
    rejected: Mapping[str, int]


@dataclass(frozen=True)
class Server:
    """A rollout server, by the newest row of metrics that has it."""

    name: str
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class Training:
    """A training run.

    Attributes:
        kind: `SFT`, `GRPO`, or `training` where nothing says.
        rows: of its metrics, by step.
        exhausted: GRPO: what it says of a batch that never came, by name; empty where that is not how it ended.
        total: how many steps it is to make; None: its configuration leaves that to the data.
        sample: the newest samples, and of which step; "": there are none.
        episodes: pages of sampled episodes, the newest first.
        batch: what is finished of GRPO's batch under way.
        evaluation: what is finished of an evaluation on held-out environments, while one is under way.
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
        """The last one that is logged, 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def curves(self) -> list[tuple[str, dict[str, list[tuple[float, float | None]]]]]:
        """What `CURVES` names, as (title, {metric: [(step, value)]})."""
        drawn = []
        for title, names in CURVES:
            lines = {
                name: [(float(row["step"]), row[name]) for row in self.rows if name in row]
                for name in names
                if any(row.get(name) is not None for row in self.rows)
            }
            if lines:
                drawn.append((title, lines))
        return drawn

    @property
    def latest(self) -> dict[str, float | None]:
        """The newest value of each metric but the servers'."""
        found: dict[str, float | None] = {}
        for row in self.rows[-50:]:
            found |= {name: value for name, value in row.items() if name != "step" and not name.startswith("servers/")}
        return dict(sorted(found.items()))

    @property
    def servers(self) -> list[Server]:
        """Those of the newest row."""
        by_name: dict[str, dict[str, float | None]] = {}
        for name, value in (self.rows[-1] if self.rows else {}).items():
            if name.startswith("servers/"):
                server, _, figure = name.removeprefix("servers/").partition("/")
                by_name.setdefault(server, {})[figure] = value
        return [Server(name, figures) for name, figures in sorted(by_name.items())]


@dataclass(frozen=True)
class Spending:
    """What a stage asked of a teacher's endpoint."""

    model: str
    stage: str
    requests: int
    tokens: int
    money: float


@dataclass(frozen=True)
class Watched:
    """A run, at a moment.

    Attributes:
        folder: of the run, as the user knows it.
        state: `running`, `finished`, `exhausted` (GRPO found no batch any more), `stopped` (nobody works on it, and it
            is not finished) or `elsewhere` (its lock is held on another machine, if it still is).
        holder: the process that works on it, as its lock says.
        command: by which it was started last, "" where no record says.
        started: when, ISO 8601.
        written: seconds since anything of it was written.
        waits: what it does, or waits for, in a sentence.
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
        """Of the folder alone."""
        return PurePosixPath(self.folder).name


class Watcher:
    """Looks at a workdir.

    Args:
        workdir: a folder of this machine, or in a bucket.

    Raises:
        InputError: nothing there is of a run.
        StorageError: the bucket cannot be read.
    """

    def __init__(self, workdir: Path | epath.Path) -> None:
        self._place: RunFolder = InBucket(epath.Path(workdir)) if in_bucket(workdir) else OnDisk(Path(workdir))
        self.name, self.workdir = self._place.name, self._place.files
        self._cached: dict[Path, tuple[Any, Any]] = {}
        self._counted: dict[Path, _Counted] = {}
        self._onlookers: dict[Path, Onlooker] = {}
        self._unread: list[str] = []
        found = self.look()
        if not (
            found.trainings
            or found.stages
            or found.datasets
            or found.command
            or found.state in ("running", "elsewhere")
        ):
            raise InputError(
                f"nothing in {self.name} is of a run; give the --workdir of launch.sft, launch.grpo, "
                "launch.trajectories, launch.environments or launch.quickstart"
            )

    def look(self) -> Watched:
        """The run as it is now."""
        self._unread = list(self._place.look())
        trainings = [self._training(folder) for folder in self._training_folders()]
        journals = [*self.workdir.glob("*.sqlite"), *self.workdir.glob("journals/*.sqlite")]
        counted = [self._counts(path) for path in sorted(journals)]
        stages = [stage for one in counted for stage in one.stages]
        datasets = {
            str(card.parent.relative_to(self.workdir)): self._json(card).get("count")
            for card in sorted([*self.workdir.glob(f"*/{CARD_FILE}"), *self.workdir.glob(f"*/*/{CARD_FILE}")])
        }
        start = self._start()
        state, holder = self._state(trainings, stages, datasets)
        written = self._written(journals)
        waits = _waits(state, written, trainings, stages)
        return Watched(
            folder=self._place.name,
            state=state,
            holder=holder,
            command=start.get("command", ""),
            started=start.get("time", ""),
            written=written,
            waits=waits,
            trainings=trainings,
            stages=stages,
            datasets=datasets,
            spending=[spent for one in counted for spent in one.spending],
            unread=list(self._unread),
        )

    # ----------------------------------------------------------------------------------------------------- trainings

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
        every = self._fresh(folder / "metrics" / METRICS, lambda path: read_metrics(path.parent), [])
        rows = [row for row in every if not is_exhausted(row)]
        last = every[-1] if every and is_exhausted(every[-1]) else {}
        kind = self._kind(folder)
        if not kind:  # a part of the quickstart
            is_grpo = last or any("rollout/reward" in row for row in rows[:3])
            kind = "GRPO" if is_grpo else "SFT" if rows else "training"
        settings = self._config(folder).get(kind.lower())
        if not isinstance(settings, Mapping):
            whole = self._json(self.workdir / "run.json").get("config", {})
            settings = whole.get(folder.name if kind == "SFT" else kind.lower()) if isinstance(whole, Mapping) else None
        total = settings.get("steps") if isinstance(settings, Mapping) else None
        samples = sorted(folder.glob("samples/*.txt"))
        text = self._fresh(samples[-1], _text, "") if samples else ""
        return Training(
            name=str(folder.relative_to(self.workdir)) if folder != self.workdir else "",
            kind=kind,
            rows=rows,
            total=total if isinstance(total, int) else None,
            sample=text[:_SHOWN_CHARACTERS],
            sample_step=samples[-1].stem.lstrip("0") if samples else "",
            episodes=[folder / "episodes" / name for name in newest_pages(_names(folder / "episodes"))],
            batch=None if last else self._batch(folder / ROLLOUTS),
            exhausted={name.removeprefix(EXHAUSTED): last[name] for name in last if name.startswith(EXHAUSTED)},
            evaluation=self._batch(folder / HELD_OUT),
        )

    def _batch(self, folder: Path) -> BatchUnderWay | None:
        if not folder.is_dir():
            return None
        with contextlib.suppress(OSError, ValueError):  # it was finished and removed meanwhile, or is damaged
            return self._onlookers.setdefault(folder, Onlooker(folder)).look()
        return None

    # ------------------------------------------------------------------------------------------------------ synthesis

    def _counts(self, path: Path) -> _Counted:
        before = self._counted.get(path)
        changed = max((_changed(one) for one in (path, path.with_name(f"{path.name}-wal"))), default=0.0)
        if before and (before.changed == changed or time.monotonic() < before.again):
            return before
        began = time.monotonic()
        counted = _Counted(changed)
        try:
            with _opened(path) as database:
                tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                if "done" in tables:
                    counted.stages = _stages(database)
                if "spent_by_stage" in tables:
                    counted.spending = _spending(database)
        except sqlite3.Error as error:
            self._unread.append(f"{path.name}: {error}")
            return before or counted
        counted.again = time.monotonic() + _PAUSE * (time.monotonic() - began)
        self._counted[path] = counted
        return counted

    # ---------------------------------------------------------------------------------------------------------- state

    def _start(self) -> Mapping[str, str]:
        """The newest line of `run.json`'s starts."""
        starts = self._json(self.workdir / "run.json").get("starts")
        last = starts[-1] if isinstance(starts, list) and starts else {}
        return {name: str(last[name]) for name in ("command", "time") if name in last} if isinstance(last, dict) else {}

    def _state(
        self, trainings: Sequence[Training], stages: Sequence[Stage], datasets: Mapping[str, Any]
    ) -> tuple[str, str]:
        held, holder = self._place.holder()
        if held:
            return held, holder
        if any(one.exhausted for one in trainings) and not (self.workdir / "summary.json").exists():
            return "exhausted", holder
        if (self.workdir / "stages").is_dir():  # the quickstart
            finished = (self.workdir / "summary.json").exists()
        elif trainings:
            finished = all(
                one.total is not None and one.step >= one.total and one.evaluation is None for one in trainings
            )
        else:
            finished = bool(datasets)
        return ("finished" if finished else "stopped"), holder

    def _written(self, journals: Sequence[Path]) -> float:
        """Seconds since the newest write."""
        files = [*journals, *(path.with_name(f"{path.name}-wal") for path in journals), self.workdir / "run.json"]
        for folder in (self.workdir, *self.workdir.glob("*/"), *self.workdir.glob("*/*/")):
            files += [
                folder / "metrics" / METRICS,
                *folder.glob(f"{ROLLOUTS}/*"),
                *folder.glob(f"{HELD_OUT}/*"),
                folder / CARD_FILE,
                folder / LOCK,
            ]
        newest = max(map(_changed, files), default=0.0)
        return max(0.0, time.time() - newest) if newest else 0.0

    # ---------------------------------------------------------------------------------------------------------- files

    def _json(self, path: Path) -> Mapping[str, Any]:
        found = self._fresh(path, lambda one: json.loads(one.read_bytes()), {})
        return found if isinstance(found, Mapping) else {}

    def _fresh(self, path: Path, read: Any, otherwise: Any) -> Any:
        """A file's content, read anew when it has changed; `otherwise` where it is not there."""
        try:
            status = path.stat()
        except OSError:
            return otherwise
        stamp = (status.st_mtime_ns, status.st_size)
        if self._cached.get(path, (None, None))[0] != stamp:
            try:
                self._cached[path] = (stamp, read(path))
            except (OSError, ValueError, InputError, RecursionError) as error:
                self._unread.append(f"{path.relative_to(self.workdir)}: {error}")
                return self._cached.get(path, (None, otherwise))[1]
        return self._cached[path][1]


@dataclass
class _Counted:
    """What was read of a journal, of which time, and when to read it again at the soonest."""

    changed: float
    stages: list[Stage] = field(default_factory=list)
    spending: list[Spending] = field(default_factory=list)
    again: float = 0.0


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """An SQLite file for reading alone. One that nobody has open has no log beside it, which a reader would have to
    make: it is read as what cannot change."""
    logged = path.with_name(f"{path.name}-wal").exists()
    address = f"file:{quote(str(path.absolute()))}?mode=ro{'' if logged else '&immutable=1'}"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=2.0)) as database:
        yield database


def _stages(database: sqlite3.Connection) -> list[Stage]:
    asked = "SELECT stage, outputs IS NULL, reason, COUNT(*) FROM done GROUP BY stage, outputs IS NULL, reason"
    passed: dict[str, int] = {}
    rejected: dict[str, dict[str, int]] = {}
    for stage, without, reason, count in database.execute(asked):
        passed.setdefault(stage, 0)
        if without:
            rejected.setdefault(stage, {})[reason or "rejected"] = count
        else:
            passed[stage] += count
    return [Stage(name, count, rejected.get(name, {})) for name, count in passed.items()]


def _spending(database: sqlite3.Connection) -> list[Spending]:
    asked = "SELECT model, stage, requests, prompt_tokens + completion_tokens, money FROM spent_by_stage"
    return [Spending(*row) for row in database.execute(asked)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.html")]


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _waits(state: str, written: float, trainings: Sequence[Training], stages: Sequence[Stage]) -> str:
    if state == "finished":
        return "Finished."
    if state == "exhausted":
        return _exhausted(next(one for one in trainings if one.exhausted))
    ago = f"the last write was {lasted(written)} ago"
    if state == "stopped":
        known = not trainings or any(one.total is not None for one in trainings)
        goes_on = "The same command goes on from there." if known else "If it is not done, the same command goes on."
        return f"Nobody works on it; {ago}. {goes_on}"
    silent = ""
    if written > _SILENT:
        silent = f" {ago.capitalize()}: it may wait for servers, a sandbox or a teacher, or compile."
    current = trainings[-1] if trainings else None
    if current is not None and current.evaluation is not None:
        update, played = current.evaluation.update, f"{current.evaluation.episodes:,} episodes are finished"
        return f"{current.kind} evaluates held-out environments after update {update:,}: {played}.{silent}"
    if current is not None and (current.total is None or current.step < current.total):
        of = f" of {current.total:,}" if current.total else ""
        name = f"{current.kind}{f' ({current.name})' if current.name else ''}"
        batch = current.batch
        if batch is not None:
            under = f", {batch.open_turns:,} turns of open ones" if batch.open_turns else ""
            return (
                f"{name} samples update {batch.update:,}{of}: {batch.episodes:,} episodes are finished{under}.{silent}"
            )
        if not current.rows:
            return (
                f"{name} is before its first step: weights are read, programs compiled, the first batch made.{silent}"
            )
        return f"{name} works on step {current.step + 1:,}{of}.{silent}"
    if stages:
        total = sum(one.passed + sum(one.rejected.values()) for one in stages)
        return f"Synthesis: {total:,} inputs of {len(stages)} stages are finished.{silent}"
    return f"It has begun.{silent}"


def _exhausted(training: Training) -> str:
    found = {name: value for name, value in training.exhausted.items() if value is not None}
    rewards = ""
    if "reward_mean" in found:
        mean, low, high = (f"{found[f'reward_{name}']:.3g}" for name in ("mean", "min", "max"))
        rewards = f" Rewards: mean {mean}, min {low}, max {high}."
    masked = f" {found['masked_episodes']:,.0f} episodes were masked." if found.get("masked_episodes") else ""
    return (
        f"Exhausted: {found.get('groups_sampled', 0):,.0f} groups were sampled for update {training.step:,}, and too "
        f"few were valid.{rewards}{masked} The newest page of sampled episodes says what to try."
    )


def lasted(seconds: float) -> str:
    """A span of time in words: 42 s, 7 min, 3 h 20 min, 2 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds / 86400:.0f} days"


def clock(started: str) -> str:
    """When a run was started, to the minute, as its record says; "" where it says nothing that is a time."""
    with contextlib.suppress(ValueError):
        return f"{datetime.datetime.fromisoformat(started):%Y-%m-%d %H:%M %Z}".strip()
    return ""


def facts(run: Watched) -> Mapping[str, str]:
    """What is said of a run in a word or two."""
    found = {"state": run.state, "last write": f"{lasted(run.written)} ago" if run.written else ""}
    found["started"] = clock(run.started)
    found["held by" if run.state in ("running", "elsewhere") else "last held by"] = run.holder
    return {name: value for name, value in found.items() if value}
