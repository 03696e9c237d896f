"""Statistics of a dataset are counted once for a run, and again whenever anything that they depend on is another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sft_world import make_dataset, make_tokenizer, trajectories

from astra_jax.sft import statistics
from astra_jax.sft.data import DataConfig, scan
from astra_jax.sft.statistics import kept_statistics
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.datasets import DatasetError

CONFIG = DataConfig(seq_len=1024, packing_bins=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "trajectories", trajectories(12))


@pytest.fixture
def counted(monkeypatch) -> list[Path]:
    """The datasets that were tokenised."""
    paths: list[Path] = []

    def counting(path, *rest):
        paths.append(path)
        return scan(path, *rest)

    monkeypatch.setattr(statistics, "scan", counting)
    return paths


def kept(workdir: Path) -> list[Path]:
    return sorted((workdir / "statistics").iterdir())


def test_a_second_start_counts_nothing(dataset, tokenizer, counted, tmp_path) -> None:
    first = kept_statistics(dataset, tokenizer, CONFIG, tmp_path)
    assert first == scan(dataset, tokenizer, CONFIG) and counted == [dataset]
    order = replace(CONFIG, seed=7, workers=2, packing_bins=8, rename_entities=0.5)
    assert kept_statistics(dataset, tokenizer, order, tmp_path) == first
    assert counted == [dataset] and len(kept(tmp_path)) == 1


def test_what_they_depend_on_counts_anew(dataset, tokenizer, counted, tmp_path, monkeypatch) -> None:
    kept_statistics(dataset, tokenizer, CONFIG, tmp_path)
    for changed in (
        {"seq_len": 512},
        {"too_long": "drop"},
        {"tools": "none"},
        {"thinking": False},
        {"split_at_user_turns": False},
    ):
        config = replace(CONFIG, **changed)
        assert kept_statistics(dataset, tokenizer, config, tmp_path) == scan(dataset, tokenizer, config), changed
    assert len(counted) == 6
    other = make_dataset(tmp_path / "other", trajectories(13))
    assert kept_statistics(other, tokenizer, CONFIG, tmp_path) == scan(other, tokenizer, CONFIG)
    text = "quite another text, of another tokenizer, " * 30
    another = ChatTokenizer.train([text], 400, tmp_path / "tokenizer")
    assert kept_statistics(dataset, another, CONFIG, tmp_path) == scan(dataset, another, CONFIG)
    monkeypatch.setattr("astra_jax.__version__", "0.0.0")
    kept_statistics(dataset, tokenizer, CONFIG, tmp_path)
    assert len(counted) == len(kept(tmp_path)) == 9


DAMAGE = {
    "empty": lambda text: b"",
    "cut short": lambda text: text[: len(text) // 2],
    "no text": lambda text: b"\xff" + text,
    "another number": lambda text: text.replace(b'"trainable": ', b'"trainable": 1'),
    "another kind of number": lambda text: text.replace(b'"trainable": ', b'"trainable": -0.5e'),
    "of other data": lambda text: text.replace(b'"dataset": "', b'"dataset": "0'),
    "an unknown field": lambda text: text.replace(b"{", b'{"more": 1, ', 1),
    "no object": lambda text: b"[]",
    "nested without end": lambda text: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_what_is_damaged_is_counted_anew_and_written_again(dataset, tokenizer, counted, tmp_path, damage) -> None:
    first = kept_statistics(dataset, tokenizer, CONFIG, tmp_path)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert kept_statistics(dataset, tokenizer, CONFIG, tmp_path) == first
    assert len(counted) == 2 and kept(tmp_path) == [file] and file.read_bytes() == whole
    assert json.loads(whole)["stats"]["trainable"] == first.trainable


def test_only_the_first_host_writes(dataset, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(statistics, "is_first", lambda: False)
    kept_statistics(dataset, tokenizer, CONFIG, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_dataset_that_is_gone_is_refused_though_its_statistics_are_there(tokenizer, tmp_path) -> None:
    data = make_dataset(tmp_path / "data", trajectories(3))
    kept_statistics(data, tokenizer, CONFIG, tmp_path)
    (data / "dataset_card.json").unlink()
    with pytest.raises(DatasetError, match="no dataset at"):
        kept_statistics(data, tokenizer, CONFIG, tmp_path)
