"""What the version before wrote is read, run and gone on with: `data/version_0_1.tar.xz` holds workdirs of it."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest

from astra_jax.evaluation.saved import load_evaluation
from astra_jax.run.metrics import read_metrics
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Task, ToolChain, ToolEnvironment, ToolServer, Trajectory
from synthesis.servers.mcp_client import McpConnections

ROOT = Path(__file__).parent.parent
ARCHIVE = ROOT / "tests" / "data" / "version_0_1.tar.xz"
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


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


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
@pytest.mark.parametrize("program", COMMANDS)
def test_a_run_goes_on_from_its_journal(old: Path, program: str) -> None:
    workdir = old / program
    before = journal(workdir)
    digests = {name: read_card(old / name)["digest"] for name in KINDS if name.startswith(program)}
    for name in digests:
        shutil.rmtree(old / name)
    command = [sys.executable, "-m", f"launch.{program}", f"--workdir={workdir}", *COMMANDS[program]]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert journal(workdir) == before, "what was finished was done again"
    assert {name: read_card(old / name)["digest"] for name in digests} == digests


SFT = """
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=400, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32,
                    tie_embeddings=True, max_positions=512)
DATA = DataConfig(seq_len=512, packing_bins=4)
CONFIG = SFTRun(MODEL, SFTConfig(data=DATA, batch_size=4, micro_batch_size=2, steps=6, learning_rate=2e-2,
                                 checkpoint_every=2, log_every=1, eval_every=100, sample_every=0))
"""
"""The settings of the run in the archive, which was killed after its step 4 of 6, as they are called today."""


def train(old: Path, config: str) -> subprocess.CompletedProcess[str]:
    (old / "sft/config.py").write_text(config)
    flags = {"config": "config.py", "weights": "hf", "data": "data", "workdir": "run"}
    command = [sys.executable, "-m", "launch.sft", *(f"--{flag}={old / 'sft' / name}" for flag, name in flags.items())]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_training_run_goes_on_from_its_checkpoint(old: Path) -> None:
    metrics = old / "sft/run/metrics"
    before = {row["step"]: row["loss"] for row in read_metrics(metrics)}
    result = train(old, SFT)
    assert result.returncode == 0, result.stderr
    after = {row["step"]: row["loss"] for row in read_metrics(metrics)}
    assert after == pytest.approx(before, rel=1e-5) and sorted(after) == [1, 2, 3, 4, 5, 6]
    assert (old / "sft/run/checkpoints/states/6").is_dir()
    starts = msgspec.json.decode((old / "sft/run/run.json").read_bytes())["starts"]
    assert len(starts) == 2


@pytest.mark.slow
def test_a_configuration_file_of_old_names_is_refused_with_the_name(old: Path) -> None:
    result = train(old, (old / "sft/config.py").read_text())
    assert result.returncode == 2 and "No module named 'astra_jax.data'" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_an_evaluation_is_read(old: Path) -> None:
    evaluation = load_evaluation(old / "evaluation")
    assert evaluation.suites["bfcl_v3_mt"].info.title == "BFCL v3 multi-turn"
    assert [one.score for one in evaluation.results] == [1.0, 0.0]
