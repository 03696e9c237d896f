"""What comparisons with other libraries rest on: all sides have one work, and what is not measured is what was added.

The libraries are not installed for tests. Where one can be imported, or ASTRA_TRL_PYTHON or ASTRA_TUNIX_PYTHON names
the Python of an environment of its own (`benchmarks/grpo_step.py` says how to make one), its GRPO loss and gradients
of a tiny model are compared with ours.
"""

import importlib.util
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from benchmark_world import program

from astra_jax.cpu.environment import cpu_environment
from astra_jax.grpo.step import trainer_logprobs
from astra_jax.planner.hardware import Slice

side = program("benchmarks.grpo_step_side")
compiled_peer = program("benchmarks.compiled_peer")
grpo_step = program("benchmarks.grpo_step")
TINY = grpo_step.CASES["tiny"]
NEEDS = {"trl": ("trl", "accelerate", "datasets"), "tunix": ("tunix",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    grpo_step.prepare(TINY, "varied", 1, folder)
    return folder


def of(name: str, folder: Path, python: str) -> dict:
    environment = cpu_environment({"JAX_PLATFORMS": "cpu"} | os.environ)
    command = [python, "-m", "benchmarks.grpo_step_side", name, str(folder)]
    return grpo_step.first_gradients(command, environment, folder, name)


def test_padded_episodes_are_the_episodes(folder: Path) -> None:
    arrays = side.read_episodes(folder)
    padded = side.padded(arrays)
    assert len(set(arrays["lengths_b"])) > 1
    for row, episode in enumerate(side.our_episodes(arrays)):
        shown = {name: padded[f"{name}_mask"][row] > 0 for name in ("prompt", "completion")}
        ids = [padded[f"{name}_ids"][row][shown[name]] for name in shown]
        assert np.concatenate(ids).tolist() == episode.token_ids and len(ids[0]) == episode.prompt_tokens
        assert (padded["completion_ids"][row][~shown["completion"]] == side.PAD).all()
        trained = padded["trained"][row][shown["completion"]]
        assert trained.tolist() == episode.loss_mask[episode.prompt_tokens :] and 0 < trained.sum() < len(trained)
        assert padded["old_logps"][row][shown["completion"]].tolist() == episode.logprobs[episode.prompt_tokens :]


def test_old_logprobs_put_the_clip_to_work(folder: Path) -> None:
    arrays, work = side.read_episodes(folder), side.read_work(folder)
    model, config = side.qwen3(work), side.grpo_config(work)
    params = model.init(jax.random.key(0))
    ratios, advantages = [], []
    for row, batch in enumerate(side.one_by_one(arrays, TINY.prompt + TINY.completion)):
        logps = np.asarray(trainer_logprobs(params, batch, model=model, config=config))[0]
        on = arrays["mask_bt"][row] > 0
        ratios += np.exp(logps - arrays["old_logps_bt"][row])[on].tolist()
        advantages += [arrays["advantages_b"][row]] * int(on.sum())
    ratio, advantage = np.asarray(ratios), np.asarray(advantages)
    assert ((ratio > 1 + side.CLIP_HIGH) & (advantage > 0)).any() and (
        (ratio < 1 - side.CLIP_LOW) & (advantage < 0)
    ).any()


@pytest.mark.nightly
@pytest.mark.parametrize("peer", NEEDS)
def test_losses_and_gradients_equal_a_peers(folder: Path, peer: str) -> None:
    python = os.environ.get(f"ASTRA_{peer.upper()}_PYTHON")
    if python is None:
        missing = [name for name in NEEDS[peer] if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"{', '.join(missing)} cannot be imported; ASTRA_{peer.upper()}_PYTHON may name another Python")
    distance = grpo_step.apart(of("jax", folder, sys.executable), of(peer, folder, python or sys.executable))
    assert distance["loss"] < 1e-6 and distance["gradient"] < 1e-5


def test_apart_is_the_worst_parameters_distance() -> None:
    ours = {"loss": 1.0, "gradients": {"a": np.array([3.0, 4.0]), "b": np.array([1.0])}}
    theirs = {"loss": 1.5, "gradients": {"a": np.array([3.0, 4.0]), "b": np.array([0.9])}}
    assert grpo_step.apart(ours, theirs) == pytest.approx({"loss": 0.5, "gradient": 0.1})
    with pytest.raises(ValueError, match="'b'"):
        grpo_step.apart(ours, theirs | {"gradients": {"a": np.zeros(2)}})


def test_what_a_layer_adds_is_added_for_the_layers_that_are_missing() -> None:
    less = {"fits": True, "peak": 10.0, "cycles": {"matmul": 4.0}, "uncounted": []}
    more = {"fits": True, "peak": 14.0, "cycles": {"matmul": 6.0, "copy": 2.0}, "uncounted": []}
    got = compiled_peer.deeper(less, more, 2, 10)
    assert got == {"fits": True, "peak": 34.0, "cycles": {"matmul": 16.0, "copy": 12.0}, "uncounted": []}


def test_seconds_of_compiling_are_told_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second cut may take less, on a machine with other users: 34 layers of that would be less than nothing."""
    slice_ = Slice.parse("v6e:2x4")
    cuts = [
        {"refusal": "", "compile_seconds": seconds, "peak_bytes_per_chip": peak, "cycles": {}}
        for seconds, peak in ((90.0, 1e9), (48.0, 1.25e9))
    ]
    monkeypatch.setattr(compiled_peer, "_compiled", lambda *_: cuts.pop(0))
    got = compiled_peer.compile_peer("tunix", "python", "4b", slice_, 8, 4096, 36, [1, 2])
    assert got["compile_seconds"] == [90.0, 48.0] and got["peak_bytes_per_chip"] == 9.75e9 and got["fits"]
