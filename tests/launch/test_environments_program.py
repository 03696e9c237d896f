"""`launch.environments` as a user runs it: what it writes and says, twice, and what it says about bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import ToolEnvironment

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.environments", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ)


def test_environments_are_written_once_and_described(tmp_path: Path) -> None:
    arguments = (f"--workdir={tmp_path}", "--seed=3", "--config.count=10", '--config.distractors={"high": 1, "low": 1}')
    first = run(*arguments)
    assert first.returncode == 0, first.stderr[-3000:]
    made = [one for split in ("train", "held_out") for one in read_dataset(tmp_path / split, ToolEnvironment)]
    assert len(made) >= 8 and all(one.id.startswith("env-3-") for one in made)
    assert all(len(tools) <= 1 for one in made for tools in one.distractors.values())
    card = read_card(tmp_path / "train")
    assert card["config"]["count"] == 10 and card["teacher"] == "OfflineTeacher" and card["seed"] == 3
    for name in ("samples", "languages", "scenarios", "sub-questions needing tools", "steps parallel / serial"):
        assert name in first.stdout
    second = run(*arguments)
    assert second.stdout == first.stdout
    assert read_card(tmp_path / "train") == card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--teacher_model=m",), "--teacher_model is for an endpoint: give --teacher_url too"),
        (("--teacher_url=host:1",), "--teacher_url=host:1: write http://HOST:PORT/v1"),
        (("--teacher_url=http://host:1/v1",), "--teacher_url wants --teacher_model"),
        (("--embedder_model=m",), "--embedder_model is for an endpoint"),
        (("--config.questions=nowhere.jsonl",), "nowhere.jsonl cannot be read"),
        (("--config.tools_of=nowhere",), "no dataset at nowhere"),
        (("--config.min_hops=9",), "min_hops is 9, max_hops is 3; the first must not be above"),
        (("--config.structure=x",), "the nearest is --config.structures"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(f"--workdir={tmp_path}", "--config.count=4", *arguments)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "train").exists()
