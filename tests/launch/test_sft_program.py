"""`launch.sft` as users run it: from a Hugging Face folder to one that transformers loads, stopped and killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from sft_world import make_dataset, make_tokenizer, trajectories

from astra_jax.metrics import read_metrics
from astra_jax.models.qwen3.modules import init_params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.models.qwen3.weights import save_hf

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow

CONFIG = """
from astra_jax.data import DataConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft_config import SFTConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=400, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64,
                    tie_embeddings=True, max_positions=512)
DATA = DataConfig(seq_len=512, rows=4, packing_bins=4)
CONFIG = SFTRun(MODEL, SFTConfig(data=DATA, steps=12, learning_rate=2e-2, checkpoint_every=3, eval_every=4))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a configuration, a Hugging Face model with its tokenizer, and two datasets."""
    folder = tmp_path_factory.mktemp("sft")
    (folder / "config.py").write_text(CONFIG)
    tokenizer = make_tokenizer(folder / "hf")
    names = {}
    exec(CONFIG, names)
    model: Qwen3Config = names["MODEL"]
    assert tokenizer.vocab_size <= model.vocab_size
    save_hf(init_params(model, jax.random.key(0)), model, folder / "hf")
    make_dataset(folder / "data", trajectories(24, longest=2))
    make_dataset(folder / "held_out", trajectories(30)[24:])
    return folder


def command(world: Path, workdir: Path, *more: str) -> list[str]:
    flags = {"config": world / "config.py", "weights": world / "hf", "data": world / "data", "workdir": workdir}
    return [sys.executable, "-m", "launch.sft", *(f"--{name}={value}" for name, value in flags.items()), *more]


def run(world: Path, workdir: Path, *more: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XLA_FLAGS": "", **environment}
    result = subprocess.run(
        command(world, workdir, *more), cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment
    )
    assert result.returncode == code, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    result = run(world, workdir, f"--held_out={world / 'held_out'}", "--profile_steps=5:6")
    assert re.search(
        r"/whole/checkpoints: 12 steps, finished, loss \d\.\d+; 24 conversations, 0 cut, 0 dropped; cpu", result.stdout
    )
    return workdir


def assert_same_losses(workdir: Path, whole: Path) -> None:
    ours, theirs = (read_metrics(one / "metrics") for one in (workdir, whole))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, 13))
    for a, b in zip(ours, theirs, strict=True):
        assert {a[name] for name in ("loss", "gradient_norm")} == {b[name] for name in ("loss", "gradient_norm")}


def test_a_run_says_what_it_was_and_what_it_came_to(finished) -> None:
    rows = read_metrics(finished / "metrics")
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8, 12]
    assert rows[-1]["held_out_loss"] < rows[3]["held_out_loss"]
    assert rows[-1]["checkpoint_seconds"] > 0 and rows[-1]["tokens_per_second"] > 0 and "mfu" not in rows[-1]
    record = json.loads((finished / "run.json").read_text())
    assert record["config"]["sft"]["learning_rate"] == 2e-2
    (start,) = record["starts"]
    assert start["versions"]["jax"] == jax.__version__ and start["hardware"]["platform"] == "cpu"
    assert "--profile_steps=5:6" in start["command"] and re.fullmatch(r"[0-9a-f]{12}\+?", start["commit"])
    assert list((finished / "profile").rglob("*.xplane.pb"))


def test_what_was_trained_loads_in_transformers(world, finished, tmp_path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    target = tmp_path / "hf"
    convert = [sys.executable, "-m", "launch.convert", f"--from_orbax={finished / 'checkpoints'}", f"--to_hf={target}"]
    subprocess.run(convert, cwd=ROOT, check=True, capture_output=True, timeout=300)
    before, after = (AutoModelForCausalLM.from_pretrained(str(folder)) for folder in (world / "hf", target))
    ids = torch.arange(30)[None]
    assert after.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=-1).shape == (1, 35)
    assert (before(ids).logits - after(ids).logits).abs().max() > 0.1


def test_the_same_command_again_has_nothing_to_do(world, finished) -> None:
    result = run(world, finished, f"--held_out={world / 'held_out'}")
    assert "12 steps, finished" in result.stdout
    assert len(json.loads((finished / "run.json").read_text())["starts"]) >= 2
    assert len(read_metrics(finished / "metrics")) == 12


def when(workdir: Path, steps: int, process: subprocess.Popen) -> None:
    """Wait until a run has logged so many steps."""
    until = time.monotonic() + 200
    while len(read_metrics(workdir / "metrics")) < steps:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)


def test_a_notice_saves_and_ends_well(world, finished, tmp_path) -> None:
    process = subprocess.Popen(command(world, tmp_path / "run"), cwd=ROOT, text=True, stdout=subprocess.PIPE)
    when(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    (steps,) = map(int, re.findall(r"(\d+) steps, preempted", out))
    assert 1 <= steps < 12 and (tmp_path / "run" / "checkpoints" / "states" / str(steps)).is_dir()
    run(world, tmp_path / "run")
    assert_same_losses(tmp_path / "run", finished)


def test_kills_lose_nothing_that_was_saved(world, finished, tmp_path) -> None:
    """Killed at random moments of its life, saves among them; each new start goes on where the last save was."""
    rng = random.Random(0)
    saved = 0
    for _ in range(6):
        process = subprocess.Popen(command(world, tmp_path / "run"), cwd=ROOT, stderr=subprocess.DEVNULL)
        done = len(read_metrics(tmp_path / "run" / "metrics"))
        try:
            when(tmp_path / "run", min(done + 1, 12), process)
            time.sleep(rng.uniform(0, 1.5))
        finally:
            process.kill()
            process.wait()
        states = tmp_path / "run" / "checkpoints" / "states"
        steps = [int(path.name) for path in states.iterdir() if path.name.isdecimal()] if states.exists() else []
        assert max(steps, default=0) >= saved
        saved = max(steps, default=0)
    run(world, tmp_path / "run")
    assert_same_losses(tmp_path / "run", finished)


def test_two_hosts_equal_one_and_one_goes_on_for_two(world, finished, tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    more = ["--mesh=fsdp=4", f"--coordinator={address}", "--hosts=2", "--config.sft.checkpoint_every=7"]
    hosts = [
        subprocess.Popen(command(world, tmp_path / "run", *more, f"--host={i}"), cwd=ROOT, env=environment)
        for i in range(2)
    ]
    try:
        when(tmp_path / "run", 8, hosts[0])
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    run(world, tmp_path / "run", "--mesh=fsdp=2", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    ours, theirs = (read_metrics(one / "metrics") for one in (tmp_path / "run", finished))
    assert [row["step"] for row in ours] == list(range(1, 13))
    np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=2e-3)
    assert [r["trained_tokens"] for r in ours] == [r["trained_tokens"] for r in theirs], "no example twice or never"


def test_preview_shows_the_mask(world, tmp_path) -> None:
    plain = run(world, tmp_path / "run", "--preview=2", NO_COLOR="1").stdout
    assert plain.count("tokens are trained on") == 2 and not (tmp_path / "run").exists()
    assert "«" in plain and "I look" in plain
    trained = "".join(re.findall("«(.*?)»", plain, re.S))
    assert "I look" in trained and "<tool_call>" in trained and "What is the capital" not in trained
    colours = run(world, tmp_path / "run", "--preview=1", NO_COLOR="").stdout
    assert "\x1b[32m" in colours and "«" not in colours


def test_bench_writes_a_row(world, tmp_path) -> None:
    out = run(world, tmp_path / "run", "--bench=3").stdout
    row = json.loads(out)
    assert row == json.loads((tmp_path / "run" / "bench.jsonl").read_text())
    assert row["tokens_per_second"] > 0 and row["steps"] == 3 and row["seq_len"] == 512 and 0 < row["mask_share"] < 1


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--profile_steps=7", "--profile_steps=7: write FIRST:LAST"),
        ("--data=/none", "no dataset at /none"),
        ("--tokenizer=/none", "/none has neither tokenizer.json"),
        ("--config.sft.data.seq_len=4096", "data.seq_len"),
        ("--config.sft.learning_rte=1", "the nearest is --config.sft.learning_rate"),
        ("--hosts=2", "--hosts goes with all of --coordinator, --hosts and --host"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(world, tmp_path, flag: str, words: str) -> None:
    errors = [
        line for line in run(world, tmp_path / "run", flag, code=2).stderr.splitlines() if line.startswith("error: ")
    ]
    assert len(errors) == 1 and words in errors[0]
