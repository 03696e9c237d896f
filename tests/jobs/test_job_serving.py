"""Jobs that need a server, from the installed wheel in an empty folder: GRPO with vLLM on the same machine (3), and an
evaluation of the checkpoint that it made (6)."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import jax
import pytest
from rollout_world import tiny_model

from astra_jax.evaluation.saved import load_evaluation
from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.run.metrics import read_metrics
from astra_jax.tokenizer import ChatTokenizer

pytestmark = pytest.mark.slow
STAND_IN = Path(__file__).resolve().parents[1] / "worlds" / "stand_in_vllm.py"

WAREHOUSE = '''
class Warehouse:
    def __init__(self, item, pieces):
        self.item, self.pieces = item, pieces
        self.question = f"How many {item} are in the warehouse?"

    def stock_of(self, item: str) -> int:
        """How many pieces of an item are in the warehouse."""
        return self.pieces if item == self.item else 0

    def score(self, episode) -> float:
        return float(episode.says(self.pieces))


warehouses = [Warehouse("bolts", 40), Warehouse("nuts", 7)]
'''
CONFIG = """
from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from configs.training import GRPORun

EPISODE = EpisodeConfig(max_turns=2, max_prompt_tokens=900, max_response_tokens=100, reward="score")
CONFIG = GRPORun({model}, GRPOConfig(steps=2, batch_size=1, group_size=4, concurrent_groups=2, episode=EPISODE,
                                     row_buckets=(1024,), micro_batch_size=4, checkpoint_every=1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's folder: an environment, a tiny model, a configuration, and `.venv-vllm` with a stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "warehouse.py").write_text(WAREHOUSE)
    texts = [WAREHOUSE, "There are 40. There are none.", '{"name": "stock_of", "arguments": {"item": "bolts"}}'] * 8
    tokenizer = ChatTokenizer.train(texts, 512, folder / "model")
    model = tiny_model(tokenizer.vocab_size, 1024)
    save_hf(model.init(jax.random.key(0)), model, folder / "model")
    (folder / "config.py").write_text(CONFIG.format(model=model))
    programs = folder / ".venv-vllm" / "bin"
    (programs.parent / "site" / "astra_vllm-1.dist-info").mkdir(parents=True)
    (programs.parent / "site" / "astra_vllm-1.dist-info" / "METADATA").write_text("Name: astra-vllm\nVersion: 1\n")
    programs.mkdir()
    for name, arguments in (("vllm", f"{STAND_IN} "), ("python", "")):
        (programs / name).write_text(
            f'#!/bin/sh\nexport PYTHONPATH={programs.parent / "site"}\nexec {sys.executable} {arguments}"$@"\n'
        )
        (programs / name).chmod(0o755)
    return folder


def is_listening(url: str) -> bool:
    address = urlsplit(url)
    assert address.hostname and address.port
    with socket.socket() as tried:
        return tried.connect_ex((address.hostname, address.port)) == 0


def grpo(workdir: str, *more: str) -> list[str]:
    flags = ["--config=config.py", "--weights=model", "--environments=warehouse:warehouses", "--publish_dtype=float32"]
    return ["grpo", *flags, f"--workdir={workdir}", "--rollout_min_servers=2", *more]


def test_grpo_with_vllm_beside_it_and_an_evaluation_of_its_checkpoint(installed_astra, folder) -> None:
    environment = {"STAND_IN_DIES_AFTER": "2"}  # the server of the second update
    trained = installed_astra(*grpo("runs/grpo", "--vllm=2"), cwd=folder, env=environment)
    assert trained.code == 0, trained.output
    plan = re.findall(r"vLLM server (\d): processors, (http://\S+), log in (\S+)", trained.output)
    assert [number for number, _, _ in plan] == ["1", "2"] and "2 vLLM servers are ready" in trained.output
    assert "out of memory" in trained.output and "is started again, for up to 4 more times" in trained.output
    assert [row["step"] for row in read_metrics(folder / "runs" / "grpo" / "metrics")] == [1, 2]
    assert not any(is_listening(url) for _, url, _ in plan)
    assert all('"max-model-len": "1000"' in Path(log).read_text() for _, _, log in plan)
    keys = folder / "runs" / "grpo" / "vllm" / "keys"
    assert {file.stat().st_mode & 0o77 for file in keys.iterdir()} == {0}

    flags = ["--weights=runs/grpo", "--workdir=runs/eval", "--slots=2", "--max_length=1000", "--max_tokens=8"]
    suite = "--suites=own:warehouse:warehouses"
    scored = installed_astra("evaluate", *flags, suite, "--trials=1", cwd=folder)
    assert scored.code == 0, scored.output
    served = re.search(r"serving grpo/checkpoints@2 on (http://\S+); log in (\S+)", scored.output)
    assert served and not is_listening(served[1]) and "programs" in Path(served[2]).read_text()
    found = load_evaluation(folder / "runs" / "eval")
    assert len(found.results) == 2 and found.weights is not None
    assert found.weights["step"] == 2 and len(found.weights["sha256"]) == 64
    assert f"step 2, sha256 {found.weights['sha256'][:16]}" in scored.output

    # A harness that cannot be had is said before the model is read.
    for name, why in (("bfcl_v3_mt", "bfcl-eval"), ("tau2", "give --judge_url")):
        refused = installed_astra("evaluate", *flags, f"--suites={name}", cwd=folder, env={"PIP_NO_INDEX": "1"})
        assert refused.code == 2 and why in refused.output and "serving" not in refused.output, refused.output


@pytest.mark.nightly
def test_a_start_of_vllm_that_fails_is_one_message_with_the_fix(installed_astra, folder, tmp_path) -> None:
    none = installed_astra(*grpo("runs/none", "--vllm=2", "--vllm_program=nowhere"), cwd=folder)
    assert none.code == 2 and "--vllm_program=nowhere is not a program; install it" in none.output
    plugin = re.search(r"pip install 'vllm>=0.32,<0.33' (\S+),", none.output)
    assert plugin and (Path(plugin[1]) / "pyproject.toml").exists() and (Path(plugin[1]) / "astra_vllm").is_dir()
    both = installed_astra(*grpo("runs/none", "--vllm=2", "--rollout_url=http://a:1"), cwd=folder)
    assert both.code == 2 and "--rollout_url does not go with --vllm" in both.output
    (tmp_path / "vllm").write_text("#!/bin/sh\necho no such device; exit 3\n")
    (tmp_path / "vllm").chmod(0o755)
    broken = installed_astra(*grpo("runs/none", "--vllm=1", f"--vllm_program={tmp_path / 'vllm'}"), cwd=folder)
    assert broken.code == 2 and "vLLM server 1 ended with code 3" in broken.output
    assert "no such device" in broken.output
