"""Experiment trackers in addition to TensorBoard: `log_to` names them, and their own settings apply.

    wandb      WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline …
    mlflow     MLFLOW_TRACKING_URI (a server, or sqlite:///FILE), MLFLOW_EXPERIMENT_NAME …
    trackio    TRACKIO_PROJECT; on this machine, `trackio show` is its page.
    my_module:MyTracker    a class with the methods of `Tracker`, made with (folder of the metrics, settings)

Besides metrics they get samples: a table `completions` with the columns of `LoggedSample` and the step, and GRPO's page
of episodes. A resumed run continues in the tracker too. A tracker that fails is disabled with one warning:
`metrics.jsonl` is the record. One that refuses samples still gets metrics.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from absl import logging
from etils import epath

from astra_jax.base.errors import InputError
from astra_jax.base.files import first_line, write_text
from synthesis.core.references import is_reference, referred

PROJECT = "astra-jax"
_MLFLOW_RUN = "mlflow_run"
"""File beside the metrics with the id of MLflow's run, which MLflow chooses."""


MAX_SAMPLES = 32
"""Most samples of a step that trackers get."""
_MAX_CHARACTERS = 20_000
"""Most characters of a text in a table; the rest is cut, with a mark."""
_MAX_PAGE = 1 << 20
"""Most characters of a page; a longer one is not sent."""
_TABLE = "completions"
"""Name of the table, as TRL's."""


@dataclass(frozen=True)
class LoggedSample:
    """A sample of the policy.

    Attributes:
        reward: None in SFT.
        expected: SFT: the dataset's turn. GRPO: the expected answer, if the environment has one.
    """

    prompt: str
    completion: str
    reward: float | None = None
    expected: str = ""


_COLUMNS = ("step", *(field.name for field in fields(LoggedSample)))


def _rows(step: int, samples: Sequence[LoggedSample]) -> list[list[str | float | None]]:
    """Return the rows of a table, bounded, in the order of `_COLUMNS`."""
    return [
        [step, _cut(one.prompt), _cut(one.completion), one.reward, _cut(one.expected)] for one in samples[:MAX_SAMPLES]
    ]


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # a model can write a lone surrogate
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}… ({len(text):,} characters)"


class Tracker(Protocol):
    """Additional destination of metric rows."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Log the scalars of a step."""

    def log_samples(self, step: int, samples: Sequence[LoggedSample], page: str) -> None:
        """Log samples of a step, after its scalars. A class without this method gets none.

        Args:
            page: an HTML page with whole episodes; "" if there is none.
        """

    def close(self) -> None:
        """Finish writing all logged rows."""


def check_installed(names: Sequence[str]) -> None:
    """Check that trackers are installed. Raises `InputError` if one is not, or cannot be imported."""
    for name in names:
        if is_reference(name):
            referred(name)
        elif importlib.util.find_spec(name) is None:
            raise InputError(f"log_to names {name}, which is not installed: pip install 'astra-jax[{name}]'")


def opened(names: Sequence[str], folder: epath.Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Return a run's trackers, started or resumed.

    Args:
        folder: of the run's metrics.
        config: settings to display; JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Any] = {"wandb": _Wandb, "mlflow": _MLflow, "trackio": _Trackio}
    made = [(name, makers.get(name) or referred(name)) for name in names]
    return [_Guarded(name, lambda make=make: make(folder, config)) for name, make in made]  # type: ignore[misc]


class _Guarded:
    """A tracker whose errors cannot end the run."""

    def __init__(self, name: str, make: Any) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        self._takes_samples = True
        self._try("begin", lambda: setattr(self, "_tracker", make()))

    def log(self, step: int, row: Mapping[str, float]) -> None:
        tracker = self._tracker
        if tracker is not None and not self._try(f"take step {step}", lambda: tracker.log(step, row)):
            self._tracker = None

    def log_samples(self, step: int, samples: Sequence[LoggedSample], page: str) -> None:
        log = getattr(self._tracker, "log_samples", None)
        if log is None or not self._takes_samples:
            return
        self._takes_samples = self._try(
            f"take the samples of step {step}",
            lambda: log(step, samples, page if len(page) <= _MAX_PAGE else ""),
            "gets no more samples; it still gets metrics",
        )

    def close(self) -> None:
        if (tracker := self._tracker) is not None:
            self._try("end", tracker.close)
            self._tracker = None

    def _try(self, what: str, do: Any, then: str = "gets nothing more; metrics.jsonl has all rows") -> bool:
        """Return whether it succeeded; else a warning says what follows."""
        try:
            do()
        except Exception as error:  # errors of three libraries and their services
            logging.warning(
                "%s could not %s (%s: %s), and %s", self._name, what, type(error).__name__, first_line(error), then
            )
            return False
        return True


def _identity(folder: epath.Path) -> str:
    """Return an id that is the same for each start of a run, from the location of its files."""
    return hashlib.sha256(os.fspath(folder).encode()).hexdigest()[:16]


class _Wandb:
    def __init__(self, folder: epath.Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.parent.name),
            id=os.environ.get("WANDB_RUN_ID", _identity(folder)),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or (None if "://" in os.fspath(folder) else os.fspath(folder)),
            config=dict(config),
        )

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample], page: str) -> None:
        table = self._wandb.Table(columns=list(_COLUMNS), data=_rows(step, samples))
        pages = {"episodes": self._wandb.Html(page, inject=False, data_is_not_path=True)} if page else {}
        self._run.log({_TABLE: table, **pages}, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, folder: epath.Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow, known = mlflow, folder / _MLFLOW_RUN
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
            mlflow.set_experiment(PROJECT)
        if known.exists():
            mlflow.start_run(run_id=known.read_text().strip(), log_system_metrics=False)
            return
        run = mlflow.start_run(run_name=folder.parent.name, log_system_metrics=False)
        write_text(known, run.info.run_id + "\n")
        mlflow.log_dict(dict(config), "config.json")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in row.items()}, step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample], page: str) -> None:
        rows, file = _rows(step, samples), f"{_TABLE}/step_{step:08}.json"
        try:
            self._mlflow.log_table(dict(zip(_COLUMNS, map(list, zip(*rows, strict=True)), strict=True)), file)
        except ImportError:  # mlflow-skinny has no pandas; the same form without it
            self._mlflow.log_dict({"columns": list(_COLUMNS), "data": rows}, file)
        if page:
            self._mlflow.log_text(page, f"episodes/step_{step:08}.html")

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    def __init__(self, folder: epath.Path, config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{folder.parent.name}-{_identity(folder)[:6]}"
        trackio.init(project=project, name=name, resume="allow", config=dict(config))

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._trackio.log(dict(row), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample], page: str) -> None:
        table = self._trackio.Table(columns=list(_COLUMNS), data=_rows(step, samples))
        pages = {"episodes": self._trackio.Html(page)} if page else {}
        self._trackio.log({_TABLE: table, **pages}, step=step)

    def close(self) -> None:
        self._trackio.finish()
