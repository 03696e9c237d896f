"""Adapters that peft wrote, merged as they are read: against `merge_and_unload` and peft's own forward pass."""

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
from selection import by_day

from astra_jax.mesh import make_mesh
from astra_jax.models import adapters, hf_checkpoint, peft_folder
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.lora import LoRA
from astra_jax.models.peft import save
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


BY_DAY = (
    "patterns", "rslora and patterns", "regular expression", "DoRA", "all biases", "own norms", "head with an adapter",
    "tied, own head", "rows", "tied, rows",
)  # fmt: skip


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


@pytest.mark.parametrize("name", by_day(HONOURED, *BY_DAY))
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


@pytest.mark.parametrize("model", [TIED, APART])
def test_a_vocabulary_that_was_extended_fits(model, tmp_path) -> None:
    theirs, adapter, base = written(model, {"target_modules": ["q_proj"]}, tmp_path, resized=140)
    found, params = merged(adapter, base)
    assert found.vocab_size == 140 and found.tie_embeddings == model.tie_embeddings
    tokens = np.concatenate([tokens_of(model, length=40), [[139, 135], [131, 130]]], axis=1)
    np.testing.assert_allclose(logits_of(params, found, tokens), torch_logits(theirs, tokens), atol=2e-4, rtol=0)


def test_the_rows_that_a_run_here_trained_extend_the_base(tmp_path) -> None:
    """What `peft.save` writes of rows that the base does not have: `tokens` from its size on."""
    model, lora = replace(LLAMA, vocab_size=135), LoRA(rank=2, tokens=(131, 132, 133, 134))
    base = base_of(LLAMA, tmp_path / "base")
    begun = adapters.initial_adapters(model, lora, jax.random.key(0), model.init(jax.random.key(1)))
    drawn = jax.tree.map(lambda x: x + 0.1, begun)
    save(drawn, model, lora, tmp_path / "adapter")
    found, params = merged(tmp_path / "adapter", base)
    whole = adapters.attach_lora(drawn, weights.load(base, model, rows=131), lora)
    tokens = np.array([[1, 131, 134, 7]])
    np.testing.assert_allclose(logits_of(params, found, tokens), logits_of(whole, model, tokens), atol=1e-5, rtol=0)


def test_on_a_mesh_and_in_bfloat16_it_is_the_same_rounded_once(tmp_path) -> None:
    model = DENSE
    _, adapter, base = written(model, {"use_dora": True}, tmp_path)
    _, alone = merged(adapter, base)
    half = replace(model, param_dtype="bfloat16")
    spread = weights.load(
        base, half, shardings=half.param_shardings(make_mesh(data=2, fsdp=2, tensor=2)), adapter=adapter
    )
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other), rtol=2**-8, atol=1e-6)


def test_names_of_wrapped_models_and_of_adapters_in_memory_are_read(tmp_path) -> None:
    _, adapter, base = written(TIED, {"target_modules": ["q_proj"]}, tmp_path)
    _, expected = merged(adapter, base)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for named in (
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("layers.", "layers._fsdp_wrapped_module._orig_mod."),
        lambda name: f"module.{name}",
        lambda name: name.removeprefix("base_model.model."),
    ):
        save_file({named(name): tensor for name, tensor in tensors.items()}, file)
        jax.tree.map(np.testing.assert_array_equal, merged(adapter, base)[1], expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; LORA is read"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is 'PREFIX_TUNING'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is .'mlp.experts.gate_up_proj'."),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow is 1, which is not computed here"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is 'pissa_niter_4', which changes the weights under",
        ),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"alpha_pattern": {"(a+)+$": 3}}, r"alpha_pattern has the regular expression '\(a\+\)\+\$'"),
        ({"rank_pattern": [3]}, "rank_pattern is .3.; it is an object"),
        ({"r": 3}, r"lora_A.weight has shape \(4, 48\), where \(3, 48\) fits"),
        ({"r": "4"}, "r is '4'; it is a whole number"),
        ({"lora_alpha": None}, "lora_alpha is None; it is a number above 0"),
        ({"trainable_token_indices": [1]}, "model.embed_tokens.* is not a row for each of"),
        ({"target_modules": ["q_proj", "up_proj"]}, "no tensor of model.layers.0.mlp.up_proj"),
    ],
)
def test_settings_that_are_not_merged_are_refused_by_name(change, said, plain) -> None:
    file = plain[0] / "adapter_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | change))
    try:
        with pytest.raises(hf_checkpoint.WeightsError, match=said):
            merged(*plain)
    finally:
        file.write_text(before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(adapter to q_proj and v_proj, its base)."""
    return written(TIED, {"target_modules": ["q_proj", "v_proj"]}, tmp_path_factory.mktemp("plain"))[1:]


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{Q}.lora_A.weight": None}, "layers.0.self_attn.q_proj has lora_B.weight, and lora_A.weight is missing"),
        ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, "no tensor of model.layers.0.self_attn.q_proj"),
        ({f"{Q}.lora_E": np.ones(4, np.float32)}, "tensor model.layers.0.self_attn.q_proj.lora_E is of a kind"),
        ({f"{Q}.bias": np.ones(48, np.float32)}, "have no tensor model.layers.0.self_attn.q_proj.bias; give the base"),
        ({f"{Q}.lora_A.weight": np.ones((4, 40), np.float32)}, r"has shape \(4, 40\), where \(4, 48\) fits"),
        ({f"{Q}.lora_A.weight": np.ones((4, 48), np.int8)}, "lora_A.weight is I8"),
        ({"base_model.model.score.weight": np.ones((2, 48), np.float32)}, "no tensor score.weight; give the base"),
        ({"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": np.ones((4, 48), np.float32),
          "base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight": np.ones((48, 4), np.float32)},
         "have no tensor model.layers.7.self_attn.q_proj.weight"),
        ({f"{Q}.lora_A.default.weight": np.ones((4, 48), np.float32)}, "lora_A.weight twice"),
        ({"base_model.model.lm_head.lora_A.weight": np.ones((4, 48), np.float32),
          "base_model.model.lm_head.lora_B.weight": np.ones((131, 4), np.float32)}, "embedding and head are one"),
    ],
)  # fmt: skip
def test_no_tensor_is_left_unused_or_missing(change, said, plain) -> None:
    file = plain[0] / "adapter_model.safetensors"
    before = file.read_bytes()
    tensors = {name: tensor for name, tensor in (load_file(file) | change).items() if tensor is not None}
    save_file(tensors, file)
    try:
        with pytest.raises(hf_checkpoint.WeightsError, match=said):
            merged(*plain)
    finally:
        file.write_bytes(before)


def test_folders_that_are_no_adapter_are_named(plain, tmp_path) -> None:
    adapter, base = plain
    assert peft_folder.is_adapter(adapter) and not peft_folder.is_adapter(base)
    for step in (100, 200):
        shutil.copytree(adapter, tmp_path / "run" / f"checkpoint-{step}")
    with pytest.raises(
        hf_checkpoint.WeightsError, match="its folders checkpoint-100, checkpoint-200 have one: give one"
    ):
        peft_folder.is_adapter(tmp_path / "run")
    shutil.copytree(adapter, tmp_path / "pickle")
    (tmp_path / "pickle" / "adapter_model.safetensors").rename(tmp_path / "pickle" / "adapter_model.bin")
    with pytest.raises(hf_checkpoint.WeightsError, match="adapter_model.bin and no .*: a pickle runs code"):
        merged(tmp_path / "pickle", base)
    with pytest.raises(hf_checkpoint.WeightsError, match="without the weights that it is for. Merge it first"):
        hf_checkpoint.read_config(adapter)


def test_a_tied_base_that_stores_another_head_is_refused(tmp_path) -> None:
    """As without an adapter: which of the two matrices is meant, nobody can say."""
    _, adapter, base = written(TIED, {}, tmp_path)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        hf_checkpoint.WeightsError, match="the weights under the adapter: .* differs from model.embed_tokens.weight"
    ):
        merged(adapter, base)
