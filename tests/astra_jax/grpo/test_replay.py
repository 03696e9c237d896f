"""Batches that a run has written are trained on again: to the bit, with nobody who samples, or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from functools import partial
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from killed_rollouts import CONFIG, ENVIRONMENTS, Killed, Sampler, Tables
from rollout_world import tiny_model
from sft_world import starting

from astra_jax.base.errors import UserError
from astra_jax.grpo import dump
from astra_jax.grpo.dump import FOLDER, BatchDump, DumpedBatches, shard_folder
from astra_jax.grpo.replay import NoSampler, Replay
from astra_jax.grpo.step import update_step
from astra_jax.grpo.train import train
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import PackedGroup, pack_episode, unpack_episode
from astra_jax.run.metrics import read_metrics
from synthesis.core.datasets import CARD_FILE, RECORDS_FILE, DatasetError, read_card, read_dataset
from synthesis.core.reward import Reward
from synthesis.core.workdir import WorkdirError

AGES = (0, 2)


@pytest.fixture(scope="module")
def model(chat_tokenizer):
    return tiny_model(chat_tokenizer.vocab_size, 1024)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(1))


def of_age(async_steps: int):
    """One configuration each, so that its programs are compiled once."""
    return dataclasses.replace(
        CONFIG,
        async_rollouts=async_steps > 0,
        max_off_policy_steps=async_steps or 1,
        checkpoint_every=2,
        dump_batches=True,
    )


def sha256(params) -> str:
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()


class Observed:
    """What a run's updates came to: by update the weights' SHA-256, and the batch. At `dies` the process would die."""

    def __init__(self, dies: int | None = None) -> None:
        self.dies = dies
        self.weights: dict[int, str] = {}
        self.groups: dict[int, list] = {}

    def update_step(self, params, state, groups, *arguments, **options):
        if options["policy_version"] == self.dies:
            raise Killed
        result = update_step(params, state, groups, *arguments, **options)
        self.weights[options["policy_version"]], self.groups[options["policy_version"]] = sha256(result[0]), groups
        return result


@pytest.fixture(scope="module")
def run(model, params, chat_tokenizer):
    """Trains, observed; with no policy, environments or sandbox where batches are replayed."""

    async def trained(
        workdir: Path, config, *, replay=None, policy=None, start=params, model=model, dies=None
    ) -> Observed:
        seen = Observed(dies)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("astra_jax.grpo.train.update_step", seen.update_step)
            with_what = (ENVIRONMENTS, chat_tokenizer, Tables()) if replay is None else ((), chat_tokenizer, None)
            arguments = (config, model, starting(start), *with_what, workdir)
            await train(*arguments, policy=policy, replay=replay and Replay(replay), progress=False)
        return seen

    return trained


@pytest.fixture(scope="module")
def dumped(run, chat_tokenizer, tmp_path_factory):
    """By k: what a run came to that wrote its batches, and where."""
    kept: dict[int, tuple[Observed, Path]] = {}

    async def of(async_steps: int) -> tuple[Observed, Path]:
        if async_steps not in kept:
            workdir = tmp_path_factory.mktemp(f"run{async_steps}")
            seen = await run(workdir, of_age(async_steps), policy=Sampler(chat_tokenizer))
            kept[async_steps] = seen, workdir / FOLDER
        return kept[async_steps]

    return of


@pytest.mark.parametrize("async_steps", AGES)
async def test_a_replay_comes_to_the_same_weights_after_each_update(run, dumped, tmp_path, async_steps) -> None:
    first, folder = await dumped(async_steps)
    again = await run(tmp_path, of_age(async_steps), replay=folder)
    assert again.weights == first.weights and len({*again.weights.values()}) == 3
    rows, wanted = (read_metrics(of / "metrics") for of in (tmp_path, folder.parent))
    same = ("rollout/", "filling/", "train/age", "train/loss")
    figures, those = (
        [{name: row[name] for name in row if name.startswith(same)} for row in of] for of in (rows, wanted)
    )
    assert figures == those and len(figures[0]) > 20
    cards = [DumpedBatches(of).card for of in (tmp_path / FOLDER, folder)]
    assert cards[0]["updates"] == cards[1]["updates"] and cards[0]["digest"] == cards[1]["digest"]


async def test_a_dataset_has_what_was_trained_on(dumped, chat_tokenizer) -> None:
    first, folder = await dumped(2)
    batches = DumpedBatches(folder)
    assert [*batches.updates] == [0, 1, 2] and batches.card["count"] == 6
    for update, trained in first.groups.items():
        found, filling = batches.groups(update)
        assert filling["counts"] and found == trained  # the sampler's logprobs are float32 already
        lines, _ = batches.shard(update)
        for place, (line, group) in enumerate(zip(lines, trained, strict=True)):
            assert (line.index, line.rewards, line.update) == (group.index, group.rewards, group.update)
            one, pieces = batches.group(update, place)
            assert one == group and {*pieces} == {id for episode in group.episodes for id in episode.token_ids}
            assert pieces[chat_tokenizer.eos_id] == chat_tokenizer.decode([chat_tokenizer.eos_id])
    shard = shard_folder(folder, 1)
    assert len(read_dataset(shard, PackedGroup)) == read_card(shard)["count"] == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        CARD_FILE, *(shard_folder(folder, update).name for update in range(3)),
    ]  # fmt: skip


def test_an_episode_takes_little_room() -> None:
    score = Reward(value=0.5, recall=0.5, precision=0.5, solved=1, needed=2, calls=1)
    mask = [0] * 50 + [1] * 30 + [0] * 10 + [1] * 10
    versions = [7 * drawn for drawn in mask[:70]] + [8 * drawn for drawn in mask[70:]]
    logprobs = [float(np.float32(-0.1)) * drawn for drawn in mask]
    one = Episode("e", [*range(100)], 50, mask, logprobs, versions, [], score, 2, "answered", [])
    small = pack_episode(one)
    assert unpack_episode(small) == one and len(small.token_ids) == 200 and len(small.logprobs) == 160
    assert np.frombuffer(small.spans, "<i4").reshape(-1, 2).tolist() == [[50, -1], [20, 7], [10, 8], [10, -1], [10, 8]]
    wide = msgspec.structs.replace(one, token_ids=[*range(151_000, 151_100)])
    assert unpack_episode(pack_episode(wide)) == wide and len(pack_episode(wide).token_ids) == 400
    masked = msgspec.structs.replace(one, score=None, finish="masked")
    packed = pack_episode(masked)
    former = msgspec.structs.replace(packed, text=packed.text.replace(b'"masked"', b'"voided"', 1))
    assert former != packed and unpack_episode(former) == masked, "as version 0.1 calls it"
    for broken in ({"tokens": 99}, {"spans": small.spans[:-8]}, {"logprobs": small.logprobs[4:]}, {"text": b"{"}):
        with pytest.raises(ValueError):
            unpack_episode(msgspec.structs.replace(small, **broken))


async def test_a_run_that_dies_has_one_life_in_its_dataset(run, dumped, chat_tokenizer, tmp_path) -> None:
    """What it had written after its last checkpoint leaves, and comes again."""
    first, _ = await dumped(0)
    with pytest.raises(Killed):
        await run(tmp_path, of_age(0), policy=Sampler(chat_tokenizer), dies=1)  # update 0 is written, nothing is saved
    left = shard_folder(tmp_path / FOLDER, 9)
    left.mkdir()
    assert [*DumpedBatches(tmp_path / FOLDER).updates] == [0]
    await run(tmp_path, of_age(0), policy=Sampler(chat_tokenizer))
    batches = DumpedBatches(tmp_path / FOLDER)
    assert [*batches.updates] == [0, 1, 2] and not left.exists()
    assert [batches.groups(update)[0] for update in range(3)] == [*first.groups.values()]


async def test_a_batch_that_cannot_be_written_leaves_no_hole(
    run, dumped, chat_tokenizer, tmp_path, monkeypatch
) -> None:
    first, _ = await dumped(0)
    policy, write = Sampler(chat_tokenizer), dump.write_dataset

    def full(path, *arguments, **options):
        if path.name.endswith("1"):
            raise DatasetError(f"{path} could not be written (no space left on device)")
        return write(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(dump, "write_dataset", full)
        with pytest.raises(DatasetError, match="update_00000001 could not be written"):
            await run(tmp_path, of_age(0), policy=policy)
    before = len(policy.draws)
    await run(tmp_path, of_age(0), policy=policy)
    batches = DumpedBatches(tmp_path / FOLDER)
    assert [batches.groups(update)[0] for update in range(3)] == [*first.groups.values()]
    assert {version for version, *_ in policy.draws[before:]} == {2}, "nothing is drawn again"


async def test_a_replay_that_dies_goes_on(run, dumped, tmp_path) -> None:
    first, folder = await dumped(0)
    with pytest.raises(Killed):
        await run(tmp_path, of_age(0), replay=folder, dies=2)
    rest = await run(tmp_path, of_age(0), replay=folder)
    assert rest.weights == {2: first.weights[2]}
    with pytest.raises(WorkdirError, match="belongs to another run: replay is '[0-9a-f]{16}' there, None here"):
        await run(tmp_path, of_age(0), policy=NoSampler())


@pytest.fixture
async def copied(dumped, tmp_path) -> Path:
    _, folder = await dumped(0)
    return Path(shutil.copytree(folder, tmp_path / "copied"))


async def test_batches_of_other_settings_get_a_folder_of_their_own(copied, chat_tokenizer) -> None:
    """A run that resumes with another learning rate; a replay has one configuration."""
    identity = DumpedBatches(copied).identity
    same = BatchDump(copied, run="r", identity=identity, tokenizer=chat_tokenizer)
    same.begin(2)
    other = BatchDump(copied, run="r", identity=identity | {"grpo.learning_rate": 0.5}, tokenizer=chat_tokenizer)
    with pytest.raises(UserError, match="learning_rate is 0.01 there, 0.5 here .*dump_batches=false"):
        other.begin(2)


async def refused(run, folder: Path, tmp_path: Path, words: str, config=None, **options) -> None:
    with pytest.raises(UserError, match=words):
        await run(tmp_path / "replay", config or of_age(0), replay=folder, **options)


async def test_what_does_not_fit_is_refused_by_name(run, model, params, copied, tmp_path) -> None:
    no = partial(refused, run, copied, tmp_path)
    await no("grpo.learning_rate is 0.01 there, 0.5 here", dataclasses.replace(of_age(0), learning_rate=0.5))
    await no("grpo.async_rollouts is False there, True here", of_age(2))
    larger = dataclasses.replace(model, d_ff=64)
    await no("model.d_ff is 32 there, 64 here", model=larger, start=larger.init(jax.random.key(1)))
    await no("started from other weights; give those as --weights", start=model.init(jax.random.key(2)))
    await no("has no batch of update 3: it has updates 0 to 2; lower steps", dataclasses.replace(of_age(0), steps=5))
    card = (copied / CARD_FILE).read_text()
    (copied / CARD_FILE).write_text(card.replace('"tokenizer": "', '"tokenizer": "x'))
    await no("tokenizer is 'x[0-9a-f]+' there")
    after = DumpedBatches(copied).updates[1].after
    (copied / CARD_FILE).write_text(card.replace(after, "0" * 64))
    await no("update 1 gave other weights than in the run that wrote")


async def test_what_is_cut_swapped_or_gone_is_refused_by_name(run, copied, tmp_path) -> None:
    no = partial(refused, run, copied, tmp_path)
    records = shard_folder(copied, 1) / RECORDS_FILE
    whole = records.read_bytes()
    records.write_bytes(whole[: len(whole) // 2])
    await no(r"update_00000001/records.array_record cannot be read")
    records.write_bytes(whole)
    shutil.rmtree(shard_folder(copied, 1))
    await no("no dataset at .*update_00000001: dataset_card.json is missing")
    shutil.copytree(shard_folder(copied, 0), shard_folder(copied, 1))
    await no("update_00000001 is another batch than .* says")
    with pytest.raises(DatasetError, match="is the batch of one update; give the folder that it is in"):
        Replay(shard_folder(copied, 0))
    (copied / CARD_FILE).write_text('{"kind": "Trajectory", "schema_version": 1, "count": 0, "digest": ""}')
    with pytest.raises(DatasetError, match="holds Trajectory records, not the batches"):
        Replay(copied)
