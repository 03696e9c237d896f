"""Each example exactly as often as asked, in training and in evaluation, however rows and batches are cut."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from absl import flags
from jax.sharding import Mesh
from selection import by_day
from sft_world import make_dataset, make_tokenizer, starting, trajectories

from astra_jax.mesh import make_mesh
from astra_jax.models import hf_checkpoint
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.batch import PackedBatch, target_mask, to_device
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, DataConfig, by_round, scan, steps_for_epochs, tokenise
from astra_jax.sft.step import sft_optimizer, train_step
from astra_jax.sft.train import train
from astra_jax.tokenizer import ChatTokenizer

COUNT = 300
DATA = DataConfig(seq_len=512, packing_bins=8)
CONFIG = SFTConfig(data=DATA, batch_size=4, learning_rate=1e-3, sample_every=0)

Document = tuple[int, ...]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "many", trajectories(COUNT, longest=1))


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "few", trajectories(17, longest=2))


def documents(batches: Iterable[PackedBatch]) -> Counter[Document]:
    found: Counter[Document] = Counter()
    for batch in batches:
        for tokens_t, segments_t in zip(batch.tokens_bt, batch.segment_ids_bt, strict=True):
            found.update(tuple(tokens_t[segments_t == one].tolist()) for one in range(1, segments_t.max() + 1))
    return found


def expected(tokenizer: ChatTokenizer, config: DataConfig, count: int, longest: int) -> Counter[Document]:
    made = (
        tokenise(one, tokenizer, config)
        for record in trajectories(count, longest=longest)
        for one in by_round(record, config)
    )
    return Counter(tuple(example.tokens.tolist()) for example in made if not example.dropped)


def times(counter: Counter[Document], factor: int) -> Counter[Document]:
    return Counter({one: factor * count for one, count in counter.items()})


# ---------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize(
    ("batch_size", "bins", "epochs"), by_day([(1, 64, 1), (3, 8, 2), (8, 1, 1), (32, 64, 2)], (3, 8, 2))
)
def test_each_example_is_seen_once_an_epoch(dataset, tokenizer, batch_size, bins, epochs) -> None:
    config = replace(DATA, packing_bins=bins)
    steps = steps_for_epochs(scan(dataset, tokenizer, config), config, batch_size, epochs)
    with BatchIterator(dataset, tokenizer, config, batch_size) as batches:
        seen = documents(next(batches) for _ in range(steps))
    assert seen == times(expected(tokenizer, config, COUNT, 1), epochs)


def test_examples_that_are_dropped_do_not_count(few, tokenizer) -> None:
    config = replace(DATA, seq_len=300, too_long="drop")
    stats = scan(few, tokenizer, config)
    assert stats.dropped["too_long"] and "data.seq_len is 300" in stats.first_dropped["too_long"]
    with BatchIterator(few, tokenizer, config, 2) as batches:
        seen = documents(next(batches) for _ in range(steps_for_epochs(stats, config, 2, 3)))
    assert seen == times(expected(tokenizer, config, 17, 2), 3)


def test_lengths_that_change_with_each_epoch_are_counted_exactly(few, tokenizer) -> None:
    config = replace(DATA, rename_entities=1.0, tools="some")
    with BatchIterator(few, tokenizer, config, 2) as batches:
        steps = batches.steps_for_epochs(3)
    examples = scan(few, tokenizer, config).count
    with BatchIterator(few, tokenizer, config, 2) as batches:
        assert documents(next(batches) for _ in range(steps)).total() == 3 * examples


def test_of_one_and_a_half_epochs_the_second_ends_after_half_of_its_batches(few, tokenizer) -> None:
    stats = scan(few, tokenizer, DATA)
    once, twice = (steps_for_epochs(stats, DATA, 2, epochs) for epochs in (1, 2))
    assert steps_for_epochs(stats, DATA, 2, 1.5) == once + math.ceil((twice - once) / 2)


def test_an_epoch_is_the_same_however_many_follow(few, tokenizer) -> None:
    """So that a run with more epochs resumes one with fewer."""
    stats = scan(few, tokenizer, DATA)
    steps = [steps_for_epochs(stats, DATA, 2, epochs) for epochs in (1, 2, 3)]
    with BatchIterator(few, tokenizer, DATA, 2) as batches:
        for _ in range(steps[1]):
            next(batches)
        state = json.loads(json.dumps(batches.get_state()))
        rest = documents(next(batches) for _ in range(steps[2] - steps[1]))
    assert rest == expected(tokenizer, DATA, 17, 2)
    with BatchIterator(few, tokenizer, DATA, 2) as resumed:
        resumed.set_state(state)
        assert documents(next(resumed) for _ in range(steps[2] - steps[1])) == rest


@pytest.mark.nightly
def test_workers_and_resumptions_change_nothing(few, tokenizer) -> None:
    flags.FLAGS.mark_as_parsed()  # programs have; Grain's workers look
    config = replace(DATA, too_long="drop", seq_len=300)
    steps = steps_for_epochs(scan(few, tokenizer, config), config, 2, 3)
    seen: Counter[Document] = Counter()
    state = None
    for part, workers in ((steps // 3, 2), (steps // 3, 0), (steps - 2 * (steps // 3), 1)):
        with BatchIterator(few, tokenizer, replace(config, workers=workers), 2) as batches:
            if state is not None:
                batches.set_state(state)
            seen += documents(next(batches) for _ in range(part))
            state = json.loads(json.dumps(batches.get_state()))
    assert seen == times(expected(tokenizer, config, 17, 2), 3)


def test_the_data_are_seen_once_an_epoch_beside_a_rehearsal(few, dataset, tokenizer) -> None:
    stats, said = scan(few, tokenizer, DATA), scan(dataset, tokenizer, DATA)
    steps = steps_for_epochs(stats, DATA, 2, 2, rehearsal=said)
    with BatchIterator(few, tokenizer, DATA, 2, rehearsal=dataset) as batches:
        seen = documents(next(batches) for _ in range(steps))
    ours, theirs = expected(tokenizer, DATA, 17, 2), expected(tokenizer, DATA, COUNT, 1)
    both = {*ours} & {*theirs}
    assert {one: count for one, count in seen.items() if one in ours and one not in both} == {
        one: 2 * count for one, count in ours.items() if one not in both
    }
    assert seen.total() == pytest.approx(2 * ours.total() / (1 - DATA.self_generated_ratio), abs=2)


def test_a_state_without_an_epoch_continues_as_it_was_begun(few, tokenizer) -> None:
    """Of a version whose rows held examples of neighbouring epochs: every batch was full."""
    with BatchIterator(few, tokenizer, DATA, 4) as batches:
        assert "epoch" in batches.get_state()
        batches.set_state({"parent": {"next_index": 0}, "next_row": 0, "counter": 0})
        assert all(next(batches).segment_ids_bt.any(axis=1).all() for _ in range(40))
        assert "epoch" not in batches.get_state()


# ---------------------------------------------------------------------------------------------------------------------
# The last batch of an epoch


@pytest.fixture(scope="module")
def model(tokenizer) -> Qwen3Config:
    sizes = dict(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=64, max_positions=512)
    return Qwen3Config(vocab_size=tokenizer.vocab_size, tie_embeddings=True, **sizes)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


def two_devices() -> Mesh:
    return make_mesh(fsdp=2, devices=jax.devices()[:2])


def gradient(config: SFTConfig, batch: PackedBatch, model, params, mesh=None) -> tuple[dict, dict]:
    """(metrics, Adam's first moment, which is the clipped gradient) of a step."""
    own = jax.tree.map(jax.numpy.copy, params)
    if mesh is not None:
        own = jax.device_put(own, model.param_shardings(mesh))
    state = sft_optimizer(config, 8).init(own)
    rows = to_device(batch, mesh, micro_batches=config.micro_batches)
    _, state, metrics = train_step(own, state, rows, model=model, config=config, steps=8, mesh=mesh)
    return jax.device_get((metrics, optax.tree.get(state, "mu")))


@pytest.mark.parametrize("devices", by_day([1, 2], 2))
def test_the_gradient_of_a_partial_batch_is_that_of_its_examples(few, tokenizer, model, params, devices) -> None:
    with BatchIterator(few, tokenizer, DATA, 4) as batches:
        *_, last = batches.epoch()
    real = int(last.segment_ids_bt.any(axis=1).sum())
    assert 0 < real < 4, "the data fill the last batch; take others"
    mesh = two_devices() if devices == 2 else None
    micro = replace(CONFIG, micro_batch_size=2)
    alone = jax.tree.map(lambda x_bt: x_bt[:real], last)
    metrics, moments = gradient(micro, last, model, params, mesh)
    theirs, expected_moments = gradient(replace(CONFIG, batch_size=real), alone, model, params)
    assert (
        metrics["train/trained_tokens"] == theirs["train/trained_tokens"] == float(np.asarray(target_mask(alone)).sum())
    )
    np.testing.assert_allclose(metrics["train/loss"], theirs["train/loss"], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8), moments, expected_moments)


def test_the_parts_of_two_hosts_are_the_batch(few, tokenizer) -> None:
    mesh = two_devices()
    with BatchIterator(few, tokenizer, DATA, 4) as batches:
        for batch in batches.epoch():
            tokens, segments = (to_device(one, mesh) for one in (batch.tokens_bt, batch.segment_ids_bt))
            parts = [
                PackedBatch(np.asarray(a.data), np.zeros((2, 1)), np.asarray(b.data), np.zeros((2, 1)))
                for a, b in zip(tokens.addressable_shards, segments.addressable_shards, strict=True)
            ]
            assert len(parts) == 2 and documents(parts) == documents([batch])


@pytest.mark.slow
def test_a_run_and_one_that_extends_it_train_on_each_token_once_an_epoch(
    few, tokenizer, model, params, tmp_path
) -> None:
    stats = scan(few, tokenizer, DATA)
    trained = []
    for epochs in (1, 3):
        config = replace(CONFIG, epochs=epochs)
        result = train(config, model, starting(params), few, tokenizer, tmp_path, progress=False)
        assert result.steps == steps_for_epochs(stats, DATA, 4, epochs)
        trained += [row["train/trained_tokens"] for row in result.history]
    assert sum(trained) == 3 * stats.trainable and len(trained) == result.steps


# ---------------------------------------------------------------------------------------------------------------------
# Held-out loss


def reference(records, tokenizer: ChatTokenizer, model: Qwen3Config, params, folder: Path) -> float:
    """The mean over the trained tokens of whole conversations, one after another, by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf_checkpoint.save_hf(params, model, folder)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, weight = 0.0, 0.0
    for record in records:
        for one in by_round(record, DATA):
            example = tokenise(one, tokenizer, DATA)
            tokens, mask = torch.tensor(example.tokens)[None].long(), torch.tensor(example.loss_mask)[1:]
            with torch.no_grad():
                logits = hf(tokens).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            total, weight = total + float((losses * mask).sum()), weight + float(mask.sum())
    return total / weight


WAYS: dict[str, dict[str, Any]] = {
    "3": dict(batch_size=3),
    "micro-batches": dict(batch_size=8, micro_batch_size=2),
    "one bin": dict(batch_size=2, data=replace(DATA, packing_bins=1)),
    "one bin, micro-batches on two devices": dict(
        batch_size=8, micro_batch_size=4, data=replace(DATA, packing_bins=1), mesh=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", by_day(WAYS, "3", "one bin, micro-batches on two devices"))
def test_the_held_out_loss_is_one_pass_whatever_the_batch_and_equals_torchs(
    few, tokenizer, model, params, tmp_path, way: str
) -> None:
    records = trajectories(30, longest=2)[17:]
    held_out = make_dataset(tmp_path / "held_out", records)
    model = replace(model, dtype="float32")
    wanted = reference(records, tokenizer, model, params, tmp_path / "hf")
    changes = dict(WAYS[way])
    mesh = two_devices() if changes.pop("mesh", False) else None
    config = replace(CONFIG, steps=1, learning_rate=0.0, **changes)
    start = starting(params if mesh is None else jax.device_put(params, model.param_shardings(mesh)))
    result = train(config, model, start, few, tokenizer, tmp_path / "run", held_out=held_out, mesh=mesh, progress=False)
    assert result.history[-1]["eval/loss"] == pytest.approx(wanted, abs=1e-5)


def test_a_cap_on_evaluation_is_printed(few, tokenizer, model, params, tmp_path, capsys) -> None:
    config = replace(CONFIG, steps=1, batch_size=1, eval_batches=2)
    train(config, model, starting(params), few, tokenizer, tmp_path, held_out=few, progress=False)
    batches = steps_for_epochs(scan(few, tokenizer, DATA), DATA, 1, 1)
    assert f"2 of the {batches} batches of all " in capsys.readouterr().out
