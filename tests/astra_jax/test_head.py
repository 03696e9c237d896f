"""The chunked output head against full logits, and its memory at Qwen3's real vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.cpu.programs import HEAD_CHUNK
from astra_jax.head import _SUMS_FIRST, summed_loss, token_logprobs
from astra_jax.run.chips import CHIPS


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


def weighted(logps, entropies, weights):
    """An objective that is not linear in the logprobs, and two sums."""
    return (jnp.sin(logps) * weights).sum(), (weights.sum(), (entropies * weights).sum())


@pytest.mark.parametrize("counted", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("chunk", [7, 16, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_it_equals_full_logits_forward_and_backward(chunk: int, temperature: float, counted: float) -> None:
    """Logprobs and entropies, the loss with its gradients, the sums; chunks that do not divide too, and tokens that
    do not count."""
    x, w, targets = operands(33, 151)
    weights = jnp.cos(jnp.arange(targets.size)).reshape(targets.shape)
    weights *= np.random.default_rng(1).random(weights.shape) < counted
    how = {"temperature": temperature, "chunk": chunk}

    def ours(x, w):
        loss, sums = summed_loss(weighted, x, w, targets, weights, weights, **how)
        return loss / 3, sums

    def theirs(x, w):
        logps, entropies = full(x, w, targets, temperature)
        loss, sums = weighted(logps, entropies, weights)
        return loss / 3, sums

    for mine, expected in zip(token_logprobs(x, w, targets, **how), full(x, w, targets, temperature), strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)
    (loss, sums), gradients = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(x, w)
    (loss_full, sums_full), expected = jax.value_and_grad(theirs, argnums=(0, 1), has_aux=True)(x, w)
    np.testing.assert_allclose([loss, *sums], [loss_full, *sums_full], rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(ours(x, w)[0], loss_full, rtol=2e-5, atol=1e-4)  # without gradients: another path
    jax.tree.map(lambda mine, one: np.testing.assert_allclose(mine, one, atol=5e-5), gradients, expected)


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_through_entropies_equal_full_logits(chunk: int, temperature: float) -> None:
    """Some logits are so low that their probability is 0 in float32: their part of the entropy is 0, not NaN."""
    x, w, targets = operands(33, 151)
    w *= 6
    weights = jnp.cos(jnp.arange(targets.size)).reshape(targets.shape)

    def objective(logps, entropies, weights):
        return (jnp.sin(logps) * weights + jnp.cos(entropies) * weights**2).sum(), ()

    def ours(x, w):
        how = {"temperature": temperature, "chunk": chunk, "has_entropy_gradient": True}
        return summed_loss(objective, x, w, targets, weights, weights, **how)[0]

    def theirs(x, w):
        logps, entropies = full(x, w, targets, temperature)
        return objective(logps, entropies, weights)[0]

    expected = jax.grad(theirs, argnums=(0, 1))(x, w)
    jax.tree.map(
        lambda mine, one: np.testing.assert_allclose(mine, one, atol=2e-3, rtol=1e-3),
        jax.grad(ours, argnums=(0, 1))(x, w),
        expected,
    )
    assert (jnp.exp(jax.nn.log_softmax(x @ w / temperature)) == 0).any()
    assert np.isfinite(ours(x, w))


def test_chunks_without_tokens_that_count_are_left_out() -> None:
    """Of 66 tokens 20 count: three chunks of eight instead of nine, for the loss and for its gradient."""
    x, w, targets = operands(33, 151)
    counted = jnp.arange(66).reshape(2, 33) % 33 < 10
    ran: list[int] = []

    def objective(logps, entropies, counted):
        jax.debug.callback(lambda: ran.append(1))
        return (logps * counted).sum(), ()

    def loss(x):
        return summed_loss(objective, x, w, targets, counted, counted, chunk=8)[0]

    jax.block_until_ready((jax.jit(loss)(x), jax.jit(jax.grad(loss))(x)))
    jax.effects_barrier()
    assert len(ran) == 6


def test_a_gradient_of_logprobs_is_refused() -> None:
    x, w, targets = operands(8, 31)
    with pytest.raises(TypeError, match="no gradient; take it through summed_loss"):
        jax.grad(lambda x: token_logprobs(x, w, targets)[0].sum())(x)


def test_the_chip_that_sums_first_has_all_its_names() -> None:
    """The head, on a lower layer than the table of chips, has them written down again."""
    assert CHIPS["v6e"].kinds == _SUMS_FIRST


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    x, w, targets = operands(4, 9)
    for head in (token_logprobs, lambda *a, **k: summed_loss(weighted, *a, targets, targets, **k)):
        with pytest.raises(ValueError, match="temperature is 0; it must be positive"):
            head(x, w, targets, temperature=0)


def temporaries(t: int, v: int, d: int = 64) -> int:
    """Bytes beside arguments and results of the gradient's compiled program."""
    shapes = jax.ShapeDtypeStruct((1, t, d), jnp.float32), jax.ShapeDtypeStruct((d, v), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def loss(x, w, y):
        ones = jnp.ones(y.shape)
        return summed_loss(lambda logps, entropies, ones: ((logps * ones).sum(), ()), x, w, y, ones, ones)[0]

    program = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return program.lower(*shapes, targets).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """From 4k to 64k tokens over 151,936 words: a few vectors of the hidden size a token, no logits."""
    v, d = 151_936, 64
    short, long = temporaries(4_096, v), temporaries(65_536, v)
    assert long - short < (65_536 - 4_096) * d * 4 * 8
    assert long < 6 * HEAD_CHUNK * v * 4, "more than a few chunks of logits"
