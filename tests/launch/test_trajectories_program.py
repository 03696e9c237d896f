"""`astra trajectories` as a user runs it: what it writes and says, twice, and what it says about bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs_world import Programs, programs

from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import ToolServer, Trajectory
from synthesis.pipeline.languages import language_of

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--config.trajectories=12", '--config.fact_servers=["numbers", "elements", "http"]', "--config.mcp_share=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Programs]:
    with programs("launch.trajectories", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.mark.slow
def test_trajectories_are_written_once_and_described(run: Programs, tmp_path: Path) -> None:
    arguments = (f"--workdir={tmp_path}", "--seed=3", *SMALL)
    first = run(*arguments)
    assert first.code == 0, first.errors[-3000:]
    made = read_dataset(tmp_path / "trajectories", Trajectory)
    assert len(made) == 12 and {one.language for one in made} <= {"en", "zh"}
    card = read_card(tmp_path / "trajectories")
    assert card["config"]["trajectories"] == 12 and card["seed"] == 3
    assert f"{tmp_path / 'trajectories'}: 12" in first.out and "tool calls" in first.out
    second = run(*arguments)
    assert second.out == first.out and read_card(tmp_path / "trajectories") == card
    assert len(list((tmp_path / "journals").glob("*.sqlite"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("language", ["en", "zh"])
def test_one_language_alone(run: Programs, tmp_path: Path, language: str) -> None:
    result = run(
        f"--workdir={tmp_path}", *SMALL, f'--config.languages={{"{language}": 1.0}}', "--config.oversample_ratio=0.5"
    )
    assert result.code == 0, result.errors[-3000:]
    made = read_dataset(tmp_path / "trajectories", Trajectory)
    assert len(made) == 12 and {one.language for one in made} == {language}
    questions = [message.content for one in made for message in one.messages if message.role == "user"]
    assert {language_of(question) for question in questions} == {language}
    assert {server.language for server in read_dataset(tmp_path / "servers", ToolServer)} == {language}
    assert f"{'languages':<32} {language} 100.0%" in result.out


@pytest.mark.slow
def test_a_registry_is_read_and_what_is_no_server_is_counted(run: Programs, tmp_path: Path) -> None:
    """The offline teacher knows nothing of foreign tools: their server is normalised, and asked about in vain."""
    tools = [
        {"name": f"find_{thing}", "description": f"Find a {thing} by its name.",
         "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
        for thing in ("book", "song", "film")
    ]  # fmt: skip
    registry = tmp_path / "tools.json"
    registry.write_text(json.dumps([{"type": "function", "function": tool} for tool in tools]), encoding="utf-8")
    (tmp_path / "broken.jsonl").write_text("{\n", encoding="utf-8")
    registries = json.dumps([str(registry), str(tmp_path / "broken.jsonl")])
    result = run(f"--workdir={tmp_path / 'run'}", *SMALL, f"--config.tools={registries}")
    assert result.code == 0, result.errors[-3000:]
    assert "rejected by tools: 1 not_json" in result.out
    assert read_card(tmp_path / "run" / "servers")["statistics"]["execution"]["emulated"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--teacher_model=m",), "--teacher_model is for an endpoint: give --teacher_url too"),
        (("--config.max_length=0",), "TrajectoriesConfig.max_length is 0; use a whole number from 1"),
        (("--config.operators=[\"vot\"]",), "vot"),
        (("--config.trajectory=1",), "the nearest is --config.trajectories"),
        (("--ray_workers=2",), "--ray_workers is for --executor=ray"),
        (("--executor=ray", "--ray_address=ray://host:10001"), "run this program on a machine of the cluster"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run: Programs, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(f"--workdir={tmp_path}", *arguments)
    assert message in result.line
    assert not (tmp_path / "trajectories").exists()


def test_without_its_package_the_executor_ray_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('it is not here')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "launch.trajectories", f"--workdir={tmp_path / 'run'}", "--executor=ray", *SMALL]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 2 and "it is not here): pip install '.[ray]'" in result.stderr
