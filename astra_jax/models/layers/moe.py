"""Mixture of experts: each token goes to a few of many feed-forwards. No token is ever dropped.

The assignments are sorted by expert, and one grouped matmul (`jax.lax.ragged_dot`) runs all experts, however uneven
their loads are. On a mesh the experts are spread over the `expert` axis: each of its devices gathers the tokens of all,
runs its own experts on those that chose them, and the partial results are summed back to where the tokens live.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from astra_jax.mesh import BATCH
from astra_jax.models.layers.elementwise import swiglu
from astra_jax.models.layers.initial import normal
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

    def __call__(self, x_btd: Array, real_bt: Array, mesh: Mesh | None) -> tuple[Array, RouterSums]:
        """The experts' weighted sum for each token, in x's dtype.

        Args:
            real_bt: False is padding: computed like the others, not counted.
            mesh: with axes as `astra_jax.mesh` names them; None is one device.
        """
        arrays = (self.router_de[...], self.gate_edf[...], self.up_edf[...], self.down_efd[...])
        if mesh is None:
            return _moe(x_btd, real_bt, *arrays, model=self.model)
        tokens = P(BATCH, "context")
        sharded = jax.shard_map(
            partial(_moe, model=self.model, manual=True),
            mesh=mesh,
            in_specs=(
                P(BATCH, "context", None),
                tokens,
                P(),
                P("expert", None, "tensor"),
                P("expert", None, "tensor"),
                P("expert", "tensor", None),
            ),
            out_specs=(P(BATCH, "context", None), P()),
            check_vma=False,  # ragged_dot has no rule for it
        )
        return sharded(x_btd, real_bt, *arrays)


def _moe(
    x_btd: Array,
    real_bt: Array,
    router_de: Array,
    gate_edf: Array,
    up_edf: Array,
    down_efd: Array,
    *,
    model: Sizes,
    manual: bool = False,
) -> tuple[Array, RouterSums]:
    """On one device, or inside `shard_map` (`manual`) with this device's tokens and experts."""
    here = gate_edf.shape[0]
    first = jax.lax.axis_index("expert") * here if manual else 0
    all_btd = jax.lax.all_gather(x_btd, "expert", axis=0, tiled=True) if manual else x_btd
    x_md = all_btd.reshape(-1, all_btd.shape[-1])

    logits_me = (x_md @ router_de.astype(x_md.dtype)).astype(jnp.float32)
    chosen_mk, weights_mk = route(logits_me, model)
    y_md = _experts(x_md, chosen_mk - first, weights_mk.astype(x_md.dtype), gate_edf, up_edf, down_efd)
    y_btd = y_md.reshape(all_btd.shape)

    # The statistics are of this device's own tokens: its rows of what was gathered.
    if manual:
        rows = x_btd.shape[0] * x_btd.shape[1]
        at = jax.lax.axis_index("expert") * rows
        logits_me, chosen_mk = (jax.lax.dynamic_slice_in_dim(x, at, rows) for x in (logits_me, chosen_mk))
    sums = _sums(jax.lax.stop_gradient(logits_me), chosen_mk, real_bt.reshape(-1).astype(jnp.float32))
    if manual:
        y_btd = jax.lax.psum_scatter(y_btd, "expert", scatter_dimension=0, tiled=True)
        y_btd = jax.lax.psum(y_btd, "tensor")
        sums = jax.lax.psum(sums, (*BATCH, "context"))
    return y_btd, sums


def route(logits_me: Array, model: Sizes) -> tuple[Array, Array]:
    """(expert ids [M, experts_per_token], their weights, float32) from router logits [M, E], float32."""
    weights_mk, chosen_mk = jax.lax.top_k(jax.nn.softmax(logits_me, axis=-1), model.experts_per_token)
    if model.norm_topk_prob:
        weights_mk = weights_mk / weights_mk.sum(-1, keepdims=True)
    return chosen_mk, weights_mk


def _experts(
    x_md: Array, chosen_mk: Array, weights_mk: Array, gate_edf: Array, up_edf: Array, down_efd: Array
) -> Array:
    """Weighted sum over each token's experts among those given; ids outside 0 … E-1 belong to other devices."""
    e = gate_edf.shape[0]
    m, k = chosen_mk.shape
    chosen = chosen_mk.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < e), chosen, e)  # others' go last, and into no group
    order = jnp.argsort(chosen)
    sizes_e = jnp.bincount(chosen, length=e + 1)[:e].astype(jnp.int32)
    mine = (jnp.arange(m * k) < sizes_e.sum())[:, None]
    rows = jnp.where(mine, x_md[order // k], 0)
    gate = jax.lax.ragged_dot(rows, gate_edf.astype(x_md.dtype), sizes_e)
    up = jax.lax.ragged_dot(rows, up_edf.astype(x_md.dtype), sizes_e)
    hidden = jnp.where(mine, swiglu(gate, up), 0)  # rows in no group are undefined
    out = jnp.where(mine, jax.lax.ragged_dot(hidden, down_efd.astype(x_md.dtype), sizes_e), 0)
    back = out[jnp.argsort(order)].reshape(m, k, -1)
    return jnp.einsum("mkd,mk->md", back, weights_mk)


def _sums(logits_me: Array, chosen_mk: Array, real_m: Array) -> RouterSums:
    logps_me = jax.nn.log_softmax(logits_me, axis=-1)
    entropy_m = -jnp.sum(jnp.exp(logps_me) * logps_me, axis=-1)
    weights = jnp.broadcast_to(real_m[:, None], chosen_mk.shape).reshape(-1)
    return RouterSums(
        assigned_e=jnp.bincount(chosen_mk.reshape(-1), weights=weights, length=logits_me.shape[-1]),
        entropy=jnp.sum(entropy_m * real_m),
        tokens=jnp.sum(real_m),
    )
