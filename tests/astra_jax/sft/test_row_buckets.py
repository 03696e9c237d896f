"""Rows cut to what is in them: the same run with less computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import tiny_model
from sft_world import CAPITALS, AfterUpdate, make_dataset, starting, trajectory

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from astra_jax.mesh import AXES, make_mesh
from astra_jax.planner.jobs import for_tokens, job_on
from astra_jax.run.batch import PackedBatch, bucket_index
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import sft_optimizer, train_step
from astra_jax.sft.train import SFTResult, train

CONFIG = SFTConfig(
    # Its conversations fill a third of a row to all of it, and no two of most of them go together.
    data=DataConfig(seq_len=800, packing_bins=1, rounds="together"),
    batch_size=2,
    micro_batch_size=1,
    steps=8,
    learning_rate=3e-3,
    eps=1e-5,  # where a gradient is 0 but for rounding, Adam would make a whole step of it
    eval_every=4,
    checkpoint_every=4,
    sample_every=0,
)
CUT = replace(CONFIG, row_buckets=(448, 320, 640))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    lengths = [3, 3, 4, 7, 3, 3, 5, 4, 3, 6, 3, 3]
    records = [trajectory(i, (list(CAPITALS) * 2)[i % 5 :][:count]) for i, count in enumerate(lengths)]
    return make_dataset(tmp_path_factory.mktemp("data") / "trajectories", records)


@pytest.fixture(scope="module")
def model(chat_tokenizer):
    return tiny_model(chat_tokenizer.vocab_size, 1024)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@pytest.fixture(scope="module")
def trained(dataset, model, params, chat_tokenizer, tmp_path_factory):
    def run(config: SFTConfig, **options: Any) -> SFTResult:
        workdir = options.pop("workdir", None) or tmp_path_factory.mktemp("run")
        options = {"held_out": dataset, "progress": False} | options
        return train(config, model, starting(params), dataset, chat_tokenizer, workdir, **options)

    return run


@pytest.fixture(scope="module")
def whole(trained):
    return trained(CONFIG)


def assert_same_run(ours: SFTResult, theirs: SFTResult) -> None:
    for one, other in zip(ours.history, theirs.history[-len(ours.history) :], strict=True):
        for name in ("step", "trained_tokens", "mask_share"):
            assert one[name] == other[name]
        assert ("held_out_loss" in one) == ("held_out_loss" in other) == (one["step"] % 4 == 0)
        for name in {"loss", "held_out_loss"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-5)
    for one, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=1e-5)


def test_cut_rows_train_as_whole_ones_do(trained, whole) -> None:
    compiled = train_step.cache_size()
    cut = trained(CUT)
    assert train_step.cache_size() == compiled + 1
    assert_same_run(cut, whole)
    assert len({row["row_tokens"] for row in cut.history}) >= 3
    for row, full in zip(cut.history, whole.history, strict=True):
        assert full["row_tokens"] == 800 >= row["row_tokens"] >= 320
        real, places = 1 - row["padding_share"], row["row_tokens"] / 800
        assert real * places == pytest.approx(1 - full["padding_share"])
    assert sum(row["row_tokens"] for row in cut.history) < 0.9 * sum(row["row_tokens"] for row in whole.history)


def test_what_is_cut_is_not_computed(model, params) -> None:
    rows = np.zeros((2, 1, 800), np.int32)
    batch = PackedBatch(rows, rows, rows, np.cumsum(np.ones_like(rows), axis=2, dtype=np.int32) - 1)

    def step(which: int) -> dict[str, float]:
        own = starting(params)()
        given = (own, sft_optimizer(CUT, 8).init(own), jax.tree.map(jnp.asarray, batch))
        options = {"model": model, "config": CUT, "steps": 8}
        metrics = train_step(*given, bucket_ids_a=jnp.full(2, which, jnp.int32), **options)[2]
        return {name: float(value) for name, value in metrics.items()}

    rows[:, :, :300] = 1
    losses = [step(which)["loss"] for which in range(4)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    # With a length that is too short: nothing behind it was looked at.
    rows[:, :, :700] = 1
    assert step(0)["trained_tokens"] == 2 * 319 and step(3)["trained_tokens"] == 2 * 699


@pytest.mark.parametrize(("sizes", "rows"), [({"context": 4}, 1), ({"data": 2, "context": 2}, 2)])
def test_a_mesh_cuts_them_too(trained, whole, sizes, rows) -> None:
    config = replace(CUT, micro_batch_size=rows, row_buckets=(448,))
    assert_same_run(trained(config, mesh=make_mesh(**sizes, devices=jax.devices()[:4])), whole)


def test_a_run_may_go_on_with_other_lengths(trained, whole, tmp_path) -> None:
    def stop(step: int, _row: object) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(CONFIG, workdir=tmp_path, hooks=[AfterUpdate(stop)])
    rest = trained(CUT, workdir=tmp_path)
    assert [row["step"] for row in rest.history] == [5, 6, 7, 8]
    assert_same_run(rest, whole)


def test_a_micro_batch_has_the_least_length_that_holds_it() -> None:
    segments_bt = np.zeros((4, 16), np.int32)
    segments_bt[0, :7], segments_bt[2, :8], segments_bt[3, :9] = 1, 1, 1
    batch = PackedBatch(segments_bt, segments_bt, segments_bt, segments_bt)
    assert bucket_index(batch, [16], 1).tolist() == [0]
    assert bucket_index(batch, [8, 16], 2).tolist() == [0, 1]
    lengths = bucket_index(batch, [4, 7, 8, 16], 4)
    assert lengths.tolist() == [1, 0, 2, 3] and lengths.dtype == np.int32
    segments_bt[1, 15] = 2
    assert bucket_index(batch, [8, 16], 4).tolist() == [0, 1, 0, 1]


def test_lengths_that_a_run_cannot_have_are_refused(trained) -> None:
    with pytest.raises(SettingError, match=r"row_buckets is \(800,\).*data.seq_len \(800\)"):
        replace(CONFIG, row_buckets=(800,))
    mesh = make_mesh(context=4, devices=jax.devices()[:4])
    with pytest.raises(InputError, match="a length in row_buckets.*321"):
        trained(replace(CUT, row_buckets=(321, 448)), mesh=mesh)


def test_plans_know_them(model) -> None:
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 4, 1), AXES)
    assert job_on(model, CUT, mesh, blocks=1).row_tokens == 800
    with pytest.raises(InputError, match="a length in row_buckets is 320.*use 512"):
        job_on(model, replace(CUT, data=replace(CUT.data, seq_len=1_024)), mesh, blocks=32)
    _, shorter = for_tokens(model, CUT, 600, 640)
    assert isinstance(shorter, SFTConfig) and shorter.data.seq_len == 640 and shorter.row_buckets == (448, 320)
