"""Initial weights that copy, for tiny models that are trained from scratch.

Calling a tool is mostly copying token by token: the argument from the question, the answer from the tool's output. A
transformer copies with two heads in two layers (Olsson et al., "In-context Learning and Induction Heads", 2022). The
first head notes at each token the token before it. The second head finds the position whose note is the current token,
and returns the token there. From random weights both must form at once, which takes tens of millions of tokens.

Here the model starts with both heads. Similarly, Trockman and Kolter initialise attention to a pattern that training
tends to reach ("Mimetic initialization of self-attention layers", 2023). The model learns where to start and stop
copying.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from astra_jax.base.errors import InputError
from astra_jax.models.layers.sizes import Sizes
from astra_jax.models.model import Params

_EMBEDDING_SCALE, _FINAL_NORM = 14.0, 0.35
"""Scales at which tokens are as long in the residual stream as the heads' outputs, and logits keep their flatness."""
_MARK = 4.0
"""Size of the embedding's first dimension, relative to the others: it is the same for all tokens."""
_NOTE = 0.6
"""Length of a note relative to the token at its position."""
_QUIET, _MLP_SCALE = 0.1, 0.1
"""Initial scale of heads and MLPs without a task."""
_SHARP_PREVIOUS, _SHARP_MATCH = 1.5, 1.2
"""Norms of queries and keys: how sharply a head attends."""
_FAST, _SLOW = 5 / 16, 3 / 8
"""Shares of the rotary embedding's pairs.

Pairs before the first share turn so fast that they distinguish positions. Pairs from the second share on turn so slowly
that they compare content over long distances.
"""


def copying_params(params: Params, model: Sizes) -> Params:
    """Return the weights of `Model.init` with an induction head, in the same shapes and dtypes.

    In the first layer the first head attends to the previous token. In the last layer the first head attends to the
    position after an earlier copy of the current token. There all heads' values and outputs are each other's inverse
    (if n_kv_heads * head_dim = d_model; if it is smaller, they project onto that many dimensions). So the tied output
    head reads off the token that they attend to.

    Raises:
        ValueError: the model has fewer than two layers, no norm of queries and keys, or n_kv_heads * head_dim is
            above d_model.
    """
    d, n, k, h = model.d_model, model.n_heads, model.n_kv_heads, model.head_dim
    if k * h > d:
        raise InputError(f"n_kv_heads * head_dim is {k * h}; copying needs at most d_model ({d})")
    if model.n_layers < 2:
        raise InputError(f"n_layers is {model.n_layers}; copying needs two layers, one to note and one to look")
    if not model.qk_norm:
        raise InputError("the model has no norm of queries and keys, by which copying says how sharply heads attend")
    attention = {name: np.array(x, np.float32) for name, x in params["layers"]["attention"].items()}
    mlp = dict(params["layers"]["mlp"])

    embed_vd = np.array(params["embed_vd"], np.float32) * _EMBEDDING_SCALE
    embed_vd[:, 0] = _MARK * np.sqrt(np.mean(embed_vd**2))

    # Two random subspaces, without the mark: the part of a token that a head reads, and where it writes its note.
    read_dh, note_dh = _orthonormal(attention["v_dkh"][0, :, 0]), _orthonormal(attention["o_nhd"][0, 0].T)
    _attend_to_previous(attention, model)
    attention["v_dkh"][0, :, 0] = read_dh
    attention["o_nhd"][0] *= _QUIET
    attention["o_nhd"][0, 0] = _NOTE * note_dh.T

    # The note of a position is compared with the current token, by the pairs that turn slowly.
    pairs = np.arange(int(_SLOW * h / 2), h // 2)
    slow = np.concatenate([pairs, pairs + h // 2])
    mixed_hc = np.linalg.qr(attention["q_dnh"][-1, :h, 0])[0][:, : len(slow)]
    for name, subspace_dh in (("q_dnh", read_dh), ("k_dkh", note_dh)):
        attention[name][-1, :, 0] *= 0.02
        attention[name][-1, :, 0][:, slow] += subspace_dh @ mixed_hc
    copied_dkh = _orthonormal(attention["v_dkh"][-1].reshape(d, k * h)).reshape(d, k, h)
    attention["v_dkh"][-1] = copied_dkh
    attention["o_nhd"][-1] = np.repeat(np.moveaxis(copied_dkh, 0, 2), n // k, axis=0) / (n // k)

    for name in ("q_norm_h", "k_norm_h"):
        attention[name][0], attention[name][-1] = _SHARP_PREVIOUS, _SHARP_MATCH
    mlp["down_fd"] = mlp["down_fd"] * _MLP_SCALE
    dtype = params["embed_vd"].dtype
    arrays = {name: jnp.asarray(x, dtype) for name, x in attention.items()}
    return {
        **params,
        "embed_vd": jnp.asarray(embed_vd, dtype),
        "final_norm_d": params["final_norm_d"] * _FINAL_NORM,
        "layers": {**params["layers"], "attention": arrays, "mlp": mlp},
    }


def _attend_to_previous(attention: dict[str, NDArray[np.float32]], model: Sizes) -> None:
    """Set queries and keys of the first layer's first head: equal for all tokens, one position apart by rotation."""
    half = model.head_dim // 2
    fast = np.arange(int(_FAST * half))
    turn = -(model.rope_theta ** (-fast / half))
    query_h, key_h = np.zeros(model.head_dim), np.zeros(model.head_dim)
    key_h[fast] = 1.0
    query_h[fast], query_h[fast + half] = np.cos(turn), np.sin(turn)
    for name, of_mark_h in (("q_dnh", query_h), ("k_dkh", key_h)):
        attention[name][0, :, 0] *= 0.05
        attention[name][0, 0, 0] = of_mark_h


def _orthonormal(x_dc: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return orthonormal columns for the span of random ones; they neither read nor write the mark."""
    columns_dc = np.linalg.qr(x_dc)[0]
    columns_dc[0] = 0.0
    return columns_dc
