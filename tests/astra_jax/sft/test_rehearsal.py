"""What a model says by itself, drawn once and rehearsed in SFT: the conversations, their share, what they are for."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from absl import flags
from rollout_world import tiny_model
from sft_world import make_dataset, make_tokenizer, starting, trajectories

from astra_jax.base.errors import InputError
from astra_jax.head import token_logprobs
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.run.batch import PackedBatch
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, DataConfig, scan, steps_for_epochs, tokenise
from astra_jax.sft.rehearsal import RehearsalConfig, longest, rehearse
from astra_jax.sft.train import train
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import DatasetError, read_dataset, write_dataset
from synthesis.core.records import Message, Trajectory
from synthesis.core.stages import Journal
from synthesis.core.workdir import WorkdirError

COUNT = 40
DATA = DataConfig(seq_len=512, packing_bins=2, rounds="apart", rehearsed=0.25)
CONFIG = RehearsalConfig(conversations=60, max_request_tokens=48, max_answer_tokens=24, concurrency=8)
TRAINING = SFTConfig(
    data=DATA, batch_size=2, micro_batch_size=2, steps=40, learning_rate=1e-2, log_every=40, sample_every=0
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "trajectories", trajectories(COUNT, longest=1))


def talk(index: int, *, unfinished: bool = False) -> Trajectory:
    """A conversation without tools."""
    messages = [Message("user", f"Say {index}."), Message("assistant", f"I say {index}, and nothing else.")]
    more = {"unfinished": True} if unfinished else {}
    return Trajectory(f"talk_{index}", "", "", "conversation", "en", [], messages, 0, {}, None, **more)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talks") / "rehearsal"
    write_dataset(path, Trajectory, [talk(i) for i in range(7)], card={"made_by": "tests"})
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Their share


def documents(batch: PackedBatch) -> list[tuple[int, ...]]:
    found = []
    for tokens_t, segments_t in zip(batch.tokens_bt, batch.segment_ids_bt, strict=True):
        found += [tuple(tokens_t[segments_t == segment]) for segment in range(1, segments_t.max() + 1)]
    return found


def told_apart(
    dataset: Path, talks: Path, tokenizer: ChatTokenizer, config: DataConfig, count: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The first documents that a run with a rehearsal sees: the data's, and the rehearsal's."""
    said = {tuple(tokenise(one, tokenizer, config).tokens) for one in read_dataset(talks, Trajectory)}
    seen: list[tuple[int, ...]] = []
    with BatchIterator(dataset, tokenizer, config, 1, rehearsal=talks) as batches:
        while len(seen) < count:
            seen += documents(next(batches))
    return [one for one in seen if one not in said], [one for one in seen if one in said]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_examples_of_the_rehearsal_are_a_share_of_all(dataset, talks, tokenizer, share) -> None:
    data, rehearsed = told_apart(dataset, talks, tokenizer, replace(DATA, rehearsed=share), 4 * COUNT)
    assert len(rehearsed) / (len(data) + len(rehearsed)) == pytest.approx(share, abs=0.05)
    assert len(set(rehearsed)) == 7, "all of them, again and again"
    whole = {tuple(tokenise(one, tokenizer, DATA).tokens) for one in trajectories(COUNT, longest=1)}
    assert set(data) == whole, "nothing of the data is left out for it"


def test_what_is_done_to_the_data_is_not_done_to_the_rehearsal(dataset, talks, tokenizer) -> None:
    """Entities of the data are renamed: each document is another; the rehearsal's are as they were said."""
    config = replace(DATA, rename_entities=1.0, tools="some")
    _, rehearsed = told_apart(dataset, talks, tokenizer, config, COUNT)
    assert len(set(rehearsed)) == 7


@pytest.mark.parametrize("taken", [0, 3])
def test_an_iterator_with_a_rehearsal_goes_on_from_its_state(dataset, talks, tokenizer, taken) -> None:
    with BatchIterator(dataset, tokenizer, DATA, 2, rehearsal=talks) as whole:
        for _ in range(taken):
            next(whole)
        state = json.loads(json.dumps(whole.get_state()))
        flags.FLAGS.mark_as_parsed()  # programs have; Grain's workers look
        with BatchIterator(dataset, tokenizer, replace(DATA, workers=2), 2, rehearsal=talks) as resumed:
            resumed.set_state(state)
            for ours, theirs in itertools.islice(zip(resumed, whole, strict=False), 6):
                jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_epochs_are_of_the_data(dataset, talks, tokenizer) -> None:
    """What is rehearsed comes on top, in its share."""
    stats, said = scan(dataset, tokenizer, DATA), scan(talks, tokenizer, DATA)
    alone = steps_for_epochs(stats, DATA, 1, 4)
    assert alone <= steps_for_epochs(stats, DATA, 1, 4, rehearsal=said) <= 1.2 * alone, "short ones fit between"
    long = dataclasses.replace(said, lengths=(DATA.seq_len,) * 7)
    more = steps_for_epochs(stats, DATA, 1, 4, rehearsal=long) - alone
    assert more == pytest.approx(4 * COUNT * 0.25 / 0.75, abs=2)


def test_an_empty_rehearsal_is_refused(dataset, tokenizer, tmp_path) -> None:
    write_dataset(tmp_path / "none", Trajectory, [], card={})
    with pytest.raises(DatasetError, match=r"none: the dataset is empty"):
        BatchIterator(dataset, tokenizer, DATA, 1, rehearsal=tmp_path / "none")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_none_or_all_is_refused(share) -> None:
    with pytest.raises(ValueError, match="rehearsed is"):
        replace(DATA, rehearsed=share)


# ---------------------------------------------------------------------------------------------------------------------
# Turns that were broken off


def test_the_end_of_a_turn_that_was_broken_off_is_not_trained_on(tokenizer) -> None:
    whole, broken = (tokenise(talk(3, unfinished=unfinished), tokenizer, DATA) for unfinished in (False, True))
    last = max(np.flatnonzero(whole.loss_mask))
    assert whole.tokens[last] == tokenizer.eos_id
    np.testing.assert_array_equal(broken.tokens, whole.tokens[:last])
    np.testing.assert_array_equal(broken.loss_mask, whole.loss_mask[:last])
    assert broken.loss_mask.any()


def test_only_the_last_turn_was_broken_off(tokenizer, tmp_path) -> None:
    """Of a conversation in rounds the earlier ones come to their ends."""
    first, second = talk(1).messages, talk(2).messages
    record = msgspec.structs.replace(talk(0, unfinished=True), messages=[*first, *second])
    write_dataset(tmp_path / "two", Trajectory, [record], card={})
    with BatchIterator(tmp_path / "two", tokenizer, DATA, 1) as batches:
        found = {one[-1] == tokenizer.eos_id or tokenizer.eos_id in one[-3:]: one for one in documents(next(batches))}
    ended, broken = found[True], found[False]
    assert len(ended) < len(broken) and tokenizer.decode(broken).endswith("I say 2, and nothing else.")


def test_a_conversation_that_the_model_does_not_end_has_nothing_to_break_off(tokenizer) -> None:
    asked = [*talk(1).messages, Message("user", "And then?")]
    records = [msgspec.structs.replace(talk(1, unfinished=broken), messages=asked) for broken in (False, True)]
    one, other = (tokenise(record, tokenizer, DATA) for record in records)
    np.testing.assert_array_equal(one.tokens, other.tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing them


@dataclass
class Says:
    """Writes these requests and answers, in turn; what has no end is broken off. Counts what it is asked."""

    tokenizer: ChatTokenizer
    turns: Sequence[str]
    fails_after: int = 10**9
    asked: list[str] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        del session
        if len(self.asked) >= self.fails_after:
            raise ConnectionError("the server is gone")
        prompt = self.tokenizer.decode(token_ids)
        said = self.turns[len(self.asked) % len(self.turns)]
        self.asked.append(prompt)
        new = self.tokenizer.encode(said)[: sampling.max_tokens]
        return Completion(new, [-1.0] * len(new), [0] * len(new), "stop" if said.endswith("<|im_end|>") else "length")

    def release(self, session: str) -> None:
        """It keeps nothing."""


async def drawn(tokenizer: ChatTokenizer, path: Path, turns: Sequence[str], count: int):
    config = RehearsalConfig(conversations=count, concurrency=1)
    policy = Says(tokenizer, turns)
    with Journal(path / "journal.sqlite") as journal:
        return await rehearse(policy, tokenizer, config, journal=journal, run="said"), policy


async def test_a_conversation_is_what_the_model_wrote(tokenizer, tmp_path) -> None:
    found, policy = await drawn(tokenizer, tmp_path, [" Who are you?<|im_end|>", "Nobody.<|im_end|>"], 2)
    assert policy.asked[0] == "<|im_start|>user\n", "nothing but the opening of a turn"
    assert policy.asked[1] == "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    assert [one.id for one in found.outputs] == ["rehearsal_0", "rehearsal_1"]
    assert found.outputs[0].messages == [Message("user", "Who are you?"), Message("assistant", "Nobody.")]
    assert found.outputs[0].tools == [] and not found.outputs[0].unfinished and not found.rejected


async def test_what_cannot_be_kept_is_counted(tokenizer, tmp_path) -> None:
    end, asks = "<|im_end|>", "Who?<|im_end|>"
    turns = [
        *("Who are",),  # a request that is not over
        *(f"  {end}",),  # none
        *(asks, f" {end}"),  # no answer
        *(asks, "<think>\nI wonder"),  # a thought that is not over
        *(asks, "<think>\nI know.\n</think>\n\nNobody, that"),
        *(asks, "Nobody<tool_call>"),
    ]
    found, _ = await drawn(tokenizer, tmp_path, turns, 6)
    counts = {"request_unfinished": 1, "empty_request": 1, "empty_answer": 1, "thought_unfinished": 1}
    assert dict(found.rejected) == counts
    thought, marked = (one.messages[1] for one in found.outputs)
    assert (thought.reasoning, thought.content) == ("I know.", "Nobody, that")
    assert all(one.unfinished is True for one in found.outputs)
    made = tokenise(found.outputs[1], tokenizer, DATA)
    control = {tokenizer.encode(text)[0] for text in ("<tool_call>", "</tool_call>")}
    assert not control & set(made.tokens.tolist()), "what the model wrote opens nothing"
    assert marked.content == "Nobody<tool_call>"


async def test_a_model_that_writes_no_requests_is_refused(tokenizer, tmp_path) -> None:
    with pytest.raises(
        InputError, match=r"of 3 conversations none could be kept \(3 request_unfinished\).*--rehearsal"
    ):
        await drawn(tokenizer, tmp_path, ["and so on"], 3)


async def test_what_was_drawn_is_not_drawn_again(tokenizer, tmp_path) -> None:
    config = RehearsalConfig(conversations=5, concurrency=1)
    turns = ["Who?<|im_end|>", "Nobody.<|im_end|>"]
    broken, whole = Says(tokenizer, turns, fails_after=5), Says(tokenizer, turns)
    with Journal(tmp_path / "journal.sqlite") as journal:
        with pytest.raises(ConnectionError):
            await rehearse(broken, tokenizer, config, journal=journal, run="said")
        found = await rehearse(whole, tokenizer, config, journal=journal, run="said")
    assert found.resumed == 2 and len(found.outputs) == 5 and len(whole.asked) == 6


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer.vocab_size, 512)


@pytest.fixture(scope="module")
def params(model, tokenizer, tmp_path_factory):
    """Of a model that has learnt to talk, a little."""
    folder = tmp_path_factory.mktemp("talker")
    spoken = make_dataset(folder / "talks", [talk(i) for i in range(100)])
    config = replace(TRAINING, steps=120)
    # All tokens are learnt, the user's too: such a model can write requests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTokenizer, "encode_segments", _all_but_the_first(ChatTokenizer.encode_segments))
        start = model.init(jax.random.key(0))
        return train(config, model, starting(start), spoken, tokenizer, folder / "run", progress=False).params


def _all_but_the_first(encode):
    def encoded(self, segments, **more):
        ids, _ = encode(self, segments, **more)
        return ids, [0, *[1] * (len(ids) - 1)]

    return encoded


@pytest.fixture(scope="module")
async def own(model, params, tokenizer, tmp_path_factory) -> list[Trajectory]:
    """Drawn by a real engine."""
    folder = tmp_path_factory.mktemp("own")
    made = []
    for name, concurrency in (("one", 8), ("other", 3)):
        config = replace(CONFIG, concurrency=concurrency)
        shapes = EngineConfig(slots=8, max_length=longest(tokenizer, config))
        with Journal(folder / f"{name}.sqlite") as journal:
            async with Engine(params, model, shapes) as engine:
                made.append((await rehearse(engine, tokenizer, config, journal=journal, run="own")).outputs)
    assert made[0] == made[1], "the same, however many are drawn at a time"
    return list(made[0])


async def test_an_engine_draws_what_its_model_has_learnt_to_say(own) -> None:
    assert len(own) > CONFIG.conversations / 2 and any(one.unfinished is True for one in own)
    assert len({one.messages[0].content for one in own}) > len(own) / 4
    assert sum(one.messages[0].content.startswith("Say") for one in own) > len(own) / 2


# ---------------------------------------------------------------------------------------------------------------------
# What it is for


def loss(params, model, tokenizer: ChatTokenizer, records: Sequence[Trajectory]) -> float:
    """Of what the model said, in nats a token."""
    total, count = 0.0, 0
    for record in records:
        made = tokenise(record, tokenizer, DATA)
        tokens = jnp.asarray(made.tokens)[None]
        positions = jnp.arange(tokens.shape[1])[None]
        x_btd, _ = model.forward(params, tokens, positions, jnp.ones_like(tokens))
        logps_bt, _ = token_logprobs(x_btd[:, :-1], model.head_weights(params), tokens[:, 1:])
        mask = made.loss_mask[None, 1:]
        total, count = total - float((logps_bt * mask).sum()), count + int(mask.sum())
    return total / count


async def test_a_model_that_rehearses_unlearns_less(own, model, params, tokenizer, dataset, tmp_path) -> None:
    """Trained on half of what it said, and asked how likely the other half still is."""
    half = tmp_path / "half"
    write_dataset(half, Trajectory, own[::2], card={})
    config = replace(TRAINING, data=replace(DATA, rehearsed=0.5))
    first = loss(params, model, tokenizer, own[1:20:2])
    after = {}
    for name, rehearsal in (("alone", None), ("rehearsed", half)):
        result = train(
            config, model, starting(params), dataset, tokenizer, tmp_path / name, rehearsal=rehearsal, progress=False
        )
        after[name] = loss(result.params, model, tokenizer, own[1:20:2]) - first
    assert after["alone"] > 1 and after["rehearsed"] < 0.5 * after["alone"]


def test_a_run_goes_on_with_its_own_rehearsal_alone(model, params, tokenizer, dataset, talks, tmp_path) -> None:
    config = SFTConfig(data=DATA, batch_size=1, steps=1, sample_every=0)
    arguments = (model, starting(params), dataset, tokenizer, tmp_path)
    train(config, *arguments, rehearsal=talks, progress=False)
    with pytest.raises(WorkdirError, match="belongs to another run"):
        train(config, *arguments, progress=False)
    other = tmp_path / "other"
    write_dataset(other, Trajectory, [talk(100)], card={})
    with pytest.raises(WorkdirError, match="rehearsal is '"):
        train(config, *arguments, rehearsal=other, progress=False)
    assert train(config, *arguments, rehearsal=talks, progress=False).steps == 1
    # Nobody speaks twice, neither in the data nor in the rehearsal: rounds apart are rounds together.
    together = replace(config, data=replace(DATA, rounds="together"))
    assert train(together, *arguments, rehearsal=talks, progress=False).steps == 1
    rounds = tmp_path / "rounds"
    twice = msgspec.structs.replace(talk(100), messages=[*talk(100).messages, *talk(101).messages])
    write_dataset(rounds, Trajectory, [talk(102), twice], card={})
    arguments = (*arguments[:-1], tmp_path / "of_rounds")
    train(config, *arguments, rehearsal=rounds, progress=False)
    with pytest.raises(WorkdirError, match="sft.data.rounds is 'apart' there, 'together' here"):
        train(together, *arguments, rehearsal=rounds, progress=False)
