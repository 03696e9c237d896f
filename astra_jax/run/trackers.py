"""Experiment trackers beside TensorBoard: `log_to` names them, and their own settings hold.

    wandb      WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline …
    mlflow     MLFLOW_TRACKING_URI (a server, or sqlite:///FILE), MLFLOW_EXPERIMENT_NAME …
    trackio    TRACKIO_PROJECT; on this machine, `trackio show` is its page
    my_module:MyTracker    a class with the methods of `Tracker`, made with (folder of the metrics, settings)

A run that goes on goes on in the tracker too. What a tracker cannot take is a warning, once, and then it is left out:
`metrics.jsonl` is the record.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from absl import logging
from etils import epath

from synthesis.core.files import first_line, write_text
from synthesis.core.references import is_reference, referred
from synthesis.core.refusals import InputError

PROJECT = "astra-jax"
_MLFLOW_RUN = "mlflow_run"
"""A file beside the metrics with the id of MLflow's run, which MLflow chooses."""


class Tracker(Protocol):
    """Where rows go beside the files."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Take the scalars of a step."""

    def close(self) -> None:
        """All that was taken is there."""


def check_installed(names: Sequence[str]) -> None:
    """Raises `InputError`: a tracker is not installed, or cannot be imported."""
    for name in names:
        if is_reference(name):
            referred(name)
        elif importlib.util.find_spec(name) is None:
            raise InputError(f"log_to names {name}, which is not installed: pip install 'astra-jax[{name}]'")


def opened(names: Sequence[str], folder: epath.Path, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run, begun or gone on with.

    Args:
        folder: of the run's metrics.
        config: what they show of its settings; JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Any] = {"wandb": _Wandb, "mlflow": _MLflow, "trackio": _Trackio}
    made = [(name, makers.get(name) or referred(name)) for name in names]
    return [_Guarded(name, lambda make=make: make(folder, config)) for name, make in made]  # type: ignore[misc]


class _Guarded:
    """A tracker that no run ends by."""

    def __init__(self, name: str, make: Any) -> None:
        self._name = name
        self._tracker: Tracker | None = None
        self._try("begin", lambda: setattr(self, "_tracker", make()))

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if (tracker := self._tracker) is not None:
            self._try(f"take step {step}", lambda: tracker.log(step, row))

    def close(self) -> None:
        if (tracker := self._tracker) is not None:
            self._try("end", tracker.close)
            self._tracker = None

    def _try(self, what: str, do: Any) -> None:
        try:
            do()
        except Exception as error:  # of three libraries, and of whatever service is behind one
            self._tracker = None
            logging.warning(
                "%s could not %s (%s: %s), and gets nothing more; metrics.jsonl has all rows",
                self._name, what, type(error).__name__, first_line(error),
            )  # fmt: skip


def _identity(folder: epath.Path) -> str:
    """The same for each start of a run: of where its files are."""
    return hashlib.sha256(os.fspath(folder).encode()).hexdigest()[:16]


class _Wandb:
    def __init__(self, folder: epath.Path, config: Mapping[str, Any]) -> None:
        import wandb

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

    def close(self) -> None:
        self._trackio.finish()
