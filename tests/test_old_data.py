"""What the version before wrote is read, run and gone on with: `data/version_0_1.tar.xz` holds workdirs of it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from programs_world import Ended, Programs, programs
from viewing import stored_runs

from astra_jax.evaluation.saved import load_evaluation
from astra_jax.run.metrics import read_metrics
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Task, ToolChain, ToolEnvironment, ToolServer, Trajectory
from synthesis.servers.mcp_client import McpConnections

COMMANDS = {
    "environments": ["--config.count=3", '--config.languages={"en":1}', "--config.fact_distractors=false"],
    "trajectories": [
        "--config.trajectories=4",
        "--config.proposals=1",
        "--config.walks=4",
        "--config.mcp_share=0.6",
        "--config.min_tools=2",
        '--config.languages={"en":1}',
        '--config.fact_servers=["numbers"]',
        "--config.emulated_servers=[]",
    ],
}
"""By which the workdirs were made."""
KINDS = {
    "trajectories/servers": ToolServer,
    "trajectories/chains": ToolChain,
    "trajectories/tasks": Task,
    "trajectories/trajectories": Trajectory,
    "environments/train": ToolEnvironment,
    "environments/held_out": ToolEnvironment,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs("launch.sft", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return stored_runs(tmp_path / "old")


@pytest.mark.parametrize("name", KINDS)
def test_datasets_are_read(old: Path, name: str) -> None:
    records = list(read_dataset(old / name, KINDS[name]))
    assert len(records) == read_card(old / name)["count"] > 0


async def test_a_stored_command_starts_its_server(old: Path, tmp_path: Path) -> None:
    [clock] = [one for one in read_dataset(old / "trajectories/servers", ToolServer) if one.id == "mcp_time"]
    assert "synthesis.trajectories.pinned_clock" in clock.execution.command
    async with McpConnections(cwd=tmp_path) as connections:
        server = await connections.get(clock.execution)
        text, succeeded = await server.call("get_current_time", {"timezone": "UTC"})
    assert succeeded and msgspec.json.decode(text)["datetime"] == "2026-01-15T12:00:00+00:00"


def journal(workdir: Path) -> set[tuple]:
    [file] = workdir.rglob("*.sqlite")
    with sqlite3.connect(file) as database:
        return set(database.execute("SELECT * FROM done"))


@pytest.mark.slow
def test_a_run_goes_on_from_its_journal(start: Programs, old: Path) -> None:
    workdir = old / "environments"
    before = journal(workdir)
    digests = {name: read_card(old / name)["digest"] for name in KINDS if name.startswith("environments")}
    for name in digests:
        shutil.rmtree(old / name)
    ended = start(f"--workdir={workdir}", *COMMANDS["environments"], module="launch.environments")
    assert ended.code == 0, ended.errors
    assert journal(workdir) == before, "what was finished was done again"
    assert {name: read_card(old / name)["digest"] for name in digests} == digests


def test_a_run_whose_journal_was_named_after_its_settings_is_refused(start: Programs, old: Path) -> None:
    """What is in it cannot be told apart by what it was made of. Its datasets stay as they are."""
    before = journal(old / "trajectories")
    digests = {name: read_card(old / name)["digest"] for name in KINDS if name.startswith("trajectories")}
    ended = start(f"--workdir={old / 'trajectories'}", *COMMANDS["trajectories"], module="launch.trajectories")
    assert ended.code == 2 and "is the journal of an earlier version" in ended.errors
    assert "Traceback" not in ended.errors and journal(old / "trajectories") == before
    assert {name: read_card(old / name)["digest"] for name in digests} == digests


SFT = """
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=400, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32,
                    tie_embeddings=True, max_positions=512)
DATA = DataConfig(seq_len=512, packing_bins=4, split_at_user_turns=False)  # the only way there was
CONFIG = SFTRun(MODEL, SFTConfig(data=DATA, batch_size=4, micro_batch_size=2, steps=6, learning_rate=2e-2,
                                 checkpoint_every=2, log_every=1, eval_every=100, sample_every=0))
"""
"""The settings of the run in the archive, which was killed after its step 4 of 6, as they are called today."""


def train(start: Programs, old: Path, config: str) -> Ended:
    (old / "sft/config.py").write_text(config)
    flags = {"config": "config.py", "weights": "hf", "data": "data", "workdir": "run"}
    return start(*(f"--{flag}={old / 'sft' / name}" for flag, name in flags.items()))


@pytest.mark.slow
def test_a_training_run_goes_on_from_its_checkpoint(start: Programs, old: Path) -> None:
    metrics = old / "sft/run/metrics"
    before = {row["step"]: row["train/loss"] for row in read_metrics(metrics)}
    ended = train(start, old, SFT)
    assert ended.code == 0, ended.errors
    after = {row["step"]: row["train/loss"] for row in read_metrics(metrics)}
    assert after == pytest.approx(before, rel=1e-5) and sorted(after) == [1, 2, 3, 4, 5, 6]
    assert (old / "sft/run/checkpoints/states/6").is_dir()
    starts = msgspec.json.decode((old / "sft/run/run.json").read_bytes())["starts"]
    assert len(starts) == 2


@pytest.mark.slow
def test_a_configuration_file_of_old_names_is_refused_with_the_name(start: Programs, old: Path) -> None:
    ended = train(start, old, (old / "sft/config.py").read_text())
    assert "No module named 'astra_jax.data'" in ended.line


def test_an_evaluation_is_read(old: Path) -> None:
    evaluation = load_evaluation(old / "evaluation")
    assert evaluation.suites["bfcl_v3_mt"].info.title == "BFCL v3 multi-turn"
    assert [one.score for one in evaluation.results] == [1.0, 0.0]
