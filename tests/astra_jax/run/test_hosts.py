"""GRPO on two hosts: two real processes of `jax.distributed`, against one process that does it all."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from programs_world import Programs
from rollout_world import make_environment
from two_hosts_world import CONFIG, MODEL, hosts, run, two_hosts

from astra_jax.grpo.train import train
from astra_jax.run.metrics import read_metrics


def on_two_hosts(start: Programs, tokenizer: Path, workdir: Path, **changes) -> list[tuple[int, str]]:
    """How each ended, and what it said of its errors."""
    with two_hosts(start, tokenizer, workdir, watch=6.0, checkpoint_every=10, **changes) as started:
        return [(ended.code, ended.errors) for ended in (host.wait(400) for host in started)]


@pytest.mark.slow
async def test_two_hosts_equal_one_and_resume(chat_tokenizer, chat_tokenizer_dir, tmp_path) -> None:
    want = await run(chat_tokenizer, tmp_path / "one", None)
    with hosts(tmp_path) as start:
        on_two = partial(on_two_hosts, start, chat_tokenizer_dir, tmp_path / "two")
        first, second = on_two(fails=2)  # all of them save, and end
        assert first[0] == second[0] == 1 and "PolicyError: no rollout server took version 2 over" in first[1]
        assert "host 0 of 2 failed: PolicyError: no rollout server took version 2 over" in second[1]
        # Nobody is left to agree with: what is broken says nothing of who broke it, and the watch does.
        left, gone = on_two(dies=3)
        assert gone[0] == 9 and left[0] == 1
        assert "error: host 1 of 2 has given no sign of life for 6 s; start all hosts again" in left[1]
        ended = on_two()  # from the checkpoint of the first run
        assert [code for code, _ in ended] == [0, 0], ended
    got = pickle.loads((tmp_path / "two" / "params.pickle").read_bytes())
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
