"""The gated feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

from astra_jax.models.layers.elementwise import swiglu
from astra_jax.models.layers.initial import normal
from astra_jax.models.layers.linear import linear
from astra_jax.models.layers.sizes import Sizes

Array = jax.Array


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, model: Sizes, *, rngs: nnx.Rngs) -> None:
        d, f = model.d_model, model.d_ff
        self.gate_df = normal(rngs, (d, f), d**-0.5, model)
        self.up_df = normal(rngs, (d, f), d**-0.5, model)
        self.down_fd = normal(rngs, (f, d), (2 * model.n_layers * f) ** -0.5, model)

    def __call__(self, x_btd: Array, mesh: Mesh | None) -> Array:
        gate_btf = linear(x_btd, self.gate_df[...], 1, mesh)
        up_btf = linear(x_btd, self.up_df[...], 1, mesh)
        return linear(swiglu(gate_btf, up_btf), self.down_fd[...], 1, mesh, True)
