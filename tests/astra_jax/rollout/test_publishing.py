"""Publishing weights: what is refused, and disks that fail. That servers can read them is tested in test_vllm.py and
test_buckets.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_world import in_its_own_process

from astra_jax.models.qwen3.presets import PRESETS
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher

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
    """`failing_publishes.py`, where a thread of Orbax or TensorStore that outlives a save that failed harms nobody
    else."""
    assert "7 passed" in in_its_own_process(Path(__file__).with_name("failing_publishes.py"))
