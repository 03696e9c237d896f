"""A run moves to another slice: what changes no result but by rounding may change when it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import jax
import numpy as np
import pytest
from absl import flags
from rollout_world import ScriptedSampler, call, make_environment, tiny_model
from sft_world import AfterUpdate, make_dataset, starting, trajectories

from astra_jax.grpo import train as grpo
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import make_mesh
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.run.identity import check_same_run
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from synthesis.core.workdir import WorkdirError

SFT = SFTConfig(
    data=DataConfig(seq_len=512, packing_bins=4, too_long="cut"),
    batch_size=4,
    steps=3,
    learning_rate=1e-3,
    eps=1e-5,  # where a gradient is 0 but for rounding, Adam would make a whole step of it
    checkpoint_every=1,
    sample_every=0,
)
GRPO = GRPOConfig(
    steps=3,
    batch_size=2,
    group_size=4,
    micro_batch_size=1,
    learning_rate=1e-3,
    eps=1e-5,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(800,),
    checkpoint_every=1,
)


@pytest.fixture(scope="module")
def model(chat_tokenizer):
    return tiny_model(chat_tokenizer.vocab_size, 1024)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@pytest.fixture
def compiled():
    """(program, whether it was compiled ahead, in a thread beside the run's start), of the training programs."""
    found: list[tuple[str, bool]] = []

    def listen(event: str, seconds: float, **about: str) -> None:
        name = about.get("fun_name", "").removeprefix("jit(").removesuffix(")")
        if event.endswith("backend_compile_duration") and name in ("train_step", "accumulate", "take_step"):
            found.append((name, threading.current_thread().name.startswith("compiling")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def assert_close(ours, theirs) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=1e-6)


def test_sft_goes_on_on_other_devices(model, params, chat_tokenizer, tmp_path, compiled) -> None:
    data = make_dataset(tmp_path / "data", trajectories(8, longest=2))

    def run(folder: str, steps: int, mesh=None, **changes):
        config = dataclasses.replace(SFT, **changes)

        def stop(step, row) -> None:
            if step == steps:
                raise KeyboardInterrupt

        arguments = (config, model, starting(params), data, chat_tokenizer, tmp_path / folder)
        return sft.train(*arguments, mesh=mesh, progress=False, hooks=[AfterUpdate(stop)])

    straight = run("straight", 0)
    with pytest.raises(KeyboardInterrupt):
        run("moved", 2)
    flags.FLAGS.mark_as_parsed()  # programs have; Grain's workers look
    changes = {"micro_batch_size": 2, "remat": "full", "data": dataclasses.replace(SFT.data, workers=1)}
    moved = run("moved", 0, make_mesh(fsdp=2, context=4), **changes)
    assert [row["step"] for row in moved.history] == [2, 3]
    assert_close(moved.params, straight.params)
    for ours, theirs in zip(moved.history, straight.history[1:], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6)
    assert compiled == [("train_step", True)] * 2  # on one device, and on the mesh


async def test_grpo_goes_on_on_other_devices(model, params, chat_tokenizer, pool, tmp_path, compiled) -> None:
    def by_seed(session, turn, seed):
        return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."

    expected = 2  # programs: `accumulate` and `take_step`, on one device

    class Patient(ScriptedSampler):
        """Begins when both programs of an update are compiled: a script may be done before, and the update, which
        does not wait for a program whose turn has not come, would compile it a second time."""

        async def load_weights(self, params, version):
            while len(compiled) < expected:
                await asyncio.sleep(0.01)
            await super().load_weights(params, version)

    class Gone(Patient):
        async def load_weights(self, params, version):
            if version == 1:
                raise ConnectionError("the server is gone")
            await super().load_weights(params, version)

    async def run(folder: str, kind=Patient, mesh=None, **changes):
        config = dataclasses.replace(GRPO, **changes)
        environments = [make_environment("a"), make_environment("b", "Japan")]
        arguments = (config, model, starting(params), environments, chat_tokenizer, pool, tmp_path / folder)
        return await grpo.train(*arguments, policy=kind(chat_tokenizer, by_seed), mesh=mesh, progress=False)

    straight = await run("straight")
    with pytest.raises(ConnectionError):
        await run("moved", Gone)
    changes = {"micro_batch_size": 2, "remat": "full", "row_buckets": (1024,), "concurrent_groups": 2}
    expected = 4  # and on the mesh
    moved = await run("moved", mesh=make_mesh(fsdp=2, context=4), **changes)
    assert [row["step"] for row in moved.history] == [2, 3]
    assert_close(moved.params, straight.params)
    assert sorted(compiled) == [("accumulate", True)] * 2 + [("take_step", True)] * 2


def test_another_tokenizer_is_another_run() -> None:
    before = {"sft.batch_size": 4}
    check_same_run(before, before | {"tokenizer": "a"}, "DIR")  # saved by a version that did not know it
    with pytest.raises(WorkdirError, match="tokenizer is 'a' there, 'b' here"):
        check_same_run(before | {"tokenizer": "a"}, before | {"tokenizer": "b"}, "DIR")
