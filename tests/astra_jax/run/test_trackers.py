"""Trackers beside the files: the rows and samples that they get, a failing one, and the real packages offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from absl import logging

from astra_jax.base.errors import InputError
from astra_jax.base.files import location
from astra_jax.run import trackers
from astra_jax.run.metrics import MetricWriter, read_metrics
from astra_jax.run.trackers import LoggedSample

ROOT = Path(__file__).parents[3]


class Kept:
    """Stands for the package wandb: what it is called with, in order."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.called: list[Any] = []
        self._fails_at = fails_at

    def init(self, **given: Any) -> Kept:
        self.called.append(("init", given["id"], given["project"], given["config"]))
        return self

    def log(self, row: Mapping[str, float], step: int) -> None:
        if step == self._fails_at:
            raise ConnectionError("no route\nto host")
        self.called.append((step, dict(row)))

    def finish(self) -> None:
        self.called.append("finish")

    Html = staticmethod(lambda page, **options: ("page", page))

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        if any("refused" in row for row in data):
            raise ValueError("a table that is refused")
        return [columns, *data]


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *given: said.append(text % given))
    return said


def test_a_tracker_gets_the_rows_that_the_file_has(tmp_path: Path, monkeypatch) -> None:
    wandb = Kept()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    folder = location(tmp_path / "run" / "metrics")
    for steps in ((1, 2), (3,)):
        with MetricWriter(folder, trackers.opened(["wandb"], folder, {"steps": 3})) as writer:
            writer.truncate(steps[0] - 1)  # a start that goes on: the tracker stays open
            for step in steps:
                writer.write(step, {"train/loss": 1.0 / step})
    first = wandb.called[0]
    assert first[2:] == ("astra-jax", {"steps": 3})
    rows = [(row["step"], {"train/loss": row["train/loss"]}) for row in read_metrics(folder)]
    assert wandb.called == [first, *rows[:2], "finish", first, rows[2], "finish"]


def test_samples_are_a_bounded_table_and_a_refused_one_costs_no_metrics(tmp_path: Path, monkeypatch, warned) -> None:
    wandb = Kept()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Plain=Plain))  # type: ignore[arg-type]
    folder = location(tmp_path / "run" / "metrics")
    many = [LoggedSample("p" * 30_000, "lone \ud800", 0.5, "Oslo")] * 50
    with MetricWriter(folder, trackers.opened(["wandb", "mine:Plain"], folder, {})) as writer:
        writer.write(1, {"train/loss": 1.0})
        writer.write_samples(1, many, "<html>")
        writer.write_samples(1, [])
        writer.write_samples(2, [LoggedSample("p", "refused")], "x" * (2 << 20))
        writer.write_samples(3, [LoggedSample("p", "c")])
        writer.write(3, {"train/loss": 2.0})
    [samples] = [row for _, row in wandb.called[2:-2]]
    columns, *rows = samples["completions"]
    assert columns == ["step", "prompt", "completion", "reward", "expected"] and samples["episodes"] == (
        "page",
        "<html>",
    )
    assert len(rows) == trackers.MAX_SAMPLES and rows[0] == [
        1,
        f"{'p' * 20_000}… (30,000 characters)",
        "lone ?",
        0.5,
        "Oslo",
    ]
    assert wandb.called[-2:] == [(3, {"train/loss": 2.0}), "finish"] and Plain.rows == [1, 3]
    [said] = warned
    assert said.startswith("wandb could not take the samples of step 2 (ValueError: a table that is refused)")


class Plain:
    """A user's tracker of a version without samples."""

    rows: ClassVar[list[int]] = []

    def __init__(self, folder: Any, config: Any) -> None: ...

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self.rows.append(step)

    def close(self) -> None: ...


@pytest.mark.parametrize("fails_at", [1, None])
def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, monkeypatch, warned, fails_at) -> None:
    wandb = Kept(fails_at) if fails_at else SimpleNamespace()  # the latter cannot even begin
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    folder = location(tmp_path / "metrics")
    with MetricWriter(folder, trackers.opened(["wandb"], folder, {})) as writer:
        for step in (1, 2):
            writer.write(step, {"train/loss": 1.0})
    assert len(read_metrics(folder)) == 2
    [said] = warned
    assert said.startswith("wandb could not ") and said.endswith("metrics.jsonl has all rows") and "\n" not in said


def test_what_is_not_installed_is_refused_by_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"names trackio, .*: pip install 'astra-jax\[trackio\]'"):
        trackers.check_installed(["trackio"])


# ---------------------------------------------------------------------------------------------------------------------
# The real packages, offline

WRITES = """
import sys
from absl import logging
from astra_jax.base.files import location
from astra_jax.run import trackers
from astra_jax.run.metrics import MetricWriter
name, folder = sys.argv[1], location(sys.argv[2])
for steps in ((1, 2), (3,)):
    with MetricWriter(folder, trackers.opened([name], folder, {"steps": 3})) as writer:
        for step in steps:
            writer.write(step, {"train/loss": 1.0 / step, "rollout/reward": 0.5})
            sample = trackers.LoggedSample("Which capital?", "It is \\ud800 Oslo.", 0.5, "Oslo")
            writer.write_samples(step, [sample] * 3, "<h1>Episodes</h1>")
"""
READS = {
    "mlflow": """
import mlflow
[run] = mlflow.search_runs(experiment_names=["astra-jax"], output_format="list")
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
client = mlflow.MlflowClient()
folder = mlflow.artifacts.download_artifacts(run_id=run.info.run_id)
from pathlib import Path
import json
tables = sorted(Path(folder).glob("completions/*.json"))
table = json.loads(tables[-1].read_text())
assert table["columns"][:4] == ["step", "prompt", "completion", "reward"] and len(table["data"]) == 3, table
assert table["data"][0] == [3, "Which capital?", "It is ? Oslo.", 0.5, "Oslo"], table
assert "Episodes" in (Path(folder) / "episodes" / "step_00000003.html").read_text()
print([one.step for one in history], run.data.metrics["rollout/reward"], len(tables))
""",
    "trackio": """
import trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("astra-jax")
rows = SQLiteStorage.get_logs("astra-jax", run.name)
scalars = [row for row in rows if "rollout/reward" in row]
tables = [row["completions"] for row in rows if "completions" in row]
assert tables[-1]["_value"][0]["completion"] == "It is ? Oslo.", tables[-1]
assert [row["episodes"]["_type"] for row in rows if "episodes" in row] == ["trackio.html"] * 3
print([row["step"] for row in scalars], scalars[-1]["rollout/reward"], len(tables))
""",
}
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder for the packages, which come from PyPI: half a processor minute, and no part of `test`."""
    if not (kept := os.environ.get("ASTRA_TRACKERS")):
        pytest.skip("ASTRA_TRACKERS=DIR says where wandb, mlflow-skinny and trackio are, or are to be installed")
    return Path(kept)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PACKAGES)
def test_the_real_package_has_the_rows_offline(tmp_path: Path, installed: Path, name: str) -> None:
    place = installed / name
    if not place.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", f"--target={place}", PACKAGES[name]]
        if subprocess.run(command, capture_output=True, timeout=500).returncode:
            pytest.skip(f"{PACKAGES[name]} could not be installed from PyPI")
    # Behind what is installed here: its copies of numpy and the like are not ours.
    opening = f"import sys; sys.path.append({str(place)!r})\n"
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # a database wants SQLAlchemy, which only the whole mlflow has
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }

    def run(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", opening + code, *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert not re.search("gets no(thing)? more", ended.stderr), ended.stderr[-3000:]
        return ended.stdout

    run(WRITES, name, str(tmp_path / "run" / "metrics"))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics")] == [1, 2, 3]
    if name == "wandb":
        runs = list((tmp_path / "run" / "metrics" / "wandb").glob("offline-run-*/*.wandb"))
        assert len(runs) == 2 and all(b"rollout/reward" in one.read_bytes() for one in runs)
        tables = [json.loads(one.read_text()) for one in (tmp_path / "run").rglob("media/table/completions_*.json")]
        assert sorted(one["data"][0][0] for one in tables) == [1, 2, 3]
        assert tables[0]["data"][0][1:] == ["Which capital?", "It is ? Oslo.", 0.5, "Oslo"]
        assert len([*(tmp_path / "run").rglob("media/html/episodes_*.html")]) == 3
    else:
        assert run(READS[name]).splitlines()[-1] == "[1, 2, 3] 0.5 3"
