"""From a model that knows no tools to one that was trained to call them: trained, exported, and started from again."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from plain_world import ADDED, SYSTEM, make_folder
from programs_world import Ended, Programs, programs
from sft_world import TOOL, make_dataset, trajectories

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.lora import LoRA
from astra_jax.run import frozen, weights
from astra_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

CONFIG = """
from astra_jax.sft.data import DataConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=384, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32,
                    tie_embeddings=False, max_positions=512)
CONFIG = SFTRun(MODEL, SFTConfig(data=DataConfig(seq_len=512, packing_bins=4), batch_size=4, steps=2,
                                 learning_rate=1e-2, checkpoint_every=1, sample_every=2, samples=1, sample_tokens=5))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, a model's folder and a dataset."""
    folder = tmp_path_factory.mktemp("plain")
    make_folder(folder / "start")
    (folder / "config.py").write_text(CONFIG)
    names: dict = {}
    exec(CONFIG, names)
    save_hf(names["MODEL"].init(jax.random.key(0)), names["MODEL"], folder / "start")
    make_dataset(folder / "data", trajectories(12, longest=1))
    return folder


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs("launch.sft", tmp_path_factory.mktemp("said")) as start:
        yield start


def sft(forked: Programs, world: Path, weights: Path, workdir: Path, *more: str) -> Ended:
    flags = {"config": world / "config.py", "data": world / "data", "weights": weights, "workdir": workdir}
    return forked(*(f"--{name}={value}" for name, value in flags.items()), *more)


def test_a_plain_chat_model_learns_calls_and_is_started_from_as_one_that_knows_them(world, forked, tmp_path) -> None:
    run, following = tmp_path / "run" / "checkpoints", tmp_path / "next" / "checkpoints"
    ended = sft(forked, world, world / "start", run.parent)
    assert ended.code == 0 and "2 steps, finished" in ended.out and "0 dropped" in ended.out, ended.errors
    tokenizer = ChatTokenizer.load(run)
    assert tokenizer.added == () and tokenizer.digest == ChatTokenizer.load(world / "start").digest
    # Again, which has nothing to do; and from what came of it, with the configuration as it was.
    assert "2 steps, finished" in sft(forked, world, world / "start", run.parent).out
    ended = sft(forked, world, run, following.parent, "--config.sft.steps=1")
    assert ended.code == 0, ended.errors
    assert [json.loads((one / "config.json").read_text())["vocab_size"] for one in (run, following)] == [512, 512]

    ended = forked(f"--from_orbax={run}", f"--to_hf={tmp_path / 'hf'}", module="launch.convert")
    assert ended.code == 0, ended.errors
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
        AutoTokenizer.from_pretrained(tmp_path / "hf"),
    )
    assert model.get_input_embeddings().weight.shape == model.lm_head.weight.shape == (512, 32)
    embedding = model.get_input_embeddings().weight.detach().numpy()
    ids = [theirs.convert_tokens_to_ids(token) for token in ADDED]
    assert ids == [384, 385, 386, 387] and len({embedding[i].tobytes() for i in ids}) == 4  # they were trained apart
    assert np.array_equal(embedding[400], embedding[401])  # and what no token has was not
    text = theirs.apply_chat_template([{"role": "user", "content": "?"}], tools=[TOOL.to_openai()], tokenize=False)
    assert text.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools\n") and "<tool_call>" in text


def test_a_configuration_of_another_vocabulary_is_refused(world, forked, tmp_path) -> None:
    ended = sft(forked, world, world / "start", tmp_path / "run", "--config.model.vocab_size=640")
    assert "has vocab_size 384, but --config=" in ended.line and "has 640" in ended.line


STARTS = """
import dataclasses
import sys
from absl import flags
from astra_jax.models.lora import LoRA
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from launch.flags import models
folder, workdir, tokenizer = sys.argv[1:4]
flags.FLAGS(["program", "--config=x", f"--weights={folder}", f"--workdir={workdir}", f"--tokenizer={tokenizer}"])
from astra_jax.models.hf_checkpoint import read_config
from astra_jax.tokenizer import ChatTokenizer
config, model = SFTConfig(data=DataConfig(seq_len=64), lora=LoRA(rank=2)), read_config(folder)
made = ChatTokenizer.load(tokenizer)
config = models.with_added_tokens(config, made)
model = dataclasses.replace(model, vocab_size=made.rows(model.vocab_size))
found = models.origin(config, model)
embedding = models.load(config, model, None)["embed_vd"]
print(config.lora.tokens, found.step, found.rows, sorted(found.new_token_pieces), float(embedding[384:388].max()))
"""


def started(folder: Path, workdir: Path, tokenizer: Path) -> str:
    command = [sys.executable, "-c", STARTS, str(folder), str(workdir), str(tokenizer)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_adapters_train_rows_of_added_tokens_for_which_the_embedding_has_room(tmp_path: Path) -> None:
    """As Qwen2's. With a tokenizer from elsewhere they are the weights' own, which a run may have trained."""
    names: dict = {}
    exec(CONFIG, names)
    model = dataclasses.replace(names["MODEL"], vocab_size=400)
    params = model.init(jax.random.key(0))
    params["embed_vd"] = params["embed_vd"].at[384:].set(100.0)
    save_hf(params, model, make_folder(tmp_path / "start"))
    make_folder(tmp_path / "tokenizer")
    tokens, largest = started(tmp_path / "start", tmp_path / "run", tmp_path / "start").rsplit(" ", 1)
    assert tokens == "(384, 385, 386, 387) None 400 [384, 385, 386, 387]" and float(largest) < 10
    assert started(tmp_path / "start", tmp_path / "run", tmp_path / "tokenizer") == "() None None [] 100.0\n"


def test_adapters_stay_with_the_step_that_they_are_of_while_the_run_under_them_goes_on(tmp_path: Path) -> None:
    names: dict = {}
    exec(CONFIG, names)
    folder, checkpoints = make_folder(tmp_path / "below"), tmp_path / "run" / "checkpoints"
    params = names["MODEL"].init(jax.random.key(0))
    for step in (1, 2):
        weights.save_orbax(params, names["MODEL"], folder, step=step)
    assert started(folder, tmp_path / "run", folder).split(") ")[1].startswith("2 ")
    checkpoints.mkdir(parents=True)
    frozen.write(frozen.frozen(params, LoRA(rank=2), frozen.WeightsSource(str(folder), 1)), checkpoints)
    assert started(folder, tmp_path / "run", folder).split(") ")[1].startswith("1 ")


def test_programs_that_only_sample_make_the_rows_too(world) -> None:
    code = """
import sys
from absl import flags
from launch.flags import policies
flags.FLAGS(["program", f"--weights={sys.argv[1]}"])
model, tokenizer = policies.read()
print(model.vocab_size, policies.load(model)["embed_vd"].shape, tokenizer.added)
"""
    command = [sys.executable, "-c", code, str(world / "start")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"512 (512, 32) {ADDED}\n", done.stderr[-2000:]
