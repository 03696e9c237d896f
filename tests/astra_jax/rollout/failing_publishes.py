"""Publishing weights to disks that fail. Run by test_publishing.py, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from pathlib import Path

import jax
import pytest
from checkpoint_world import full_disk
from emulated_rollouts import emulated, policy_on
from rollout_world import tiny_model

from astra_jax.rollout.sampler import Sampling
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher, PublishError

KINDS = pytest.mark.parametrize("kind", [Publisher, FolderPublisher])
MODEL = tiny_model(640, 4096)
ROOM = 50_000
"""Bytes, of the weights of a model of twice as much."""


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_failed_in_the_background_is_named_when_it_is_closed(params, tmp_path) -> None:
    publisher = Publisher(tmp_path / "policy", MODEL, dtype="float32")
    with full_disk(ROOM):
        publisher.publish(params, 1)
        with pytest.raises(PublishError, match="weights of version 1 could not be published"):
            publisher.close()


@KINDS
def test_a_disk_that_fails_is_named_and_what_was_begun_goes(kind, params, tmp_path) -> None:
    """Full, removed in the middle, and taken away; the version before stays, and the next one is written."""
    folder = tmp_path / "policy"
    publisher = kind(folder, MODEL, dtype="float32")

    def publish(version: int) -> None:
        publisher.publish(params, version)
        publisher.wait()

    publish(1)
    with full_disk(ROOM), pytest.raises(PublishError, match="weights of version 2 could not be published") as error:
        publish(2)
    assert str(folder) in str(error.value) and "\n" not in str(error.value) and "make room there" in str(error.value)
    assert names(folder) == {"1"}
    publish(2)
    assert names(folder) == {"1", "2"}
    shutil.rmtree(folder)
    publish(3)  # it is made again
    assert "3" in names(folder)
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    with pytest.raises(PublishError, match="version 4 could not be published"):
        publish(4)
    folder.unlink()
    publish(4)
    assert names(folder) == {"4"}
    publisher.close()


def test_a_folder_that_is_removed_while_it_is_written_to(params, tmp_path) -> None:
    publisher = Publisher(tmp_path / "policy", MODEL, dtype="float32")
    publisher.publish(params, 1)
    shutil.rmtree(tmp_path / "policy", ignore_errors=True)
    with contextlib.suppress(PublishError):  # it may be quicker
        publisher.wait()
    # On a busy machine, remaining writes of a failed save may outlive the next version, or disturb it.
    version, deadline = 1, time.monotonic() + 60
    while version == 1 or any("tmp" in name for name in names(tmp_path / "policy")):
        assert time.monotonic() < deadline
        with contextlib.suppress(PublishError):
            publisher.publish(params, version + 1)
            publisher.wait()
            version += 1
    assert str(version) in names(tmp_path / "policy")
    publisher.close()


async def test_an_update_waits_for_room_on_the_disk(params, tmp_path, caplog) -> None:
    async with emulated(1) as (server,), policy_on([server], MODEL, tmp_path, answer_seconds=20.0) as policy:
        await policy.load_weights(params, 1)
        with caplog.at_level(logging.WARNING), full_disk(ROOM):
            preparing = asyncio.create_task(policy.publish_weights(params, 2))
            while not any("version 2 could not be published" in line for line in caplog.messages):
                await asyncio.sleep(0.01)
        await preparing
        await policy.load_weights(params, 2)
        assert server.syncs == ["r1:1", "r1:2"]


async def test_patience_with_a_disk_ends(params, tmp_path) -> None:
    async with (
        emulated(1) as (server,),
        policy_on([server], MODEL, tmp_path, patience_seconds=0.2, answer_seconds=20.0) as policy,
    ):
        await policy.load_weights(params, 1)
        with full_disk(ROOM), pytest.raises(PublishError, match="version 2 could not be published"):
            await policy.load_weights(params, 2)
        assert server.syncs == ["r1:1"] and policy.fleet.version == 1


async def test_servers_draw_and_come_back_while_the_next_version_is_written(params, tmp_path, monkeypatch) -> None:
    """One that comes back then gets the version before, whole, not the one that is begun."""
    async with (
        emulated(2) as (first, second),
        policy_on([first, second], MODEL, tmp_path, answer_seconds=20.0) as policy,
    ):
        await policy.load_weights(params, 1)
        written, waited = threading.Event(), Publisher.wait

        def wait(self: Publisher) -> None:
            assert written.wait(60)
            waited(self)

        monkeypatch.setattr(Publisher, "wait", wait)
        preparing = asyncio.create_task(policy.publish_weights(params, 2))
        second.version = "none"  # started again
        sampling = Sampling(max_tokens=2, stop_ids=(), seed=0)
        while second.syncs != ["r1:1", "r1:1"]:
            assert (await policy.generate([1, 2], sampling)).policy_version == 1
        assert [item.split("/")[-2:] for item in second.items] == [["1", "params"]] * 2
        assert not written.is_set() and first.syncs == ["r1:1"]
        written.set()
        await preparing
        await policy.load_weights(params, 2)
        assert (await policy.generate([1, 2], sampling)).policy_version == 2
        assert first.items[-1] == second.items[-1] == str(tmp_path / "policy" / "2" / "params")
