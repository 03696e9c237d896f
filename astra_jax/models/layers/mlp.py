"""The gated feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx

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

    def __call__(self, x_btd: Array) -> Array:
        gate_btf = linear(x_btd, self.gate_df[...])
        up_btf = linear(x_btd, self.up_df[...])
        # Not to be fused into the next matmul: in decoding, XLA would multiply by `up` for each of its tiles on TPUs.
        hidden_btf = jax.lax.optimization_barrier(swiglu(gate_btf, up_btf))
        return linear(hidden_btf, self.down_fd[...])
