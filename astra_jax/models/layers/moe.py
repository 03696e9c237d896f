"""Mixture of experts: each token goes to a few of many feed-forwards. No token is ever dropped.

The assignments are sorted by expert, and one grouped matmul (`grouped`) runs all experts, however uneven their loads
are. On a mesh the experts are spread over the `expert` axis: each of its devices gathers the tokens of all, runs its
own experts on those that chose them, and the partial results are summed back to where the tokens live.
"""

from __future__ import annotations

from functools import partial

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
    """Of one layer, or stacked over layers: sums over real tokens; divide by `tokens`.

    Attributes:
        assigned_e: how often each expert was chosen; adds up to tokens * experts_per_token.
        entropy: of the router's distribution, nats.
        tokens: how many tokens.
    """

    assigned_e: Array
    entropy: Array
    tokens: Array


def router_metrics(sums_l: RouterSums) -> dict[str, Array]:
    """Scalars to log from sums that are stacked over layers.

    Returns:
        `router_entropy` (nats, mean over layers), `router_max_load` (the busiest expert's tokens over the mean, of the
        worst layer; 1 is balanced), `router_idle_share` (experts that no token chose).
    """
    load_le = sums_l.assigned_e / jnp.maximum(sums_l.assigned_e.mean(-1, keepdims=True), 1.0)
    return {
        "router_entropy": jnp.mean(sums_l.entropy / jnp.maximum(sums_l.tokens, 1.0)),
        "router_max_load": load_le.max(),
        "router_idle_share": jnp.mean(sums_l.assigned_e == 0),
    }


class MoE(nnx.Module):
    """SwiGLU experts behind a softmax router that keeps the `experts_per_token` most likely."""

    def __init__(self, model: Sizes, *, rngs: nnx.Rngs) -> None:
        d, f, e = model.d_model, model.d_ff, model.n_experts
        self.model = model
        self.router_de = normal(rngs, (d, e), d**-0.5, model)
        self.gate_edf = normal(rngs, (e, d, f), d**-0.5, model)
        self.up_edf = normal(rngs, (e, d, f), d**-0.5, model)
        self.down_efd = normal(rngs, (e, f, d), (2 * model.n_layers * f) ** -0.5, model)

    def __call__(self, x_btd: Array, real_bt: Array, mesh: AnyMesh | None) -> tuple[Array, RouterSums]:
        """The experts' weighted sum for each token, in x's dtype.

        Args:
            real_bt: False is padding: computed like the others, not counted.
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
    """On one device, or inside `shard_map` with this device's tokens and experts; statistics are summed over the axes
    `counted`."""
    on_mesh = bool(counted)
    logits_me = logits_bte.reshape(-1, logits_bte.shape[-1])
    chosen_mk, weights_mk = route(logits_me, model)
    sums = _sums(jax.lax.stop_gradient(logits_me), chosen_mk, real_bt.reshape(-1).astype(jnp.float32))
    first: Array | int = 0
    everyones = (x_btd.reshape(-1, x_btd.shape[-1]), chosen_mk, weights_mk.astype(x_btd.dtype))
    if on_mesh:
        first = jax.lax.axis_index("expert") * gate_edf.shape[0]
        everyones = jax.tree.map(lambda x: jax.lax.all_gather(x, "expert", tiled=True), everyones)
    y_md = _experts(everyones, first, (gate_edf, up_edf, down_efd), how)
    if on_mesh:
        y_md = jax.lax.psum_scatter(y_md, "expert", tiled=True)
        y_md = jax.lax.psum(y_md, "tensor")
        sums = jax.lax.psum(sums, counted)
    return y_md.reshape(x_btd.shape), sums


def route(logits_me: Array, model: Sizes) -> tuple[Array, Array]:
    """(expert ids [M, experts_per_token], their weights, float32) from router logits [M, E], float32."""
    weights_mk, chosen_mk = jax.lax.top_k(jax.nn.softmax(logits_me, axis=-1), model.experts_per_token)
    if model.norm_topk_prob:
        weights_mk = weights_mk / weights_mk.sum(-1, keepdims=True)
    return chosen_mk, weights_mk


def _experts(
    tokens: tuple[Array, Array, Array], first: Array | int, matrices: tuple[Array, Array, Array], how: How
) -> Array:
    """Weighted sum over each token's experts among those given.

    Args:
        tokens: hidden states [M, D], each one's experts and their weights [M, experts_per_token].
        first: the number of the first expert given; those of other numbers belong to other devices.
        matrices: gate, up and down.
    """
    x_md, chosen_mk, weights_mk = tokens
    gate_edf, up_edf, down_efd = matrices
    e = gate_edf.shape[0]
    m, k = chosen_mk.shape
    chosen = chosen_mk.reshape(-1) - first
    chosen = jnp.where((chosen >= 0) & (chosen < e), chosen, e)  # others' go last, and into no group
    order = jnp.argsort(chosen)
    places_mk = jnp.argsort(order).reshape(m, k)
    sizes_e = jnp.bincount(chosen, length=e + 1)[:e].astype(jnp.int32)
    mine = (jnp.arange(m * k) < sizes_e.sum())[:, None]

    def defined(x: Array) -> Array:
        """Rows in no group come out undefined, forward and backward."""
        return jnp.where(mine, x, 0)

    rows = defined(_sorted(x_md, order, places_mk))
    gate = grouped_matmul(rows, gate_edf, sizes_e, how)
    up = grouped_matmul(rows, up_edf, sizes_e, how)
    hidden = defined(swiglu(gate, up))
    out = defined(grouped_matmul(hidden, down_efd, sizes_e, how, 2))
    return jnp.einsum("mkd,mk->md", _unsorted(out, order, places_mk), weights_mk)


# Where rows go and come from is a permutation, known both ways: autodiff would add gradients up row by row, in the
# activations' type.


@jax.custom_vjp
def _sorted(x_md: Array, order: Array, places_mk: Array) -> Array:
    """Each token once for each of its experts, in the experts' order."""
    return x_md[order // places_mk.shape[1]]


def _sorted_backward(residuals: tuple[Array, Array], d_rd: Array) -> tuple[Array, None, None]:
    _, places_mk = residuals
    return d_rd[places_mk].sum(1, dtype=jnp.float32).astype(d_rd.dtype), None, None


_sorted.defvjp(lambda *of: (_sorted(*of), of[1:]), _sorted_backward)


@jax.custom_vjp
def _unsorted(x_rd: Array, order: Array, places_mk: Array) -> Array:
    """[M, experts_per_token, D], of rows in the experts' order."""
    return x_rd[places_mk]


def _unsorted_backward(residuals: tuple[Array, Array], d_mkd: Array) -> tuple[Array, None, None]:
    order, _ = residuals
    return d_mkd.reshape(-1, d_mkd.shape[-1])[order], None, None


_unsorted.defvjp(lambda *of: (_unsorted(*of), of[1:]), _unsorted_backward)


def _sums(logits_me: Array, chosen_mk: Array, real_m: Array) -> RouterSums:
    logps_me = jax.nn.log_softmax(logits_me, axis=-1)
    entropy_m = -jnp.sum(jnp.exp(logps_me) * logps_me, axis=-1)
    weights = jnp.broadcast_to(real_m[:, None], chosen_mk.shape).reshape(-1)
    return RouterSums(
        assigned_e=jnp.bincount(chosen_mk.reshape(-1), weights=weights, length=logits_me.shape[-1]),
        entropy=jnp.sum(entropy_m * real_m),
        tokens=jnp.sum(real_m),
    )
