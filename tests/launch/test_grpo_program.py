"""`launch.grpo` as users run it, with the embedded engine and its workdir in a bucket; on vLLM servers it is the local
recipe's (`test_local_recipe.py`)."""

from __future__ import annotations

import json

import pytest
from bucket_world import storage
from grpo_world import grpo_flags, make_grpo_world
from programs_world import HEAVY, programs

pytestmark = pytest.mark.slow


def test_a_run_in_a_bucket_goes_on_there(tmp_path) -> None:
    make_grpo_world(tmp_path)
    given = [*grpo_flags(tmp_path), "--workdir=gs://bucket/run"]
    with storage() as bucket, programs("launch.grpo", tmp_path, heavy=HEAVY, **bucket.environment) as start:
        for updates in (2, 3):
            ended = start(*given, f"--config.grpo.steps={updates}")
            assert ended.code == 0, ended.errors[-3000:]
            assert f"gs://bucket/run/checkpoints: {updates} steps, finished" in ended.out
            rows = [json.loads(line) for line in bucket.get("run/metrics/metrics.jsonl").splitlines()]
            assert [row["step"] for row in rows] == list(range(1, updates + 1))
            assert all(row["train/trained_tokens"] > 0 and row["train/gradient_norm"] > 0 for row in rows)
            pages = [f"update_{update:05}.html" for update in range(1, updates + 1)]
            assert bucket.names("run/episodes/") == pages
        assert all(b"How many people live" in bucket.get(f"run/episodes/{page}") for page in pages)
        states = {name.partition("/")[0] for name in bucket.names("run/checkpoints/states/")}
        assert states == {"2", "3"} and len(json.loads(bucket.get("run/run.json"))["starts"]) == 2
        alone = start(*given, f"--rollout_sync_key_file={tmp_path / 'key'}").line
        assert "error: --rollout_sync_key_file is for servers: give --rollout_url too" in alone
        nowhere = start(*given, "--rollout_url=http://127.0.0.1:9", "--rollout_sync=reload").line
        assert "error: --workdir=gs://bucket/run is no folder, and cannot be a bucket" in nowhere


@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM: launch/vllm_cpu.sh .venv-vllm")
def test_runs_on_vllm_servers(tmp_path) -> None:
    """A server with our plugin and dummy weights, and one as it comes, whose weights are reloaded from a folder."""
    world = World(tmp_path, MODEL, make_grpo_world(tmp_path))
    (tmp_path / "key").write_text(KEY)
    served = tmp_path / "served"
    run_grpo(tmp_path, f"--workdir={tmp_path / 'none'}", f"--write_serving_folder={served}", "--publish_dtype=float32")
    assert not (tmp_path / "none").exists() and not list(served.glob("*.safetensors"))
    plain = Server(world, plugin=False, dummy=False, scale_out=False)
    with serving(Server(world, forked=False, folder=served), plain) as servers:
        for server, way in zip(servers, ("plugin", "reload"), strict=True):
            workdir = tmp_path / way
            asked = [f"--rollout_url={server.url}", f"--rollout_key_file={tmp_path / 'key'}", f"--rollout_sync={way}"]
            asked.append("--publish_dtype=float32")
            if way == "plugin":
                asked.append(f"--rollout_sync_key_file={tmp_path / 'sync_key'}")
            ended = run_grpo(tmp_path, f"--workdir={workdir}", *asked)
            assert f"{workdir / 'checkpoints'}: 2 steps, finished" in ended.stdout
            rows = read_metrics(workdir / "metrics")
            assert [row["step"] for row in rows] == [1, 2]
            for row in rows:
                assert row["train/trained_tokens"] > 0 and row["rollout/reward"] > 0
                assert row["train/mismatch_abs"] < 1e-4  # the servers' weights are the trainer's, after each update
