"""The output head: logprobs and entropies of given tokens, without ever holding the logits of all of them.

Full logits of 74,752 tokens over 151,936 words are 45 GB in float32. Here the linear layer, its log-softmax and the
look-up are one function over chunks of tokens, and the backward pass computes each chunk's logits again. On a mesh each
device takes its own tokens, and over `tensor` its own part of the vocabulary: three numbers a token are summed forward,
and the hidden states' gradient backward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from astra_jax.mesh import BATCH, WIDTH

Array = jax.Array

CHUNK = 1024
"""Tokens at a time, on each device: 0.6 GB of float32 logits at Qwen3's vocabulary."""


@dataclass(frozen=True)
class _Plan:
    """How the head runs: static, hashable."""

    temperature: float
    chunk: int
    mesh: Mesh | None

    @property
    def shards_vocabulary(self) -> bool:
        return self.mesh is not None and self.mesh.shape["tensor"] > 1


def token_logprobs(
    x_btd: Array,
    w_dv: Array,
    targets_bt: Array,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    mesh: Mesh | None = None,
) -> tuple[Array, Array]:
    """Log-probability of each target token, and the entropy of each distribution.

    Args:
        x_btd: hidden states.
        w_dv: the head's matrix.
        targets_bt: int32 token ids; the target of position t is what position t should predict.
        temperature: logits are divided by it.
        chunk: tokens at a time; memory is chunk x V in float32, forward and backward.
        mesh: with axes as `astra_jax.mesh` names them; None is one device.

    Returns:
        (logps_bt, entropy_bt), float32, in nats. Gradients flow through the logprobs; the entropy is a measurement.

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    logps_bt, entropy_bt = _token_logprobs(x_btd, w_dv, targets_bt, _Plan(temperature, chunk, mesh))
    return logps_bt, jax.lax.stop_gradient(entropy_bt)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logprobs(x_btd: Array, w_dv: Array, targets_bt: Array, plan: _Plan) -> tuple[Array, Array]:
    return _forward(x_btd, w_dv, targets_bt, plan)[0]


def _forward(x_btd: Array, w_dv: Array, targets_bt: Array, plan: _Plan) -> tuple[Any, Any]:
    part = functools.partial(_forward_part, plan=plan)
    if plan.mesh is not None:
        tokens = P(BATCH, "context")
        specs = (P(BATCH, "context", None), P(None, "tensor"), tokens)
        part = jax.shard_map(part, mesh=plan.mesh, in_specs=specs, out_specs=(tokens,) * 3, check_vma=False)
    logps_bt, entropy_bt, log_sum_bt = part(x_btd, w_dv, targets_bt)
    return (logps_bt, entropy_bt), (x_btd, w_dv, targets_bt, log_sum_bt)


def _backward(plan: _Plan, residuals: Any, gradients: Any) -> tuple[Array, Array, None]:
    part = functools.partial(_backward_part, plan=plan)
    if plan.mesh is not None:
        tokens, hidden = P(BATCH, "context"), P(BATCH, "context", None)
        specs = (hidden, P(None, "tensor"), tokens, tokens, tokens)
        part = jax.shard_map(
            part, mesh=plan.mesh, in_specs=specs, out_specs=(hidden, P(WIDTH, "tensor")), check_vma=False
        )
    x_btd, w_dv, targets_bt, log_sum_bt = residuals
    dx_btd, dw_dv = part(x_btd, w_dv, targets_bt, log_sum_bt, gradients[0])
    return dx_btd, dw_dv, None


_token_logprobs.defvjp(_forward, _backward)

# ---------------------------------------------------------------------------------------------------------------------
# One device's part. With the vocabulary spread over `tensor`, column j here is word `first + j`.


def _chunks(x_bt: Array, chunk: int) -> Array:
    """[B, T, …] → [chunks, chunk, …], padded with zeros."""
    flat = x_bt.reshape(-1, *x_bt.shape[2:])
    chunk = min(chunk, flat.shape[0])
    more = -flat.shape[0] % chunk
    return jnp.pad(flat, ((0, more),) + ((0, 0),) * (flat.ndim - 1)).reshape(-1, chunk, *flat.shape[1:])


def _unchunk(x_nc: Array, like_bt: Array) -> Array:
    return x_nc.reshape(-1, *x_nc.shape[2:])[: like_bt.size].reshape(*like_bt.shape, *x_nc.shape[2:])


def _logits(x_cd: Array, w_dv: Array, plan: _Plan) -> Array:
    return jnp.einsum("cd,dv->cv", x_cd, w_dv, preferred_element_type=jnp.float32) / plan.temperature


def _here(targets_c: Array, width: int, plan: _Plan) -> Array:
    """The targets' columns on this device; outside 0 … width-1 where they are another's."""
    return targets_c - jax.lax.axis_index("tensor") * width if plan.shards_vocabulary else targets_c


def _over_vocabulary(x: Array, plan: _Plan) -> Array:
    return jax.lax.psum(x, "tensor") if plan.shards_vocabulary else x


def _forward_part(x_btd: Array, w_dv: Array, targets_bt: Array, *, plan: _Plan) -> tuple[Array, Array, Array]:
    width = w_dv.shape[1]

    def one(block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x_cd, targets_c = block
        logits_cv = _logits(x_cd, w_dv, plan)
        highest_c = logits_cv.max(-1)
        if plan.shards_vocabulary:
            highest_c = jax.lax.pmax(highest_c, "tensor")
        below_cv = logits_cv - highest_c[:, None]  # the entropy's terms stay small
        weights_cv = jnp.exp(below_cv)
        at_c = _here(targets_c, width, plan)
        target_c = jnp.take_along_axis(logits_cv, jnp.clip(at_c, 0, width - 1)[:, None], axis=-1)[:, 0]
        target_c = jnp.where((at_c >= 0) & (at_c < width), target_c, 0.0)
        sums = jnp.stack([weights_cv.sum(-1), (weights_cv * below_cv).sum(-1), target_c])
        total_c, weighted_c, target_c = _over_vocabulary(sums, plan)
        log_sum_c = highest_c + jnp.log(total_c)
        return target_c - log_sum_c, jnp.log(total_c) - weighted_c / total_c, log_sum_c

    logps, entropy, log_sum = jax.lax.map(one, (_chunks(x_btd, plan.chunk), _chunks(targets_bt, plan.chunk)))
    return _unchunk(logps, targets_bt), _unchunk(entropy, targets_bt), _unchunk(log_sum, targets_bt)


def _backward_part(
    x_btd: Array, w_dv: Array, targets_bt: Array, log_sum_bt: Array, g_bt: Array, *, plan: _Plan
) -> tuple[Array, Array]:
    width = w_dv.shape[1]

    def one(dw_dv: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        x_cd, targets_c, log_sum_c, g_c = block
        p_cv = jnp.exp(_logits(x_cd, w_dv, plan) - log_sum_c[:, None])
        hit_cv = jnp.arange(width) == _here(targets_c, width, plan)[:, None]
        dlogits_cv = ((hit_cv - p_cv) * g_c[:, None]).astype(x_cd.dtype)
        dx_cd = jnp.einsum("cv,dv->cd", dlogits_cv, w_dv, preferred_element_type=jnp.float32)
        dw_dv = dw_dv + jnp.einsum("cd,cv->dv", x_cd, dlogits_cv, preferred_element_type=jnp.float32)
        return dw_dv, dx_cd.astype(x_cd.dtype)

    blocks = tuple(_chunks(x, plan.chunk) for x in (x_btd, targets_bt, log_sum_bt, g_bt / plan.temperature))
    dw_dv, dx_ncd = jax.lax.scan(one, jnp.zeros(w_dv.shape, jnp.float32), blocks)
    dx_btd = _over_vocabulary(_unchunk(dx_ncd, targets_bt), plan)
    if plan.mesh is not None:
        dw_dv = jax.lax.psum_scatter(jax.lax.psum(dw_dv, "data"), WIDTH, scatter_dimension=0, tiled=True)
    return dx_btd, dw_dv.astype(w_dv.dtype)
