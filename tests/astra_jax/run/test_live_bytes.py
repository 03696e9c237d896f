"""What lies on the devices at each phase of a run is what the planner counts: weights, optimizer state, a batch."""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from rollout_world import ScriptedSampler, call, make_environment
from sft_world import make_dataset, trajectories

from astra_jax.grpo import train as grpo
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.step import grpo_optimizer
from astra_jax.models import adapters
from astra_jax.models.lora import LoRA
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.planner import programs
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.sampler import Completion
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.optimizers import abstract_state
from astra_jax.run.trainer import RunContext
from astra_jax.sft import step
from astra_jax.sft import train as sft
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.hooks import HeldOutLoss
from astra_jax.sft.samples import TurnSampler
from astra_jax.sft.step import sft_optimizer

SFT = SFTConfig(
    data=DataConfig(seq_len=512, packing_bins=4, too_long="cut"),
    batch_size=2,
    steps=2,
    learning_rate=1e-3,
    checkpoint_every=1,
    sample_every=1,
    samples=1,
    sample_tokens=4,
    eval_every=1,
)
GRPO = GRPOConfig(
    steps=2,
    batch_size=2,
    group_size=4,
    micro_batch_size=2,
    learning_rate=1e-3,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(800,),
    checkpoint_every=1,
)
SMALL = 100_000
"""Bytes of a batch, of metrics and of constants; a hundredth of the weights and more."""


@pytest.fixture(scope="module")
def model(chat_tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=chat_tokenizer.vocab_size,
        d_model=256,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=1024,
        tie_embeddings=True,
        max_positions=1024,
    )


def bytes_of(tree) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Live:
    """The most bytes of arrays, beyond those that were there before, when a phase begins and when it ends."""

    def __init__(self, monkeypatch) -> None:
        self.most: dict[str, int] = defaultdict(int)
        self._before, self._monkeypatch = self._now(), monkeypatch

    def _now(self) -> int:
        gc.collect()
        # Arrays that share a buffer are one.
        pointers = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if not x.is_deleted()}
        return sum(pointers.values())

    def look(self, phase: str) -> None:
        self.most[phase] = max(self.most[phase], self._now() - self._before)

    def watch(self, owner, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments, **options):
            self.look(f"{name} begins")
            result = real(*arguments, **options)
            del arguments, options  # what was donated
            self.look(f"{name} ends")
            return result

        self._monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def live(monkeypatch) -> Iterator[Live]:
    gc.collect()
    gc.freeze()  # or each look goes through all that other tests of this process have made
    made = Live(monkeypatch)
    save = Checkpointer.save

    def saved(checkpointer, step, **parts):
        # Until it is written a checkpoint is copied in the host's memory, which on a CPU is the device's.
        seconds = save(checkpointer, step, **parts)
        checkpointer.wait()
        return seconds

    monkeypatch.setattr(Checkpointer, "save", saved)
    for owner, name in ((RunContext, "restore_or_init"), (Checkpointer, "restore"), (Checkpointer, "save")):
        made.watch(owner, name)
    yield made
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "times"), [("float32", 2), ("bfloat16", 1)])
def test_sft_holds_one_state_and_a_batch(model, chat_tokenizer, tmp_path, live, moments, times) -> None:
    one = dataclasses.replace(SFT, optimizer_state_dtype=moments)
    data = make_dataset(tmp_path / "data", trajectories(8, longest=2))
    for owner, name in ((sft, "train_step"), (HeldOutLoss, "loss"), (TurnSampler, "draw")):
        live.watch(owner, name)
    weights, state = map(bytes_of, abstract_state(model.abstract_params(), sft_optimizer(one, 2)))
    assert state == pytest.approx(times * weights, rel=0.01) and weights / 20 > SMALL

    def start():
        return model.init(jax.random.key(0))

    def run(config) -> None:
        arguments = (config, model, start, data, chat_tokenizer, tmp_path / "run")
        assert sft.train(*arguments, held_out=data, progress=False).steps == config.steps

    run(one)
    assert live.most.keys() >= {"restore_or_init ends", "train_step ends", "save begins", "loss ends", "draw begins"}
    # An engine on a CPU has the layers of its weights one by one, and a cache for the samples' lengths.
    samples = weights + 2 * model.n_layers * SFT.data.seq_len * model.n_kv_heads * model.head_dim * 4
    for phase, most in live.most.items():
        assert most <= weights + state + SMALL + (samples if "draw" in phase else 0), phase
    assert live.most["begin begins"] <= SMALL
    live.most.clear()
    run(dataclasses.replace(one, epochs=1.0))  # there is nothing left to do: it is restored, and that is all
    assert live.most["restore begins"] <= SMALL, "a fresh state lies beside the one that is restored"
    assert live.most["restore_or_init ends"] <= weights + state + SMALL


@pytest.mark.slow
def test_sft_of_adapters_holds_their_state_alone(model, chat_tokenizer, tmp_path, live) -> None:
    """AdamW's two means of the adapters, 8 bytes a number, and the weights under them once; so the planner says too."""
    config = dataclasses.replace(SFT, lora=LoRA(rank=16), sample_every=0)
    data = make_dataset(tmp_path / "data", trajectories(8, longest=2))
    live.watch(sft, "train_step")
    base = bytes_of(model.abstract_params())
    count = sum(leaf.size for leaf in jax.tree.leaves(adapters.abstract_adapters(model, config.lora)))
    _, planned, _ = step.abstract_arguments(model, config, 2, None)
    counters = bytes_of([leaf for leaf in jax.tree.leaves(planned) if not leaf.shape])
    assert programs._held(planned) - counters == 2 * 4 * count and counters < 100
    states, save = [], Checkpointer.save

    def saved(checkpointer, step, *, params, state, extra):
        states.append(state)
        return save(checkpointer, step, params=params, state=state, extra=extra)

    live._monkeypatch.setattr(Checkpointer, "save", saved)
    arguments = (config, model, lambda: model.init(jax.random.key(0)), data, chat_tokenizer, tmp_path / "run")
    assert sft.train(*arguments, progress=False).steps == 2
    measured = sum(x.nbytes for x in jax.tree.leaves(states[-1]) if x.ndim)
    assert measured == 2 * 4 * count
    for phase in ("restore_or_init ends", "train_step ends", "save begins"):
        assert live.most[phase] <= base + 3 * 4 * count + SMALL, phase
    assert live.most["train_step ends"] >= base + 3 * 4 * count
    assert 10 * measured < 2 * base, "so small a difference would say little"


@pytest.mark.slow
@pytest.mark.parametrize("async_steps", [0, 1])
async def test_grpo_holds_one_state_and_what_is_sampled_with(
    model, chat_tokenizer, pool, tmp_path, live, async_steps
) -> None:
    config = dataclasses.replace(GRPO, async_rollouts=async_steps > 0, max_off_policy_steps=async_steps or 1)
    live.watch(grpo, "update_step")
    weights, state = map(bytes_of, abstract_state(model.abstract_params(), grpo_optimizer(config)))

    class Sampler(ScriptedSampler):
        aliases_params = True
        given = None

        async def load_weights(self, params, version):
            live.look("sync")
            self.given = params
            await super().load_weights(params, version)

        async def generate(self, *arguments, **options):
            live.look("sampling")
            return await super().generate(*arguments, **options)

    def by_seed(session, turn, seed):
        return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."

    async def run() -> None:
        policy = Sampler(chat_tokenizer, by_seed)
        start, environments = (lambda: model.init(jax.random.key(0))), [make_environment()]
        arguments = (config, model, start, environments, chat_tokenizer, pool, tmp_path)
        assert (await grpo.train(*arguments, policy=policy, progress=False)).steps == 2

    await run()
    assert live.most.keys() >= {"sync", "sampling", "update_step begins", "update_step ends", "save begins"}
    # With async_rollouts the policy samples with a copy while the other is trained; while it is handed the next there
    # are two, of which it may still be using the first.
    for phase, most in live.most.items():
        copies = (2 if phase == "sync" else 1) * async_steps
        busy = "sampling" in phase and async_steps  # beside an update: its gradients, and both states where it ends
        if not busy:
            assert most <= weights + state + SMALL + copies * weights, phase
    live.most.clear()
    await run()
    assert live.most["restore begins"] <= SMALL, "a fresh state lies beside the one that is restored"


@pytest.mark.slow
async def test_beside_an_update_the_embedded_engine_holds_nothing(
    model, chat_tokenizer, pool, tmp_path, live, monkeypatch
) -> None:
    """Neither its cache nor the weights as it reads them, which are half as much as all else here."""
    engines = []

    class Sampling(Engine):
        async def generate(self, token_ids, sampling, *, session=""):
            engines.append(self)
            await super().generate(token_ids, dataclasses.replace(sampling, max_tokens=1), session=session)
            live.look("sampling")
            said = call("capital_of", country="France") if sampling.seed % 2 else f"I say {sampling.seed % 7}."
            new = chat_tokenizer.encode(said + "<|im_end|>")
            return Completion(new, [-1.0] * len(new), [self.version] * len(new), "stop")

    monkeypatch.setattr(grpo, "Engine", Sampling)
    live.watch(grpo, "update_step")
    weights, state = map(bytes_of, abstract_state(model.abstract_params(), grpo_optimizer(GRPO)))
    start, environments = (lambda: model.init(jax.random.key(0))), [make_environment()]
    arguments = (GRPO, model, start, environments, chat_tokenizer, pool, tmp_path)
    assert (await grpo.train(*arguments, progress=False)).steps == 2
    cache = 2 * model.n_layers * engines[0].config.slots * engines[0].config.max_length * model.n_kv_heads * 16 * 4
    assert live.most["sampling"] >= weights + state + cache
    for phase in ("update_step begins", "update_step ends", "save begins"):
        more = weights + cache if phase.startswith("save") else 0  # it has the next weights by then
        assert live.most[phase] <= weights + state + SMALL + more, phase
