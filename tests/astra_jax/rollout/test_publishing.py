"""Publishing weights: what is refused, and disks that fail. That servers can read them is tested in test_vllm.py and
test_buckets.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from astra_jax.models.qwen3.presets import PRESETS
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher

ROOT = Path(__file__).parents[3]
KINDS = pytest.mark.parametrize("kind", [Publisher, FolderPublisher])


@KINDS
def test_folders_that_cannot_be_published_to_are_refused(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="keep is 1; a server may still read the version before"):
        kind(tmp_path / "policy", PRESETS["tiny"], keep=1)
    with pytest.raises(ValueError, match="s3://bucket/policy is neither a folder nor gs://BUCKET/FOLDER"):
        kind("s3://bucket/policy", PRESETS["tiny"])
    assert not list(tmp_path.iterdir())


def test_what_vllm_reloads_is_on_a_disk() -> None:
    with pytest.raises(ValueError, match="published to gs://bucket/policy, and vLLM's reload reads them from a disk"):
        FolderPublisher("gs://bucket/policy", PRESETS["tiny"])


def test_disks_that_fail() -> None:
    """`failing_publishes.py`, in a process that ends with it: threads of Orbax and TensorStore outlive a save that has
    failed, and in two of some forty runs one of them crashed, seconds later, the process that went on."""
    ends = "import os, sys, pytest; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    file = Path(__file__).with_name("failing_publishes.py")
    command = [sys.executable, "-c", ends, "-q", "-n0", "-p", "no:cacheprovider", str(file)]
    ended = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert "6 passed" in ended.stdout
