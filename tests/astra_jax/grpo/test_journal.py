"""Finished episodes of a batch are neither sampled again nor trained on twice, whatever ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_rollouts import CONFIG, ENVIRONMENTS, Killed, Sampler, Tables, by_seed
from rollout_world import tiny_model
from sft_world import starting

from astra_jax.grpo import journal as journal_module
from astra_jax.grpo import rollouts
from astra_jax.grpo.journal import BatchJournal, BatchKey, Journals
from astra_jax.grpo.rollouts import GroupBatch, Rollouts
from astra_jax.grpo.train import train
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import Group
from astra_jax.run.identity import run_id
from astra_jax.run.metrics import read_metrics
from synthesis.core.environment import CallRecord
from synthesis.core.reward import Reward
from synthesis.core.workdir import WorkdirError


async def one_life(policy, folder: Path, *, weights: str = "w", identity: str = "i") -> GroupBatch | None:
    """Fill the first batch, or die of it."""
    journals = Journals(folder, "run", identity)
    sampling = Rollouts(policy, Tables(), ENVIRONMENTS, policy.tokenizer, CONFIG, journals)
    try:
        await sampling.set_version(0, weights)
        await sampling.fill(0)
        return sampling.take()
    finally:
        await sampling.close()


async def two_updates(policy, folder: Path, trained: dict[int, list[Group]], **changes) -> None:
    """From the start, or die of it; what was trained on in an earlier life is trained on again."""
    config = dataclasses.replace(CONFIG, **changes)
    sampling = Rollouts(policy, Tables(), ENVIRONMENTS, policy.tokenizer, config, Journals(folder, "run", "i"))
    weights = "w"
    try:
        for update in range(2):
            policy.version = update
            await sampling.set_version(update, weights)
            await sampling.fill(update)
            batch = sampling.take()
            assert trained.setdefault(update, batch.groups) == batch.groups
            weights = hashlib.sha256(repr((weights, batch.groups)).encode()).hexdigest()
    finally:
        await sampling.close()


def lives(tokenizer, folder: Path, kills: list[int], torn: random.Random | None = None):
    """The batch that is filled over so many kills, every draw that ended, and what was drawn though it was finished."""
    again = set()

    async def live() -> tuple[GroupBatch, Sampler, set[str]]:
        first = Sampler(tokenizer)
        for kill_at in kills:
            policy = first.like(kill_at)
            known, before = finished(folder), len(first.draws)
            try:
                return await one_life(policy, folder), first, again
            except Killed:
                again.update(known & {session for _, session, _ in first.draws[before:]})
                if torn is not None and (files := sorted(folder.glob("*.journal"))):
                    whole = files[-1].read_bytes()
                    files[-1].write_bytes(whole + whole[-40:] * torn.randrange(2))
        known, before = finished(folder), len(first.draws)
        batch = await one_life(first.like(10**9), folder)
        return batch, first, again | known & {session for _, session, _ in first.draws[before:]}

    return asyncio.run(live())


def finished(folder: Path) -> set[str]:
    """The sessions of all episodes in the journals."""
    journal = BatchJournal(folder, key())
    places = [(group, number) for group in range(50) for number in range(CONFIG.group_size)]
    return {f"group{group}.{number}" for group, number in places if journal.take_episode(group, number)}


def without_counts(batch: GroupBatch) -> list:
    return [batch.groups, batch.filling.rollout, batch.filling.counts["episodes"]]


@settings(max_examples=12, deadline=None)
@given(kills=st.lists(st.integers(1, 25), max_size=4), seed=st.integers(0, 10**6))
def test_a_batch_is_the_same_over_any_kills(chat_tokenizer, kills, seed) -> None:
    """And no finished episode is sampled again."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        straight, first, _ = lives(chat_tokenizer, folder / "straight", [])
        killed, sampler, again = lives(chat_tokenizer, folder / "killed", kills, random.Random(seed))
        assert not again
        assert without_counts(killed) == without_counts(straight)
        trained = [group.index for group in killed.groups]
        assert len(set(trained)) == len(trained)
        assert set(first.draws) == set(sampler.draws) and len(set(first.draws)) == len(first.draws)
        assert max(Counter(sampler.draws).values()) <= 1 + len(kills)


@settings(max_examples=12, deadline=None)
@given(
    kills=st.lists(st.integers(1, 60), max_size=4),
    fail_at=st.integers(0, 25),
    concurrent=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    deadline=st.sampled_from([None, 1e-6]),
)
def test_what_was_trained_on_is_trained_on_again(chat_tokenizer, kills, fail_at, concurrent, deadline) -> None:
    """Though an episode was masked, the deadline had passed, or other numbers of groups are begun at once now: none of
    it is tried again once an update had its batch."""

    async def live(folder: Path) -> None:
        first, trained = Sampler(chat_tokenizer), {}
        for life, kill_at in enumerate([*kills, 10**9]):
            policy = first.like(kill_at)
            policy.fail_at = 0 if life else fail_at
            known, before = set(trained), len(first.draws)
            changes = dict(concurrent_groups=concurrent[life], deadline_seconds=deadline)
            with contextlib.suppress(Killed):
                await two_updates(policy, folder, trained, **changes)
            assert not known & {version for version, _, _ in first.draws[before:]}
        assert set(trained) == {0, 1}

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder)))


@pytest.mark.parametrize("k", [0, 1])
async def test_who_gave_a_batch_up_samples_others_the_next_time(chat_tokenizer, tmp_path, k) -> None:
    """From the same checkpoint: it had been saved before the rollouts, and is not saved again."""
    config = dataclasses.replace(CONFIG, async_rollouts=k > 0, max_off_policy_steps=k or 1, max_groups_per_step=4)
    first = Sampler(chat_tokenizer)
    first.script = lambda session, turn, seed: by_seed(session, turn, seed if session.startswith("group9.") else 0)
    found, before = [], 0
    for _ in range(4):
        sampling = Rollouts(
            first.like(10**9), Tables(), ENVIRONMENTS, chat_tokenizer, config, Journals(tmp_path, "r", "i")
        )
        await sampling.set_version(0, "w")
        await sampling.fill(0)
        batch = sampling.take()
        await sampling.close()
        groups = {int(session.removeprefix("group").partition(".")[0]) for _, session, _ in first.draws[before:]}
        found, before = [*found, (sorted(groups), batch)], len(first.draws)
    assert found == [([0, 1, 2, 3], None), ([4, 5, 6, 7], None), ([8, 9, 10, 11], None), ([12, 13, 14, 15], None)]


PROCESS = """
import asyncio, os, signal, sys
from pathlib import Path
import killed_rollouts, test_journal
from astra_jax.grpo.journal import JournalReader
from astra_jax.tokenizer import ChatTokenizer

class Process(killed_rollouts.Sampler):
    async def generate(self, *arguments, **options):
        if self.asked + 1 == self.kill_at:
            async with asyncio.timeout(120):
                while not ((seen := journal.look()) and seen.episodes):  # episodes finished; a slow disk has none yet
                    await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        completion = await super().generate(*arguments, **options)
        print(*self.draws[-1], flush=True)
        return completion

journal = JournalReader(Path(sys.argv[2]))
policy = Process(ChatTokenizer.load(sys.argv[1]), int(sys.argv[3]))
batch = asyncio.run(test_journal.one_life(policy, Path(sys.argv[2])))
print("batch", *(group.index for group in batch.groups), *(group.deviation for group in batch.groups))
print("taken", batch.filling.counts["journal_episodes"])
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_what_it_was_drawing(chat_tokenizer_dir, tmp_path) -> None:
    """By a real SIGKILL, which runs nothing of ours any more."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}

    def live(folder: str, kill_at: int) -> list[str]:
        arguments = [str(chat_tokenizer_dir), str(tmp_path / folder), str(kill_at)]
        ended = subprocess.run([sys.executable, "-c", PROCESS, *arguments], env=environment, capture_output=True)
        assert ended.returncode == (0 if kill_at > 1000 else -signal.SIGKILL), ended.stderr.decode()[-2000:]
        return ended.stdout.decode().splitlines()

    *straight, batch, taken = live("straight", 10**9)
    assert taken == "taken 0.0"
    draws, many = random.Random(0), len(straight)
    points = many - draws.randint(2, 4), draws.randint(2, 4)  # first behind the episodes that run at once at the start
    killed = [line for kill_at in points for line in live("killed", kill_at)]
    *rest, again, taken = live("killed", 10**9)
    assert again == batch and taken != "taken 0.0" and set(killed + rest) == set(straight)
    drawn, needed = (Counter(line.split()[1] for line in one) for one in (killed + rest, straight))
    assert all(drawn[session] <= needed[session] * 3 for session in drawn) and len(rest) < len(straight)


def key(**changes) -> BatchKey:
    parts = dict(run="run", identity="i", version=0, weights="w")
    return BatchKey(**(parts | changes))


EPISODE = Episode(
    "e\ud800",
    [4, 5, 6, 7, 8, 9],
    1,
    [0, 1, 1, 0, 0, 0],
    [0.0, -0.5, float(np.float32(-1e-9)), 0.0, 0.0, 0.0],
    [0, 0, 1, 0, 0, 0],
    [CallRecord(0, "f", {"n": 10**40, "text": "\ud800", "x": float("inf")}, "ok", "{}", [1])],
    Reward(value=0.5, recall=0.5, precision=0.5, solved=1, needed=2, calls=1),
    1,
    "answered",
    [],
)


async def kept(folder: Path, count: int = 3, **changes) -> None:
    journal = BatchJournal(folder, key(**changes))
    await asyncio.gather(*(journal.keep_episode(4, number, EPISODE) for number in range(count)))
    await journal.close()


async def test_episodes_come_back_as_they_were(tmp_path) -> None:
    await kept(tmp_path)
    journal = BatchJournal(tmp_path, key())
    assert journal.available == 3
    assert [journal.take_episode(4, number) for number in range(4)] == [EPISODE, EPISODE, EPISODE, None]
    assert journal.take_episode(4, 0) is None and journal.stats.episodes == 3


async def test_what_a_policy_says_reaches_every_host(tmp_path, chat_tokenizer, monkeypatch) -> None:
    """An integer of 40 digits in a call's arguments ended a run on several hosts."""
    batch = await one_life(Sampler(chat_tokenizer), tmp_path)
    first, *rest = batch.groups
    episodes = [msgspec.structs.replace(first.episodes[0], calls=EPISODE.calls), *first.episodes[1:]]
    batch = GroupBatch([msgspec.structs.replace(first, episodes=episodes), *rest], batch.filling)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(rollouts, "broadcast_from_host0", lambda value: value)
    assert rollouts.on_every_host(batch) == batch and rollouts.on_every_host(None) is None


@pytest.mark.parametrize("other", [{"run": "x"}, {"identity": "x"}, {"weights": "x"}], ids=str)
async def test_what_others_drew_is_dropped_and_counted(tmp_path, other, caplog) -> None:
    await kept(tmp_path, **other)
    journal = BatchJournal(tmp_path, key())
    assert journal.stats.dropped == 1 and journal.available == 0 and not list(tmp_path.glob("*.journal"))
    assert not caplog.messages


async def test_a_journal_of_an_earlier_version_is_dropped_by_name(tmp_path, caplog, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_FORMAT", 2)
        await kept(tmp_path)
    (file,) = tmp_path.glob("*.journal")
    assert BatchJournal(tmp_path, key()).stats.dropped == 1 and not file.exists()
    assert f"{file} has the format of an earlier version: its rollouts are sampled again" in caplog.text


@pytest.mark.parametrize("place", range(0, 100, 9))
async def test_nothing_behind_damage_counts(tmp_path, place) -> None:
    await kept(tmp_path)
    (file,) = tmp_path.glob("*.journal")
    content = bytearray(file.read_bytes())
    content[len(content) * place // 100] ^= 0x10
    file.write_bytes(content)
    journal = BatchJournal(tmp_path, key())
    found = [journal.take_episode(4, number) for number in range(3)]
    assert journal.stats.dropped == 1 and found.count(None) >= 1
    assert found == [EPISODE] * (3 - found.count(None)) + [None] * found.count(None)


async def test_a_disk_that_takes_nothing_ends_no_run(tmp_path, chat_tokenizer, caplog) -> None:
    (tmp_path / "file").write_text("")
    policy = Sampler(chat_tokenizer)
    with caplog.at_level("WARNING"):
        batch = await one_life(policy, tmp_path / "file" / "rollouts")
    assert batch.filling.counts["journal_unwritten"] > 3 and len(batch.groups) == 2
    assert sum("cannot be written" in line for line in caplog.messages) == 1


def test_a_runs_id_is_drawn_once(tmp_path) -> None:
    found = run_id(tmp_path)
    assert found == run_id(tmp_path) != run_id(tmp_path / "other")
    (tmp_path / "run_id").write_text("../x")
    with pytest.raises(WorkdirError, match="does not have a run's id"):
        run_id(tmp_path)


async def test_a_run_that_dies_in_its_rollouts_draws_nothing_again(pool, chat_tokenizer, tmp_path, capsys) -> None:
    """In its third batch, with no checkpoint yet: it takes both earlier batches and what there is of this one, comes to
    the same weights, and leaves nothing behind."""
    model = tiny_model(chat_tokenizer.vocab_size, 1024)
    params = model.init(jax.random.key(1))

    async def run(workdir: Path, policy: Sampler):
        arguments = (CONFIG, model, starting(params), ENVIRONMENTS, chat_tokenizer, pool, workdir)
        return await train(*arguments, policy=policy, progress=False)

    straight = Sampler(chat_tokenizer)
    whole = await run(tmp_path / "straight", straight)
    first = Sampler(chat_tokenizer)
    with pytest.raises(Killed):
        await run(tmp_path / "killed", first.like(len(straight.draws) - 2))
    assert list((tmp_path / "killed" / "rollouts").iterdir())
    before = len(first.draws)
    result = await run(tmp_path / "killed", first.like(10**9))
    assert before + 2 * CONFIG.group_size * 3 > len(first.draws) and set(first.draws) == set(straight.draws)
    for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(a, b)
    rows, wanted = (read_metrics(tmp_path / name / "metrics") for name in ("killed", "straight"))
    assert [row["rollout/reward"] for row in rows] == [row["rollout/reward"] for row in wanted]
    assert all(row["filling/journal_episodes"] > 0 and row["filling/journal_dropped"] == 0 for row in rows)
    assert (
        "episodes that an earlier process finished are reused; unfinished ones start again" in capsys.readouterr().err
    )
    assert not list((tmp_path / "killed" / "rollouts").iterdir())


class Stopped(Sampler):
    """Asks its process to stop, in the rollouts of a version."""

    stop_in = 2

    async def generate(self, *arguments, **options):
        if self.version == self.stop_in and not self.asked_to_stop:
            self.asked_to_stop = True
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        return await super().generate(*arguments, **options)

    asked_to_stop = False


async def test_a_stop_forgets_nothing_before_its_checkpoint_is_whole(pool, chat_tokenizer, tmp_path, capsys) -> None:
    """It saves a step that is being saved already; where that one does not get whole, all is there to go on from the
    one before."""
    model = tiny_model(chat_tokenizer.vocab_size, 1024)
    params = model.init(jax.random.key(1))
    config = dataclasses.replace(CONFIG, checkpoint_every=2)

    async def run(policy: Sampler):
        arguments = (config, model, starting(params), ENVIRONMENTS, chat_tokenizer, pool, tmp_path)
        return await train(*arguments, policy=policy, progress=False)

    result = await run(Stopped(chat_tokenizer))
    assert (result.stopped, result.steps) == ("preempted", 2)
    assert re.search(r"\d+ unfinished episodes are cancelled; they start again when", capsys.readouterr().err)
    shutil.rmtree(tmp_path / "checkpoints" / "states" / "2")
    again = Sampler(chat_tokenizer)
    result = await run(again)
    assert result.stopped == "finished" and {version for version, _, _ in again.draws} == {2}
    assert [row["filling/journal_episodes"] > 0 for row in result.history[:2]] == [True, True]
