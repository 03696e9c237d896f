"""Initial weights that make copying easy to learn, for tiny models that are trained from scratch.

From random weights, a small transformer must see each token in many copies before its value and output matrices pass
that token on. Copying in general needs only that they are each other's inverse: then whatever a head attends to, the
tied output head reads off again, also tokens that were hardly seen. So the first layer and the last begin like that
(Trockman and Kolter, "Mimetic initialization of self-attention layers", 2023, with the sign that copies), and the last
layer's queries equal its keys, which attends to equal tokens; training makes the rest.
"""

from __future__ import annotations

import jax.numpy as jnp

from astra_jax.models.layers.sizes import Sizes
from astra_jax.models.model import Params
from synthesis.core.refusals import InputError

_EMBEDDING_SCALE = 3.5
_MLP_SCALE = 0.3


def copying_params(params: Params, model: Sizes) -> Params:
    """The weights of `Model.init` with value and output matrices that copy, in the first layer and in the last.

    With n_kv_heads * head_dim = d_model the two are inverse; below, they project onto that many dimensions. The
    embedding becomes 3.5 times as large and the MLPs' outputs 0.3 times, so that the residual stream keeps the tokens.

    Raises:
        ValueError: n_kv_heads * head_dim is above d_model.
    """
    d, n, k, h = model.d_model, model.n_heads, model.n_kv_heads, model.head_dim
    if k * h > d:
        raise InputError(f"n_kv_heads * head_dim is {k * h}; copying needs at most d_model ({d})")
    attention, mlp = dict(params["layers"]["attention"]), dict(params["layers"]["mlp"])
    group = n // k
    for layer in {0, model.n_layers - 1}:
        orthonormal_dkh = jnp.linalg.qr(attention["v_dkh"][layer].reshape(d, k * h))[0].reshape(d, k, h)
        output_nhd = jnp.repeat(jnp.moveaxis(orthonormal_dkh, 0, 2), group, axis=0) / group
        attention["v_dkh"] = attention["v_dkh"].at[layer].set(orthonormal_dkh)
        attention["o_nhd"] = attention["o_nhd"].at[layer].set(output_nhd)
    attention["q_dnh"] = attention["q_dnh"].at[-1].set(jnp.repeat(attention["k_dkh"][-1], group, axis=1))
    mlp["down_fd"] = mlp["down_fd"] * _MLP_SCALE
    layers = {**params["layers"], "attention": attention, "mlp": mlp}
    return {**params, "embed_vd": params["embed_vd"] * _EMBEDDING_SCALE, "layers": layers}
