"""`launch.grpo` as users run it, with the embedded engine and its workdir in a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bucket_world import Storage, storage
from rollout_world import CAPITAL, DISTRACTORS, POPULATION, make_environment

from astra_jax.chat import render
from astra_jax.models.qwen3.modules import Params, init_params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.models.qwen3.weights import save_hf
from astra_jax.tokenizer import ChatTokenizer
from synthesis.datasets import write_dataset
from synthesis.records import Message, ToolCall, ToolEnvironment

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow

CONFIG = """
from astra_jax.grpo_config import GRPOConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from configs.training import GRPORun

MODEL = Qwen3Config(vocab_size=512, d_model=512, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32,
                    tie_embeddings=False, max_positions=512)
EPISODE = EpisodeConfig(max_turns=2, max_prompt_tokens=400, max_response_tokens=100, distractors_per_band=0)
CONFIG = GRPORun(MODEL, GRPOConfig(updates=2, groups_per_batch=2, group_size=4, concurrent_groups=1, episode=EPISODE,
                                   row_buckets=(512,), micro_batch_rows=2, checkpoint_every=1, episodes_every=1))
"""


def caller(config: Qwen3Config, tokenizer: ChatTokenizer) -> Params:
    """A model that knows which token follows which: it calls a tool, in some of its attempts the right one."""
    right = '<tool_call>{"name": "capital_of", "arguments": {"country": "France"}}</tool_call><|im_end|>'
    follow_vv = jnp.zeros((config.vocab_size, config.vocab_size))
    for text in (f"\n{right}", "\nNo<|im_end|>"):
        ids = tokenizer.encode(text)
        follow_vv = follow_vv.at[jnp.array(ids[:-1]), jnp.array(ids[1:])].set(1.0)
    params = init_params(config, jax.random.key(0))
    layers = params["layers"]
    layers["attention"]["o_nhd"] *= 0
    layers["mlp"]["down_fd"] *= 0
    return params | {"embed_vd": jnp.eye(config.vocab_size), "head_dv": follow_vv}  # normed, an entry of 1 is 22


@pytest.fixture
def world(tmp_path) -> Path:
    """A folder with a configuration, a model with its tokenizer, and environments."""
    (tmp_path / "config.py").write_text(CONFIG)
    names: dict[str, Qwen3Config] = {}
    exec(CONFIG, names)
    environments = [make_environment(f"e{i}") for i in range(4)]
    specs = [tool.spec for tool in (CAPITAL, POPULATION, *DISTRACTORS["high"], *DISTRACTORS["low"])]
    call = Message("assistant", "", tool_calls=[ToolCall("call_0", "capital_of", {"country": "France"})])
    segments = render([Message("user", environments[0].question), call], specs)
    tokenizer = ChatTokenizer.train(["".join(segment.text for segment in segments)] * 8, 512, tmp_path / "hf")
    save_hf(caller(names["MODEL"], tokenizer), names["MODEL"], tmp_path / "hf")
    write_dataset(tmp_path / "environments", ToolEnvironment, environments, card={"split": "train"})
    return tmp_path


def run(world: Path, bucket: Storage, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    flags = {"config": world / "config.py", "weights": world / "hf", "environments": world / "environments"}
    program = [sys.executable, "-m", "launch.grpo", *(f"--{name}={value}" for name, value in flags.items())]
    environment = {**os.environ, **bucket.environment}
    result = subprocess.run([*program, *more], cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == code, result.stderr[-3000:]
    return result


def test_a_run_in_a_bucket_goes_on_there(world) -> None:
    with storage() as bucket:
        for updates in (2, 3):
            more = ("--workdir=gs://bucket/run", f"--config.grpo.updates={updates}")
            assert f"gs://bucket/run/checkpoints: {updates} updates, finished" in run(world, bucket, *more).stdout
            rows = [json.loads(line) for line in bucket.get("run/metrics/metrics.jsonl").splitlines()]
            assert [row["step"] for row in rows] == list(range(1, updates + 1))
            assert all(row["train/trained_tokens"] > 0 and row["train/gradient_norm"] > 0 for row in rows)
            pages = [f"update_{update:05}.html" for update in range(1, updates + 1)]
            assert bucket.names("run/episodes/") == pages
        assert all(b"How many people live" in bucket.get(f"run/episodes/{page}") for page in pages)
        states = {name.partition("/")[0] for name in bucket.names("run/checkpoints/states/")}
        assert states == {"2", "3"} and len(json.loads(bucket.get("run/run.json"))["starts"]) == 2
        more = ("--workdir=gs://bucket/run", "--rollout_urls=http://127.0.0.1:9", "--rollout_sync=reload")
        refusal = "error: --workdir=gs://bucket/run is no folder, and cannot be a bucket"
        assert refusal in run(world, bucket, *more, code=2).stderr
