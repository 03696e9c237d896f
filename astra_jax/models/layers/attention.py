"""Attention layer around `astra_jax.attention`: projections, norms, rotation."""

from __future__ import annotations

import jax
from flax import nnx

from astra_jax.mesh import AnyMesh
from astra_jax.models.layers.elementwise import rms_norm
from astra_jax.models.layers.initial import filled, normal
from astra_jax.models.layers.linear import add_bias, linear
from astra_jax.models.layers.rotary import rotate
from astra_jax.models.layers.sizes import Sizes

Array = jax.Array


class Attention(nnx.Module):
    """Projections of grouped-query attention, with the family's RMS norm on each head's queries and keys."""

    def __init__(self, model: Sizes, *, rngs: nnx.Rngs) -> None:
        d, n, k, h = model.d_model, model.n_heads, model.n_kv_heads, model.head_dim
        self.model = model
        self.q_dnh = normal(rngs, (d, n, h), d**-0.5, model)
        self.k_dkh = normal(rngs, (d, k, h), d**-0.5, model)
        self.v_dkh = normal(rngs, (d, k, h), d**-0.5, model)
        # Each layer adds twice to the residual stream; this keeps its variance at 1 over the depth.
        self.o_nhd = normal(rngs, (n, h, d), (2 * model.n_layers * n * h) ** -0.5, model)
        if model.qk_norm:
            self.q_norm_h = filled(1.0, (h,), model)
            self.k_norm_h = filled(1.0, (h,), model)
        if model.attention_bias:
            self.q_bias_nh = filled(0.0, (n, h), model)
            self.k_bias_kh = filled(0.0, (k, h), model)
            self.v_bias_kh = filled(0.0, (k, h), model)
            if model.output_bias:
                self.o_bias_d = filled(0.0, (d,), model)

    def project(
        self, x_btd: Array, angles_bth: tuple[Array, Array], mesh: AnyMesh | None, matmul: str = "none"
    ) -> tuple[Array, Array, Array]:
        """Return queries, keys (both normed, then rotated) and values; for `matmul` see `linear`."""
        model = self.model
        q_btnh = linear(x_btd, self.q_dnh[...], 1, mesh, False, matmul)
        k_btkh = linear(x_btd, self.k_dkh[...], 1, mesh, False, matmul)
        v_btkh = linear(x_btd, self.v_dkh[...], 1, mesh, False, matmul)
        if model.attention_bias:
            q_btnh = add_bias(q_btnh, self.q_bias_nh[...])
            k_btkh = add_bias(k_btkh, self.k_bias_kh[...])
            v_btkh = add_bias(v_btkh, self.v_bias_kh[...])
        if model.qk_norm:
            q_btnh = rms_norm(q_btnh, self.q_norm_h[...], model.rms_eps)
        q_btnh = rotate(q_btnh, angles_bth)
        if model.qk_norm:
            k_btkh = rms_norm(k_btkh, self.k_norm_h[...], model.rms_eps)
        return q_btnh, rotate(k_btkh, angles_bth), v_btkh

    def output(self, o_btnh: Array, mesh: AnyMesh | None, matmul: str = "none") -> Array:
        """Project back to the model's width; for `matmul` see `linear`."""
        y_btd = linear(o_btnh, self.o_nhd[...], 2, mesh, True, matmul)
        biased = self.model.attention_bias and self.model.output_bias
        return add_bias(y_btd, self.o_bias_d[...]) if biased else y_btd
