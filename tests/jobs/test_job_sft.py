"""Fine-tune a model on conversations of one's own: on one host, on several, again, and to where others load it."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from hub_world import TOKEN, serving_hub
from recipes_world import RECIPES, dry_run
from sft_world import CAPITALS, make_tokenizer
from two_hosts_world import free_port

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.metrics import read_metrics

pytestmark = pytest.mark.nightly
ROWS = 80
COMMAND = ("sft", "--weights=model", "--data=train.jsonl", "--held_out=10%", "--workdir=runs/sft")
"""As README and docs/sft.md have it, with a tiny model."""


@dataclass(frozen=True)
class Trained:
    """The user's folder, and what the first command printed."""

    folder: Path
    output: str


def write_inputs(folder: Path) -> None:
    """Write what a user brings: a model's folder, and conversations."""
    make_tokenizer(folder / "model")
    sizes = dict(vocab_size=400, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64)
    model = Qwen3Config(**sizes, tie_embeddings=True, max_positions=512)
    save_hf(model.init(jax.random.key(0)), model, folder / "model")
    rng = random.Random(0)
    with (folder / "train.jsonl").open("w") as file:
        for number in range(ROWS):
            country = rng.choice(list(CAPITALS))
            asked = {"role": "user", "content": f"Question {number}: what is the capital of {country}?"}
            said = {"role": "assistant", "content": f"{CAPITALS[country]}. " * rng.randint(1, 8)}
            file.write(json.dumps({"messages": [asked, said]}) + "\n")


def devices(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives a process so many devices."""
    return {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"}


@pytest.fixture(scope="module")
def trained(installed_astra, tmp_path_factory) -> Trained:
    """Outcome of the complete command, on a host with two devices."""
    folder = tmp_path_factory.mktemp("own")
    write_inputs(folder)
    two = devices(2, installed_astra.environment())
    ended = installed_astra(*COMMAND, cwd=folder, env=two, timeout=1200)
    assert ended.code == 0, ended.output
    return Trained(folder, ended.output)


def test_one_command_uses_all_devices_and_holds_a_share_out(trained: Trained) -> None:
    assert "--mesh=data=2 is chosen for 2 devices of cpu: each device has a copy of the weights" in trained.output
    assert f"--held_out=10%: of {ROWS} conversations 72 are trained on and 8 are held out" in trained.output
    assert "warning: 8 held-out conversations give a noisy loss" in trained.output
    assert "--config=sft:auto chooses" in trained.output
    rows = read_metrics(trained.folder / "runs" / "sft" / "metrics")
    assert len(rows) >= 8 and rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert any("eval/loss" in row for row in rows)
    assert (trained.folder / "runs" / "sft" / "checkpoints" / "states" / str(len(rows))).is_dir()
    assert trained.output.endswith(
        "next: astra serve --weights=runs/sft, or astra convert --from_orbax=runs/sft --to_hf=MODEL\n"
    )


def split_of(run: Path) -> list[str]:
    """Return what a run's card says of its data: their parts, with the digests of the records."""
    parts = re.findall(
        r"^\| (?:data|held out) \| train.jsonl \|.*$", (run / "checkpoints" / "README.md").read_text(), re.M
    )
    assert [part.split(" | ")[2] for part in parts] == ["72", "8"]
    return parts


def test_the_same_command_resumes_with_the_same_split(installed_astra, trained: Trained) -> None:
    """On one device and with more epochs; and the message of a refusal says how to go on."""
    run = trained.folder / "runs" / "sft"
    before, split = read_metrics(run / "metrics"), split_of(run)
    again = installed_astra(*COMMAND, cwd=trained.folder)
    assert again.code == 0 and f"{len(before)} steps, finished" in again.output
    assert split_of(run) == split
    more = installed_astra(*COMMAND, "--config.sft.epochs=3", "--config.sft.learning_rate=5e-5", cwd=trained.folder)
    assert more.code == 0, more.output
    assert "sft.learning_rate is 5e-05, it was 0.0001" in more.output
    after = read_metrics(run / "metrics")
    assert len(after) > len(before) and after[: len(before)] == before
    assert split_of(run) == split
    for changed, named in (
        ("--held_out=20%", "(--data, or the share of --held_out)"),
        ("--config.sft.batch_size=12", "(--config.sft.batch_size)"),
    ):
        refused = installed_astra(*COMMAND, changed, cwd=trained.folder)
        assert refused.code == 2 and "belongs to another run" in refused.output and named in refused.output
        assert f"start a new run from its weights: --weights={run / 'checkpoints'} --workdir=NEW" in refused.output


def test_the_model_goes_to_transformers_and_to_the_hub(installed_astra, trained: Trained, tmp_path) -> None:
    """The run's folder stands for its checkpoints."""
    transformers = pytest.importorskip("transformers")
    exported = installed_astra("convert", "--from_orbax=runs/sft", f"--to_hf={tmp_path / 'hf'}", cwd=trained.folder)
    assert exported.code == 0 and "parameters in float32" in exported.output, exported.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    asked = [{"role": "user", "content": "Question 7: what is the capital of Peru?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**prompt, max_new_tokens=4).shape[1] == prompt["input_ids"].shape[1] + 4
    with serving_hub() as hub:
        variables = hub.environment(tmp_path / "home", HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0")
        push = ("push", "--weights=runs/sft", "--repository=me/own")
        pushed = installed_astra(*push, cwd=trained.folder, env=variables)
    assert pushed.code == 0, pushed.output
    files = hub.repositories["models/me/own"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()


def test_a_slices_recipe_trains_the_same(installed_astra, trained: Trained, tmp_path) -> None:
    """The command that the TPU recipe gives to each host, on two hosts of one device."""
    given = {
        "PROGRAM": "sft",
        "BUCKET": str(tmp_path / "run"),
        "WEIGHTS": "model",
        "DATA": "train.jsonl",
        "HELD_OUT": "10%",
    }
    recipe = dry_run(RECIPES / "tpu" / "queued_resources.sh", tmp_path / "dry", "train", **given)
    ((program, arguments),) = recipe.ours()
    left_out = ("--multihost", "--metrics_")  # what finds a slice's hosts, and a key of the recipe
    flags = [one for one in arguments if not one.startswith(left_out)]
    assert program == "sft" and len(flags) == len(arguments) - 4
    hosts = (f"--coordinator=localhost:{free_port()}", "--hosts=2")
    both: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    both |= dict(cwd=trained.folder, env=installed_astra.environment())
    command = [installed_astra.command, "sft", *flags, *hosts]
    started = [subprocess.Popen([*command, f"--host_index={index}"], **both) for index in range(2)]
    said = [host.communicate(timeout=1200)[0] for host in started]
    assert [host.returncode for host in started] == [0, 0], said
    assert "--mesh=data=2 is chosen for 2 devices of cpu on 2 hosts" in said[0]
    run = tmp_path / "run" / "run"
    assert split_of(run) == split_of(trained.folder / "runs" / "sft")
    ours = read_metrics(run / "metrics")
    whole = read_metrics(trained.folder / "runs" / "sft" / "metrics")[: len(ours)]
    assert [row["train/loss"] for row in ours] == pytest.approx([row["train/loss"] for row in whole], rel=2e-3)
