"""A folder's `config.json` and files are read as transformers reads them, or refused by field and value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from astra_jax.base.settings import SettingError
from astra_jax.models import hf_checkpoint
from astra_jax.models.decoder import Decoder
from astra_jax.models.hf_checkpoint import WeightsError
from astra_jax.models.layers.rotary import rotary_angles
from astra_jax.models.layers.sizes import Llama3Scaling, Yarn
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import Qwen3Config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = Qwen3Config(
    vocab_size=48, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=24, tie_embeddings=True
)
LLAMA, QWEN2 = (kind(**{**vars(SMALL), "attention_bias": kind is Qwen2Config}) for kind in (LlamaConfig, Qwen2Config))
MODELS: dict[str, Decoder] = {"qwen3": SMALL, "qwen3_moe": SMALL, "llama": LLAMA, "qwen2": QWEN2}


def plain(kind: str) -> dict[str, Any]:
    """What `config.json` of a `model_type` has, without the rotary embedding."""
    config = MODELS[kind].to_hf() | {"model_type": kind}
    if kind == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return {key: value for key, value in config.items() if key not in ("rope_theta", "rope_parameters")}


PLAIN = plain("qwen3")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
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
        {"rope_scaling": LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32, "type": "llama3"}, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3 | {"rope_theta": 4e5, "factor": 32.0}, "max_position_embeddings": 128},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 9}, "rope_scaling": {}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e5},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 3e5}},
        {"rope_theta": 7e5},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_rotary_embedding_is_transformers(tmp_path, rope: dict, kind: str) -> None:
    """Angles, and what cos and sin are multiplied by, whichever of the places they are written in."""
    ours = hf_checkpoint.read_config(written(tmp_path, plain(kind) | rope))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    module = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "qwen2": "Qwen2"}[kind]
    embedding = getattr(getattr(transformers.models, kind), f"modeling_{kind}")
    positions = np.arange(0, 200, 7)[None]
    cos, sin = getattr(embedding, f"{module}RotaryEmbedding")(theirs)(torch.zeros(1), torch.tensor(positions))
    half = SMALL.head_dim // 2
    for one, other in zip(rotary_angles(positions, ours), (cos, sin), strict=True):
        np.testing.assert_allclose(np.asarray(one), other[..., :half].numpy(), atol=2e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path, kind: str) -> None:
    sizes = {key: PLAIN[key] for key in ("vocab_size", "num_hidden_layers")}
    if kind != "llama":  # the others take a number there that is no model's
        sizes["num_key_value_heads"] = PLAIN["num_key_value_heads"]
    sizes |= {"model_type": kind, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 24}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ours: Any = hf_checkpoint.read_config(written(tmp_path, sizes))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.hidden_act == "silu" and not getattr(theirs, "use_sliding_window", False)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 8)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", kind == "qwen2")
    assert (ours.rope_theta, ours.rms_eps) == (theirs.rope_parameters["rope_theta"], theirs.rms_norm_eps)
    assert ours.max_positions == theirs.max_position_embeddings
    if kind == "qwen3_moe":
        assert ours.norm_topk_prob == theirs.norm_topk_prob


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_null_key_value_heads_are_as_many_as_heads(tmp_path, kind: str) -> None:
    written(tmp_path, plain(kind) | {"num_key_value_heads": None})
    ours: Any = hf_checkpoint.read_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
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
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": "2"}, "n_layers is '2'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True; no released Llama has biases in its feed-forw"),
        ({"model_type": "llama", "hidden_act": "relu2"}, "hidden_act is 'relu2'; every released Llama has 'silu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is True.*no released Qwen2.5 has wi"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "layer_types .*'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'; this port computes 'default', 'linear', 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' and no factor; copy"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' and no low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_turns is 1.0; it must be above low_turns"),
        ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "Llama3Scaling.factor is 0.5"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, change: dict, message: str) -> None:
    config = plain(change.get("model_type", "qwen3")) | change
    with pytest.raises(WeightsError, match=rf"config\.json: .*{message}"):
        hf_checkpoint.read_config(written(tmp_path, config))


def test_all_that_is_not_computed_is_named_in_one_message(tmp_path) -> None:
    change = {"hidden_act": "gelu", "rope_scaling": {"rope_type": "dynamic"}, "use_sliding_window": True}
    config = plain("llama") | change | {"mlp_bias": True, "architectures": ["LlamaForSequenceClassification"]}
    del config["hidden_size"], config["intermediate_size"]
    with pytest.raises(WeightsError) as refused:
        hf_checkpoint.read_config(written(tmp_path, config))
    for part in ("hidden_size, intermediate_size are missing", "hidden_act", "'dynamic'", "use_sliding_window is True",
                 "mlp_bias is True", "this port computes LlamaForCausalLM"):  # fmt: skip
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": None},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2, "layer_types": None},
    ],
    ids=str,
)
def test_what_changes_nothing_is_read(tmp_path, change: dict[str, Any]) -> None:
    config = plain(change.get("model_type", "llama")) | change
    hf_checkpoint.read_config(written(tmp_path, config))
    if "max_window_layers" in change:
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert set(theirs.layer_types) == {"full_attention"}


def test_an_object_for_each_kind_of_layer_is_refused(tmp_path) -> None:
    """It was read as a plain embedding with a base of 10,000."""
    config = PLAIN | {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}}
    with pytest.raises(WeightsError, match="one object each for full_attention, sliding_attention"):
        hf_checkpoint.read_config(written(tmp_path, config))


def test_what_a_family_has_always_or_never_is_no_setting() -> None:
    with pytest.raises(SettingError, match="Qwen2Config.attention_bias is False; every Qwen2 has biases"):
        replace(QWEN2, attention_bias=False)
    for model in (LLAMA, QWEN2):
        with pytest.raises(SettingError, match=r"n_experts is 4; .*dense.*: use 0"):
            replace(model, n_experts=4, experts_per_token=2)
    with pytest.raises(SettingError, match="yarn and llama3 are both given"):
        replace(LLAMA, yarn=Yarn(2.0, 64), llama3=Llama3Scaling(2.0, 64))
    with pytest.raises(SettingError, match="llama3 and linear are both given"):
        replace(LLAMA, linear=2.0, llama3=Llama3Scaling(2.0, 64))


def test_a_context_is_stretched_from_what_the_weights_were_made_for() -> None:
    assert replace(LLAMA, max_positions=8_192).with_context_length(8_192).yarn is None
    longer = replace(LLAMA, max_positions=8_192).with_context_length(20_000)
    assert (longer.yarn, longer.max_positions, longer.stretch) == (Yarn(3.0, 8_192), 24_576, 3.0)
    assert longer.with_context_length(40_000).yarn == Yarn(5.0, 8_192)  # not 24,576 stretched once more
    for model in (SMALL, QWEN2):  # as Qwen says, from 32,768, also where max_position_embeddings is above
        assert replace(model, max_positions=40_960).with_context_length(74_752).yarn == Yarn(3.0, 32_768)
    scaled = replace(LLAMA, llama3=Llama3Scaling(8.0, 8_192), max_positions=65_536)
    with pytest.raises(ValueError, match="max_positions is 65536, which its llama3 scaling already makes of a shorter"):
        scaled.with_context_length(65_537)
    with pytest.raises(ValueError, match="which its linear scaling already makes"):
        replace(LLAMA, linear=4.0, max_positions=16_384).with_context_length(20_000)


@pytest.mark.parametrize("name", ["num_key_value_heads", "hidden_size", "intermediate_size"])
def test_a_size_that_is_missing_is_named(tmp_path, name: str) -> None:
    with pytest.raises(WeightsError, match=f"config.json: {name} is missing; copy"):
        hf_checkpoint.read_config(written(tmp_path, {key: value for key, value in PLAIN.items() if key != name}))


def test_a_config_that_is_a_list_is_refused(tmp_path) -> None:
    with pytest.raises(WeightsError, match="config.json is not a JSON object"):
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
    with pytest.raises(WeightsError, match=r"zz.safetensors holds model.norm.weight, which another file there has"):
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
