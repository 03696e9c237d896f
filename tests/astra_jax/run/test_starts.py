"""Starts that come to nothing are counted in the workdir, and the run is given up; what gets on is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rollout_world import tiny_model

from astra_jax.base.errors import UserError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.step import grpo_optimizer
from astra_jax.rollout.vllm.server import Unreachable
from astra_jax.run.crash_loop import FILE, CrashLoopGuard, FaultsError
from astra_jax.run.trainer import RunContext

MODEL = tiny_model(16, 64)
CONFIG = GRPOConfig(steps=3, max_failed_restarts=3)
JOB = SimpleNamespace(steps=3, identity={"of": "this"})


def one(workdir: Path, step: int = 0, kept: int = 0, *, most: int = 3) -> CrashLoopGuard:
    """A start that is killed, unless it is taken back."""
    starts = CrashLoopGuard(workdir, most)
    starts.begin(step, kept)
    return starts


def test_faults_without_progress_end_it_and_the_next_start_tries_again(tmp_path) -> None:
    for _ in range(2):
        for _ in range(3):
            one(tmp_path, 7)
        with pytest.raises(FaultsError, match="3 starts in a row have ended .* after step 7: .*max_failed_restarts"):
            one(tmp_path, 7)


def test_what_gets_on_may_fail_for_ever(tmp_path) -> None:
    for step in range(20):
        one(tmp_path, step)
    for kept in range(20):  # of a batch that takes long
        one(tmp_path, 20, kept)
    for _ in range(20):
        one(tmp_path, 20, 20, most=0)


def test_a_start_that_is_taken_back_does_not_count(tmp_path) -> None:
    for _ in range(20):
        one(tmp_path, 7).take_back()
    one(tmp_path, 7)
    one(tmp_path, 7)
    one(tmp_path, 7).take_back()
    one(tmp_path, 7)
    with pytest.raises(FaultsError):
        one(tmp_path, 7)


@pytest.mark.parametrize("there", [b"", b"{", b"[]", b"\xff", b'{"step": "7"}'])
def test_a_file_that_is_none_counts_as_none(tmp_path, there: bytes) -> None:
    (tmp_path / FILE).write_bytes(there)
    one(tmp_path, 7)
    assert json.loads((tmp_path / FILE).read_text()) == {"step": 7, "kept": 0, "faults": 1}


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def away() -> None:
    raise Unreachable("no rollout server is there")


def refused() -> None:
    raise UserError("weights of another model")


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ends", "counts"), [(full_disk, True), (away, True), (refused, False), (interrupted, False), (lambda: None, False)]
)
def test_a_run_counts_what_ends_it_with_a_fault(tmp_path, ends: Callable[[], None], counts: bool) -> None:
    def start() -> None:
        with RunContext("GRPO", CONFIG, MODEL, tmp_path, JOB, progress=False) as run:
            run.restore_or_init(lambda: MODEL.init(jax.random.key(0)), grpo_optimizer(CONFIG), None)
            ends()

    for _ in range(2):
        try:
            start()
        except (OSError, UserError, KeyboardInterrupt) as error:
            assert not isinstance(error, FaultsError)
    assert json.loads((tmp_path / FILE).read_text())["faults"] == 2 * counts


def test_a_run_that_is_given_up_has_read_no_weights(tmp_path) -> None:
    for _ in range(3):
        one(tmp_path)
    with (
        pytest.raises(FaultsError),
        RunContext("GRPO", CONFIG, MODEL, tmp_path, JOB, progress=False) as run,
    ):
        run.restore_or_init(lambda: pytest.fail("weights were read"), grpo_optimizer(CONFIG), None)


def test_a_run_that_was_given_up_tries_as_often_again(tmp_path) -> None:
    """The refusal itself is no fault, and what takes itself back must not bring the faults before it back."""

    def start() -> None:
        with RunContext("GRPO", CONFIG, MODEL, tmp_path, JOB, progress=False) as run:
            run.restore_or_init(full_disk, grpo_optimizer(CONFIG), None)

    for _ in range(2):
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                start()
        with pytest.raises(FaultsError):
            start()
