"""The teacher's flags: what they refuse, and a run that stops with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ENDPOINT = ["--teacher_url=http://127.0.0.1:9/v1", "--teacher_model=m"]


def run(workdir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.environments", f"--workdir={workdir}", "--config.count=2", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--teacher_token_budget=5"], "--teacher_token_budget is for an endpoint: give --teacher_url too"),
        ([*ENDPOINT, "--teacher_prices=1"], "--teacher_prices=1: write two numbers"),
        ([*ENDPOINT, "--teacher_money_budget=5"], "money_budget is 5.0: without price_prompt"),
        ([*ENDPOINT, "--teacher_tokens_per_minute=-1"], "--teacher_tokens_per_minute=-1: use a number above 0"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_stops_says_what_is_finished_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"question": "How many seats has the aircraft?", "domain": "flights"}')
    stopped = run(tmp_path, *ENDPOINT, "--teacher_mode=replay", f"--config.questions={tmp_path}/questions.jsonl")
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/teacher.sqlite has no answer to a request for DecompositionAnswer" in line
    assert "decompose: 0 of 2 inputs are finished and kept in" in line
