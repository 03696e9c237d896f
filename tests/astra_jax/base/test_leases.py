"""One program at a time in a bucket's folder, on emulators of both services: who lives keeps it, the killed lose it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_world import Buckets, s3_storage, storage, used

from astra_jax.base import leases
from astra_jax.base.buckets import Guarded, guarded
from astra_jax.base.files import check_held, holding, location, write_text
from astra_jax.base.leases import LeaseError
from synthesis.core.datasets import read_dataset
from synthesis.core.journal import Journal
from synthesis.core.records import Answer
from synthesis.core.workdir import locked, locked_target

ROOT = Path(__file__).parent.parent.parent.parent
SECONDS = 1.2
pytestmark = pytest.mark.slow

HOLDER = f"""
import sys, time
from astra_jax.base import leases
from astra_jax.base.buckets import Guarded, guarded
from astra_jax.base.files import location
leases.LEASE_SECONDS = {SECONDS}
from synthesis.core.workdir import locked
try:
    with locked(sys.argv[1]):
        print("held", flush=True)
        time.sleep(60)
except leases.LeaseError as error:
    print(error, flush=True)
"""


RUN = f"""
import asyncio, sys, time
from astra_jax.base import leases
from synthesis.core import mirror
from synthesis.core.datasets import write_dataset
from astra_jax.base.files import location
from synthesis.core.journal import Journal
from synthesis.core.records import Answer
leases.LEASE_SECONDS = {SECONDS}
mirror.SNAPSHOT_SECONDS = 0.2
from synthesis.core.workdir import locked

async def main(place, seed):
    with locked(place):
        async with mirror.mirrored(location(place, s3=True)) as folder:
            with Journal(folder / "journal.sqlite") as journal:
                journal.add("stage", str(seed), b"[]")
            write_dataset(folder / "data", Answer, [Answer(seed)], card={{}})
            print("working", flush=True)
            if seed == 1:
                while True:
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(sys.stdin.readline)

try:
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
except leases.LeaseError as error:
    print(error, flush=True)
"""


@pytest.fixture(scope="module", params=[storage, s3_storage])
def bucket(request) -> Iterator[Buckets]:
    with used(request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", SECONDS)


@pytest.fixture
def name(request) -> str:
    """A folder in the bucket that is the test's own."""
    return request.node.originalname or request.node.name


@pytest.fixture
def holder(bucket, name) -> Iterator[subprocess.Popen[str]]:
    """A process that holds it."""
    command = [sys.executable, "-c", HOLDER, bucket.place(name)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def objects(bucket) -> type[Any]:
    """What locks are made of there."""
    return type(guarded(location(bucket.place("any/lock"), s3=True), SECONDS))


def test_who_lives_keeps_it(bucket, holder, name) -> None:
    words = rf"{bucket.place(name)} is in use by another process \(process {holder.pid} of .*; wait for it"
    with pytest.raises(LeaseError, match=words), locked(bucket.place(name)):
        pytest.fail("two hold it")


def test_what_is_there_is_read_once_where_it_is_held(bucket, holder, name, objects, monkeypatch) -> None:
    real, read = objects.read, []

    def watched(lease: leases._Lease, stamp: str, who: str) -> bool:
        assert stamp and who.startswith(f"process {holder.pid} of ")
        raise LeaseError("watched")

    monkeypatch.setattr(objects, "read", lambda self: (read.append(self), real(self))[1])
    monkeypatch.setattr(leases._Lease, "_abandoned", watched)
    with pytest.raises(LeaseError, match="watched"), locked(bucket.place(name)):
        pytest.fail("two hold it")
    assert len(read) == 1


def test_from_who_was_killed_it_is_taken_over(bucket, holder, name, capsys) -> None:
    holder.kill()
    holder.wait()
    with locked(bucket.place(name)):
        assert f"is of process {holder.pid} of" in capsys.readouterr().out
        assert bucket.get(f"{name}/lock").startswith(b"process %d of" % os.getpid())


def test_who_slept_too_long_is_ended_in_what_it_does(bucket, holder, name) -> None:
    holder.send_signal(signal.SIGSTOP)
    with locked(bucket.place(name)):
        holder.send_signal(signal.SIGCONT)
        assert holder.stdout is not None
        assert f"(process {os.getpid()} of " in holder.stdout.readline()
        assert holder.wait(timeout=60) == 0
        bucket.get(f"{name}/lock")  # it took nothing with it


def run_of(bucket: Buckets, name: str, seed: int) -> list[str]:
    return [sys.executable, "-c", RUN, bucket.place(name), str(seed)]


def left_by(bucket: Buckets, name: str, tmp_path: Path) -> tuple[list[str], list[Answer]]:
    """What the bucket holds: the journal's keys, and the dataset."""
    folder = bucket.copy(f"{name}/", tmp_path)
    with Journal(folder / "journal.sqlite") as journal:
        return sorted(journal.load("stage")), read_dataset(folder / "data", Answer)


@pytest.mark.parametrize("ended", [True, False])
def test_who_slept_too_long_leaves_the_folder_as_the_other_made_it(bucket, name, tmp_path, ended) -> None:
    """It ended by writing its old journal and datasets over the newer ones, and the run went on from those."""
    name = f"{name}-{ended}"
    with subprocess.Popen(run_of(bucket, name, 1), cwd=ROOT, stdout=subprocess.PIPE, text=True) as sleeper:
        assert sleeper.stdout is not None and sleeper.stdout.readline() == "working\n"
        sleeper.send_signal(signal.SIGSTOP)
        with subprocess.Popen(
            run_of(bucket, name, 2), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None and other.stdin is not None
            while other.stdout.readline() != "working\n":  # it says first that it waits
                assert other.poll() is None
            if ended:
                assert other.communicate("end\n", timeout=60)[0] == "" and other.returncode == 0
            sleeper.send_signal(signal.SIGCONT)
            said = sleeper.stdout.readline()
            assert sleeper.wait(timeout=60) == 0
            if not ended:
                assert other.communicate("end\n", timeout=60)[0] == "" and other.returncode == 0
    assert f"{bucket.place(name)}" in said and "which took over" in said and "was silent for more than" in said
    assert ("which has ended" in said) is ended
    keys, data = left_by(bucket, name, tmp_path)  # what the sleeper had kept before, the other went on from
    assert "2" in keys and data == [Answer(2)]


def test_what_another_has_taken_over_is_written_no_more(bucket, name, monkeypatch) -> None:
    """Neither a checkpoint's files nor metrics, in the moment before the next renewal, nor after the end."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 60.0)
    monkeypatch.setattr(leases, "_FRESH_SECONDS", 0.0)
    place = location(bucket.place(name), s3=True)
    object = guarded(place / "lock", 10.0)
    words = "is in use by another process .process 1 of elsewhere., which took over"
    with pytest.raises(LeaseError, match=words), locked(bucket.place(name)):
        write_text(place / "kept.txt", "mine")
        write = holding(place)
        assert object.write(b"process 1 of elsewhere\nits token\n", object.read()[0])
        for _ in range(2):
            with pytest.raises(LeaseError, match="took over since this one was silent"):
                write_text(place / "kept.txt", "mine again")
            with pytest.raises(LeaseError, match="given up; wait for it"):
                check_held(place / "checkpoints")
        write_text(place.parent / f"{name}-beside.txt", "not below it")
    with pytest.raises(LeaseError):
        write()
    assert bucket.get(f"{name}/kept.txt") == b"mine"


def test_an_object_that_was_taken_over_is_left_as_nobodys_and_taken_at_once(bucket, holder, name, capsys) -> None:
    holder.kill()
    holder.wait()
    with locked(bucket.place(name)):
        pass
    assert bucket.get(f"{name}/lock").startswith(b"nobody\n")
    assert "waiting for" in capsys.readouterr().out
    with locked(bucket.place(name)):
        assert "waiting for" not in capsys.readouterr().out


def test_it_is_renewed_and_removed_and_its_holder_may_enter_again(bucket) -> None:
    with locked(bucket.place("again")), locked(bucket.place("again")):
        first = bucket.get("again/lock")
        until = time.monotonic() + 60
        while bucket.get("again/lock") == first:
            assert time.monotonic() < until, "it is not renewed"
            time.sleep(SECONDS / 4)
    with locked_target(bucket.place("again/data")):
        assert bucket.names("again/") == [".data.lock"]
    assert "again/lock" not in bucket.names("")


def test_a_write_whose_answer_was_lost_is_known_again(bucket, objects, monkeypatch) -> None:
    """The client tries again, and is told that something else is there: its own."""
    real, written = objects.write, []

    def twice(self: Guarded, data: bytes, over: str) -> str | None:
        if not written:
            written.append(real(self, data, over))
        return real(self, data, over)

    monkeypatch.setattr(objects, "write", twice)
    with locked(bucket.place("lost")):
        assert written[0] and bucket.get("lost/lock").startswith(b"process %d of" % os.getpid())
    assert "lost/lock" not in bucket.names("")


def test_an_object_is_written_only_over_what_was_seen(bucket) -> None:
    one, other = (guarded(location(bucket.place("seen/object"), s3=True), 10.0) for _ in range(2))
    assert one.read() == ("", b"") and one.write(b"1", over="") is not None
    first, data = other.read()
    assert data == b"1" and other.write(b"2", over="") is None
    second = other.write(b"2", over=first)
    assert second and one.write(b"3", over=first) is None and one.read() == (second, b"2")
    one.remove(first)
    assert one.read() == (second, b"2")
    one.remove(second)
    assert other.read() == ("", b"") and other.write(b"4", over=second) is None
