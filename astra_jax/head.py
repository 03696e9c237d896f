"""The output head: logprobs and entropies of given tokens, without ever holding the logits of all of them.

Full logits of 74,752 tokens over 151,936 words are 45 GB in float32. Here the linear layer, its log-softmax and the
look-up are one function over chunks of tokens, and the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def token_logprobs(
    x_btd: Array, w_dv: Array, targets_bt: Array, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Array, Array]:
    """Log-probability of each target token, and the entropy of each distribution.

    Args:
        x_btd: hidden states.
        w_dv: the head's matrix.
        targets_bt: int32 token ids; the target of position t is what position t should predict.
        temperature: logits are divided by it.
        chunk: tokens at a time; memory is chunk x V in float32, forward and backward.

    Returns:
        (logps_bt, entropy_bt), float32, in nats. Gradients flow through the logprobs; the entropy is a measurement.

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    b, t, d = x_btd.shape
    tokens = b * t
    chunk = min(chunk, tokens)
    more = -tokens % chunk
    x_md = jnp.pad(x_btd.reshape(tokens, d), ((0, more), (0, 0)))
    targets_m = jnp.pad(targets_bt.reshape(tokens), (0, more))
    logps_m, entropy_m = _token_logprobs(x_md, w_dv, targets_m, temperature, chunk)
    return logps_m[:tokens].reshape(b, t), jax.lax.stop_gradient(entropy_m[:tokens]).reshape(b, t)


def _logits(x_cd: Array, w_dv: Array, temperature: float) -> Array:
    return jnp.einsum("cd,dv->cv", x_cd, w_dv, preferred_element_type=jnp.float32) / temperature


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_logprobs(x_md: Array, w_dv: Array, targets_m: Array, temperature: float, chunk: int) -> tuple[Array, Array]:
    return _forward(x_md, w_dv, targets_m, temperature, chunk)[0]


def _forward(x_md: Array, w_dv: Array, targets_m: Array, temperature: float, chunk: int) -> tuple[Any, Any]:
    def one(block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x_cd, targets_c = block
        logits_cv = _logits(x_cd, w_dv, temperature)
        log_sum_c = jax.nn.logsumexp(logits_cv, axis=-1)
        target_c = jnp.take_along_axis(logits_cv, targets_c[:, None], axis=-1)[:, 0]
        mean_c = jnp.sum(jnp.exp(logits_cv - log_sum_c[:, None]) * logits_cv, axis=-1)
        return target_c - log_sum_c, log_sum_c - mean_c, log_sum_c

    blocks = x_md.reshape(-1, chunk, x_md.shape[-1]), targets_m.reshape(-1, chunk)
    logps, entropy, log_sum = jax.lax.map(one, blocks)
    return (logps.reshape(-1), entropy.reshape(-1)), (x_md, w_dv, targets_m, log_sum)


def _backward(temperature: float, chunk: int, residuals: Any, gradients: Any) -> tuple[Array, Array, None]:
    x_md, w_dv, targets_m, log_sum_nc = residuals
    g_m = gradients[0] / temperature

    def one(dw_dv: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        x_cd, targets_c, log_sum_c, g_c = block
        p_cv = jnp.exp(_logits(x_cd, w_dv, temperature) - log_sum_c[:, None])
        hit_cv = jnp.arange(w_dv.shape[1]) == targets_c[:, None]
        dlogits_cv = ((hit_cv - p_cv) * g_c[:, None]).astype(x_cd.dtype)
        dx_cd = jnp.einsum("cv,dv->cd", dlogits_cv, w_dv, preferred_element_type=jnp.float32)
        dw_dv = dw_dv + jnp.einsum("cd,cv->dv", x_cd, dlogits_cv, preferred_element_type=jnp.float32)
        return dw_dv, dx_cd.astype(x_cd.dtype)

    blocks = (x_md.reshape(-1, chunk, x_md.shape[-1]), targets_m.reshape(-1, chunk), log_sum_nc, g_m.reshape(-1, chunk))
    dw_dv, dx = jax.lax.scan(one, jnp.zeros(w_dv.shape, jnp.float32), blocks)
    return dx.reshape(x_md.shape), dw_dv.astype(w_dv.dtype), None


_token_logprobs.defvjp(_forward, _backward)
