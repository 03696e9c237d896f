"""The chunked output head against full logits, and its memory at Qwen3's real vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.head import CHUNK, token_logprobs


def operands(t: int, v: int, d: int = 24):
    rng = np.random.default_rng(0)
    x_btd, w_dv = (
        jnp.asarray(rng.normal(size=(2, t, d)), jnp.float32),
        jnp.asarray(rng.normal(size=(d, v)), jnp.float32),
    )
    return x_btd, w_dv, jnp.asarray(rng.integers(0, v, (2, t)))


def full(x_btd, w_dv, targets_bt, temperature):
    logps = jax.nn.log_softmax(x_btd @ w_dv / temperature)
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return jnp.take_along_axis(logps, targets_bt[..., None], -1)[..., 0], entropy


@pytest.mark.parametrize("chunk", [7, 16, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_it_equals_full_logits_forward_and_backward(chunk: int, temperature: float) -> None:
    x, w, targets = operands(33, 151)
    weights = jnp.cos(jnp.arange(targets.size)).reshape(targets.shape)

    def gradients(f):
        return jax.value_and_grad(lambda x, w: (f(x, w)[0] * weights).sum(), argnums=(0, 1))(x, w)

    for ours, expected in zip(
        token_logprobs(x, w, targets, temperature=temperature, chunk=chunk),
        full(x, w, targets, temperature),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, atol=2e-5)
    ours = gradients(lambda x, w: token_logprobs(x, w, targets, temperature=temperature, chunk=chunk))
    expected = gradients(lambda x, w: full(x, w, targets, temperature))
    jax.tree.map(lambda mine, one: np.testing.assert_allclose(mine, one, atol=5e-5), ours, expected)


def test_the_entropy_is_a_measurement() -> None:
    x, w, targets = operands(8, 31)
    gradient = jax.grad(lambda x: token_logprobs(x, w, targets)[1].sum())(x)
    assert not np.asarray(gradient).any()


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is 0; it must be positive"):
        token_logprobs(*operands(4, 9), temperature=0)


def temporaries(t: int, v: int, d: int = 64) -> int:
    """Bytes beside arguments and results of the gradient's compiled program."""
    shapes = jax.ShapeDtypeStruct((1, t, d), jnp.float32), jax.ShapeDtypeStruct((d, v), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, t), jnp.int32)
    program = jax.jit(jax.grad(lambda x, w, y: token_logprobs(x, w, y)[0].sum(), argnums=(0, 1)))
    return program.lower(*shapes, targets).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """From 4k to 64k tokens over 151,936 words: a few vectors of the hidden size a token, no logits."""
    v, d = 151_936, 64
    short, long = temporaries(4_096, v), temporaries(65_536, v)
    assert long - short < (65_536 - 4_096) * d * 4 * 8
    assert long < 6 * CHUNK * v * 4, "more than a few chunks of logits"
