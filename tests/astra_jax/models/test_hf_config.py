"""A folder's `config.json` and files are read as transformers reads them, or refused by field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from astra_jax.models import hf_checkpoint
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.layers.rotary import rotary_angles
from astra_jax.models.qwen3.presets import Qwen3Config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = Qwen3Config(
    vocab_size=48, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=24, tie_embeddings=True
)
PLAIN = {key: value for key, value in SMALL.to_hf().items() if key not in ("rope_theta", "rope_parameters")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


def written(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": DEFAULT, "rope_scaling": YARN},
        {"rope_parameters": DEFAULT, "rope_scaling": YARN | {"rope_theta": 3e5}},
        {"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 2e5},
        {"rope_parameters": YARN | {"rope_theta": 4e5}, "rope_scaling": DEFAULT},
        {"rope_parameters": YARN | {"rope_theta": 4e5}, "rope_scaling": None},
        {"rope_parameters": YARN, "rope_theta": 2e5},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1e6, "max_position_embeddings": 128},
        {"rope_scaling": YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32},
        {"rope_scaling": YARN | {"factor": None}, "rope_theta": 1e6, "max_position_embeddings": 192},
        {"rope_theta": 7e5},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_rotary_embedding_is_transformers(tmp_path, rope: dict, kind: str) -> None:
    """Angles, and what cos and sin are multiplied by, whichever of the places they are written in."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = {**PLAIN, **rope, "model_type": kind, **(experts if kind == "qwen3_moe" else {})}
    ours = hf_checkpoint.read_config(written(tmp_path, config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    module = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[kind]
    embedding = getattr(getattr(transformers.models, kind), f"modeling_{kind}")
    positions = np.arange(0, 200, 7)[None]
    cos, sin = getattr(embedding, f"{module}RotaryEmbedding")(theirs)(torch.zeros(1), torch.tensor(positions))
    half = SMALL.head_dim // 2
    for one, other in zip(rotary_angles(positions, ours), (cos, sin), strict=True):
        np.testing.assert_allclose(np.asarray(one), other[..., :half].numpy(), atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path, kind: str) -> None:
    sizes = {key: PLAIN[key] for key in ("vocab_size", "num_hidden_layers", "num_key_value_heads")}
    sizes |= {"model_type": kind, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 24}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ours = hf_checkpoint.read_config(written(tmp_path, sizes))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.hidden_act == "silu" and not theirs.use_sliding_window
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 8)
    assert (ours.tie_embeddings, ours.attention_bias) == (theirs.tie_word_embeddings, theirs.attention_bias)
    assert (ours.rope_theta, ours.rms_eps) == (theirs.rope_parameters["rope_theta"], theirs.rms_norm_eps)
    assert ours.max_positions == theirs.max_position_embeddings
    if kind == "qwen3_moe":
        assert ours.norm_topk_prob == theirs.norm_topk_prob


def test_null_key_value_heads_are_as_many_as_heads(tmp_path) -> None:
    written(tmp_path, PLAIN | {"num_key_value_heads": None})
    ours, theirs = hf_checkpoint.read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.n_kv_heads == theirs.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; every released Qwen3 has 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is of 'fp8'.*give the release that is not quantised"),
        ({"quantization_config": "int8"}, "quantization_config is of 'int8'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*'sliding_attention'"),
        ({"rope_scaling": [1]}, r"rope_parameters is \[1\]; it is an object"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": "2"}, "n_layers is '2'"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, change: dict, message: str) -> None:
    with pytest.raises(WeightsError, match=rf"config\.json: .*{message}"):
        hf_checkpoint.read_config(written(tmp_path, PLAIN | change))


@pytest.mark.parametrize("name", ["num_key_value_heads", "hidden_size", "intermediate_size"])
def test_a_size_that_is_missing_is_named(tmp_path, name: str) -> None:
    with pytest.raises(WeightsError, match=f"config.json: {name} is missing; copy"):
        hf_checkpoint.read_config(written(tmp_path, {key: value for key, value in PLAIN.items() if key != name}))


def test_a_config_that_is_a_list_is_refused(tmp_path) -> None:
    with pytest.raises(WeightsError, match="config.json is no JSON object"):
        hf_checkpoint.read_config(written(tmp_path, [PLAIN]))


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.fixture
def saved(tmp_path):
    """A checkpoint in several files with an index, and its parameters."""
    params = SMALL.init(jax.random.key(0))
    hf_checkpoint.save_hf(params, SMALL, tmp_path, max_bytes=4_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path, params


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_a_stale_file_beside_the_index_is_not_read(saved) -> None:
    folder, params = saved
    stale = {name: np.ones((3, 5), np.float32) for name in [*index_of(folder)["weight_map"], "of.another.model"]}
    save_file(stale, folder / "model-00009-of-00009.safetensors")
    save_file(stale, folder / "zz.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, hf_checkpoint.load_hf(folder, SMALL))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_array_equal(theirs.model.embed_tokens.weight.detach().numpy(), params["embed_vd"])


def test_a_stale_file_beside_the_only_one_is_not_read(tmp_path) -> None:
    params = SMALL.init(jax.random.key(0))
    hf_checkpoint.save_hf(params, SMALL, tmp_path)
    save_file({"model.norm.weight": np.zeros(16, np.float32)}, tmp_path / "zz.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, hf_checkpoint.load_hf(tmp_path, SMALL))
    (tmp_path / "model.safetensors").rename(tmp_path / "aa.safetensors")
    with pytest.raises(WeightsError, match=r"zz.safetensors holds model.norm.weight, which another file there holds"):
        hf_checkpoint.load_hf(tmp_path, SMALL)


def test_an_index_that_does_not_fit_its_files_is_refused(saved) -> None:
    folder, _ = saved
    index = index_of(folder)
    save_file({"model.norm.weight": np.zeros(16, np.float32)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has both model.safetensors and model.safetensors.index.json"):
        hf_checkpoint.load_hf(folder, SMALL)
    (folder / "model.safetensors").unlink()
    file = index["weight_map"]["model.norm.weight"]
    for change, message in [
        (
            {"weight_map": index["weight_map"] | {"model.norm.weight": "gone.safetensors"}},
            "gone.safetensors is missing",
        ),
        ({"weight_map": index["weight_map"] | {"more": file}}, f"{file} lacks more, which"),
        ({"weight_map": {"model.norm.weight": "../other.safetensors"}}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ([], "has no weight_map"),
    ]:
        (folder / "model.safetensors.index.json").write_text(json.dumps(change))
        with pytest.raises(WeightsError, match=message):
            hf_checkpoint.load_hf(folder, SMALL)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match="index.json is not JSON"):
        hf_checkpoint.load_hf(folder, SMALL)


@pytest.mark.parametrize("kind", ["int8", "int32", "uint8", "bool", "fp8"])
def test_tensors_that_are_no_weights_are_refused_by_name(tmp_path, kind: str) -> None:
    hf_checkpoint.save_hf(SMALL.init(jax.random.key(0)), SMALL, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: torch.tensor(tensor) for name, tensor in load_file(file).items()}
    dtype = torch.float8_e4m3fn if kind == "fp8" else getattr(torch, kind)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    from safetensors.torch import save_file as save_torch

    save_torch(tensors, file)
    with pytest.raises(
        WeightsError, match=r"tensor model.norm.weight is \w+, .*give the release that is not quantised"
    ):
        hf_checkpoint.load_hf(tmp_path, SMALL)
