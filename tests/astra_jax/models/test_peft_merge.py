"""Adapters that peft wrote, merged as they are read: against `merge_and_unload`, and against peft's own forward pass."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_world import DENSE
from parity_world import hf_model, logits_of, tokens_of
from safetensors.numpy import load_file, save_file

from astra_jax.mesh import make_mesh
from astra_jax.models import adapters, hf_checkpoint, peft_folder
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.peft import load
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run import weights

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

SIZES = dict(vocab_size=131, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=80)
TIED = Qwen3Config(**SIZES, tie_embeddings=True)
APART = Qwen2Config(**SIZES, tie_embeddings=False)
LLAMA = LlamaConfig(**SIZES, tie_embeddings=True)
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}

HONOURED = {
    "plain": (APART, {}),
    "rslora": (APART, {"use_rslora": True}),
    "patterns": (
        APART,
        {
            "rank_pattern": {"q_proj": 5, "^model.layers.1.mlp.up_proj": 2},
            "alpha_pattern": {"layers.0.mlp.down_proj": 3},
        },
    ),
    "rslora and patterns": (TIED, {"use_rslora": True, "rank_pattern": {"v_proj": 7}, "alpha_pattern": {"v_proj": 1}}),
    "some layers": (TIED, {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "regular expression": (LLAMA, {"target_modules": r".*\.(q|v)_proj"}),
    "all-linear": (LLAMA, {"target_modules": "all-linear"}),
    "but some": (LLAMA, {"exclude_modules": ["o_proj"]}),
    "whole names": (LLAMA, {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]}),
    "DoRA": (APART, {"use_dora": True}),
    "bias of adapters": (APART, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "all biases": (APART, {"bias": "all"}),
    "biases under adapters": (APART, {"bias": "lora_only", "target_modules": ["q_proj"]}),
    "own embedding and head": (APART, BOTH),
    "own head": (APART, {"modules_to_save": ["lm_head"]}),
    "own norms": (TIED, {"modules_to_save": ["input_layernorm", "norm"]}),
    "head with an adapter": (APART, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding with an adapter": (APART, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied, own embedding and head": (TIED, BOTH),
    "tied, own embedding": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "tied, own head": (TIED, {"modules_to_save": ["lm_head"]}),
    "tied on purpose": (TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "rows": (APART, {"trainable_token_indices": {"embed_tokens": [4, 98], "lm_head": [4, 98]}}),
    "rows of the embedding": (APART, {"trainable_token_indices": [4, 98]}),
    "tied, rows": (TIED, {"trainable_token_indices": [130, 3]}),
    "gaussian": (LLAMA, {"init_lora_weights": "gaussian"}),
    "orthogonal": (LLAMA, {"init_lora_weights": "orthogonal"}),
}


def base_of(model, folder):
    hf_model(model).save_pretrained(folder)
    return folder


def trained(model, settings, base="", *, resized=None):
    """peft's model as after some training: everything that is trained differs from what it began as."""
    torch.manual_seed(0)
    under = copy.deepcopy(hf_model(model))
    under.config._name_or_path = str(base)
    under.name_or_path = str(base)
    if resized is not None:
        under.resize_token_embeddings(resized, mean_resizing=False)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": EVERY, "task_type": "CAUSAL_LM"} | settings)
    made = peft.get_peft_model(under, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def written(model, settings, tmp_path, **options):
    """(peft's model, its folder, that of the weights under it)."""
    base = base_of(model, tmp_path / "base")
    made = trained(model, settings, base, **options)
    made.save_pretrained(tmp_path / "adapter")
    return made, tmp_path / "adapter", base


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def merged(adapter, base, **dtypes):
    model = weights.read_model(base, adapter, **dtypes)
    return model, weights.load(base, model, adapter=adapter)


@pytest.mark.parametrize("name", HONOURED)
def test_merged_weights_compute_what_was_trained_and_what_peft_merges(name, tmp_path) -> None:
    model, settings = HONOURED[name]
    theirs, adapter, base = written(model, settings, tmp_path)
    tokens = tokens_of(model, length=40)
    expected = torch_logits(theirs, tokens)
    found, params = merged(adapter, base)
    logits = logits_of(params, found, tokens)
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)
    assert np.abs(logits - torch_logits(hf_model(model), tokens)).max() > 0.01, "the adapter does nothing"
    hf_checkpoint.save_hf(params, found, tmp_path / "merged")
    ours = type(hf_model(model)).from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(torch_logits(ours, tokens), expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(torch_logits(theirs.merge_and_unload(), tokens), expected, atol=1e-5, rtol=0)
    expected_tied = model.tie_embeddings and not name.startswith("tied, own")
    assert found.tie_embeddings == expected_tied
