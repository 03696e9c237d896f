"""`astra grpo` as users run it, with the embedded engine and its workdir in a bucket; on vLLM servers it is the local
recipe's (`test_local_recipe.py`)."""

from __future__ import annotations

import json

import pytest
from bucket_world import storage
from grpo_world import grpo_flags, make_grpo_world
from programs_world import programs
from rollout_world import make_environment

from synthesis.core.datasets import write_dataset
from synthesis.core.records import ToolEnvironment

pytestmark = pytest.mark.slow

_KEPT = ("--config.grpo.dump_batches=true",)


def test_a_run_in_a_bucket_goes_on_there(tmp_path) -> None:
    make_grpo_world(tmp_path)
    unseen = [make_environment(f"held{i}", "Japan") for i in range(2)]
    write_dataset(tmp_path / "held_out", ToolEnvironment, unseen, card={})
    given = [*grpo_flags(tmp_path), "--workdir=gs://bucket/run", f"--held_out={tmp_path / 'held_out'}"]
    with storage() as bucket, programs("launch.grpo", tmp_path, **bucket.environment) as start:
        for updates in (2, 3):
            ended = start(*given, *_KEPT, f"--config.grpo.steps={updates}")
            assert ended.code == 0, ended.errors[-3000:]
            assert f"gs://bucket/run/checkpoints: {updates} steps, finished" in ended.out
            rows = [json.loads(line) for line in bucket.get("run/metrics/metrics.jsonl").splitlines()]
            assert [row["step"] for row in rows] == list(range(updates + 1))
            assert [row["step"] for row in rows if "eval/greedy/reward" in row] == [0, 2, 3][:updates]
            reports = [f"update_{update:08}.json" for update in [0, 2, 3][:updates]]
            assert bucket.names("run/held_out/") == reports, "the journals of evaluations that ended are gone"
            assert ended.out.splitlines()[-1].startswith("held-out reward 0.") and "(greedy), " in ended.out
            assert f"2 environments, update 0 → {updates}" in ended.out
            rows = rows[1:]
            assert all(row["train/trained_tokens"] > 0 and row["train/grad_norm"] > 0 for row in rows)
            pages = [f"update_{update:05}.html" for update in range(1, updates + 1)]
            assert bucket.names("run/episodes/") == pages
        assert all(b"How many people live" in bucket.get(f"run/episodes/{page}") for page in pages)
        states = {name.partition("/")[0] for name in bucket.names("run/checkpoints/states/")}
        assert states == {"2", "3"} and len(json.loads(bucket.get("run/run.json"))["starts"]) == 2
        card = bucket.get("run/checkpoints/README.md").decode()
        assert "| held out | held_out | 2 |" in card and "| eval/greedy/reward |" in card
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
        both = start(*replayed, f"--held_out={tmp_path / 'held_out'}", f"--workdir={tmp_path / 'both'}").line
        assert "error: --replay samples nothing from --held_out; give one of the two" in both
        train = str(tmp_path / "environments")
        for held_out, said in (
            (train, "4 of the 4 held-out environments are trained on too (same id and prompt), such as 'e0'"),
            (f"{train},{train}", f"--held_out={train},{train} names {train} twice"),
            ("json:no_name", "json has no no_name"),
            (" , ", "--held_out= is empty"),
            (str(tmp_path / "nowhere"), "no dataset at"),
        ):
            assert said in start(*given[:-2], f"--workdir={tmp_path / 'twice'}", f"--held_out={held_out}").line
        unread = start(*given[:-1], "--config.grpo.eval_every=2").line
        assert "--config.grpo.eval_every=2 is for held-out environments: give --held_out too" in unread
        counted = start(*given, "--held_out_count=3").line
        assert "--held_out_count is for verifiers:ID and openenv:URL in --held_out" in counted
        alone = start(*given, f"--rollout_sync_key_file={tmp_path / 'key'}").line
        assert "error: --rollout_sync_key_file is for servers: give --rollout_url too" in alone
        server = "--rollout_url=http://127.0.0.1:9"
        for flags, said in (
            (["--rollout_sync=direct"], "VLLMConfig.sync='direct' without sync_key, by which trainer and servers know"),
            (["--publish_address=:9100"], "--publish_address is for --rollout_sync=direct: give that too"),
            (
                ["--rollout_sync=direct", f"--publish_dir={tmp_path}"],
                "--publish_dir has no effect with --rollout_sync=direct",
            ),
        ):
            assert f"error: {said}" in start(*given, server, *flags).line
        nowhere = start(*given, "--rollout_url=http://127.0.0.1:9", "--rollout_sync=reload").line
        assert "error: --workdir=gs://bucket/run is not a folder, and cannot be a bucket" in nowhere
