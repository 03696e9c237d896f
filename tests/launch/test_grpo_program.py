"""`launch.grpo` as users run it, with the embedded engine and its workdir in a bucket; on vLLM servers it is the local
recipe's (`test_local_recipe.py`)."""

from __future__ import annotations

import json

import pytest
from bucket_world import storage
from grpo_world import grpo_flags, make_grpo_world
from programs_world import programs

pytestmark = pytest.mark.slow

_KEPT = ("--config.grpo.dump_batches=true",)


def test_a_run_in_a_bucket_goes_on_there(tmp_path) -> None:
    make_grpo_world(tmp_path)
    given = [*grpo_flags(tmp_path), "--workdir=gs://bucket/run"]
    with storage() as bucket, programs("launch.grpo", tmp_path, **bucket.environment) as start:
        for updates in (2, 3):
            ended = start(*given, *_KEPT, f"--config.grpo.steps={updates}")
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
        sampled_from, *rest = reversed(grpo_flags(tmp_path))
        replayed = [*rest, "--replay=gs://bucket/run/batches", "--config.grpo.steps=3"]
        ended = start(*replayed, f"--workdir={tmp_path / 'replayed'}")
        assert ended.code == 0, ended.errors[-3000:]
        again = (tmp_path / "replayed" / "metrics" / "metrics.jsonl").read_text().splitlines()
        assert [(json.loads(row)["train/loss"], json.loads(row)["rollout/reward"]) for row in again] == [
            (row["train/loss"], row["rollout/reward"]) for row in rows
        ]
        both = start(*replayed, sampled_from, f"--workdir={tmp_path / 'both'}").line
        assert "error: --replay samples nothing from --environments; give one of the two" in both
        alone = start(*given, f"--rollout_sync_key_file={tmp_path / 'key'}").line
        assert "error: --rollout_sync_key_file is for servers: give --rollout_url too" in alone
        server = "--rollout_url=http://127.0.0.1:9"
        for flags, said in (
            (["--rollout_sync=direct"], "VLLMConfig.sync='direct' without sync_key, by which trainer and servers know"),
            (["--publish_address=:9100"], "--publish_address is for --rollout_sync=direct: give that too"),
            (["--rollout_sync=direct", f"--publish_dir={tmp_path}"], "--publish_dir is for files, and --rollout_sync="),
        ):
            assert f"error: {said}" in start(*given, server, *flags).line
        nowhere = start(*given, "--rollout_url=http://127.0.0.1:9", "--rollout_sync=reload").line
        assert "error: --workdir=gs://bucket/run is no folder, and cannot be a bucket" in nowhere
