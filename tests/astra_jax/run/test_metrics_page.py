"""Metrics have one name each, which the page lists. Tests of the loops compare their rows with it (`metrics_page`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from metrics_page import NAMES, PAGE, undocumented

from astra_jax.run.metrics import _FORMER_METRICS, MetricWriter, read_metrics
from astra_jax.run.trainer import _SHOWN
from launch.viewer.watched import CURVES

ROOT = Path(__file__).parent.parent.parent.parent
_OWN_NAMES = {"masked_REASON", "reward_NAME", "pass_at_K", "ROLLOUT", "COUNT", "sync_STAGE_seconds", "reward_mean",
              "reward_min", "reward_max", "finish_answered", "finish_turn_limit", "finish_token_limit"}  # fmt: skip
"""Names that the code puts together."""


def test_every_name_is_namespaced_and_listed_once() -> None:
    assert len(NAMES) > 100 and len(set(NAMES)) == len(NAMES)
    assert all("/" in name for name in NAMES)
    assert undocumented([{name: 0.0 for name in NAMES}, {"step": 1}]) == set()
    assert undocumented([{"loss": 1.0, "train/los": 1.0}]) == {"loss", "train/los"}


def test_every_listed_name_is_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "astra_jax").rglob("*.py"))
    words = set(re.findall(r"[a-z][a-z_0-9]*", code))
    last = {name.rpartition("/")[2].removeprefix("age_N_").removeprefix("journal_") for name in NAMES}
    assert last - words - _OWN_NAMES == set()


def test_every_former_name_is_listed_with_todays() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert undocumented([dict.fromkeys(_FORMER_METRICS.values(), 0.0)]) == set()
    former = {name for name in _FORMER_METRICS if not name.startswith("exhausted/")}
    assert undocumented([dict.fromkeys(former, 0.0)]) == former
    plain = {name for name in _FORMER_METRICS if "/" not in name and not name.startswith("router_")}
    assert [name for name in plain if f"`{name}`" not in page] == []


ROWS = [
    {"step": 1, "loss": 2.0, "gradient_norm": 1.0, "padding_share": 0.25, "held_out_loss": 3.0, "own": 7.0},
    {"step": 2, "train/loss": 0.5, "train/gradient_norm": 1.0, "train/row_fill": 0.75, "goodput/began": 9.0},
    {"step": 3, "train/loss": None, "train/row_fill": None, "train/mfu": 0.5, "loss": 4.0},
]
TODAY = [
    {"step": 1, "train/loss": 2.0, "train/grad_norm": 1.0, "data/padding_share": 0.25, "eval/loss": 3.0, "own": 7.0},
    {"step": 2, "train/loss": 0.5, "train/grad_norm": 1.0, "goodput/started_at": 9.0, "data/padding_share": 0.25},
    {"step": 3, "train/loss": None, "perf/mfu": 0.5, "loss": 4.0, "data/padding_share": None},
]


def test_rows_of_an_earlier_version_have_todays_names(tmp_path: Path) -> None:
    """A hook's own metric that has a former name beside today's keeps it."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    assert read_metrics(tmp_path) == TODAY
    with MetricWriter(tmp_path) as writer:  # a run that resumes
        writer.truncate(2)
        writer.write(3, {"train/loss": 0.25})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [*TODAY[:2], {"step": 3, "train/loss": 0.25}]


def test_the_progress_bar_and_the_charts_show_documented_metrics() -> None:
    shown = {*_SHOWN, *(name for of_chart in CURVES.values() for name in of_chart)}
    assert undocumented([dict.fromkeys(shown, 0.0)]) == set()
