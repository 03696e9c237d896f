"""Gated feed-forward layer."""

from __future__ import annotations

import jax
from flax import nnx

from astra_jax.mesh import AnyMesh
from astra_jax.models.layers.elementwise import swiglu
from astra_jax.models.layers.initial import normal
from astra_jax.models.layers.linear import linear
from astra_jax.models.layers.sizes import Sizes

Array = jax.Array


_FEW = 128
"""Tokens up to which reading the weights is all the work, as in decoding."""


class MLP(nnx.Module):
    """SwiGLU feed-forward."""

    def __init__(self, model: Sizes, *, rngs: nnx.Rngs) -> None:
        d, f = model.d_model, model.d_ff
        self.gate_df = normal(rngs, (d, f), d**-0.5, model)
        self.up_df = normal(rngs, (d, f), d**-0.5, model)
        self.down_fd = normal(rngs, (f, d), (2 * model.n_layers * f) ** -0.5, model)

    def __call__(self, x_btd: Array, mesh: AnyMesh | None, matmul: str = "none") -> Array:
        """Compute the layer in x's dtype; for `matmul` see `linear`."""
        gate_btf = linear(x_btd, self.gate_df[...], 1, mesh, False, matmul)
        up_btf = linear(x_btd, self.up_df[...], 1, mesh, False, matmul)
        hidden_btf = swiglu(gate_btf, up_btf)
        if x_btd.shape[0] * x_btd.shape[1] <= _FEW:
            # Otherwise XLA on TPUs fuses it into the next matmul, and multiplies by `up` once per tile of that matmul.
            hidden_btf = jax.lax.optimization_barrier(hidden_btf)
        return linear(hidden_btf, self.down_fd[...], 1, mesh, True, matmul)
