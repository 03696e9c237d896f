"""Programs with a model: what is wrong is said before weights are read, disks fail, files are corrupt, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from grpo_world import make_grpo_world
from programs_world import ROOT, Programs, Started, programs
from sft_world import make_dataset, trajectories

from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.metrics import read_metrics
from synthesis.core.workdir import locked, locked_target

pytestmark = pytest.mark.slow

SFT_CONFIG = """
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs.training import SFTRun
from {module} import MODEL

CONFIG = SFTRun(MODEL, SFTConfig(data=DataConfig(seq_len=512, packing_bins=4), batch_size=2, steps={steps},
                                 learning_rate=1e-3, checkpoint_every=1, sample_every=0))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Configurations and a model (`serve`), `environments`, and `data`, trajectories."""
    folder = tmp_path_factory.mktemp("starts")
    make_grpo_world(folder)
    text = (folder / "config.py").read_text(encoding="utf-8")
    model = text[: text.index("EPISODE")]
    for name, steps in (("sft", 1), ("long", 10_000)):
        content = SFT_CONFIG.replace("from {module} import MODEL\n", model).format(steps=steps)
        (folder / f"{name}.py").write_text(content, encoding="utf-8")
    make_dataset(folder / "data", trajectories(8, longest=2))
    return folder


def sft(world: Path, workdir: Path, **changed: Path | str) -> list[str]:
    flags = {"config": world / "sft.py", "weights": world / "serve", "data": world / "data", "workdir": workdir}
    return [f"--{name}={value}" for name, value in (flags | changed).items()]


def grpo(world: Path, workdir: Path, **changed: Path | str) -> list[str]:
    flags = {"config": world / "config.py", "weights": world / "serve", "environments": world / "environments"}
    return [f"--{name}={value}" for name, value in (flags | {"workdir": workdir} | changed).items()]


@pytest.fixture(scope="module")
def start_sft(tmp_path_factory) -> Iterator[Programs]:
    with programs("launch.sft", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="module")
def start_nowhere(tmp_path_factory) -> Iterator[Programs]:
    """There is no device here: whoever asks for one gets another error."""
    with programs("launch.sft", tmp_path_factory.mktemp("said"), JAX_PLATFORMS="nowhere") as made:
        yield made


# ---------------------------------------------------------------------------------------------------------------------
# Cheap checks first


def test_sft_looks_at_its_inputs_before_it_wakes_a_device(world, start_nowhere, tmp_path) -> None:
    nowhere, wrong = tmp_path / "nowhere", tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    card = tmp_path / "card"
    shutil.copytree(world / "data", card)
    (card / "dataset_card.json").write_text("[]")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(world / "serve" / "config.json", bare)
    untold = tmp_path / "untold"
    untold.mkdir()
    (untold / "config.json").write_text('{"model_type": "qwen3"}')
    llama = tmp_path / "llama"
    shutil.copytree(world / "serve", llama)
    (llama / "config.json").write_text(
        (world / "serve" / "config.json").read_text().replace("qwen3", "llama").replace("Qwen3", "Llama")
    )
    cases: list[tuple[dict[str, Path | str], str]] = [
        ({"data": nowhere, "weights": nowhere}, f"no dataset at {nowhere}"),
        ({"data": wrong}, f"{wrong}, row 0 (counted from 0): bad_record: it is of no known form; its keys are none"),
        ({"data": card}, "dataset_card.json is not a JSON object"),
        ({"data": world / "environments"}, "holds ToolEnvironment records, expected Trajectory"),
        ({"held_out": nowhere}, f"no dataset at {nowhere}"),
        ({"config": world / "config.py"}, "is of type GRPORun; this program takes one of SFTRun"),
        ({"weights": nowhere}, f"{nowhere} has no config.json"),
        ({"weights": bare}, f"{bare} has no weights"),
        ({"weights": untold}, f"{untold}/config.json: vocab_size, hidden_size, num_hidden_layers, "),
        ({"weights": llama}, f"--config={world / 'sft.py'} are different models: family is llama there, qwen3 here;"),
        ({"tokenizer": nowhere}, f"{nowhere}"),
        ({"profile_steps": "3"}, "--profile_steps=3: write FIRST:LAST"),
    ]
    for changed, message in cases:
        assert message in start_nowhere(*sft(world, tmp_path / "run", **changed)).line
    assert not (tmp_path / "run").exists()


def test_grpo_looks_at_its_inputs_before_it_wakes_a_device(world, start_nowhere, tmp_path) -> None:
    nowhere = tmp_path / "nowhere"
    key, mine = tmp_path / "key", tmp_path / "mine.py"
    mine.write_text(
        "class Mine:\n    question = 'How many?'\n    def score(self, episode): return 1\nmine = [Mine()]\n"
    )
    leaves, leaving = tmp_path / "leaves.py", tmp_path / "leaving.py"
    leaves.write_text("import sys\nsys.exit(0)\n")
    leaving.write_text(
        f"import sys\n{mine.read_text()}def made(): sys.exit(0)\n"
        "class Asks(Mine):\n    @property\n    def question(self): sys.exit(0)\n"
    )
    servers: dict[str, Path | str] = {"rollout_url": "http://127.0.0.1:9"}
    cases: list[tuple[dict[str, Path | str], str]] = [
        ({"environments": nowhere, "weights": nowhere}, f"no dataset at {nowhere}"),
        ({"environments": world / "data"}, "holds Trajectory records, expected ToolEnvironment"),
        ({"config": world / "sft.py"}, "is of type SFTRun; this program takes one of GRPORun"),
        ({"config.grpo.solve_rates": "[0.1,0.9]"}, "has no recorded solve rate"),
        ({"weights": nowhere}, f"{nowhere} has no config.json"),
        ({"rollout_key_file": key}, "--rollout_key_file is for servers: give --rollout_url too"),
        (servers | {"rollout_key_file": key}, f"--rollout_key_file={key} is not a file"),
        (servers | {"rollout_sync_key_file": key}, f"--rollout_sync_key_file={key} is not a file"),
        (servers | {"rollout_ca_file": key}, f"--rollout_ca_file={key} is not a file of certificates"),
        ({"sandbox_key_file": key}, "--sandbox_key_file is for a sandbox service"),
        ({"environments": "no_such_module:mine"}, "no_such_module:mine: no_such_module cannot be imported"),
        ({"environments": "no_such_module:mine"}, "Start the program in the folder of no_such_module.py, or write the"),
        (
            {"environments": "mine.mine"},
            "there is no dataset at mine.mine; write environments of your own as",
        ),
        ({"environments": "random:mine"}, "random.py)"),
        ({"environments": f"{mine}:others"}, "has no others; it has Mine, mine"),
        ({"environments": f"{mine}:mine"}, "reward f1 counts sub-tasks"),
        ({"environments": f"{leaves}:mine"}, f"{leaves} cannot be imported (SystemExit: 0)"),
        ({"environments": f"{leaving}:made"}, f"{leaving}:made raised SystemExit: 0"),
        ({"environments": f"{leaving}:Asks"}, "environment Asks: question raised SystemExit: 0"),
        ({"config.grpo.episode.reward": f"{leaves}:judge"}, f"{leaves} cannot be imported (SystemExit: 0)"),
        ({"environments": f"mcp:{nowhere}"}, f"{nowhere}: No such file"),
        ({"environments_count": "3"}, "--environments_count is for verifiers:ID and openenv:URL"),
        ({"config.grpo.episode.reward": "f2"}, "there is no reward 'f2'; use f1"),
        ({"config.grpo.episode.reward": "no_such_module:judge"}, "no_such_module cannot be imported"),
    ]
    for changed, message in cases:
        assert message in start_nowhere(*grpo(world, tmp_path / "run", **changed), module="launch.grpo").line
    assert not (tmp_path / "run").exists()


def test_a_backend_that_jax_cannot_start_is_refused_before_weights_are_read(world, start_nowhere, tmp_path) -> None:
    """It was called a fault of astra-jax, with a traceback."""
    damaged, served = tmp_path / "damaged", ["--max_prompt_tokens=400", "--max_response_tokens=100"]
    shutil.copytree(world / "serve", damaged)
    for file in damaged.glob("*.safetensors"):
        file.write_bytes(b"reading this is another error")
    cases = {
        "launch.sft": [*sft(world, tmp_path / "sft"), "--metrics_port=0"],
        "launch.grpo": grpo(world, tmp_path / "grpo"),
        "launch.serve": [f"--weights={damaged}", "--port=0"],
        "launch.convert": [f"--from_hf={damaged}", f"--to_orbax={tmp_path / 'to'}"],
        "launch.rehearse": [f"--weights={damaged}", f"--to={tmp_path / 'to'}"],
        "launch.difficulty": [f"--environments={world / 'environments'}", f"--to={tmp_path / 'to'}", *served]
        + [f"--weights={damaged}"],
        "launch.quickstart": [f"--workdir={tmp_path / 'quickstart'}", "--profile=ci"],
    }
    for module, arguments in cases.items():
        line = start_nowhere(*arguments, module=module).line
        assert line.startswith("error: JAX_PLATFORMS=nowhere: JAX cannot start the backend nowhere: "), module


# ---------------------------------------------------------------------------------------------------------------------
# Corrupt files, two runs, and disks


@pytest.mark.parametrize("damage", ["cut", "changed", "other"])
def test_records_that_are_corrupt_are_refused_by_name(world, start_sft, tmp_path, damage) -> None:
    data = tmp_path / "data"
    shutil.copytree(world / "data", data)
    file = data / "records.array_record"
    content = bytearray(file.read_bytes())
    if damage == "other":  # whole, and of as many records: only the digest tells
        other = trajectories(8, longest=2)
        other[0] = msgspec.structs.replace(other[0], id="another")
        shutil.copy(make_dataset(tmp_path / "others", other) / file.name, file)
    else:
        if damage == "changed":
            used = [place for place, byte in enumerate(content) if byte]  # the others fill blocks up
            content[used[len(used) // 2]] ^= 0xFF
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    assert str(data) in start_sft(*sft(world, tmp_path / "run", data=data)).line
    assert not list((tmp_path / "run").rglob("_CHECKPOINT_METADATA"))


def test_a_second_run_is_refused_before_it_writes(world, start_sft, tmp_path) -> None:
    """`run.json` was rewritten by the one that was refused."""
    workdir = tmp_path / "run"
    with locked(workdir):
        line = start_sft(*sft(world, workdir)).line
        assert f"is in use by another process (process {os.getpid()} of " in line
        assert {one.name for one in workdir.iterdir()} == {"lock", "ending.json"}


def test_conversions_and_measurements_hold_what_they_write(world, start_sft, tmp_path) -> None:
    target = tmp_path / "target"
    cases = [
        ("launch.convert", [f"--from_hf={world / 'serve'}", f"--to_orbax={target}"]),
        (
            "launch.difficulty",
            [f"--environments={world / 'environments'}", f"--to={target}", f"--weights={world / 'serve'}"]
            + ["--max_prompt_tokens=400", "--max_response_tokens=100"],
        ),
    ]
    with locked_target(target):
        for module, arguments in cases:
            assert "is being written by another process" in start_sft(*arguments, module=module).line
    assert not list(tmp_path.glob(".target*")) and not target.exists()


def test_a_full_disk_is_refused_by_name_and_leaves_nothing_half(world, start_sft, tmp_path) -> None:
    workdir = tmp_path / "run"
    ended = start_sft(*sft(world, workdir), file_bytes=100_000)  # any weights are more
    line = ended.line
    assert str(workdir) in line and "could not be written" in line and ended.errors.endswith(f"{line}\n"), ended
    checkpointer = Checkpointer(workdir / "checkpoints", reading=True)
    assert checkpointer.latest() is None
    checkpointer.close()
    assert start_sft(*sft(world, workdir)).code == 0  # there is room again


def test_a_run_is_whole_where_its_output_cannot_be_written(world, tmp_path) -> None:
    """The error of the progress bar ended training, and left the last checkpoint half written."""
    started = []
    for name, arguments in (("sft", sft(world, tmp_path / "sft")), ("grpo", grpo(world, tmp_path / "grpo"))):
        command = [sys.executable, "-m", f"launch.{name}", *arguments]
        redirected = ["bash", "-c", 'exec "$@" >/dev/full 2>/dev/full', "bash", *command]
        started.append(subprocess.Popen(redirected, cwd=ROOT))
    for name, process in zip(("sft", "grpo"), started, strict=True):
        assert process.wait(timeout=500) == 0, name
        rows = read_metrics(tmp_path / name / "metrics")
        checkpointer = Checkpointer(tmp_path / name / "checkpoints", reading=True)
        assert checkpointer.latest() == rows[-1]["step"] > 0
        checkpointer.close()


def test_a_folder_that_may_not_be_written_is_refused_by_name(world, start_sft, tmp_path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o500)
    elif subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs to mount a disk, or not to be root")
    try:
        assert f"error: {folder}/run: " in start_sft(*sft(world, folder / "run")).line
    finally:
        if not os.geteuid():
            subprocess.run(["umount", folder], check=True)


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM


def test_ctrl_c_ends_training_in_one_line_and_sigterm_saves(world, start_sft, tmp_path) -> None:
    """All four at once: most of their time they wait for one another's processor. Each gets its signal in its steps,
    with all its children."""
    runs = {
        (name, number): tmp_path / f"{name}{int(number)}" / "run"
        for name in ("sft", "grpo")
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    started: dict[tuple[str, signal.Signals], Started] = {}
    for (name, number), workdir in runs.items():
        workdir.parent.mkdir()
        if name == "sft":
            arguments = [*sft(world, workdir, config=world / "long.py"), "--config.sft.data.workers=1"]
        else:
            arguments = [*grpo(world, workdir), "--config.grpo.steps=10000"]
        started[name, number] = start_sft.begin(*arguments, module=f"launch.{name}")
    waiting = set(runs)
    while waiting:
        for key in list(waiting):
            if started[key].poll() is not None or (runs[key] / "metrics" / "metrics.jsonl").exists():
                started[key].send(key[1])
                waiting.remove(key)
        time.sleep(0.02)
    for (name, number), program in started.items():
        ended = program.wait()
        code, said = ended.code, ended.errors
        assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
        last = said.splitlines()[-1]
        checkpointer = Checkpointer(runs[name, number] / "checkpoints", reading=True)
        saved = checkpointer.latest()
        checkpointer.close()
        if number == signal.SIGINT:
            expected = "interrupted; run the same command again: it goes on from its last checkpoint"
            assert (code, last) == (130, expected), said
        else:
            rows = read_metrics(runs[name, number] / "metrics")
            assert code == 0 and "preempted" in ended.out and saved == rows[-1]["step"], said
        for step in (runs[name, number] / "checkpoints" / "params").iterdir():
            if step.name.isdecimal():
                assert json.loads((step / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
