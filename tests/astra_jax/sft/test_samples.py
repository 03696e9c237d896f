"""Samples of a model in training: what the engine draws from the same weights, over any mesh."""

from __future__ import annotations

import jax
import pytest
from sft_world import make_tokenizer, trajectories

from astra_jax.mesh import make_mesh
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.sampler import Sampling
from astra_jax.sft.data import DataConfig
from astra_jax.sft.samples import Sample, TurnSampler

MODEL = Qwen3Config(400, 32, 2, 4, 2, 16, 64, tie_embeddings=True, max_positions=512)
DATA = DataConfig(seq_len=512)
TOKENS = 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def drawn(tokenizer, params) -> list[Sample]:
    return TurnSampler(trajectories(8), tokenizer, MODEL, DATA, count=3, max_tokens=TOKENS).draw(params)


async def test_samples_are_what_the_engine_draws(drawn, tokenizer, params):
    greedy = Sampling(max_tokens=TOKENS, stop_ids=(tokenizer.eos_id,), seed=0, temperature=0.0)
    engine = Engine(params, MODEL, EngineConfig(slots=3, max_length=512))
    try:
        for sample in drawn:
            completion = await engine.generate(tokenizer.encode(sample.prompt), greedy)
            assert sample.said == tokenizer.decode(completion.token_ids)
    finally:
        await engine.close()


def test_a_sample_shows_the_opening_and_what_the_dataset_has_there(drawn):
    assert [sample.id for sample in drawn] == ["trajectory_0", "trajectory_1", "trajectory_2"]
    for sample in drawn:
        assert "What is the capital of" in sample.prompt and sample.prompt.endswith("<|im_start|>assistant\n")
        assert sample.wanted.startswith("<think>") and sample.wanted.endswith("<|im_end|>")
        assert '"capital_of"' in sample.wanted and sample.said not in ("", sample.wanted)
        assert all(part in str(sample) for part in (sample.id, sample.prompt, sample.wanted, sample.said))


def test_a_mesh_draws_the_same(drawn, tokenizer, params):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    sampler = TurnSampler(trajectories(8), tokenizer, MODEL, DATA, count=3, max_tokens=TOKENS, mesh=mesh)
    assert sampler.draw(jax.device_put(params, MODEL.param_shardings(mesh))) == drawn


def test_openings_that_do_not_fit_are_left_out(tokenizer, params):
    short = DataConfig(seq_len=64)
    assert TurnSampler(trajectories(8), tokenizer, MODEL, short, count=3, max_tokens=TOKENS).draw(params) == []
