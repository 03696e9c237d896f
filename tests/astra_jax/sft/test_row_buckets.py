"""Rows cut to what is in them: the same run with less computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from rollout_world import tiny_model
from sft_world import CAPITALS, make_dataset, starting, trajectory

from astra_jax.mesh import AXES, make_mesh
from astra_jax.planner.jobs import for_tokens, job_on
from astra_jax.run.batch import PackedBatch, cut_to_content
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import train_step
from astra_jax.sft.train import SFTResult, train
from sandbox.settings import SettingError
from synthesis.core.refusals import InputError

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
    assert_same_run(cut, whole)
    lengths = Counter(int(row["row_tokens"]) for row in cut.history)
    assert lengths.keys() <= {320, 448, 640, 800} and len(lengths) >= 3
    assert train_step.cache_size() - compiled == len(lengths - Counter({800: 8})) <= 3  # 800 is there
    for row, full in zip(cut.history, whole.history, strict=True):
        assert full["row_tokens"] == 800
        real, places = 1 - row["padding_share"], row["row_tokens"] / 800
        assert real * places == pytest.approx(1 - full["padding_share"])
    assert sum(row["row_tokens"] for row in cut.history) < 0.9 * sum(row["row_tokens"] for row in whole.history)


def test_a_mesh_cuts_them_too(trained, whole) -> None:
    assert_same_run(trained(CUT, mesh=make_mesh(fsdp=1, context=4, devices=jax.devices()[:4])), whole)


def test_a_run_may_go_on_with_other_lengths(trained, whole, tmp_path) -> None:
    def stop(step: int, _row: object) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(CONFIG, workdir=tmp_path, on_step=stop)
    rest = trained(CUT, workdir=tmp_path)
    assert [row["step"] for row in rest.history] == [5, 6, 7, 8]
    assert_same_run(rest, whole)


def test_a_batch_is_cut_to_the_least_length_that_holds_it() -> None:
    segments_bt = np.zeros((3, 16), np.int32)
    segments_bt[1, :7] = 1
    batch = PackedBatch(segments_bt + 5, segments_bt, segments_bt, segments_bt)

    def length(*allowed: int) -> int:
        cut = cut_to_content(batch, allowed)
        assert {leaf.shape for leaf in jax.tree.leaves(cut)} == {cut.tokens_bt.shape}
        np.testing.assert_array_equal(cut.segment_ids_bt, segments_bt[:, : cut.tokens_bt.shape[1]])
        return cut.tokens_bt.shape[1]

    assert length() == 16 and length(4, 6) == 16
    assert length(7) == 7 and length(12, 8, 4) == 8
    segments_bt[2, 15] = 2
    assert length(7, 12, 15) == 16


def test_lengths_that_a_run_cannot_have_are_refused(trained) -> None:
    with pytest.raises(SettingError, match=r"row_buckets is \(900,\).*data.seq_len \(800\)"):
        replace(CONFIG, row_buckets=(900,))
    mesh = make_mesh(fsdp=1, context=4, devices=jax.devices()[:4])
    with pytest.raises(InputError, match="a length in row_buckets.*321"):
        trained(replace(CUT, row_buckets=(321, 448)), mesh=mesh)


def test_plans_know_them(model) -> None:
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 4, 1), AXES)
    assert job_on(model, CUT, mesh, blocks=1).row_tokens == 800
    with pytest.raises(InputError, match="a length in row_buckets is 320.*use 512"):
        job_on(model, replace(CUT, data=replace(CUT.data, seq_len=1_024)), mesh, blocks=32)
    _, shorter = for_tokens(model, CUT, 600, 640)
    assert isinstance(shorter, SFTConfig) and shorter.data.seq_len == 640 and shorter.row_buckets == (448, 320)
