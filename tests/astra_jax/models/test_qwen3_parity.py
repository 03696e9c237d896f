"""The port against Hugging Face's Qwen3, on random weights; and against itself with a cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.attention.cache import each
from astra_jax.head import summed_loss
from astra_jax.models import families, hf_checkpoint
from astra_jax.models.layers.sizes import Yarn
from astra_jax.models.qwen3.presets import PRESETS, Qwen3Config
from astra_jax.models.remat import REMATS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4

SMALL = Qwen3Config(
    vocab_size=331,
    d_model=48,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=12,
    d_ff=80,
    tie_embeddings=True,
)
EXPERTS = dataclasses.replace(SMALL, n_experts=5, experts_per_token=2, d_ff=24)
CONFIGS = {
    "tied": SMALL,
    "untied": dataclasses.replace(SMALL, tie_embeddings=False),
    "head_dim is not hidden / heads": dataclasses.replace(SMALL, head_dim=32, tie_embeddings=False),
    "one key-value head": dataclasses.replace(SMALL, n_kv_heads=1),
    "as many key-value heads": dataclasses.replace(SMALL, n_kv_heads=4),
    "rope_theta 5e6": dataclasses.replace(SMALL, rope_theta=5e6, head_dim=32),
    "biases": dataclasses.replace(SMALL, attention_bias=True),
    "odd sizes": dataclasses.replace(SMALL, vocab_size=113, d_model=42, d_ff=75, n_heads=6, n_kv_heads=3, head_dim=22),
    "YaRN": dataclasses.replace(SMALL, yarn=Yarn(4.0, 64), max_positions=256, head_dim=32),
    "YaRN, ends not rounded": dataclasses.replace(
        SMALL,
        yarn=Yarn(2.5, 100, beta_fast=20.0, beta_slow=2.0, attention_factor=1.3, truncate=False),
        max_positions=250,
    ),
    "experts": EXPERTS,
    "experts, weights not normalised": dataclasses.replace(
        EXPERTS, norm_topk_prob=False, tie_embeddings=False, experts_per_token=3, yarn=Yarn(4.0, 64), max_positions=256
    ),
}


def hf_model(config: Qwen3Config, seed: int = 0):
    """HF's Qwen3 in float32, every weight random: also the norms, which HF starts at 1, and biases, at 0."""
    torch.manual_seed(seed)
    kind = "Qwen3Moe" if config.n_experts else "Qwen3"
    values = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "model_type")}
    hf = getattr(transformers, f"{kind}Config")(**values)
    hf._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(hf).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def tokens_of(config: Qwen3Config, batch: int = 2, length: int = 150) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocab_size, (batch, length))


def logits_of(params, config: Qwen3Config, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_logits(params, config, tokens))


@functools.partial(jax.jit, static_argnames="config")
def _logits(params, config: Qwen3Config, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = config.forward(params, tokens, positions, jnp.ones(tokens.shape, jnp.int32))
    return jnp.einsum("btd,dv->btv", x, config.head_kernel(params))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_hugging_face(name: str, tmp_path) -> None:
    config = CONFIGS[name]
    model = hf_model(config)
    model.save_pretrained(tmp_path)
    loaded = hf_checkpoint.read_config(tmp_path)
    params = hf_checkpoint.load_hf(tmp_path, loaded)
    assert loaded == dataclasses.replace(config, max_positions=loaded.max_positions)
    tokens = tokens_of(config)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(expected).max() > 1, "the comparison would say little about logits that are all near 0"
    np.testing.assert_allclose(logits_of(params, config, tokens), expected, atol=TOLERANCE, rtol=0)


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


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_hugging_face(name: str, tmp_path) -> None:
    """Of the mean negative logprob of the next token, for every parameter."""
    config = CONFIGS[name]
    model = hf_model(config)
    model.save_pretrained(tmp_path)
    params = hf_checkpoint.load_hf(tmp_path, hf_checkpoint.read_config(tmp_path))
    tokens = tokens_of(config, length=90)
    model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss.backward()
    expected = hf_gradients(model)

    def loss(params):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones(tokens.shape, jnp.int32)
        x, _ = config.forward(params, jnp.asarray(tokens), *places)
        operands = x[:, :-1], config.head_kernel(params), jnp.asarray(tokens[:, 1:]), jnp.ones(tokens[:, 1:].shape)
        loss, count = summed_loss(lambda logps, _, ones: (-(logps * ones).sum(), ones.sum()), *operands)
        return loss / count

    ours = dict(hf_checkpoint.hf_tensors(jax.jit(jax.grad(loss))(params), config))
    assert ours.keys() == expected.keys()
    for tensor, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-6, tensor
        np.testing.assert_allclose(ours[tensor], gradient, atol=2e-5, rtol=1e-3, err_msg=tensor)


@pytest.mark.parametrize("name", ["tied", "untied", "YaRN", "experts"])
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


@pytest.mark.parametrize("stacked", [True, False])
def test_decoding_with_the_cache_equals_the_whole_sequence(stacked: bool) -> None:
    config = SMALL
    params = config.init(jax.random.key(0))
    tokens = tokens_of(config, length=24)
    expected = logits_of(params, config, tokens)
    served = params if stacked else config.for_decoding(params, apart=True)
    cache = config.cache(2, 32, stacked=stacked)
    step = jax.jit(config.forward_cached)

    def kept(cache, new, start: int, count: int):
        every = jnp.ones(2, jnp.int32)
        return each(lambda layer, more: layer.put(jnp.arange(2), start * every, count * every, more), cache, new)

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


@pytest.mark.parametrize("remat", [name for name in REMATS if name != "none"])
def test_rematerialisation_changes_no_gradient(remat: str) -> None:
    config = SMALL
    params = config.init(jax.random.key(0))
    tokens = jnp.asarray(tokens_of(config, length=16))
    positions, segments = jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32)

    def gradient(policy: str):
        def loss(p):
            return (config.forward(p, tokens, positions, segments, remat=policy)[0] ** 2).sum()

        return jax.jit(jax.grad(loss))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient("none"), gradient(remat))


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

    config = CONFIGS["head_dim is not hidden / heads"]
    params = config.init(jax.random.key(0))
    tokens = jnp.asarray(tokens_of(config, length=16))
    positions, segments = jnp.broadcast_to(jnp.arange(16), (2, 16)), jnp.ones((2, 16), jnp.int32)

    def gradient():
        return jax.jit(jax.grad(lambda p: (config.forward(p, tokens, positions, segments)[0] ** 2).sum()))(params)

    spelled_out = gradient()
    for layer in (attention, mlp):
        monkeypatch.setattr(layer, "linear", lambda x, w, contracted=1, *_: jnp.tensordot(x, w, contracted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), spelled_out, gradient())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("0.6b", 0.596),
        ("1.7b", 1.721),
        ("4b", 4.022),
        ("8b", 8.191),
        ("14b", 14.768),
        ("32b", 32.762),
        ("30b-a3b", 30.532),
    ],
)
def test_presets_have_the_released_number_of_parameters(name: str, billions: float) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(PRESETS[name].abstract_params()))
    assert count / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters": None}, "rope_type is 'dynamic'"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [3], "moe_intermediate_size": 32}
            | {"num_experts": 4, "num_experts_per_tok": 2},
            r"mlp_only_layers is \[3\]",
        ),
    ],
)
def test_configs_that_the_port_does_not_compute_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        families.from_hf(SMALL.to_hf() | change)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path) -> None:
    hf_checkpoint.save_hf(SMALL.init(jax.random.key(0)), SMALL, tmp_path)
    with pytest.raises(
        hf_checkpoint.WeightsError, match=r"gate_proj.weight has shape \(80, 48\), the config says \(96, 48\)"
    ):
        hf_checkpoint.load_hf(tmp_path, dataclasses.replace(SMALL, d_ff=96))
    with pytest.raises(hf_checkpoint.WeightsError, match="lm_head.weight is missing"):
        hf_checkpoint.load_hf(tmp_path, CONFIGS["untied"])
    with pytest.raises(hf_checkpoint.WeightsError, match="do not belong to this model"):
        hf_checkpoint.load_hf(tmp_path, dataclasses.replace(SMALL, n_layers=2))
    (tmp_path / "config.json").unlink()
    with pytest.raises(hf_checkpoint.WeightsError, match="no config.json"):
        hf_checkpoint.read_config(tmp_path)
