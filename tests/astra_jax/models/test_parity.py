"""Each family against Hugging Face's, on random weights; and against itself with a cache."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity_world import hf_model, logits_of, tokens_of
from selection import by_day

from astra_jax.attention.cache import ChunkedCache, put
from astra_jax.head import summed_loss
from astra_jax.models import families, hf_checkpoint
from astra_jax.models.decoder import Decoder
from astra_jax.models.layers.sizes import Llama3Scaling, Yarn
from astra_jax.models.llama.presets import PRESETS as LLAMAS
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.model import parameters
from astra_jax.models.qwen2.presets import PRESETS as QWEN2S
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import PRESETS, Qwen3Config
from astra_jax.models.remat import REMATS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4

SIZES: dict[str, Any] = dict(
    vocab_size=331, d_model=48, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=80, tie_embeddings=True
)
ODD: dict[str, Any] = dict(vocab_size=113, d_model=42, d_ff=75, n_heads=6, n_kv_heads=3, head_dim=22)
SMALL = Qwen3Config(**SIZES)
LLAMA, QWEN2 = LlamaConfig(**SIZES, rms_eps=1e-5), Qwen2Config(**SIZES)
FAMILIES: dict[str, Decoder] = {"qwen3": SMALL, "llama": LLAMA, "qwen2": QWEN2}
EXPERTS = replace(SMALL, n_experts=5, experts_per_token=2, d_ff=24)
YARN: dict[str, Any] = dict(yarn=Yarn(4.0, 64), max_positions=256, head_dim=32)
CONFIGS: dict[str, Decoder] = {
    "qwen3": SMALL,
    "qwen3, untied": replace(SMALL, tie_embeddings=False),
    "qwen3, head_dim is not hidden / heads": replace(SMALL, head_dim=32, tie_embeddings=False),
    "qwen3, one key-value head": replace(SMALL, n_kv_heads=1),
    "qwen3, as many key-value heads": replace(SMALL, n_kv_heads=4),
    "qwen3, rope_theta 5e6": replace(SMALL, rope_theta=5e6, head_dim=32),
    "qwen3, biases": replace(SMALL, attention_bias=True),
    "qwen3, odd sizes": replace(SMALL, **ODD),
    "qwen3, YaRN": replace(SMALL, **YARN),
    "qwen3, YaRN, ends not rounded": replace(
        SMALL,
        yarn=Yarn(2.5, 100, beta_fast=20.0, beta_slow=2.0, attention_factor=1.3, truncate=False),
        max_positions=250,
    ),
    "qwen3, experts": EXPERTS,
    "qwen3, experts, weights not normalised": replace(
        EXPERTS, norm_topk_prob=False, tie_embeddings=False, experts_per_token=3, yarn=Yarn(4.0, 64), max_positions=256
    ),
    "llama": replace(LLAMA, rope_theta=1e4, n_heads=9, n_kv_heads=3, d_model=54, head_dim=6),  # as SmolLM2, in small
    "llama, untied, llama3": replace(
        LLAMA, tie_embeddings=False, rope_theta=5e5, head_dim=32, llama3=Llama3Scaling(8.0, 64), max_positions=512
    ),
    "llama, biases, as many key-value heads, linear": replace(LLAMA, attention_bias=True, n_kv_heads=4, linear=4.0),
    "llama, odd sizes, YaRN": replace(LLAMA, **ODD | YARN),
    "qwen2": QWEN2,
    "qwen2, untied, YaRN": replace(QWEN2, tie_embeddings=False, **YARN),
    "qwen2, odd sizes, llama3": replace(QWEN2, **ODD, llama3=Llama3Scaling(4.0, 64, 0.5, 2.0), max_positions=256),
}


BY_DAY = (
    "qwen3, untied", "qwen3, experts, weights not normalised", "llama", "qwen2",
    "llama, biases, as many key-value heads, linear",
)  # fmt: skip
"""Logits of experts with normalised weights and of Llama 3's RoPE: `test_saved_weights_are_read_by_hugging_face`."""


def hf_gradients(model) -> dict[str, np.ndarray]:
    """By the names of checkpoints, in which each expert has tensors of its own."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(np.split(one, 2) for one in gradient):
                gradients[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                gradients[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(gradient):
                gradients[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            gradients[name] = gradient
    return gradients


@pytest.mark.parametrize("name", by_day(CONFIGS, *BY_DAY))
def test_logits_and_gradients_equal_hugging_face(name: str, tmp_path) -> None:
    """Gradients are those of the mean negative logprob of the next token, for every parameter."""
    config = CONFIGS[name]
    model = hf_model(config)
    model.save_pretrained(tmp_path)
    loaded = hf_checkpoint.read_config(tmp_path)
    params = hf_checkpoint.load_hf(tmp_path, loaded)
    assert loaded == replace(config, max_positions=loaded.max_positions)
    tokens = tokens_of(config)
    model.zero_grad()
    output = model(torch.tensor(tokens), labels=torch.tensor(tokens))
    output.loss.backward()
    expected = hf_gradients(model)

    def loss(params):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones(tokens.shape, jnp.int32)
        x, _ = config.forward(params, jnp.asarray(tokens), *places)
        head = config.head_kernel(params)
        operands = x[:, :-1], head, jnp.asarray(tokens[:, 1:]), jnp.ones(tokens[:, 1:].shape)
        loss, count = summed_loss(lambda logps, _, ones: (-(logps * ones).sum(), ones.sum()), *operands, operands[-1])
        return loss / count, jnp.einsum("btd,dv->btv", x, head)

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    theirs = output.logits.detach().numpy()
    assert np.abs(theirs).max() > 1, "the comparison would say little about logits that are all near 0"
    np.testing.assert_allclose(logits, theirs, atol=TOLERANCE, rtol=0)
    ours = dict(hf_checkpoint.hf_tensors(gradients, config))
    assert ours.keys() == expected.keys()
    for tensor, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-6, tensor
        np.testing.assert_allclose(ours[tensor], gradient, atol=2e-5, rtol=1e-3, err_msg=tensor)


SAVED = ["qwen3", "qwen3, untied", "qwen3, experts", "llama, untied, llama3", "llama, odd sizes, YaRN", "qwen2"]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen2, untied, YaRN",
        *by_day(["llama", "llama, biases, as many key-value heads, linear"]),
    ],
)
def test_documents_of_a_packed_and_padded_row_are_those_that_hugging_face_reads_alone(name: str, tmp_path) -> None:
    """Logits, and the gradients of the sum of their logprobs; padding is for nothing."""
    config, model = CONFIGS[name], hf_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    params = hf_checkpoint.load_hf(tmp_path, config)
    lengths = [[31, 1, 12, 4], [48, 0, 0, 0]]  # the last are padding
    tokens = tokens_of(config, length=48)
    segments = np.stack([np.repeat([1, 2, 3, 0], row) for row in lengths])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    predicts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)

    def loss(params):
        x, _ = config.forward(params, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments))
        logits = jnp.einsum("btd,dv->btv", x, config.head_kernel(params))
        logps = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(tokens)[:, 1:, None], -1)[..., 0]
        return (logps * predicts).sum(), logits

    (_, ours), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    model.zero_grad()
    total = torch.zeros(())
    for row, segment in [(0, 1), (0, 2), (0, 3), (1, 1)]:
        alone = torch.tensor(tokens[row][segments[row] == segment])[None]
        theirs = model(alone).logits[0]
        np.testing.assert_allclose(
            np.asarray(ours)[row][segments[row] == segment], theirs.detach().numpy(), atol=TOLERANCE, rtol=0
        )
        total = total + theirs[:-1].log_softmax(-1).gather(-1, alone[0, 1:, None]).sum()
    total.backward()
    expected = hf_gradients(model)
    for tensor, gradient in hf_checkpoint.hf_tensors(gradients, config):
        np.testing.assert_allclose(gradient, expected[tensor], atol=2e-4, rtol=1e-3, err_msg=tensor)


WIDE: dict[str, Any] = dict(vocab_size=64, d_model=48, n_layers=1, n_heads=3, n_kv_heads=1, d_ff=40)


@pytest.mark.parametrize(
    ("family", "backend", "head_dim"),
    [
        ("llama", "splash", 64),
        ("qwen2", "triton", 64),
        *by_day([("llama", "splash", 128), ("llama", "triton", 64), ("qwen2", "splash", 64), ("qwen2", "splash", 128)]),
    ],
)
def test_each_attention_backend_gives_hugging_faces_logits(family: str, backend: str, head_dim: int, tmp_path) -> None:
    """The kernels, interpreted; heads of 64 are SmolLM2's and Llama 3.2 1B's."""
    config = replace(FAMILIES[family], **WIDE, head_dim=head_dim)
    model = hf_model(config)
    model.save_pretrained(tmp_path)
    params, tokens = hf_checkpoint.load_hf(tmp_path, config), tokens_of(config, batch=1)
    places = jnp.arange(tokens.shape[1])[None]
    forward = jax.jit(config.forward, static_argnames="backend")
    x, _ = forward(params, jnp.asarray(tokens), places, jnp.ones_like(places), backend=f"{backend}_interpret")
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(x @ config.head_kernel(params), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", by_day(SAVED, "qwen3, experts", "llama, untied, llama3", "qwen2"))
def test_saved_weights_are_read_by_hugging_face(name: str, tmp_path) -> None:
    config = CONFIGS[name]
    params = config.init(jax.random.key(3))
    hf_checkpoint.save_hf(params, config, tmp_path, max_bytes=20_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = tokens_of(config)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(params, config, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("family", "stacked", "part"),
    [
        ("qwen3", True, None),
        ("qwen3", False, 12),
        ("qwen2", False, None),
        *by_day([("qwen3", False, None), ("llama", False, None), ("llama", False, 7), ("qwen2", True, None)]),
    ],
)
def test_decoding_with_the_cache_equals_the_whole_sequence(family: str, stacked: bool, part: int | None) -> None:
    config = FAMILIES[family]
    params = config.init(jax.random.key(0))
    tokens = tokens_of(config, length=24)
    expected = logits_of(params, config, tokens)
    served = params if stacked else config.for_decoding(params, unstacked=True)
    cache = config.cache(2, 32, stacked=stacked, part=part)
    assert isinstance(cache[0], ChunkedCache) == (part is not None)
    step = jax.jit(config.forward_cached)

    def kept(cache, new, start: int, count: int):
        every = jnp.ones(2, jnp.int32)
        return put(cache, jnp.arange(2), start * every, count * every, new)

    # A chunk of 10 with 2 places of padding, then token by token.
    chunk = np.pad(tokens[:, :10], ((0, 0), (0, 2)))
    places = np.pad(np.broadcast_to(np.arange(10), (2, 10)), ((0, 0), (0, 2)), constant_values=-1)
    x, new = step(served, tokens_bt=jnp.asarray(chunk), positions_bt=jnp.asarray(places), past=cache)
    cache = kept(cache, new, 0, 10)
    hidden = [np.asarray(x)[:, :10]]
    forward_one = jax.jit(config.forward_next)
    recent = config.cache(2, 14, stacked=stacked)
    for t in range(10, 24):
        one, at = jnp.asarray(tokens[:, t : t + 1]), jnp.full((2, 1), t)
        if t < 14:
            x, new = step(served, tokens_bt=one, positions_bt=at, past=cache)
            cache = kept(cache, new, t, 1)
        else:  # 14 and after as in a decode chunk
            x, recent = forward_one(served, one, at, cache, recent, t - 14)
        hidden.append(np.asarray(x))
    logits = np.concatenate(hidden, axis=1) @ np.asarray(config.head_kernel(params))
    np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_keys_of_single_queries_are_one_array() -> None:
    config = replace(FAMILIES["qwen3"], n_kv_heads=FAMILIES["qwen3"].n_heads)
    assert not isinstance(config.cache(2, 32, stacked=False, part=8)[0], ChunkedCache)


@functools.cache
def small_gradient(policy: str) -> Any:
    params, tokens = SMALL.init(jax.random.key(0)), jnp.asarray(tokens_of(SMALL, length=16))
    positions, segments = jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32)

    def loss(p):
        return (SMALL.forward(p, tokens, positions, segments, remat=policy)[0] ** 2).sum()

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize("remat", by_day([name for name in REMATS if name != "none"], "full", "dots"))
def test_rematerialisation_changes_no_gradient(remat: str) -> None:
    want, found = small_gradient("none"), small_gradient(remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), want, found)


def test_each_policy_computes_again_what_it_says() -> None:
    """`dots` no matmul, attention neither; `heads` not what goes into attention; `attention` and `offload` all other
    matmuls of a layer once more; `full` all of them."""
    params, tokens = SMALL.init(jax.random.key(0)), jnp.zeros((1, 64), jnp.int32)

    def matmuls(policy: str) -> int:
        def loss(p):
            return SMALL.forward(p, tokens, jnp.arange(64)[None], tokens + 1, remat=policy)[0].sum()

        text = jax.jit(jax.grad(loss)).lower(params).as_text()
        return text.count("stablehlo.dot_general")

    counts = {policy: matmuls(policy) for policy in REMATS}
    assert counts["none"] == counts["dots"] < counts["heads"] < counts["attention"] < counts["full"], counts
    assert counts["offload"] == counts["attention"], counts


def test_the_gradient_is_that_of_plain_einsums(monkeypatch) -> None:
    """`linear` spells its backward pass out; autodiff of the same layer must agree."""
    from astra_jax.models.layers import attention, mlp

    config = CONFIGS["qwen3, head_dim is not hidden / heads"]
    params = config.init(jax.random.key(0))
    tokens = jnp.asarray(tokens_of(config, length=16))
    positions, segments = jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32)

    def gradient():
        return jax.jit(jax.grad(lambda p: (config.forward(p, tokens, positions, segments)[0] ** 2).sum()))(params)

    spelled_out = gradient()
    for layer in (attention, mlp):
        monkeypatch.setattr(layer, "linear", lambda x, w, contracted=1, *_: jnp.tensordot(x, w, contracted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), spelled_out, gradient())


BILLIONS = {
    "0.6b": 0.596,
    "1.7b": 1.721,
    "4b": 4.022,
    "8b": 8.191,
    "14b": 14.768,
    "32b": 32.762,
    "30b-a3b": 30.532,
    "llama2-7b": 6.738,
    "llama2-13b": 13.016,
    "llama2-70b": 68.977,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3.1-8b": 8.030,
    "llama3.1-70b": 70.554,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "smollm2-135m": 0.135,
    "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.711,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706,
}


def test_presets_have_the_released_number_of_parameters() -> None:
    """And their `config.json` says all of them."""
    presets: dict[str, Decoder] = {**PRESETS, **LLAMAS, **QWEN2S}
    del presets["tiny"]
    assert {name: round(parameters(preset) / 1e9, 3) for name, preset in presets.items()} == BILLIONS
    for preset in presets.values():
        assert families.from_hf(preset.to_hf(), dtype=preset.dtype, param_dtype=preset.param_dtype) == preset


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; this port reads 'llama', 'qwen2', 'qwen3', 'qwen3_moe'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters": None}, "rope_type is 'dynamic'"),
    ],
    ids=str,
)
def test_configs_that_the_port_does_not_compute_are_refused(config: Decoder, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        families.from_hf(config.to_hf() | change)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path) -> None:
    hf_checkpoint.save_hf(SMALL.init(jax.random.key(0)), SMALL, tmp_path)
    with pytest.raises(
        hf_checkpoint.WeightsError, match=r"gate_proj.weight has shape \(80, 48\), the config says \(96, 48\)"
    ):
        hf_checkpoint.load_hf(tmp_path, replace(SMALL, d_ff=96))
    with pytest.raises(hf_checkpoint.WeightsError, match="lm_head.weight is missing"):
        hf_checkpoint.load_hf(tmp_path, CONFIGS["qwen3, untied"])
    with pytest.raises(hf_checkpoint.WeightsError, match="do not belong to this model"):
        hf_checkpoint.load_hf(tmp_path, replace(SMALL, n_layers=2))
    (tmp_path / "config.json").unlink()
    with pytest.raises(hf_checkpoint.WeightsError, match="no config.json"):
        hf_checkpoint.read_config(tmp_path)
