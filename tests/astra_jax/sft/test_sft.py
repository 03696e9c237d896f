"""The SFT loop: it learns, resumes to the bit, and its step does not depend on how the batch is divided."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from metrics_page import undocumented
from selection import by_day
from sft_world import AfterUpdate, make_dataset, make_tokenizer, starting, trajectories

from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.batch import PackedBatch, target_mask
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.metrics import read_metrics
from astra_jax.run.optimizers import learning_rate
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import BatchIterator, DataConfig
from astra_jax.sft.step import loss_sums, sft_optimizer, train_step
from astra_jax.sft.train import train
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import DatasetError
from synthesis.core.workdir import WorkdirError

CONFIG = SFTConfig(
    data=DataConfig(seq_len=512, packing_bins=4),
    batch_size=4,
    steps=8,
    learning_rate=2e-2,
    weight_decay=0.1,
    checkpoint_every=3,
    sample_every=0,
)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return make_tokenizer(tokenizer_dir)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "trajectories", trajectories(24, longest=2))


@pytest.fixture(scope="module")
def model(tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=64,
        tie_embeddings=True,
        max_positions=512,
    )


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@pytest.fixture(scope="module")
def uninterrupted(dataset, tokenizer, model, params, tmp_path_factory):
    """(workdir, result) of eight steps in one go."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    return workdir, train(CONFIG, model, starting(params), dataset, tokenizer, workdir, progress=False)


def assert_trees_equal(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_the_loss_falls_and_every_step_has_its_row_of_metrics(uninterrupted, tokenizer):
    workdir, result = uninterrupted
    rows = read_metrics(workdir / "metrics")
    assert not undocumented(rows) and rows == result.history and [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["train/loss"] == pytest.approx(math.log(tokenizer.vocab_size), rel=0.1)  # an untrained model guesses
    assert result.final_loss == rows[-1]["train/loss"] < rows[0]["train/loss"] - 1
    for row in rows:
        assert 0 < row["data/mask_share"] < 1 and 0 <= row["data/padding_share"] < 0.5
        assert row["train/grad_norm"] > 0 and row["perf/tokens_per_second"] > 0 and row["train/trained_tokens"] > 0
        assert row["train/learning_rate"] == pytest.approx(float(learning_rate(CONFIG, 8)(row["step"] - 1)))


def test_weights_are_saved_every_k_steps_and_at_the_end(uninterrupted, params):
    workdir, result = uninterrupted
    checkpointer = Checkpointer(workdir / "checkpoints")
    assert checkpointer.params_steps() == [3, 6, 8] and checkpointer.latest() == 8
    assert_trees_equal(checkpointer.restore_params(8, params), result.params)
    checkpointer.close()


@partial(jax.jit, static_argnames="model")
def sums(params, batch, *, model):
    """(loss, trained tokens), both summed."""
    loss, (count, _) = loss_sums(params, batch, model=model)
    return loss, count


def test_steps_go_on_while_a_checkpoint_is_written(dataset, tokenizer, model, params, tmp_path, monkeypatch):
    """What a save writes does not hold the loop: here each is not done before a later step is."""
    rename, stepped = os.rename, threading.Condition()
    taken, went_on = 0, {}

    def step_taken(step, _row):
        nonlocal taken
        with stepped:
            taken = step
            stepped.notify_all()

    def after_a_later_step(source, target):
        if Path(target).name in ("3", "6"):
            step = int(Path(target).name)
            with stepped:
                went_on[Path(target).parent.name, step] = stepped.wait_for(lambda: taken > step, timeout=30)
        rename(source, target)

    monkeypatch.setattr(os, "rename", after_a_later_step)
    result = train(
        CONFIG, model, starting(params), dataset, tokenizer, tmp_path, progress=False, hooks=[AfterUpdate(step_taken)]
    )
    assert went_on == {(folder, step): True for folder in ("params", "states") for step in (3, 6)}
    assert all(row["seconds/checkpoint"] > 0 for row in result.history if row["step"] in (4, 7))


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", by_day([2, 5, 6], 5))
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(
    uninterrupted, dataset, tokenizer, model, params, tmp_path, killed_at
):
    def kill(step, _row):
        if step == killed_at:
            raise Killed

    compiled = train_step.cache_size()
    with pytest.raises(Killed):
        train(CONFIG, model, starting(params), dataset, tokenizer, tmp_path, progress=False, hooks=[AfterUpdate(kill)])
    resumed = train(CONFIG, model, starting(params), dataset, tokenizer, tmp_path, progress=False)
    assert train_step.cache_size() == compiled  # restored arrays look to jit as fresh ones do
    workdir, whole = uninterrupted
    assert len(resumed.history) == 8 - 3 * ((killed_at - 1) // 3)  # steps after the last checkpoint, and no others
    for ours, theirs in zip(read_metrics(tmp_path / "metrics"), read_metrics(workdir / "metrics"), strict=True):
        for name in (
            "step",
            "train/loss",
            "train/grad_norm",
            "train/learning_rate",
            "data/mask_share",
            "train/trained_tokens",
        ):
            assert ours[name] == theirs[name]
    assert_trees_equal(resumed.params, whole.params)


def test_a_finished_run_is_not_run_again(uninterrupted, dataset, tokenizer, model, params):
    workdir, whole = uninterrupted
    again = train(CONFIG, model, starting(params), dataset, tokenizer, workdir, progress=False)
    assert again.history == [] and again.steps == 8 and again.final_loss == whole.final_loss
    assert_trees_equal(again.params, whole.params)
    assert len(read_metrics(workdir / "metrics")) == 8


def test_the_callers_weights_stay_valid(uninterrupted, params):
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, m: (replace(c, batch_size=2, learning_rate=1e-3), m),
            r"sft.batch_size is 4 there, 2 here \(--config.sft.batch_size\). Use those settings, or start a new run "
            r"from its weights: --weights=\S*/checkpoints --workdir=NEW",
        ),
        (lambda c, m: (c, replace(m, d_ff=128)), "model.d_ff is 64 there, 128 here. .* use another --workdir"),
    ],
)
def test_a_workdir_of_another_run_is_refused(uninterrupted, dataset, tokenizer, model, params, change, message):
    config, other = change(CONFIG, model)
    with pytest.raises(WorkdirError, match=message):
        train(config, other, starting(params), dataset, tokenizer, uninterrupted[0], progress=False)


def test_a_run_resumes_with_another_learning_rate_and_length(
    dataset, tokenizer, model, params, tmp_path, capsys
) -> None:
    def run(**changes):
        config = replace(CONFIG, **changes)
        return train(config, model, starting(params), dataset, tokenizer, tmp_path, progress=False)

    run(steps=4)
    changes = {"steps": 6, "learning_rate": 1e-3, "weight_decay": 0.0}
    capsys.readouterr()
    rows = run(**changes).history
    assert [row["step"] for row in rows] == [5, 6] and rows[0]["train/learning_rate"] <= 1e-3
    said = capsys.readouterr().err.splitlines()
    assert "from step 5 on: sft.learning_rate is 0.001, it was 0.02" in said
    extended = [line for line in said if line.startswith("extended from 4 to 6 steps: the learning rate continues at ")]
    assert len(extended) == 1 and extended[0].endswith(", on its schedule over 6 steps; in step 4 it was 0.002")
    assert f"continues at {rows[0]['train/learning_rate']:.3g}," in extended[0]
    recorded = json.loads((tmp_path / "run.json").read_text())["changes"]
    assert {"step": 4, "setting": "sft.learning_rate", "before": 0.02, "now": 0.001} in recorded and len(recorded) == 3
    assert run(**changes, log_every=2).history == [] and "it was" not in capsys.readouterr().err
    run(**changes | {"learning_rate": 2e-3, "steps": 7})  # a second change is behind the first
    recorded = json.loads((tmp_path / "run.json").read_text())["changes"]
    assert [one["now"] for one in recorded if one["setting"] == "sft.learning_rate"] == [0.001, 0.002]


def kill_after(step: int):
    def on_step(now: int, _row) -> None:
        if now == step:
            raise Killed

    return on_step


@pytest.mark.parametrize("final_fraction", by_day([1.0, 0.1], 0.1))
def test_a_finished_run_is_extended_and_an_interruption_changes_no_bit(
    final_fraction, dataset, tokenizer, model, params, tmp_path, capsys
) -> None:
    config = replace(CONFIG, checkpoint_every=2, warmup_fraction=0.0, final_fraction=final_fraction)

    def run(name: str, steps: int, **options):
        arguments = (replace(config, steps=steps), model, starting(params), dataset, tokenizer, tmp_path / name)
        return train(*arguments, progress=False, **options)

    first = run("whole", 3)
    assert first.stopped == "finished"
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    whole = run("whole", 7)
    assert [row["step"] for row in whole.history] == [4, 5, 6, 7]
    assert [row["train/learning_rate"] for row in whole.history] == pytest.approx(
        [float(learning_rate(config, 7)(step)) for step in (3, 4, 5, 6)]
    )
    with pytest.raises(Killed):
        run("killed", 7, hooks=[AfterUpdate(kill_after(5))])
    capsys.readouterr()
    resumed = run("killed", 7)
    assert "extended" not in capsys.readouterr().err, "that was said when it was extended"
    assert [row["step"] for row in resumed.history] == [5, 6, 7]
    assert_trees_equal(resumed.params, whole.params)
    for name in ("whole", "killed"):
        steps = {"step": 3, "setting": "sft.steps", "before": 3, "now": 7}
        assert json.loads((tmp_path / name / "run.json").read_text())["changes"] == [steps]
    if final_fraction == 1.0:  # a constant rate: as if it had had so many steps from its start
        assert_trees_equal(run("straight", 7).params, whole.params)
    with pytest.raises(WorkdirError, match=r"whole has done 7 steps, and the run is to have 5 in all .* at least 7"):
        run("whole", 5)


@pytest.mark.nightly
def test_a_run_of_two_epochs_is_extended_to_three(dataset, tokenizer, model, params, tmp_path, capsys) -> None:
    def run(name: str, epochs: float):
        config = replace(CONFIG, steps=None, epochs=epochs, warmup_fraction=0.0, final_fraction=1.0)
        return train(config, model, starting(params), dataset, tokenizer, tmp_path / name, progress=False)

    two = run("two", 2)
    capsys.readouterr()
    three = run("two", 3)
    assert f"extended from {two.steps} to {three.steps} steps" in capsys.readouterr().err
    assert [row["step"] for row in three.history] == [*range(two.steps + 1, three.steps + 1)]
    assert_trees_equal(three.params, run("three", 3).params)
    with pytest.raises(WorkdirError, match="to have .* in all .steps, or what epochs come to"):
        run("two", 1)


def test_how_often_to_save_and_log_may_change_on_resume(uninterrupted, dataset, tokenizer, model, params):
    config = replace(CONFIG, checkpoint_every=100, log_every=4)
    assert train(config, model, starting(params), dataset, tokenizer, uninterrupted[0], progress=False).steps == 8


# ---------------------------------------------------------------------------------------------------------------------
# The step


@pytest.fixture(scope="module")
def batch(dataset, tokenizer) -> PackedBatch:
    return jax.tree.map(jnp.asarray, next(BatchIterator(dataset, tokenizer, CONFIG.data, CONFIG.batch_size)))


def split(batch: PackedBatch, accumulation: int) -> PackedBatch:
    return jax.tree.map(lambda x_bt: x_bt.reshape(accumulation, -1, x_bt.shape[1]), batch)


def test_accumulation_one_equals_n(batch, model, params):
    # The rows have different numbers of trained tokens, so that a mean of their means would be another loss.
    counts = np.asarray(target_mask(batch)).sum(axis=1)
    assert counts.max() > 1.05 * counts.min()
    (metrics, moments), (split_metrics, split_moments) = (
        one_step(replace(CONFIG, micro_batch_size=size), batch, model, params) for size in (None, 1)
    )
    assert metrics["train/trained_tokens"] == split_metrics["train/trained_tokens"] == counts.sum()
    np.testing.assert_allclose(split_metrics["train/loss"], metrics["train/loss"], rtol=1e-6)
    total, count = sums(params, batch, model=model)
    np.testing.assert_allclose(metrics["train/loss"], total / count, rtol=1e-6)
    # After one step Adam's first moment is the clipped gradient, scaled.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8), split_moments, moments)


def one_step(config: SFTConfig, batch: PackedBatch, model: Qwen3Config, params: dict) -> tuple[dict, dict]:
    """(metrics, Adam's first moment) after one step."""
    own = jax.device_put(jax.tree.map(jnp.copy, params), jax.devices()[0])
    state = jax.device_put(sft_optimizer(config, 8).init(own), jax.devices()[0])
    rows = split(batch, config.micro_batches)
    _, state, metrics = train_step(own, state, rows, model=model, config=config, steps=8)
    return jax.device_get((metrics, optax.tree.get(state, "mu")))


def test_the_packed_loss_is_the_sum_of_the_documents_losses(batch, model, params):
    total, count = sums(params, batch, model=model)
    alone = np.zeros(2)
    for row in range(4):
        for segment in range(1, int(batch.segment_ids_bt[row].max()) + 1):
            where = np.flatnonzero(batch.segment_ids_bt[row] == segment)
            tokens, mask = (np.zeros((1, 512), np.int32) for _ in range(2))
            tokens[0, : len(where)], mask[0, : len(where)] = batch.tokens_bt[row][where], batch.loss_mask_bt[row][where]
            used = (np.arange(512) < len(where))[None].astype(np.int32)
            document = PackedBatch(
                jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(used), jnp.arange(512)[None] * used
            )
            alone += np.array([float(x) for x in sums(params, document, model=model)])
    np.testing.assert_allclose([float(total), float(count)], alone, rtol=1e-5)


def test_the_loss_does_not_see_tokens_outside_the_mask_or_after_it(batch, model, params):
    # Changing the last trained target changes the loss; changing the padding behind it does not.
    loss, _ = sums(params, batch, model=model)
    padding = batch.segment_ids_bt == 0
    assert padding.any()
    noise = batch.replace(tokens_bt=jnp.where(padding, 3, batch.tokens_bt))
    assert sums(params, noise, model=model)[0] == loss
    at = np.argwhere(np.asarray(target_mask(batch)))[-1]
    changed = batch.replace(tokens_bt=batch.tokens_bt.at[at[0], at[1] + 1].add(1))
    assert sums(params, changed, model=model)[0] != loss


def test_the_mask_belongs_to_the_target_and_stops_at_documents_ends():
    batch = PackedBatch(
        tokens_bt=jnp.array([[5, 6, 7, 8, 9, 0]]),
        loss_mask_bt=jnp.array([[0, 1, 1, 1, 0, 0]]),
        segment_ids_bt=jnp.array([[1, 1, 1, 2, 2, 0]]),
        positions_bt=jnp.array([[0, 1, 2, 0, 1, 0]]),
    )
    # 6 and 7 are predicted from 5 and 6; 8 begins a document, so nothing predicts it.
    assert target_mask(batch).tolist() == [[1, 1, 0, 0, 0, 0]]


def test_the_schedule_warms_up_to_the_peak_and_ends_at_its_fraction():
    config = replace(CONFIG, learning_rate=2.0, warmup_fraction=0.1, final_fraction=0.1)
    rates = [float(learning_rate(config, 100)(i)) for i in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) * 0.2, rtol=1e-6)
    assert max(rates) == pytest.approx(rates[9]) and rates[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert rates[54] == pytest.approx(1.1, rel=0.01)


def test_norm_scales_and_biases_do_not_decay(model):
    params = replace(model, attention_bias=True).init(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 1, params)  # a bias of 0 would not move anyway
    config = replace(CONFIG, weight_decay=1.0)
    optimizer = sft_optimizer(config, 8)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    moved = {jax.tree_util.keystr(path): bool((u != 0).any()) for path, u in jax.tree.leaves_with_path(updates)}
    assert any(moved.values())
    assert all(moves != ("norm" in name or "bias" in name) for name, moves in moved.items())


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


class WrongMask(ChatTokenizer):
    """Masks every token alike, as a renderer that lost its segments would."""

    value = 0

    def encode_segments(self, segments):
        ids, _ = super().encode_segments(segments)
        return ids, [self.value] * len(ids)


@pytest.mark.parametrize(("value", "error"), [(0, "no conversation can be trained on"), (1, "covers 100%")])
def test_a_loss_mask_that_is_empty_or_full_is_an_error(
    dataset, tokenizer, tokenizer_dir, model, params, tmp_path, value, error
):
    wrong = WrongMask.load(tokenizer_dir)
    assert isinstance(wrong, WrongMask)
    wrong.value = value
    with pytest.raises((DatasetError, ValueError), match=error):
        train(CONFIG, model, starting(params), dataset, wrong, tmp_path, progress=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batch_size": 3}, r"micro_batch_size is 3, which does not divide batch_size \(4\)"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **fields)


def test_a_model_with_too_small_a_vocabulary_is_refused(dataset, tokenizer, model, params, tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 100"):
        train(CONFIG, replace(model, vocab_size=100), starting(params), dataset, tokenizer, tmp_path, progress=False)


def test_epochs_become_steps(dataset, tokenizer, model, params, tmp_path):
    config = replace(CONFIG, steps=None, epochs=1, log_every=100)
    result = train(config, model, starting(params), dataset, tokenizer, tmp_path, progress=False)
    batch_tokens = config.batch_size * config.data.seq_len
    assert result.steps >= math.ceil(result.stats.tokens / batch_tokens)
    assert result.steps <= math.ceil(1.5 * result.stats.tokens / batch_tokens)
    assert [row["step"] for row in result.history] == sorted({*range(3, result.steps + 1, 3), result.steps})
