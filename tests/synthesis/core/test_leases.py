"""One program at a time in a bucket's folder, on an emulator of the service: who lives keeps it, the killed lose it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_world import Storage, storage

from synthesis.core import leases
from synthesis.core.leases import LeaseError
from synthesis.core.workdir import locked, locked_target

ROOT = Path(__file__).parent.parent.parent.parent
SECONDS = 1.2
pytestmark = pytest.mark.slow

HOLDER = f"""
import sys, time
from synthesis.core import leases
leases.LEASE_SECONDS = {SECONDS}
from synthesis.core.workdir import locked
try:
    with locked(sys.argv[1]):
        print("held", flush=True)
        time.sleep(60)
except leases.LeaseError as error:
    print(error, flush=True)
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[Storage]:
    with storage() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", SECONDS)


@pytest.fixture
def holder(request, bucket) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `gs://bucket/NAME`, NAME the test's."""
    command = [sys.executable, "-c", HOLDER, f"gs://bucket/{request.node.name}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_lives_keeps_it(bucket, holder, request) -> None:
    words = rf"gs://bucket/{request.node.name} is in use by another process \(process {holder.pid} of .*; wait for it"
    with pytest.raises(LeaseError, match=words), locked(f"gs://bucket/{request.node.name}"):
        pytest.fail("two hold it")


def test_what_is_there_is_read_once_where_it_is_held(bucket, holder, request, monkeypatch) -> None:
    from google.cloud.storage import Blob

    real, read = Blob.reload, []

    def watched(lease: leases._Lease, generation: int, who: str) -> bool:
        assert generation and who.startswith(f"process {holder.pid} of ")
        raise LeaseError("watched")

    monkeypatch.setattr(Blob, "reload", lambda self, **options: (read.append(self.name), real(self, **options)))
    monkeypatch.setattr(leases._Lease, "_abandoned", watched)
    with pytest.raises(LeaseError, match="watched"), locked(f"gs://bucket/{request.node.name}"):
        pytest.fail("two hold it")
    assert read == [f"{request.node.name}/lock"]


def test_from_who_was_killed_it_is_taken_over(bucket, holder, request, capsys) -> None:
    holder.kill()
    holder.wait()
    name = f"gs://bucket/{request.node.name}"
    with locked(name):
        assert f"is of process {holder.pid} of" in capsys.readouterr().out
        assert bucket.get(f"{request.node.name}/lock").startswith(b"process %d of" % os.getpid())


def test_who_slept_too_long_is_ended_in_what_it_does(bucket, holder, request) -> None:
    holder.send_signal(signal.SIGSTOP)
    with locked(f"gs://bucket/{request.node.name}"):
        holder.send_signal(signal.SIGCONT)
        assert holder.stdout is not None
        assert f"(process {os.getpid()} of " in holder.stdout.readline()
        assert holder.wait(timeout=60) == 0
        bucket.get(f"{request.node.name}/lock")  # it took nothing with it


def test_it_is_renewed_and_removed_and_its_holder_may_enter_again(bucket) -> None:
    with locked("gs://bucket/again"), locked("gs://bucket/again"):
        first = bucket.get("again/lock")
        until = time.monotonic() + 60
        while bucket.get("again/lock") == first:
            assert time.monotonic() < until, "it is not renewed"
            time.sleep(SECONDS / 4)
    with locked_target("gs://bucket/again/data"):
        assert bucket.names("again/") == [".data.lock"]
    assert "again/lock" not in bucket.names("")


def test_a_write_whose_answer_was_lost_is_known_again(bucket, monkeypatch) -> None:
    """The client tries again, and is told that another generation is there: its own."""
    from google.cloud.storage import Blob

    real, written = Blob.upload_from_string, []

    def twice(self: Blob, text: str, **options: object) -> None:
        if not written:
            written.append(real(self, text, **options))
        real(self, text, **options)

    monkeypatch.setattr(Blob, "upload_from_string", twice)
    with locked("gs://bucket/lost"):
        assert bucket.get("lost/lock").startswith(b"process %d of" % os.getpid())
    assert "lost/lock" not in bucket.names("")
