"""`astra rehearse` as users run it: a tiny random model; whole, killed and again, refused; `astra sft` reads it."""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from programs_world import Programs, in_journal, journal_of, programs
from rollout_world import tiny_model
from sft_world import make_dataset, make_tokenizer, trajectories

from astra_jax.models.hf_checkpoint import save_hf
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Trajectory

pytestmark = pytest.mark.slow
COUNT = 60


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a dataset."""
    folder = tmp_path_factory.mktemp("rehearse")
    tokenizer = make_tokenizer(folder / "hf")
    model = tiny_model(tokenizer.vocab_size, 640)
    save_hf(model.init(jax.random.key(0)), model, folder / "hf")
    make_dataset(folder / "trajectories", trajectories(8))
    return folder


def arguments(world: Path, to: Path, *more: str) -> list[str]:
    flags = {
        "weights": world / "hf",
        "to": to,
        "conversations": COUNT,
        "max_request_tokens": 200,
        "max_answer_tokens": 100,
        "slots": 4,
    }
    return [*(f"--{name}={value}" for name, value in flags.items()), *more]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs("launch.rehearse", tmp_path_factory.mktemp("said")) as made:
        yield made


@pytest.fixture(scope="module")
def rehearsal(world: Path, start: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("drawn") / "rehearsal"
    ended = start(*arguments(world, to))
    assert ended.code == 0, ended.errors[-3000:]
    kept = read_dataset(to, Trajectory)
    left_out = map(int, re.findall(r"(\d+) (?:request_unfinished|empty_answer)", ended.out))
    assert f"{to}: {len(kept)} conversations, " in ended.out and sum(left_out) == COUNT - len(kept)
    return to


def test_conversations_of_a_request_and_an_answer(rehearsal: Path) -> None:
    kept, card = read_dataset(rehearsal, Trajectory), read_card(rehearsal)
    assert 0 < len(kept) < COUNT and card["rehearsal"]["policy"] == "hf"
    assert all([message.role for message in one.messages] == ["user", "assistant"] for one in kept)
    assert {one.unfinished is True for one in kept} == {True, False}


def test_a_killed_run_goes_on_where_it_was(world: Path, rehearsal: Path, start: Programs, tmp_path: Path) -> None:
    to = tmp_path / "again"
    killed = start.begin(*arguments(world, to))
    until = time.monotonic() + 100
    while not in_journal(to):
        assert killed.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    killed.kill()
    assert 0 < (done := in_journal(to)) < COUNT and not to.exists()
    marked = tmp_path / "marked"
    with contextlib.closing(sqlite3.connect(shutil.copy(journal_of(to), journal_of(marked)))) as journal:
        journal.execute("UPDATE done SET outputs = NULL, reason = 'marked'")
        journal.commit()
    assert f"{done} marked" in start(*arguments(world, marked)).out, "what was drawn is not drawn again"
    assert start(*arguments(world, to, f"--conversations={COUNT + 5}")).code == 0
    drawn = read_dataset(to, Trajectory)
    assert drawn[: len(read_dataset(rehearsal, Trajectory))] == read_dataset(rehearsal, Trajectory)


def test_sft_trains_on_it_beside_its_data(world: Path, rehearsal: Path, start: Programs, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        "from astra_jax.models.hf_checkpoint import read_config\n"
        "from astra_jax.sft.config import SFTConfig\n"
        "from astra_jax.sft.data import DataConfig\n"
        "from configs.training import SFTRun\n"
        "SFT = SFTConfig(data=DataConfig(seq_len=640), batch_size=1, steps=2, sample_every=0)\n"
        f"CONFIG = SFTRun(read_config({str(world / 'hf')!r}), SFT)\n"
    )
    flags = {
        "config": tmp_path / "config.py",
        "weights": world / "hf",
        "data": world / "trajectories",
        "rehearsal": rehearsal,
        "workdir": tmp_path / "run",
        "config.sft.data.self_generated_ratio": 0.5,
    }
    given = {name: f"--{name}={value}" for name, value in flags.items()}
    ended = start(*given.values(), module="launch.sft")
    assert ended.code == 0, ended.errors[-3000:]
    assert "rehearsal" in (tmp_path / "run" / "checkpoints" / "README.md").read_text(encoding="utf-8")
    other = start(*(flag for name, flag in given.items() if "rehears" not in name), module="launch.sft").line
    assert "belongs to another run" in other
    missing = start(*given.values(), f"--rehearsal={tmp_path / 'none'}", module="launch.sft").line
    assert f"no dataset at {tmp_path / 'none'}" in missing


def test_what_is_wrong_is_said_in_one_line(world: Path, start: Programs, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("dear")
    for flag, words in (
        (f"--to={tmp_path / 'mine'}", "has files that are not a dataset's"),
        ("--max_answer_tokens=1000", "the model's max_positions is 640"),
        ("--step=3", "--step=3: --weights="),
        ("--max_request_tokens=1", "none could be kept"),
        ("--conversations=0", "--conversations"),
    ):
        assert words in start(*arguments(world, tmp_path / "to", flag)).line, flag
    assert (tmp_path / "mine" / "letters.txt").exists() and not (tmp_path / "to").exists()
