"""GRPO on two hosts: two real processes of `jax.distributed`, against one process that does it all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from rollout_world import ScriptedPolicy, call, make_environment

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.train import train
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.run.metrics import read_metrics
from astra_jax.tokenizer import ChatTokenizer
from sandbox import SandboxPool

MODEL = Qwen3Config(
    vocab_size=512,
    d_model=64,
    n_layers=1,
    n_heads=8,
    n_kv_heads=4,
    head_dim=8,
    d_ff=64,
    tie_embeddings=True,
    max_positions=1024,
)
CONFIG = GRPOConfig(
    steps=3,
    batch_size=2,
    group_size=4,
    learning_rate=1e-2,
    eps=1e-3,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(512, 1024),
    micro_batch_size=4,
    checkpoint_every=2,
)


def script(session: str, turn: int, seed: int) -> str:
    return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."


async def run(tokenizer: ChatTokenizer, workdir: Path, mesh, **changes):
    """Train, sampling with a script on the first host; any other's policy must not be asked. All publish."""
    publisher = Publisher(workdir / "policy", MODEL, dtype="float32")

    class Policy(ScriptedPolicy):
        async def update(self, params, version):
            publisher.publish(params, version)
            await asyncio.to_thread(publisher.wait)
            await super().update(params, version)

        async def generate(self, *arguments, **options):
            assert jax.process_index() == 0, "only the first host samples"
            return await super().generate(*arguments, **options)

    params = MODEL.init(jax.random.key(0))
    config = dataclasses.replace(CONFIG, **changes)
    environments = [make_environment("a"), make_environment("b", "Japan"), make_environment("c")]
    policy = Policy(tokenizer, script)
    async with SandboxPool() as pool:
        result = await train(
            config,
            MODEL,
            lambda: params,
            environments,
            tokenizer,
            pool,
            workdir,
            policy=policy,
            mesh=mesh,
            progress=False,
        )
    publisher.close()
    assert policy.version == result.steps, "every host takes part in publishing"
    return result


HOST = """
import asyncio, os, pickle, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from pathlib import Path
from jax.experimental import multihost_utils
from test_hosts import run
from astra_jax.mesh import make_mesh
from astra_jax.tokenizer import ChatTokenizer
tokenizer, workdir, updates = ChatTokenizer.load(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
mesh = make_mesh(fsdp=2, context=2, tensor=2)
result = asyncio.run(run(tokenizer, workdir, mesh, steps=updates))
assert jax.process_count() == 2 and not jax.tree.leaves(result.params)[0].is_fully_addressable
params = multihost_utils.process_allgather(result.params, tiled=True)
if jax.process_index() == 0:
    (workdir / "params.pickle").write_bytes(pickle.dumps(jax.device_get(params)))
"""


def on_two_hosts(tokenizer: Path, workdir: Path, updates: int):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workdir.mkdir(exist_ok=True)
    script = workdir / "host.py"
    script.write_text(HOST)
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}  # with the folder of what is compiled
    arguments = [str(tokenizer), str(workdir), str(updates)]
    hosts = [
        subprocess.Popen([sys.executable, str(script), str(port), str(i), *arguments], env=environment)
        for i in range(2)
    ]
    try:
        assert [host.wait(timeout=400) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    return pickle.loads((workdir / "params.pickle").read_bytes())


@pytest.mark.slow
async def test_two_hosts_equal_one_and_resume(chat_tokenizer, chat_tokenizer_dir, tmp_path) -> None:
    want = await run(chat_tokenizer, tmp_path / "one", None)
    on_two_hosts(chat_tokenizer_dir, tmp_path / "two", updates=2)
    got = on_two_hosts(chat_tokenizer_dir, tmp_path / "two", updates=3)  # from the checkpoint of the first run
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    for name in ("model.embed_tokens.weight", "model.layers.{}.mlp.up_proj.weight"):
        a, b = (published(tmp_path / one / "policy" / "3" / "params", name) for one in ("two", "one"))
        np.testing.assert_allclose(a, b, atol=3e-5)
    rows, wanted = (read_metrics(tmp_path / name / "metrics") for name in ("two", "one"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, one in zip(rows, wanted, strict=True):
        for name in ("rollout/reward", "filling/groups_sampled", "train/trained_tokens"):
            assert row.get(name) == one.get(name), name
        assert row["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
    assert json.loads((tmp_path / "two" / "checkpoints" / "config.json").read_text())["vocab_size"] == 512


def published(item: Path, name: str) -> np.ndarray:
    store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result().read().result()


async def test_several_hosts_need_servers(chat_tokenizer, tmp_path, pool, monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="on several hosts give a mesh of all their devices, and rollout servers"):
        await train(CONFIG, MODEL, dict, [make_environment()], chat_tokenizer, pool, tmp_path)
