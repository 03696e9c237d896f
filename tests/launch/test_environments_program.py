"""`astra environments` as a user runs it: what it writes and says, twice, and what it says about bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from programs_world import Programs, programs

from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import ToolEnvironment


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Programs]:
    with programs("launch.environments", tmp_path_factory.mktemp("said")) as made:
        yield made


def test_environments_are_written_once_and_described(run: Programs, tmp_path: Path) -> None:
    arguments = (f"--workdir={tmp_path}", "--seed=3", "--config.count=10", '--config.distractors={"high": 1, "low": 1}')
    first = run(*arguments)
    assert first.code == 0, first.errors[-3000:]
    made = [one for split in ("train", "held_out") for one in read_dataset(tmp_path / split, ToolEnvironment)]
    assert len(made) >= 8 and all(one.id.startswith("env-3-") for one in made)
    assert all(len(tools) <= 1 for one in made for tools in one.distractors.values())
    card = read_card(tmp_path / "train")
    assert card["config"]["count"] == 10 and card["teacher"] == "OfflineTeacher" and card["seed"] == 3
    for name in ("samples", "languages", "scenarios", "sub-questions needing tools", "steps parallel / serial"):
        assert name in first.out
    second = run(*arguments)
    assert second.out == first.out
    assert read_card(tmp_path / "train") == card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--teacher_model=m",), "--teacher_model is for an endpoint: give --teacher_url too"),
        (("--teacher_url=host:1",), "--teacher_url=host:1: write http://HOST:PORT/v1"),
        (("--teacher_url=http://host:1/v1",), "--teacher_url needs --teacher_model"),
        (('--roles={"embedder": {"model": "m"}}',), "--roles: embedder has no url"),
        (("--config.questions=nowhere.jsonl",), "nowhere.jsonl cannot be read"),
        (("--config.tools_of=nowhere",), "no dataset at nowhere"),
        (("--config.min_hops=9",), "min_hops is 9, max_hops is 3; the first must not be above"),
        (("--config.structure=x",), "the nearest is --config.structures"),
    ],
)
def test_bad_input_is_one_line(run: Programs, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(f"--workdir={tmp_path}", "--config.count=4", *arguments)
    assert message in result.line
    assert not (tmp_path / "train").exists()
