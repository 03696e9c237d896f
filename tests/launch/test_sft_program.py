"""`astra sft` as users run it: from a Hugging Face folder to one that transformers loads, stopped and killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from bucket_world import Storage, storage
from programs_world import Ended, Programs, Started, programs
from selection import by_day
from sft_world import make_dataset, make_tokenizer, trajectories
from tensorboardX.proto.event_pb2 import Event
from vllm_world import Server, World, post, require_vllm, serving

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.metrics import read_metrics
from astra_jax.run.optimizers import initial_state
from astra_jax.sft.step import sft_optimizer
from astra_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow

UNSAMPLED = "--config.sft.sample_every=0"
"""Where something else is tested: compiling what draws samples is a fifth of so short a run."""

KILLS = int(os.environ.get("ASTRA_KILLS", "2"))
"""How often a run is killed; 50 take six minutes."""
STEPS = max(12, 2 * KILLS)

CONFIG = f"""
from astra_jax.sft.data import DataConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=400, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64,
                    tie_embeddings=True, max_positions=512)
DATA = DataConfig(seq_len=512, packing_bins=4)
CONFIG = SFTRun(MODEL, SFTConfig(data=DATA, batch_size=4, steps={STEPS}, learning_rate=2e-2, checkpoint_every=3,
                                   eval_every=4, sample_every=5, samples=2, sample_tokens=20))
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
    save_hf(model.init(jax.random.key(0)), model, folder / "hf")
    make_dataset(folder / "data", trajectories(24, longest=2))
    make_dataset(folder / "held_out", trajectories(30)[24:])
    return folder


def command(world: Path, workdir: Path | str, *more: str) -> list[str]:
    flags = {"config": world / "config.py", "weights": world / "hf", "data": world / "data", "workdir": workdir}
    return [sys.executable, "-m", "launch.sft", *(f"--{name}={value}" for name, value in flags.items()), *more]


def run(world: Path, workdir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command(world, workdir, *more), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Programs]:
    """Starts, where how the program begins is tested elsewhere."""
    with programs("launch.sft", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="module")
def begun(world, start) -> Callable[..., Started]:
    """A run that goes on beside the test."""
    return lambda workdir, *more, **environment: start.begin(*command(world, workdir, *more)[3:], **environment)


@pytest.fixture(scope="module")
def forked(begun) -> Callable[..., Ended]:
    """A run, and what became of it."""
    return lambda workdir, *more, **environment: begun(workdir, *more, **environment).wait()


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    result = run(world, workdir, f"--held_out={world / 'held_out'}", "--profile_steps=5:5")
    assert re.search(
        rf"/whole/checkpoints: {STEPS} steps, finished, loss \d\.\d+, held-out loss \d\.\d+; 36 examples, 0 cut, "
        r"0 dropped; cpu",
        result.stdout,
    )
    return workdir


def assert_same_losses(workdir: Path, whole: Path) -> None:
    ours, theirs = (read_metrics(one / "metrics") for one in (workdir, whole))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, STEPS + 1))
    for a, b in zip(ours, theirs, strict=True):
        assert {a[name] for name in ("train/loss", "train/grad_norm")} == {
            b[name] for name in ("train/loss", "train/grad_norm")
        }


def test_a_run_says_what_it_was_and_what_it_came_to(finished) -> None:
    rows = read_metrics(finished / "metrics")
    evaluated = [row["step"] for row in rows if "eval/loss" in row]
    assert evaluated == sorted({*range(4, STEPS + 1, 4), STEPS})
    assert rows[-1]["eval/loss"] < rows[3]["eval/loss"]
    assert rows[-1]["seconds/checkpoint"] > 0 and rows[-1]["perf/tokens_per_second"] > 0 and "perf/mfu" not in rows[-1]
    assert rows[-1]["perf/peak_host_memory_gib"] > 0
    samples = {path.name: path.read_text() for path in (finished / "samples").iterdir()}
    assert sorted(samples) == [f"{step:08d}.txt" for step in sorted({*range(5, STEPS + 1, 5), STEPS})]
    assert all(text.count("--- the model") == 2 and "What is the capital of" in text for text in samples.values())
    assert_in_tensorboard(finished / "metrics", rows)
    record = json.loads((finished / "run.json").read_text())
    assert record["config"]["sft"]["learning_rate"] == 2e-2
    (start,) = record["starts"]
    assert start["versions"]["jax"] == jax.__version__ and start["hardware"]["platform"] == "cpu"
    assert "--profile_steps=5:5" in start["command"] and re.fullmatch(r"[0-9a-f]{12}\+?", start["commit"])
    assert list((finished / "profile").rglob("*.xplane.pb"))


def assert_in_tensorboard(folder: Path, rows: list[dict[str, float]]) -> None:
    """Every figure of every row is there, and the samples."""
    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("events.*")):  # of the same step the later start's counts
        data, place = file.read_bytes(), 0
        while place < len(data):  # TFRecord: length, its checksum, the record, its checksum
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += length + 16
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    for row in rows:
        for name, value in row.items():
            if name != "step":
                assert found[name][row["step"]] == pytest.approx(value, rel=1e-5)
    assert max(found["samples/text_summary"]) == STEPS


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    """What was trained, as a Hugging Face folder."""
    target = tmp_path_factory.mktemp("exported") / "hf"
    convert = [sys.executable, "-m", "launch.convert", f"--from_orbax={finished / 'checkpoints'}", f"--to_hf={target}"]
    subprocess.run(convert, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return target


PROMPT = "<|im_start|>user\nWhat is the capital of Kenya?<|im_end|>\n<|im_start|>assistant\n"


def transformers_says(folder: Path, count: int) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(str(folder))(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32")
    drawn = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return drawn[0, ids.shape[1] :].tolist()


def test_what_was_trained_loads_in_transformers(world, exported) -> None:
    before, after = (transformers_says(folder, 12) for folder in (world / "hf", exported))
    assert len(after) == 12 and before != after


def test_what_was_trained_loads_in_vllm(exported, tmp_path) -> None:
    """Which draws what transformers draws, from the folder's own tokenizer on."""
    require_vllm()
    (tmp_path / "serve").symlink_to(exported)
    names: dict[str, Any] = {}
    exec(CONFIG, names)
    world = World(tmp_path, names["MODEL"], ChatTokenizer.load(exported))
    asked = {"model": "policy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with serving(Server(world, plugin=False, dummy=False, arguments=["--max-model-len=256"])) as (server,):
        status, answer = post(server, "/v1/completions", asked | {"return_token_ids": True})
    assert status == 200 and answer["choices"][0]["token_ids"] == transformers_says(exported, 12)


def test_the_same_command_again_has_nothing_to_do(world, finished, forked) -> None:
    ended = forked(finished, f"--held_out={world / 'held_out'}")
    assert ended.code == 0 and f"{STEPS} steps, finished" in ended.out
    assert len(json.loads((finished / "run.json").read_text())["starts"]) >= 2
    assert len(read_metrics(finished / "metrics")) == STEPS


def when(workdir: Path, steps: int, process: Started) -> None:
    """Wait until a run has logged so many steps."""
    until = time.monotonic() + 200
    while len(read_metrics(workdir / "metrics")) < steps:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("kills", by_day([0, KILLS], 0))
def test_notice_and_kills_lose_nothing_that_was_saved(finished, begun, tmp_path, kills: int) -> None:
    """SIGTERM saves and ends well. Then it is killed at random moments of its life, saves among them; each new start
    goes on where the last save was."""
    workdir = tmp_path / "run"
    run = begun(workdir, UNSAMPLED)
    when(workdir, 1, run)
    run.send(signal.SIGTERM)
    ended = run.wait(200)
    assert ended.code == 0
    (saved,) = map(int, re.findall(r"(\d+) steps, preempted", ended.out))
    assert 1 <= saved < STEPS and (workdir / "checkpoints" / "states" / str(saved)).is_dir()
    rng = random.Random(0)
    for _ in range(kills):
        run = begun(workdir, UNSAMPLED)
        done = len(read_metrics(workdir / "metrics"))
        when(workdir, min(done + 1, STEPS), run)
        time.sleep(rng.uniform(0, 1))
        run.kill()
        states = workdir / "checkpoints" / "states"
        steps = [int(path.name) for path in states.iterdir() if path.name.isdecimal()]
        assert max(steps) >= saved
        saved = max(steps)
    assert begun(workdir, UNSAMPLED).wait().code == 0
    assert_same_losses(workdir, finished)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def devices(count: int) -> str:
    """The `XLA_FLAGS` of a process with so many devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def start_hosts(
    begun: Callable[..., Started], workdir: Path, count: int, *more: str, faults: Mapping[int, str] | None = None
) -> list[Started]:
    address = f"localhost:{free_port()}"
    more = ("--mesh=fsdp=4", f"--coordinator={address}", f"--hosts={count}", *more)
    last = {} if faults is None else {host: [flag] for host, flag in faults.items()}
    return [
        begun(workdir, *more, f"--host_index={i}", *last.get(i, []), XLA_FLAGS=devices(4 // count))
        for i in range(count)
    ]


def assert_trained_like(workdir: Path, whole: Path) -> None:
    """The losses of another reduction order, of the same examples."""
    ours, theirs = (read_metrics(one / "metrics") for one in (workdir, whole))
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([r["train/loss"] for r in ours], [r["train/loss"] for r in theirs], rtol=2e-3)
    assert [r["train/trained_tokens"] for r in ours] == [r["train/trained_tokens"] for r in theirs], (
        "no example twice or never"
    )


@pytest.mark.nightly
def test_of_four_hosts_one_is_killed_and_two_and_then_one_go_on_and_all_is_as_with_one(
    begun, forked, finished, tmp_path
) -> None:
    """Those that are left end and name it; what several hosts saved, several others and one alone go on from."""
    workdir = tmp_path / "run"
    hosts = start_hosts(begun, workdir, 4, UNSAMPLED, "--host_deadline=8")
    when(workdir, 4, hosts[0])
    hosts[2].kill()
    for host in hosts:
        ended = host.wait(120)
        if host is not hosts[2]:
            assert ended.code == 1 and "error: host 2 of 4 has given no sign of life for 8 s" in ended.errors
    hosts = start_hosts(begun, workdir, 2, "--config.sft.sample_every=2")
    when(workdir, 8, hosts[0])
    for host in hosts:
        host.kill()
    assert list((workdir / "samples").iterdir())
    assert forked(workdir, UNSAMPLED, "--mesh=fsdp=2", XLA_FLAGS=devices(2)).code == 0
    assert_trained_like(workdir, finished)


def test_a_host_that_fails_ends_the_others_with_its_reason(begun, tmp_path) -> None:
    """One of them looks for its data where there is none."""
    hosts = start_hosts(begun, tmp_path / "run", 2, "--host_deadline=8", faults={1: "--data=/none"})
    first, other = (host.wait(200) for host in hosts)
    assert "error: host 1 of 2 failed: DatasetError: no dataset at /none" in first.errors and first.code == 1
    assert "error: no dataset at /none" in other.errors and other.code != 0


@pytest.fixture(scope="module")
def bucket(world) -> Iterator[Storage]:
    """Google's storage, emulated, with the datasets in `gs://bucket`."""
    with storage() as made:
        for file in (*(world / "data").iterdir(), *(world / "held_out").iterdir()):
            made.put(f"{file.parent.name}/{file.name}", file.read_bytes())
        yield made


def test_a_run_in_a_bucket_that_is_killed_goes_on_and_is_the_same_run(
    finished, bucket, exported, start, begun, forked, tmp_path
) -> None:
    """Killed with a checkpoint there and maybe a later one on its way; what was left half-done is taken by nobody.

    Data and workdir are in the bucket: metrics, samples and weights are the same, to the bit; and it can be exported
    from there.
    """
    more = ("--data=gs://bucket/data", "--held_out=gs://bucket/held_out")
    killed = begun("gs://bucket/run", *more, **bucket.environment)
    until = time.monotonic() + 200
    while "states/3/commit_success.txt" not in bucket.names("run/checkpoints/"):
        assert killed.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    killed.kill()
    bucket.remove("run/lock")  # for whose end it would be waited a minute: tests/astra_jax/base/test_leases.py
    before = [row["step"] for row in map(json.loads, bucket.get("run/metrics/metrics.jsonl").splitlines())]
    assert before[:3] == [1, 2, 3] and before[-1] < STEPS, "what a checkpoint was saved after is there"
    bucket.put("run/checkpoints/states/99/state/d/half", b"as a save that was killed leaves it")
    out = forked("gs://bucket/run", *more, **bucket.environment).out
    assert f"gs://bucket/run/checkpoints: {STEPS} steps, finished" in out
    ours = bucket.copy("run/", tmp_path / "run")
    assert_same_losses(ours, finished)
    assert {name.partition("/")[0] for name in bucket.names("run/checkpoints/states/")} == {str(STEPS - 3), str(STEPS)}
    for a, b in zip(final_state(ours), final_state(finished), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = read_metrics(ours / "metrics")
    assert rows[-1]["eval/loss"] == read_metrics(finished / "metrics")[-1]["eval/loss"]
    assert_in_tensorboard(ours / "metrics", rows)
    samples, theirs = (
        {file.name: file.read_bytes() for file in (one / "samples").iterdir()} for one in (ours, finished)
    )
    assert samples == theirs
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (ours / "checkpoints" / name).read_bytes() == (finished / "checkpoints" / name).read_bytes()
    assert len(json.loads((ours / "run.json").read_text())["starts"]) == 2
    convert = ("--from_orbax=gs://bucket/run/checkpoints", f"--to_hf={tmp_path / 'hf'}")
    assert start(*convert, module="launch.convert", **bucket.environment).code == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (exported / name).read_bytes()
    other = ("--data=gs://bucket/data", "--config.sft.batch_size=1")
    line = forked("gs://bucket/run", *other, **bucket.environment).line
    assert "error: gs://bucket/run belongs to another run: sft.batch_size is " in line
    assert "--weights=gs://bucket/run/checkpoints --workdir=NEW" in line


def test_a_file_of_conversations_in_a_bucket_is_read_and_split(bucket, forked, tmp_path) -> None:
    rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Lima"}] for n in range(8)]
    bucket.put("chats.jsonl", "".join(json.dumps({"messages": row}) + "\n" for row in rows).encode())
    flags = {"--preview=1", "--held_out=25%"}
    place = bucket.environment | {"XDG_CACHE_HOME": str(tmp_path)}
    out = forked(tmp_path / "run", *flags, "--data=gs://bucket/chats.jsonl", **place).out
    assert "--held_out=25%: of 8 conversations 6 are trained on and 2 are held out" in out
    line = forked(tmp_path / "run", *flags, "--data=gs://bucket/none.jsonl", **place).line
    assert line == "error: --data=gs://bucket/none.jsonl: there is no such file"


def final_state(workdir: Path) -> list[np.ndarray]:
    """Weights and optimizer of the last step."""
    names: dict[str, Any] = {}
    exec(CONFIG, names)
    like = initial_state(names["MODEL"].init(jax.random.key(0)), sft_optimizer(names["CONFIG"].sft, STEPS))
    with contextlib.closing(Checkpointer(workdir / "checkpoints", reading=True)) as checkpointer:
        params, state, _ = checkpointer.restore(STEPS, like)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]


def test_preview_shows_the_mask(forked, tmp_path) -> None:
    plain = forked(tmp_path / "run", "--preview=2", NO_COLOR="1").out
    assert plain.count("tokens are trained on") == 2 and not (tmp_path / "run").exists()
    assert "«" in plain and "I look" in plain
    trained = "".join(re.findall("«(.*?)»", plain, re.S))
    assert "I look" in trained and "<tool_call>" in trained and "What is the capital" not in trained
    colours = forked(tmp_path / "run", "--preview=1", NO_COLOR="").out
    assert "\x1b[32m" in colours and "«" not in colours


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--profile_steps=7", "--profile_steps=7: write FIRST:LAST"),
        ("--data=/none", "no dataset at /none"),
        ("--workdir=s3://bucket/run", "--workdir=s3://bucket/run is neither a folder nor gs://BUCKET/FOLDER"),
        ("--tokenizer=/none", "/none has neither tokenizer.json"),
        ("--config.sft.data.seq_len=4096", "data.seq_len"),
        ("--config.sft.learning_rte=1", "the nearest is --config.sft.learning_rate"),
        *(
            (
                f"--held_out={share}",
                f"--held_out={share} leaves nothing to {what}: write a share above 0% and below 100%",
            )
            for share, what in (("0%", "measure on"), ("-5%", "measure on"), ("100%", "train on"), ("150%", "train on"))
        ),
        ("--held_out=0.05", "--held_out=0.05: write a share of --data with %, for example --held_out=5%"),
        ("--hosts=2", "--hosts is not enough: give all of --coordinator, --hosts and --host_index"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(forked, tmp_path, flag: str, words: str) -> None:
    assert words in forked(tmp_path / "run", flag).line
