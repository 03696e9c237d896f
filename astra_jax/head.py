"""Output head: from hidden states to a loss, without the logits of all tokens in memory.

Full logits of 74,752 tokens over 151,936 vocabulary entries are 45 GB in float32. Here one function over chunks of
tokens computes the linear layer, its log-softmax, the targets' log-probabilities and the objective. A loss is a sum
over tokens, and each token's part is a function of its own logprob. So a chunk's gradient follows from its logits, and
is computed at once. The logits are computed once, for forward and backward together.

On a mesh devices share the vocabulary, and each computes its own entries. They share it over `tensor`, and over
`context` or all axes over which the matrix is spread. Devices on the latter axes see each other's tokens, chunk by
chunk. Three numbers per token are summed, and the hidden states' gradient. So a device stores only its part of the
matrix, in the activations' dtype, and of the matrix's float32 gradient. The axes are chosen by traffic: tokens are sent
between devices that share, the matrix and its gradient to devices that do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from astra_jax.cpu import programs as cpu
from astra_jax.mesh import BATCH, WIDTH, AnyMesh, device_kind_of, free, on_each_device, platform_of
from astra_jax.models.layers.linear import weight_gradient

Array = jax.Array

CHUNK = 1024
"""Tokens at a time, on each device but CPUs: 0.6 GB of float32 logits at Qwen3's vocabulary."""

_SUMS_FIRST = ("TPU v6 lite", "TPU v6e")
"""Kinds of devices on which the matrix's gradient is summed before the layers' backward pass.

Memory is scarce there, and the compiler reports no cost for the order. On v5p the step becomes 2.5 % slower; others
were not compiled.
"""

Objective = Callable[[Array, Array, Any], tuple[Array, Any]]
"""Function (logprobs [C], entropies [C], terms with leaves [C]) → (loss, sums): two scalars, summed over C tokens."""


@dataclass(frozen=True)
class _Plan:
    """Static settings of the head.

    Attributes:
        words: padded size of the vocabulary.
        tokens: tokens on all devices.
        has_entropy_gradient: gradients flow through the entropies too.
    """

    temperature: float
    chunk: int
    mesh: AnyMesh | None
    words: int
    tokens: int
    has_entropy_gradient: bool = False

    @classmethod
    def of(
        cls,
        temperature: float,
        chunk: int | None,
        mesh: AnyMesh | None,
        words: int,
        tokens: int,
        has_entropy_gradient: bool = False,
    ) -> _Plan:
        chunk = chunk or (cpu.HEAD_CHUNK if platform_of(mesh) == "cpu" else CHUNK)
        return cls(temperature, chunk, mesh, words, tokens, has_entropy_gradient)

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be positive")

    @property
    def sums_first(self) -> bool:
        """Return whether to sum the matrix's gradient before the layers' backward pass, not when the compiler likes."""
        return self.mesh is not None and device_kind_of(self.mesh).startswith(_SUMS_FIRST)

    @functools.cached_property
    def peers(self) -> tuple[str, ...]:
        """Axes whose devices share the vocabulary and see each other's tokens.

        They are none, `context`, or all over which the matrix's width is spread. Among those dividing it, the choice
        has the least traffic.
        """
        if self.mesh is None:
            return ()
        shape = self.mesh.shape
        here = self.tokens / math.prod(shape[axis] for axis in free(self.mesh, (*BATCH, "context")))

        def sent(axes: tuple[str, ...]) -> float:
            """Return the traffic in rows of the model's width: tokens among peers, and gathered parts of the matrix."""
            size = math.prod(shape[axis] for axis in axes)
            gathered = math.prod(shape[axis] for axis in WIDTH) > size
            return (size > 1) * size * here + gathered * self.words / shape["tensor"] / size

        ways = [tuple(axis for axis in axes if shape[axis] > 1) for axes in ((), ("context",), WIDTH)]
        divides = [one for one in ways if self.words % (shape["tensor"] * math.prod(shape[axis] for axis in one)) == 0]
        return min(divides, key=sent, default=())

    @property
    def sharers(self) -> tuple[str, ...]:
        """Axes whose devices share the vocabulary, the outer one first."""
        return (("tensor",) if self.mesh is not None and self.mesh.shape["tensor"] > 1 else ()) + self.peers

    @property
    def rows(self) -> tuple[str, ...]:
        """Axes over which a matrix's width is gathered."""
        shape = {} if self.mesh is None else self.mesh.shape
        return tuple(axis for axis in WIDTH if axis not in self.peers and shape.get(axis, 1) > 1)

    def spread(self, part: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Run `part(x_btd, w_dv, targets_bt, terms)` on each device's tokens and part of the matrix."""
        if self.mesh is None:
            return part
        return on_each_device(part, self.mesh, (_HIDDEN, _MATRIX, _TOKENS, _TOKENS), outputs)

    def own_words(self, w_dv: Array, dtype: Any) -> Array:
        """Return a device's own vocabulary entries at full width in `dtype`, from its part of the matrix's width."""
        w_dv = w_dv.astype(dtype)
        if self.mesh is None:
            return w_dv
        if self.peers:
            w_dv = jax.lax.all_to_all(w_dv, self.peers, split_axis=1, concat_axis=0, tiled=True)
        return jax.lax.all_gather(w_dv, self.rows, axis=0, tiled=True) if self.rows else w_dv

    def back(self, dw_vd: Array) -> Array:
        """Invert `own_words` for the matrix's transposed gradient: sum over devices, each receives its part."""
        if self.mesh is None:
            return dw_vd
        dw_vd = jax.lax.psum(dw_vd, free(self.mesh, ["data"]))
        if self.rows:
            dw_vd = jax.lax.psum_scatter(dw_vd, self.rows, scatter_dimension=1, tiled=True)
        if self.peers:
            dw_vd = jax.lax.all_to_all(dw_vd, self.peers, split_axis=1, concat_axis=0, tiled=True)
        return dw_vd

    def first_word(self, width: int) -> Array | int:
        """Return the first vocabulary entry of a device that has `width` entries."""
        return jax.lax.axis_index(self.sharers) * width if self.sharers else 0

    def summed(self, x: Array) -> Array:
        """Sum over the devices that share the vocabulary."""
        return jax.lax.psum(x, self.sharers) if self.sharers else x

    def everyones(self, tree: Any) -> Any:
        """Concatenate arrays [C, …] of all peers."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.peers, tiled=True), tree) if self.peers else tree

    def own(self, x: Array, count: int) -> Array:
        """Return this device's `count` rows of `everyones`."""
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.peers) * count, count) if self.peers else x

    def own_sum(self, dx: Array) -> Array:
        """Sum over the vocabulary the values for `everyones`, and return this device's own rows."""
        if "tensor" in self.sharers:
            dx = jax.lax.psum(dx, "tensor")
        return jax.lax.psum_scatter(dx, self.peers, tiled=True) if self.peers else dx


_TOKENS, _HIDDEN, _MATRIX = P(BATCH, "context"), P(BATCH, "context", None), P(WIDTH, "tensor")


def token_logprobs(
    x_btd: Array,
    w_dv: Array,
    targets_bt: Array,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    mesh: AnyMesh | None = None,
) -> tuple[Array, Array]:
    """Return the log-probability of each target token, and the entropy of each distribution, without a gradient.

    Args:
        x_btd: hidden states.
        w_dv: the head's matrix; it is cast to the hidden states' dtype, its gradient has its own dtype.
        targets_bt: int32 token ids; the target of position t is the token that position t should predict.
        temperature: logits are divided by it.
        chunk: tokens at a time; memory is chunk x V in float32. None: the devices' default.
        mesh: with axes as `astra_jax.mesh` names them; None is one device.

    Returns:
        (logps_bt, entropy_bt), float32, in nats.

    Raises:
        ValueError: the temperature is not positive.
        TypeError: it is differentiated; use `summed_loss` for a gradient.
    """
    plan = _Plan.of(temperature, chunk, mesh, w_dv.shape[1], targets_bt.size)
    return _token_logprobs(x_btd, w_dv, targets_bt, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logprobs(x: Array, w: Array, targets: Array, plan: _Plan) -> tuple[Array, Array]:
    return plan.spread(functools.partial(_measure, plan), (_TOKENS, _TOKENS))(x, w, targets, ())


def _no_gradient(*_: Any) -> Any:
    # Autodiff would keep the logits of every chunk.
    raise TypeError("token_logprobs has no gradient; take it through summed_loss")


_token_logprobs.defvjp(_no_gradient, _no_gradient)


def summed_loss(
    objective: Objective,
    x_btd: Array,
    w_dv: Array,
    targets_bt: Array,
    terms: Any,
    counted_bt: Array,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    mesh: AnyMesh | None = None,
    has_entropy_gradient: bool = False,
) -> tuple[Array, Any]:
    """Return an objective's sum over counted tokens; gradients flow to `x_btd` and `w_dv` through the logprobs.

    Args:
        objective: each token's part of the loss depends on that token's logprob and terms only. It is called with
            chunks. These are padded with tokens that are not counted or whose terms are 0, which must add nothing.
        terms: other inputs for each token, a pytree of [B, T].
        counted_bt: nonzero for tokens that may add something.
        has_entropy_gradient: True if gradients flow through the entropies too. Their logits are also in memory only by
            chunks. False: entropies are metrics.

    The other arguments are those of `token_logprobs`.

    Returns:
        (loss, sums), as the objective returns them, over all tokens of all devices. Sums are metrics, without a
        gradient.

    Raises:
        ValueError: the temperature is not positive.
    """
    plan = _Plan.of(temperature, chunk, mesh, w_dv.shape[1], targets_bt.size, has_entropy_gradient)
    return _summed_loss(x_btd, w_dv, targets_bt, (terms, counted_bt), objective, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed_loss(
    x: Array, w: Array, targets: Array, terms: Any, objective: Objective, plan: _Plan
) -> tuple[Array, Any]:
    part = functools.partial(_loss, objective, plan)
    return plan.spread(part, P())(x, w, targets, terms)


def _forward(
    x: Array, w: Array, targets: Array, terms: Any, objective: Objective, plan: _Plan
) -> tuple[tuple[Array, Any], tuple[Array, Array]]:
    part = functools.partial(_loss_and_gradients, objective, plan)
    result, dx_btd, dw_dv = plan.spread(part, (P(), _HIDDEN, _MATRIX))(x, w, targets, terms)
    if plan.sums_first:
        # The layers' backward pass starts with dx and does not need dw. So the devices would sum dw last, and each keep
        # the gradient of its entries' whole matrix until then.
        dx_btd, dw_dv = jax.lax.optimization_barrier((dx_btd, dw_dv))
    return result, (dx_btd, dw_dv)


def _backward(objective: Objective, plan: _Plan, gradients: tuple[Array, Array], of: Any) -> tuple[Any, ...]:
    loss, _ = of
    dx_btd, dw_dv = ((x * loss).astype(x.dtype) for x in gradients)
    return dx_btd, dw_dv, None, None


_summed_loss.defvjp(_forward, _backward)

# ---------------------------------------------------------------------------------------------------------------------
# One device's part. If several devices share the vocabulary, column j here is entry `first_word + j`.


def _chunks(x_bt: Array, chunk: int) -> Array:
    """Split into chunks padded with zeros: [B, T, …] → [chunks, chunk, …]."""
    flat = x_bt.reshape(-1, *x_bt.shape[2:])
    chunk = min(chunk, flat.shape[0])
    more = -flat.shape[0] % chunk
    return jnp.pad(flat, ((0, more),) + ((0, 0),) * (flat.ndim - 1)).reshape(-1, chunk, *flat.shape[1:])


def _unchunk(x_nc: Array, like_bt: Array) -> Array:
    return x_nc.reshape(-1, *x_nc.shape[2:])[: like_bt.size].reshape(*like_bt.shape, *x_nc.shape[2:])


@dataclass(frozen=True)
class _Distribution:
    """Softmax of a chunk of all peers' tokens over this device's vocabulary entries. Arrays [C] are over all entries.

    Attributes:
        below_cv: logits minus the largest of all entries.
        weights_cv: exp(below_cv).
        at_c: the target's column here; out of range if another device has it.
    """

    below_cv: Array
    weights_cv: Array
    total_c: Array
    logps_c: Array
    entropy_c: Array
    at_c: Array


def _distribution(x_cd: Array, w_dv: Array, targets_c: Array, plan: _Plan) -> _Distribution:
    logits_cv = jnp.einsum("cd,dv->cv", x_cd, w_dv, preferred_element_type=jnp.float32) / plan.temperature
    width = w_dv.shape[1]
    highest_c = logits_cv.max(-1)
    if plan.sharers:
        highest_c = jax.lax.pmax(highest_c, plan.sharers)
        targets_c = targets_c - plan.first_word(width)
    below_cv = logits_cv - highest_c[:, None]  # keeps the entropy's terms small
    weights_cv = jnp.exp(below_cv)
    target_c = jnp.take_along_axis(logits_cv, jnp.clip(targets_c, 0, width - 1)[:, None], axis=-1)[:, 0]
    target_c = jnp.where((targets_c >= 0) & (targets_c < width), target_c, 0.0)
    sums = jnp.stack([weights_cv.sum(-1), cpu.sum_of_products(weights_cv, below_cv), target_c])
    total_c, weighted_c, target_c = plan.summed(sums)
    logps_c = target_c - highest_c - jnp.log(total_c)
    return _Distribution(below_cv, weights_cv, total_c, logps_c, jnp.log(total_c) - weighted_c / total_c, targets_c)


def _total(parts: Any, plan: _Plan) -> Any:
    """Return the sum over chunks, and over the devices' tokens."""
    sums = jax.tree.map(lambda x: x.sum(0), parts)
    return sums if plan.mesh is None else jax.lax.psum(sums, free(plan.mesh, (*BATCH, "context")))


def _measure(plan: _Plan, x_btd: Array, w_dv: Array, targets_bt: Array, terms: tuple[()]) -> tuple[Array, Array]:
    del terms
    w_dv = plan.own_words(w_dv, x_btd.dtype)

    def chunk(block: tuple[Array, Array]) -> tuple[Array, Array]:
        x_cd, targets_c = plan.everyones(block)
        found = _distribution(x_cd, w_dv, targets_c, plan)
        return plan.own(found.logps_c, len(block[1])), plan.own(found.entropy_c, len(block[1]))

    logps, entropy = jax.lax.map(chunk, (_chunks(x_btd, plan.chunk), _chunks(targets_bt, plan.chunk)))
    return _unchunk(logps, targets_bt), _unchunk(entropy, targets_bt)


@dataclass(frozen=True)
class _Counted:
    """This device's tokens in chunks, counted tokens first.

    Attributes:
        order_nc: int32, indices into the flattened [B, T]; beyond its end for padding of the last chunk.
        used: number of chunks in which any device has a counted token. All devices take the same branch at each chunk:
            they exchange data there, and wait for the slowest anyway.
    """

    order_nc: Array
    used: Array

    @classmethod
    def of(cls, counted_bt: Array, plan: _Plan) -> _Counted:
        chunk = min(plan.chunk, counted_bt.size)
        counted = jnp.pad(counted_bt.reshape(-1) != 0, (0, -counted_bt.size % chunk))
        used = -(-counted.sum(dtype=jnp.int32) // chunk)
        if plan.mesh is not None:
            used = jax.lax.pmax(used, free(plan.mesh, (*BATCH, "context")))
        return cls(jnp.argsort(~counted, stable=True).astype(jnp.int32).reshape(-1, chunk), used)

    def map(self, work: Callable[[Any, Any], tuple[Any, Any]], carry: Any, tree_bt: Any) -> tuple[Any, Any]:
        """Run `lax.scan` of `work(carry, chunk of the tree)`; chunks without counted tokens keep the carry, give 0."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree_bt)

        def step(carry: Any, at: tuple[Array, Array]) -> tuple[Any, Any]:
            index, order_c = at
            block = jax.tree.map(lambda x: x.at[order_c].get(mode="fill", fill_value=0), flat)
            shapes = jax.eval_shape(work, carry, block)[1]
            idle = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
            return jax.lax.cond(index < self.used, work, lambda carry, _: (carry, idle), carry, block)

        return jax.lax.scan(step, carry, (jnp.arange(len(self.order_nc)), self.order_nc))

    def back(self, x_nc: Array, like_bt: Array) -> Array:
        """Move the chunks' results, [chunks, chunk, …], to their tokens' positions [B, T, …]."""
        places = jnp.argsort(self.order_nc.reshape(-1))[: like_bt.size]
        flat = x_nc.reshape(-1, *x_nc.shape[2:])
        return flat[places].reshape(*like_bt.shape, *flat.shape[1:])


def _loss(
    objective: Objective, plan: _Plan, x_btd: Array, w_dv: Array, targets_bt: Array, of_tokens: tuple[Any, Array]
) -> tuple[Array, Any]:
    w_dv = plan.own_words(w_dv, x_btd.dtype)
    terms, counted_bt = of_tokens

    def chunk(_: None, block: Any) -> tuple[None, tuple[Array, Any]]:
        x_cd, targets_c = plan.everyones(block[:2])
        found, count = _distribution(x_cd, w_dv, targets_c, plan), len(block[1])
        return None, objective(plan.own(found.logps_c, count), plan.own(found.entropy_c, count), block[2])

    _, parts = _Counted.of(counted_bt, plan).map(chunk, None, (x_btd, targets_bt, terms))
    return _total(parts, plan)


def _loss_and_gradients(
    objective: Objective, plan: _Plan, x_btd: Array, w_dv: Array, targets_bt: Array, of_tokens: tuple[Any, Array]
) -> tuple[tuple[Array, Any], Array, Array]:
    dtype, w_dv = w_dv.dtype, plan.own_words(w_dv, x_btd.dtype)
    terms, counted_bt = of_tokens

    # The gradient of the matrix is summed as [V, D], as a tied embedding is.
    def chunk(dw_vd: Array, block: Any) -> tuple[Array, Any]:
        x_cd, targets_c = plan.everyones(block[:2])
        found, count = _distribution(x_cd, w_dv, targets_c, plan), len(block[1])
        entropy_c = plan.own(found.entropy_c, count)
        through = (0, 1) if plan.has_entropy_gradient else 0

        def of_chunk(logps_c: Array, entropy_c: Array) -> tuple[Array, Any]:
            return objective(logps_c, entropy_c, block[2])

        with_gradient = jax.value_and_grad(of_chunk, argnums=through, has_aux=True)
        result, found_c = with_gradient(plan.own(found.logps_c, count), entropy_c)
        g_c, h_c = found_c if plan.has_entropy_gradient else (found_c, None)
        g_c = plan.everyones(g_c / plan.temperature)
        hit_cv = jnp.arange(w_dv.shape[1]) == found.at_c[:, None]
        dlogits_cv = jnp.where(hit_cv, g_c[:, None], 0.0) - found.weights_cv * (g_c / found.total_c)[:, None]
        if h_c is not None:  # dH/dlogit = -p (log p + H)
            h_c = plan.everyones(h_c / plan.temperature) / found.total_c
            more_c = found.entropy_c - jnp.log(found.total_c)
            dlogits_cv -= found.weights_cv * h_c[:, None] * (found.below_cv + more_c[:, None])
        dlogits_cv = dlogits_cv.astype(x_cd.dtype)
        dx_cd = jnp.einsum("cv,dv->cd", dlogits_cv, w_dv, preferred_element_type=jnp.float32)
        dw_vd = dw_vd + weight_gradient(dlogits_cv, x_cd)
        return dw_vd, (result, plan.own_sum(dx_cd).astype(x_cd.dtype))

    zeros, counted = jnp.zeros(w_dv.shape[::-1], jnp.float32), _Counted.of(counted_bt, plan)
    dw_vd, (parts, dx_ncd) = counted.map(chunk, zeros, (x_btd, targets_bt, terms))
    return _total(parts, plan), counted.back(dx_ncd, targets_bt), plan.back(dw_vd).T.astype(dtype)
