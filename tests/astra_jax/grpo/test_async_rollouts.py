"""Rollouts that go on across updates, of a run that is killed: the same batches again, and no draw is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from killed_rollouts import CONFIG, ENVIRONMENTS, Killed, Sampler, Tables

from astra_jax.grpo.journal import Journals
from astra_jax.grpo.rollouts import GroupBatch, Rollouts
from astra_jax.rollout.buffer import FillCounts
from astra_jax.rollout.records import Group

UPDATES = 4


class Unsteady(Sampler):
    """Some turns take longer than an update; by `pause` seconds also than what an update does on the disk."""

    pause = 0.0

    async def generate(self, token_ids, sampling, *, session=""):
        slow = random.Random(f"{session}/{len(token_ids)}").random() < 0.3
        for _ in range(120 if slow else 2):
            await asyncio.sleep(0)
        await asyncio.sleep(self.pause * slow)
        return await super().generate(token_ids, sampling, session=session)

    def like(self, kill_at: int) -> Unsteady:
        other = Unsteady(self.tokenizer, kill_at)
        other.draws = self.draws
        return other


@dataclass
class Disk:
    """What outlives a process: its checkpoints, the last of which is gone on from, and what was trained on by then."""

    folder: Path
    k: int
    checkpoints: list[tuple[int, str, str]] = field(default_factory=lambda: [(0, "w", "")])
    trained: dict[int, tuple[str, list[Group]]] = field(default_factory=dict)
    batches: dict[int, GroupBatch] = field(default_factory=dict)
    lost: int = 0

    def lose_checkpoint(self, lost: bool) -> None:
        """The newest one; behind the one before it nothing is there to go on from."""
        if lost and self.checkpoints[-1][0] > self.lost:
            self.lost = self.checkpoints.pop()[0]

    async def live(self, policy: Unsteady, *, saves: int, journaled: bool = True) -> dict:
        """Train from the last checkpoint to the end, or die of it; returns the last state."""
        step, weights, state = self.checkpoints[-1]
        config = dataclasses.replace(
            CONFIG, async_rollouts=self.k > 0, max_off_policy_steps=self.k or 1, steps=UPDATES + 1
        )
        journals = Journals(self.folder, "run", "i") if journaled else None
        rollouts = Rollouts(policy, Tables(), ENVIRONMENTS, policy.tokenizer, config, journals)
        if state:
            rollouts.load(json.loads(state))
        policy.version = step
        try:
            await rollouts.set_version(step, weights)
            while step < UPDATES:
                await rollouts.fill(step)
                batch = rollouts.take()
                # Whatever was trained on in an earlier life is trained on again.
                assert self.trained.setdefault(step, (weights, batch.groups))[:2] == (weights, batch.groups)
                self.batches[step] = batch
                for _ in range(60):  # of training
                    await asyncio.sleep(0)
                weights = hashlib.sha256(repr((weights, batch.groups)).encode()).hexdigest()
                step += 1
                await rollouts.set_version(step, weights)
                policy.version = step
                if step % saves == 0:
                    self.checkpoints.append((step, weights, json.dumps(rollouts.state())))
                    if len(self.checkpoints) > 1 and journals is not None:
                        journals.forget(self.checkpoints[-2][0] - self.k)
            return rollouts.state()
        finally:
            await rollouts.close()


def lives(tokenizer, disk: Disk, kills: list[int], saves: int, damaged: Collection[int] = ()) -> tuple[dict, Unsteady]:
    """The last state of a run over so many kills, and every draw that ended. Before the `damaged` lives the newest
    checkpoint is lost, of which there are two."""

    async def live() -> tuple[dict, Unsteady]:
        first = Unsteady(tokenizer)
        for life, kill_at in enumerate(kills):
            disk.lose_checkpoint(life in damaged)
            try:
                return await disk.live(first.like(kill_at), saves=saves), first
            except Killed:
                pass
        disk.lose_checkpoint(len(kills) in damaged)
        return await disk.live(first.like(10**9), saves=saves), first

    return asyncio.run(live())


@settings(max_examples=15)
@given(
    k=st.integers(1, 3),
    kills=st.lists(st.integers(1, 90), max_size=4),
    saves=st.sampled_from([1, 2, 3, 10]),
    damaged=st.sets(st.integers(1, 4)),
)
@example(k=1, kills=[58, 9], saves=2, damaged={2})
@example(k=2, kills=[60, 12], saves=2, damaged={2})
def test_a_run_goes_on_over_any_kills(chat_tokenizer, k, kills, saves, damaged) -> None:
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder), k)
        state, policy = lives(chat_tokenizer, disk, kills, saves, damaged)
    trained = [(update, group) for update in range(UPDATES) for group in disk.trained[update][1]]
    indices = {group.index for _, group in trained}
    assert len(indices) == len(trained) == UPDATES * CONFIG.batch_size
    assert all(0 <= update - group.update <= k and group.deviation > CONFIG.min_reward_std for update, group in trained)
    # Every group that was started was trained on, or waits, or is under way, or it is counted what became of it.
    waiting = [group["index"] for group in state["buffer"]["groups"]]
    there = {*waiting, *state["open"]}
    assert len(there) == len(waiting) + len(state["open"]) and not there & indices
    rows = [disk.batches[update].filling.counts for update in range(UPDATES)]
    dropped = sum(row["groups_expired"] + row["groups_cancelled"] for row in rows)
    equal = sum(row["groups_sampled"] * (1 - row["valid_share"]) for row in rows)
    left = msgspec.convert(state["buffer"]["counts"], FillCounts)
    gone = dropped + equal + left.expired + left.cancelled + left.sampled - left.valid
    assert len(set(range(state["next_index"])) - there - indices) == pytest.approx(gone)
    # A turn is drawn again only where its episode was unfinished when the process was killed.
    drawn = Counter((session, place) for _, session, place in policy.draws)
    assert max(drawn.values()) <= 1 + len(kills)


@pytest.mark.parametrize("k", [1, 3])
def test_tokens_of_several_versions_are_trained_on(chat_tokenizer, tmp_path, monkeypatch, k) -> None:
    monkeypatch.setattr(Unsteady, "pause", 0.1)
    disk = Disk(tmp_path, k)
    lives(chat_tokenizer, disk, [], 10)
    episodes = [episode for batch in disk.batches.values() for group in batch.groups for episode in group.episodes]
    assert any(len(episode.sampled_by) > 1 for episode in episodes)
    assert all(0 < batch.filling.counts["mean_age"] <= k for batch in list(disk.batches.values())[1:])


async def test_without_journals_what_waits_is_kept(chat_tokenizer, tmp_path) -> None:
    disk = Disk(tmp_path, 2)
    await disk.live(Unsteady(chat_tokenizer), saves=2, journaled=False)
    step, _, state = disk.checkpoints[-1]
    again = Disk(tmp_path / "again", 2, [disk.checkpoints[-1]])
    assert step == 4 and json.loads(state)["next_index"] >= 8
    assert (await again.live(Unsteady(chat_tokenizer), saves=2, journaled=False))["buffer"] == json.loads(state)[
        "buffer"
    ]
