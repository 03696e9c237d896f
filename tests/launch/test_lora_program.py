"""Adapters through the programs: trained by `astra sft` and `astra grpo`, refused before weights are read."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from grpo_world import MODEL, grpo_flags, make_grpo_world
from programs_world import programs
from sft_world import make_dataset, trajectories

from astra_jax.models import hf_checkpoint
from astra_jax.models.lora import LoRA
from astra_jax.run import frozen, weights

pytestmark = pytest.mark.slow

SFT = f"""
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from configs.training import SFTRun

DATA = DataConfig(seq_len=512, packing_bins=4)
CONFIG = SFTRun({MODEL}, SFTConfig(data=DATA, batch_size=2, steps=1, learning_rate=1e-2, sample_every=0))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    make_grpo_world(folder)
    (folder / "sft.py").write_text(SFT)
    make_dataset(folder / "data", trajectories(6, longest=1))
    return folder


def differing(folder, checkpoints) -> int:
    """How many arrays a run's folder has otherwise than the weights that it began with."""
    before = hf_checkpoint.load_hf(folder / "serve", MODEL)
    after = weights.load(checkpoints, MODEL)
    same = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), before, after)
    return sum(not one for one in jax.tree.leaves(same))


def test_sft_trains_adapters_and_refuses_what_there_is_not(world, tmp_path) -> None:
    flags = [f"--config={world / 'sft.py'}", f"--weights={world / 'serve'}", f"--data={world / 'data'}"]
    with programs("launch.sft", tmp_path) as sft:
        lora = ["--config.lora.rank=2", "--config.lora.alpha=4", '--config.lora.targets=["o_proj","down_proj"]']
        ended = sft(*flags, f"--workdir={tmp_path / 'run'}", *lora)
        assert ended.code == 0, ended.errors
        card = frozen.read(tmp_path / "run" / "checkpoints")
        assert card.lora == LoRA(rank=2, alpha=4.0, targets=("o_proj", "down_proj"))
        assert card.origin == frozen.WeightsSource(str(world / "serve"))
        assert differing(world, tmp_path / "run" / "checkpoints") == 2
        for wrong, said in (
            (["--config.lora.rank=0"], "rank is 0"),
            (["--config.lora.rank=2", '--config.lora.targets=["qproj"]'], "q_proj, k_proj, v_proj, o_proj, gate_proj"),
            (["--config.lora.alpha=2"], "give a rank too"),
            (["--config.lora.rnak=2"], "the nearest is --config.sft.lora.rank"),
            (["--config.lora.rank=2", "--config.sft.optimizer=muon"], "optimizer is muon"),
        ):
            refused = sft(*flags, f"--workdir={tmp_path / 'wrong'}", *wrong)
            assert refused.code == 2 and said in refused.line, refused.errors


def test_grpo_trains_adapters_with_the_embedded_engine(world, tmp_path) -> None:
    with programs("launch.grpo", tmp_path) as grpo:
        ended = grpo(*grpo_flags(world), f"--workdir={tmp_path / 'run'}", "--config.lora.rank=2")
        assert ended.code == 0, ended.errors
    assert frozen.read(tmp_path / "run" / "checkpoints").lora == LoRA(rank=2)
    assert 0 < differing(world, tmp_path / "run" / "checkpoints") <= 7
