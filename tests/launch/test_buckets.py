"""Buckets: who may use one and what is said of others, weights that servers read from there, and metrics.

What whole runs keep there is tested in test_sft_program.py and test_grpo_program.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from bucket_world import Buckets, Storage, s3_storage, storage, used
from rollout_world import tiny_model

from astra_jax.base import buckets
from astra_jax.base.files import StorageError, location, on_disk, write_bytes, write_text
from astra_jax.grpo import journal
from astra_jax.models.hf_checkpoint import WeightsError, hf_tensors, save_hf
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.run.checkpoints import Checkpointer, CheckpointError
from astra_jax.run.metrics import MetricWriter, read_metrics
from astra_jax.run.weights import load
from launch.flags import cli
from synthesis.core import mirror
from synthesis.core.datasets import read_dataset, write_dataset
from synthesis.core.journal import Journal
from synthesis.core.recording import Recording
from synthesis.core.records import Answer

PLUGIN = Path(__file__).parent.parent.parent / "astra_jax" / "rollout" / "vllm" / "plugin"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[Storage]:
    with used(storage) as made:
        yield made


@pytest.fixture(scope="module")
def s3() -> Iterator[Buckets]:
    with used(s3_storage) as made:
        yield made


@pytest.fixture(params=["bucket", "s3"])
def either(request) -> Buckets:
    return request.getfixturevalue(request.param)


def flag(value: str) -> flags.FlagHolder[str | None]:
    parsed = flags.FlagValues()
    holder = flags.DEFINE_string("workdir", None, "", flag_values=parsed)
    parsed(["program", f"--workdir={value}"])
    return holder


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("s3://bucket/run", "--workdir=s3://bucket/run is neither a folder nor gs://BUCKET/FOLDER; give one of these"),
        ("gs://bucket", "--workdir=gs://bucket names no folder in a bucket"),
        ("gs://none/run", "--workdir=gs://none/run: there is no bucket none; make it .gcloud storage buckets create"),
        (
            "gs://readonly/run",
            "--workdir=gs://readonly/run cannot be used .PERMISSION_DENIED: .* the account has roles",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_flag(bucket, value: str, words: str) -> None:
    with pytest.raises(cli.UsageError, match=words):
        cli.folder(flag(value), written=True)


def test_what_can_be_used_is_left_as_it_was(bucket) -> None:
    assert str(cli.folder(flag("gs://bucket/tried/run/"), written=True)) == "gs://bucket/tried/run"
    assert not bucket.names("tried/")


def test_of_s3_too(s3, monkeypatch) -> None:
    def refused(place: str, words: str) -> None:
        with pytest.raises(cli.UsageError, match=words):
            cli.folder(flag(place), written=True, s3=True)

    refused("s3://bucket", "--workdir=s3://bucket names no folder in a bucket; write s3://BUCKET/FOLDER")
    refused("hub://bucket/run", "is neither a folder nor gs://BUCKET/FOLDER nor s3://BUCKET/FOLDER")
    refused("s3://none/run", "--workdir=s3://none/run: there is no bucket none; make it .aws s3 mb s3://none")
    assert str(cli.folder(flag("s3://bucket/tried/run/"), written=True, s3=True)) == "s3://bucket/tried/run"
    assert not s3.names("tried/")
    with monkeypatch.context() as patch:
        patch.setattr(buckets._OnS3, "write", lambda *_, **__: "written all the same")
        refused("s3://bucket/run", r"its service ignores If-None-Match .* use a service that supports it")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        refused("s3://bucket/run", "--workdir=s3://bucket/run cannot be used .*AWS_ENDPOINT_URL")
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        refused("s3://bucket/run", "credentials or their region are missing .*aws configure")


@pytest.mark.parametrize(("place", "package", "extra"), [("gs://b/r", "gcsfs", "gcs"), ("s3://b/r", "s3fs", "s3")])
def test_without_its_client_it_is_asked_for(monkeypatch, place: str, package: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{place} needs {package}, .* pip install 'astra-jax\[{extra}\]'"):
        location(place, s3=True)


def test_an_object_is_written_whole_and_what_fails_is_named(bucket) -> None:
    write_text(location("gs://bucket/files/a.txt"), "北京\n")
    assert bucket.get("files/a.txt") == "北京\n".encode()
    large = np.random.default_rng(0).bytes(20 << 20)  # in several parts
    write_bytes(location("gs://bucket/files/large"), large)
    assert bucket.get("files/large") == large
    with pytest.raises(StorageError, match="gs://readonly/files/a.txt could not be written .*check the bucket and run"):
        write_text(location("gs://readonly/files/a.txt"), "a")


def test_a_folder_that_was_written_on_disk_is_copied_up(bucket) -> None:
    with pytest.raises(RuntimeError, match="later"), on_disk(location("gs://bucket/profile")) as folder:
        (folder / "plugins" / "profile").mkdir(parents=True)
        (folder / "plugins" / "profile" / "trace.pb").write_bytes(b"trace")
        raise RuntimeError("later")
    assert bucket.names("profile/") == ["plugins/profile/trace.pb"] and bucket.get("profile/plugins/profile/trace.pb")


def test_a_synthesis_goes_on_from_a_snapshot_of_its_stores(either, monkeypatch, tmp_path) -> None:
    """After a machine is lost that worked there: what a journal has, the recording has; datasets are whole."""
    monkeypatch.setattr(mirror, "SNAPSHOT_SECONDS", 0.05)

    async def work(first: int, last: int) -> tuple[list[str], dict[str, bytes]]:
        async with mirror.mirrored(location(either.place("synthesis"), s3=True)) as folder:
            recording = Recording(folder / "teacher.sqlite")
            with Journal(folder / "journals" / "j.sqlite") as journal, contextlib.closing(recording):
                found = sorted(journal.load("stage"), key=int)
                assert all(recording.answer(key.encode()) for key in found)
                for number in range(first, last):
                    recording.keep(str(number).encode(), "answer")
                    journal.add("stage", str(number), b"[]")
                journal.commit()
                seen: dict[str, bytes] = {}
                while seen.keys() != {"journals/j.sqlite", "teacher.sqlite"}:
                    await asyncio.sleep(0.05)
                    seen = {name: either.get(f"synthesis/{name}") for name in either.names("synthesis/")}
                    seen = {name: data for name, data in seen.items() if name.endswith(".sqlite")}
                journal.add("stage", str(last), b"[]")
                write_dataset(folder / "data", Answer, [Answer(value=last)], card={})
        return found, seen

    def kept() -> list[Answer]:
        return read_dataset(either.copy("synthesis/data/", tmp_path), Answer)

    found, seen = asyncio.run(work(0, 50))
    assert not found and kept() == [Answer(value=50)]
    for name, data in seen.items():  # as it was when the machine was lost
        either.put(f"synthesis/{name}", data)
    found, _ = asyncio.run(work(50, 60))
    assert found and len(found) <= 50 and kept() == [Answer(value=60)]


def test_what_is_read_is_fetched_and_what_is_not_there_is_named(either) -> None:
    either.put("inputs/a/one.json", b"1")
    either.put("inputs/two.json", b"2")
    place = either.place("inputs")
    folder = mirror.fetched(place)
    assert folder.name == "inputs" and folder == mirror.fetched(place)
    assert {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.json")} == {
        "a/one.json": b"1", "two.json": b"2",
    }  # fmt: skip
    assert mirror.fetched(f"{place}/two.json").read_bytes() == b"2"
    with pytest.raises(StorageError, match=f"{place}/none could not be read .*check the bucket"):
        mirror.fetched(f"{place}/none")


def test_metrics_are_there_when_they_were_flushed(bucket) -> None:
    with MetricWriter("gs://bucket/metrics") as writer:
        writer.write(1, {"train/loss": 1.0})
        writer.write(2, {"train/loss": 2.0})
        writer.flush()
        writer.write(3, {"train/loss": 3.0})
        assert [row["step"] for row in read_metrics("gs://bucket/metrics")] == [1, 2]
    lines = bucket.get("metrics/metrics.jsonl").splitlines()
    assert [json.loads(line) for line in lines] == [{"step": i, "train/loss": float(i)} for i in (1, 2, 3)]
    with MetricWriter("gs://bucket/metrics") as writer:
        writer.truncate(2)
        writer.write(3, {"train/loss": 9.0})
    assert [row["train/loss"] for row in read_metrics("gs://bucket/metrics")] == [1.0, 2.0, 9.0]
    assert [name for name in bucket.names("metrics/") if name.startswith("events.out.")]


def test_a_batch_under_way_is_kept(bucket, monkeypatch) -> None:
    """An object for each write, of all that was finished since the one before."""
    monkeypatch.setattr(journal, "_BUCKET_SECONDS", 0.01)
    episode = Episode("e", [5, 6], 1, [0, 1], [0.0, -0.25], [0, 3], [], None, 1, "masked", [])
    journals = journal.Journals("gs://bucket/rollouts", "run", "identity")

    async def kept(*numbers: int) -> list[bool]:
        opened = journals.open(3, "w")
        found = [opened.take_episode(9, number) == episode for number in range(4)]
        await asyncio.gather(*(opened.keep_episode(9, number, episode) for number in numbers))
        await opened.close()
        return found

    assert asyncio.run(kept(0, 1)) == [False] * 4
    assert asyncio.run(kept(2)) == [True, True, False, False]
    assert asyncio.run(kept()) == [True, True, True, False]
    assert len(bucket.names("rollouts/update_00000003")) >= 2
    journals.forget(3)
    assert bucket.names("rollouts/update_")
    journals.forget()
    assert not bucket.names("rollouts/update_")


def test_servers_read_what_is_published(bucket, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    from astra_vllm.access import NotTaken, SyncRoot
    from astra_vllm.checkpoint import PolicyCheckpoint
    from astra_vllm.layout import PolicyCheckpointError as Unreadable

    model = tiny_model(512, 128)
    publisher = Publisher("gs://bucket/policy", model, dtype="float32")
    published = {}
    for version in (1, 2, 3, 3):  # the last one by a run that was killed and goes on
        published[version] = model.init(jax.random.key(len(published) + 10 * version))
        item = publisher.publish(published[version], version)
        publisher.wait()
    publisher.close()
    assert str(item) == "gs://bucket/policy/3/params"
    versions = {name.partition("/")[0] for name in bucket.names("policy/")}
    assert versions == {"2", "3"}
    root = SyncRoot("gs://bucket/policy")
    found = PolicyCheckpoint(str(item), root)
    wanted = dict(hf_tensors(published[3], model))
    found.compare({name: tensor.shape for name, tensor in wanted.items()}, {}, "float32")
    buffer = bytearray(found.bytes)
    found.read(memoryview(buffer), {})
    assert {span.name for span in found.spans} == wanted.keys()
    for span in found.spans:
        read = np.frombuffer(buffer, np.float32, span.bytes // 4, span.start).reshape(span.shape)
        np.testing.assert_array_equal(read, wanted[span.name])
    bucket.put("policy/7/_CHECKPOINT_METADATA", b'{"commit_timestamp_nsecs": null}')
    with pytest.raises(Unreadable, match="gs://bucket/policy/7/params was not committed"):
        PolicyCheckpoint("gs://bucket/policy/7/params", root)
    for other in (
        "gs://bucket/policy2/3/params",
        "gs://other/policy/3/params",
        "gs://bucket/policy/../x",
        str(item) + "?a",
    ):
        with pytest.raises(NotTaken, match="is not below ASTRA_SYNC_ROOT=gs://bucket/policy"):
            PolicyCheckpoint(other, root)


def test_who_reads_checkpoints_leaves_a_save_that_is_under_way(bucket) -> None:
    params = {"w": jnp.arange(8.0)}
    run = Checkpointer("gs://bucket/run/checkpoints")
    run.save(1, params=params, state=params, extra={})
    run.wait()
    half = "run/checkpoints/params/2/params/d/half"
    bucket.put(half, b"not all of it yet")
    reader = Checkpointer("gs://bucket/run/checkpoints", reading=True)
    assert reader.params_steps() == [1]
    np.testing.assert_array_equal(reader.restore_params(1, params)["w"], params["w"])
    reader.close()
    assert bucket.get(half)
    with pytest.raises(CheckpointError, match="no weights of step 2; steps there: 1"):
        run.restore_params(2, params)
    run.save(2, params=params)  # a run that goes on clears what another one left before it
    run.close()
    assert half not in bucket.names("")


def test_safetensors_are_read_from_disk_alone(bucket, tmp_path) -> None:
    model = tiny_model(512, 128)
    save_hf(model.init(jax.random.key(0)), model, tmp_path)
    for file in tmp_path.iterdir():
        bucket.put(f"hf/{file.name}", file.read_bytes())
    with pytest.raises(WeightsError, match="gs://bucket/hf holds Hugging Face's safetensors, .* copy that folder here"):
        load("gs://bucket/hf", model)
