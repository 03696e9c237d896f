"""`astra watch` of runs in buckets: as of the same files on a disk, and who works there by the lock's renewals."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_world import Buckets, Storage, s3_storage, storage, used
from pages_world import grpo_workdir
from viewing import ROOT, stored_runs, until

from astra_jax.base.files import location
from launch.viewer import workdirs
from launch.viewer.outcome import outcome_of
from launch.viewer.watched import Watched, Watcher
from synthesis.core.workdir import locked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[Storage]:
    with used(storage) as made:
        yield made


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked into the bucket as often as that is quick, and a lock's holder has to renew it soon."""
    monkeypatch.setattr(workdirs, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(workdirs, "LEASE_SECONDS", 1.0)


def sent(folder: Path, bucket: Buckets, name: str) -> str:
    """The address of a copy of a run's files."""
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "lock":
            bucket.put(f"{name}/{file.relative_to(folder)}", file.read_bytes())
    return bucket.place(name)


def watcher_of(address: str) -> Watcher:
    return Watcher(location(address, s3=True))


def told(run: Watched) -> dict[str, object]:
    """What does not depend on where it is, nor on when it was written."""
    found = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    found["trainings"] = [
        dataclasses.replace(one, episodes=[page.name for page in one.episodes]) for one in run.trainings
    ]
    return {name: value for name, value in found.items() if name not in ("folder", "holder", "written")}


@pytest.mark.parametrize("service", [storage, s3_storage])
def test_runs_are_shown_as_on_a_disk(service, request, often: None, tmp_path: Path) -> None:
    seen: list[Watched] = []
    folder = stored_runs(tmp_path / "stored")
    runs = {"grpo": grpo_workdir(tmp_path / "grpo")}
    runs |= {"sft": folder / "sft" / "run", "tools": folder / "trajectories", "worlds": folder / "environments"}
    with contextlib.ExitStack() as stack:
        there = request.getfixturevalue("bucket") if service is storage else stack.enter_context(used(service))
        for name, run in runs.items():
            here, watcher = Watcher(run).look(), watcher_of(sent(run, there, name))
            found = watcher.look()
            assert told(found) == told(here) and found.folder == there.place(name)
            assert (found.trainings or found.stages) and found.written < 300 and found.unread == []
        if service is storage:
            return
    # The service is away: what was copied is shown, and why it is old.
    until(lambda: bool((away := watcher.look()).unread) and seen.append(away) is None)
    assert told(dataclasses.replace(seen[0], unread=[])) == told(here)
    assert seen[0].unread[0].startswith("s3://bucket/worlds: ")


def test_a_run_goes_on_ends_and_is_killed(bucket: Storage, often: None, tmp_path: Path) -> None:
    workdir = grpo_workdir(tmp_path / "run")
    address = sent(workdir, bucket, "live")
    watcher = watcher_of(address)
    assert watcher.look().state == "stopped" and watcher.look().holder == ""
    # Whoever works there renews the lock, and is known to once that was seen.
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as run:
        patch.setattr("astra_jax.base.leases.LEASE_SECONDS", 1.0)
        run.enter_context(locked(address))
        until(lambda: watcher.look().state == "elsewhere")
        until(lambda: watcher.look().state == "running")
        assert watcher.look().holder == f"process {os.getpid()} of {socket.gethostname()}"
        metrics = (workdir / "metrics" / "metrics.jsonl").read_bytes()
        bucket.put("live/metrics/metrics.jsonl", metrics + json.dumps({"step": 41, "loss": 0.5}).encode() + b"\n")
        bucket.put("live/rollouts/update_42.1.journal", b"a turn")
        until(lambda: watcher.look().trainings[0].step == 41)
        assert "step 42 of 140" in outcome_of(watcher.look()).headline
    until(lambda: watcher.look().state == "finished")  # it has ended, and said so
    bucket.remove("live/ending.json")
    until(lambda: watcher.look().state == "stopped")  # the lock is gone
    bucket.put("live/lock", b"process 1 of another\nabc\n1\n")
    until(lambda: watcher.look().state == "elsewhere")
    until(lambda: watcher.look().state == "stopped")  # nothing renews it
    assert watcher.look().holder == "process 1 of another"
    bucket.remove("live/metrics/metrics.jsonl")
    until(lambda: watcher.look().trainings[0].step == 0)


def test_a_holder_is_silent_for_as_long_as_it_is_looked_at(bucket: Storage, often: None, monkeypatch, tmp_path) -> None:
    """Where looks are far apart, the time between two says nothing."""
    monkeypatch.setattr(workdirs, "LEASE_SECONDS", 0.0)
    address = sent(grpo_workdir(tmp_path / "run"), bucket, "silent")
    bucket.put("silent/lock", b"process 1 of another\nabc\n1\n")
    watcher = watcher_of(address)
    assert watcher.look().state == "elsewhere"
    until(lambda: watcher.look().state == "stopped")


def test_what_is_large_is_left_where_it_is_and_named(
    bucket: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workdir = grpo_workdir(tmp_path / "run")
    (workdir / "checkpoints" / "40").mkdir(parents=True)
    (workdir / "checkpoints" / "40" / "run.json").write_text("{}")
    (workdir / "journal.sqlite").write_bytes(bytes(2 << 20))
    monkeypatch.setattr(workdirs, "MAX_BYTES", 1 << 20)
    watcher = watcher_of(sent(workdir, bucket, "large"))
    assert watcher.look().unread == ["journal.sqlite: has 2 MiB; of a file in a bucket 1 are read"]
    assert watcher.look().trainings[0].step == 40
    copied = {str(path.relative_to(watcher.workdir)) for path in watcher.workdir.rglob("*") if path.is_file()}
    assert copied == {"run.json", "metrics/metrics.jsonl", "samples/00000040.txt", "episodes/update_00040.html"}


class FlatClient:
    """A bucket's client: objects are called by any text. The emulator keeps them in folders, and has no such names."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def ls(self, above: str, detail: bool) -> list[dict[str, object]]:
        assert detail
        below = [name.removeprefix(f"{above}/") for name in self.objects if name.startswith(f"{above}/")]
        files = [{"name": f"{above}/{name}", "type": "file", "size": 1} for name in below if "/" not in name]
        folders = {name.partition("/")[0] for name in below if "/" in name}
        return [*files, *({"name": f"{above}/{name}", "type": "directory"} for name in folders)]

    def open(self, address: str, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self.objects[address])


def test_names_that_lead_elsewhere_are_left_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such objects were written over files of this machine."""
    tempfile_folder, victim = tmp_path / "copies", tmp_path / "victim"
    tempfile_folder.mkdir()
    victim.mkdir()
    monkeypatch.setattr(workdirs.tempfile, "tempdir", str(tempfile_folder))
    names = ["run.json", "../../victim/summary.json", "../run.json", "..", "sft\\..\\run.json", "sft/./run.json"]
    client = FlatClient({f"bucket/run/{name}": b"{}" for name in names})
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda name, **_: (client, "bucket/run"))
    run = workdirs.InBucket(location("gs://bucket/run"))
    assert [path.relative_to(run.files) for path in tmp_path.rglob("*") if path.is_file()] == [Path("run.json")]
    assert run.look() == [
        f"'bucket/run/{name}' is not the name of a file; it is left there"
        for name in ("..", "sft/.", "sft\\\\..\\\\run.json")
    ]


def test_a_service_that_is_away_is_named_until_it_is_back(bucket: Storage, monkeypatch, tmp_path: Path) -> None:
    """Not by the one look that failed alone, of four between two looks into the bucket."""
    watcher = watcher_of(sent(grpo_workdir(tmp_path / "run"), bucket, "away"))
    monkeypatch.setattr(workdirs, "LOOK_SECONDS", 3_600.0)
    with monkeypatch.context() as patch:
        patch.setattr(workdirs.InBucket, "_copy", lambda self: (_ for _ in ()).throw(OSError("no network")))
        patch.setattr(workdirs.time, "monotonic", lambda: float(10**9))
        assert watcher.look().unread == ["gs://bucket/away: no network"]
        assert watcher.look().unread == ["gs://bucket/away: no network"]
    monkeypatch.setattr(workdirs.time, "monotonic", lambda: float(10**10))
    assert watcher.look().unread == [] and watcher.look().trainings[0].step == 40


def test_the_program_shows_one_and_refuses_what_is_none(bucket: Storage, tmp_path: Path) -> None:
    def watch(address: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch.watch", address, "--terminal"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    ended = watch(sent(grpo_workdir(tmp_path / "run"), bucket, "said"))
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.startswith("gs://bucket/said\n") and "GRPO: step 40 of 140" in ended.stdout
    for address, code, words in (
        (
            "gs://bucket/none",
            2,
            "--workdir=gs://bucket/none: there is no folder gs://bucket/none; give the --workdir of a run",
        ),
        ("gs://bucket", 2, "--workdir=gs://bucket names no folder in a bucket"),
    ):
        ended = watch(address)
        assert ended.returncode == code and words in ended.stderr and ended.stderr.count("\n") == 1
