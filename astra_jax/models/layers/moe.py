"""Mixture of experts: each token uses a few of many feed-forwards. No token is ever dropped.

The assignments are sorted by expert, and one grouped matmul (`grouped`) runs all experts, however uneven their loads
are. On a mesh the experts are spread over the `expert` axis. Each of its devices gathers the tokens of all, and runs
its own experts on the tokens that chose them. The partial results are summed back to the tokens' devices.
"""

from __future__ import annotations

from functools import partial, reduce

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import PartitionSpec as P

from astra_jax.mesh import BATCH, AnyMesh, free, on_each_device
from astra_jax.models.layers.elementwise import swiglu
from astra_jax.models.layers.grouped import How, grouped_matmul
from astra_jax.models.layers.initial import normal
from astra_jax.models.layers.linear import linear
from astra_jax.models.layers.sizes import Sizes

Array = jax.Array


@struct.dataclass
class RouterSums:
    """Router statistics of one layer, or stacked over layers: sums over real tokens; divide by `tokens`.

    Attributes:
        assigned_e: number of assignments per expert; adds up to tokens * experts_per_token.
        entropy: entropy of the router's distribution, nats.
        tokens: number of tokens.
    """

    assigned_e: Array
    entropy: Array
    tokens: Array


def router_metrics(sums_l: RouterSums) -> dict[str, Array]:
    """Return scalars to log from sums that are stacked over layers.

    Returns:
        Metrics by name: `train/router_entropy` (nats, mean over layers), `train/router_max_load` (the busiest expert's
        tokens over the mean, of the worst layer; 1 is balanced), `train/router_idle_share` (experts that no token
        chose).
    """
    load_le = sums_l.assigned_e / jnp.maximum(sums_l.assigned_e.mean(-1, keepdims=True), 1.0)
    return {
        "train/router_entropy": jnp.mean(sums_l.entropy / jnp.maximum(sums_l.tokens, 1.0)),
        "train/router_max_load": load_le.max(),
        "train/router_idle_share": jnp.mean(sums_l.assigned_e == 0),
    }


class MoE(nnx.Module):
    """SwiGLU experts after a softmax router that keeps the `experts_per_token` most likely."""

    def __init__(self, model: Sizes, *, rngs: nnx.Rngs) -> None:
        d, f, e = model.d_model, model.d_ff, model.n_experts
        self.model = model
        self.router_de = normal(rngs, (d, e), d**-0.5, model)
        self.gate_edf = normal(rngs, (e, d, f), d**-0.5, model)
        self.up_edf = normal(rngs, (e, d, f), d**-0.5, model)
        self.down_efd = normal(rngs, (e, f, d), (2 * model.n_layers * f) ** -0.5, model)

    def __call__(self, x_btd: Array, real_bt: Array, mesh: AnyMesh | None) -> tuple[Array, RouterSums]:
        """Return the experts' weighted sum for each token, in x's dtype, and the router's statistics.

        Args:
            real_bt: False is padding, which is computed but not counted.
            mesh: with axes as `astra_jax.mesh` names them; None is one device.
        """
        arrays = (self.gate_edf[...], self.up_edf[...], self.down_efd[...])
        logits_bte = linear(x_btd, self.router_de[...], 1).astype(jnp.float32)
        how = How.on(mesh)
        if mesh is None:
            return _moe(x_btd, real_bt, logits_bte, *arrays, model=self.model, how=how)
        tokens, hidden = P(BATCH, "context"), P(BATCH, "context", None)
        matrix = P("expert", how.spread, "tensor")
        sharded = on_each_device(
            partial(_moe, model=self.model, how=how, counted=free(mesh, (*BATCH, "context"))),
            mesh,
            (hidden, tokens, hidden, matrix, matrix, P("expert", "tensor", how.spread)),
            (hidden, P()),
        )
        return sharded(x_btd, real_bt, logits_bte, *arrays)


def _moe(
    x_btd: Array,
    real_bt: Array,
    logits_bte: Array,
    gate_edf: Array,
    up_edf: Array,
    down_efd: Array,
    *,
    model: Sizes,
    how: How,
    counted: tuple[str, ...] = (),
) -> tuple[Array, RouterSums]:
    """Compute the layer on one device, or inside `shard_map` for this device's tokens and experts.

    Statistics are summed over the axes `counted`.
    """
    on_mesh = bool(counted)
    logits_me = logits_bte.reshape(-1, logits_bte.shape[-1])
    chosen_mk, weights_mk = route(logits_me, model)
    sums = _sums(jax.lax.stop_gradient(logits_me), chosen_mk, real_bt.reshape(-1).astype(jnp.float32))
    first: Array | int = 0
    everyones = (x_btd.reshape(-1, x_btd.shape[-1]), chosen_mk, weights_mk)
    if on_mesh:
        first = jax.lax.axis_index("expert") * gate_edf.shape[0]
        everyones = jax.tree.map(lambda x: jax.lax.all_gather(x, "expert", tiled=True), everyones)
    others = gate_edf.shape[0] < model.n_experts
    y_md = _experts(everyones, first, (gate_edf, up_edf, down_efd), how, others=others)
    if on_mesh:
        y_md = jax.lax.psum_scatter(y_md, "expert", tiled=True)
        y_md = jax.lax.psum(y_md, "tensor")
        sums = jax.lax.psum(sums, counted)
    return y_md.reshape(x_btd.shape), sums


def route(logits_me: Array, model: Sizes) -> tuple[Array, Array]:
    """Return (expert ids [M, experts_per_token], their weights, float32) from router logits [M, E], float32."""
    weights_mk, chosen_mk = jax.lax.top_k(jax.nn.softmax(logits_me, axis=-1), model.experts_per_token)
    if model.norm_topk_prob:
        weights_mk = weights_mk / weights_mk.sum(-1, keepdims=True)
    return chosen_mk, weights_mk


def _experts(
    tokens: tuple[Array, Array, Array],
    first: Array | int,
    matrices: tuple[Array, Array, Array],
    how: How,
    *,
    others: bool,
) -> Array:
    """Return the weighted sum over each token's experts among the given ones.

    Args:
        tokens: hidden states [M, D], each one's experts and their weights [M, experts_per_token].
        first: id of the first given expert; other devices have the experts outside this range.
        matrices: gate, up and down.
        others: True if some experts are not given.
    """
    x_md, chosen_mk, weights_mk = tokens
    gate_edf, up_edf, down_efd = matrices
    e = gate_edf.shape[0]
    m, k = chosen_mk.shape
    chosen = chosen_mk.T.reshape(-1) - first  # all tokens' first experts, then all their second ones
    if others:
        chosen = jnp.where((chosen >= 0) & (chosen < e), chosen, e)  # others are sorted to the end, and are in no group
    order = jnp.argsort(chosen)
    places_km = jnp.argsort(order).reshape(k, m)
    sizes_e = jnp.bincount(chosen, length=e + 1)[:e].astype(jnp.int32)
    mine = (jnp.arange(m * k) < sizes_e.sum())[:, None]

    def defined(x: Array) -> Array:
        """Replace the rows in no group, which are undefined, forward and backward."""
        return jnp.where(mine, x, 0) if others else x

    rows = defined(_sorted(x_md, order, places_km))
    if how.spread:  # Matrices that are gathered anyway are concatenated, and a row's gradients are one sum.
        both = grouped_matmul(rows, jnp.concatenate([gate_edf, up_edf], 2), sizes_e, how)
        gate, up = jnp.split(both, 2, axis=1)
    else:
        gate, up = grouped_matmul(rows, gate_edf, sizes_e, how), grouped_matmul(rows, up_edf, sizes_e, how)
    # A token's weights are gathered like its hidden state, and this row's weight is selected: single numbers are slow.
    own_rk = order[:, None] // m == jnp.arange(k)
    weights_rk = defined(jnp.where(own_rk, _sorted(weights_mk, order, places_km), 0))
    # Before the last product, which is linear: so the backward pass does not need its output, and multiplies the
    # weights with F numbers per row, not D.
    hidden = swiglu(gate, up).astype(jnp.float32) * weights_rk.sum(1, keepdims=True)
    out = grouped_matmul(defined(hidden.astype(x_md.dtype)), down_efd, sizes_e, how, 2)
    return _summed(defined(out), order, places_km)


# Rows are moved by a permutation that is known in both directions, and each direction is the other's gradient. Autodiff
# would add gradients row by row, in the activations' dtype. A token's experts are the outer axis, summed one by one:
# arrays are added, in one pass. On a v5p the compiler's own sum over an axis takes three times as long, over an outer
# axis five times.


@jax.custom_vjp
def _sorted(x_md: Array, order: Array, places_km: Array) -> Array:
    """Return [R, D]: each token once for each of its experts, in the experts' order."""
    return x_md[order % places_km.shape[1]]


@jax.custom_vjp
def _summed(x_rd: Array, order: Array, places_km: Array) -> Array:
    """Return [M, D]: the sum of each token's rows, from the experts' order, in float32."""
    return reduce(jnp.add, (x_md.astype(jnp.float32) for x_md in x_rd[places_km])).astype(x_rd.dtype)


_sorted.defvjp(lambda *of: (_sorted(*of), of[1:]), lambda of, d_rd: (_summed(d_rd, *of), None, None))
_summed.defvjp(lambda *of: (_summed(*of), of[1:]), lambda of, d_md: (_sorted(d_md, *of), None, None))


def _sums(logits_me: Array, chosen_mk: Array, real_m: Array) -> RouterSums:
    logps_me = jax.nn.log_softmax(logits_me, axis=-1)
    entropy_m = -jnp.sum(jnp.exp(logps_me) * logps_me, axis=-1)
    weights = jnp.broadcast_to(real_m[:, None], chosen_mk.shape).reshape(-1)
    return RouterSums(
        assigned_e=jnp.bincount(chosen_mk.reshape(-1), weights=weights, length=logits_me.shape[-1]),
        entropy=jnp.sum(entropy_m * real_m),
        tokens=jnp.sum(real_m),
    )
