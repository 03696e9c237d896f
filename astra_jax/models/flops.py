"""How much arithmetic a model is, and how much memory it reads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from astra_jax.attention.documents import before
from astra_jax.models.layers.sizes import Sizes


def _layers_matrices(model: Sizes) -> dict[str, int]:
    """Numbers of one layer's matrices that each token is multiplied with, by what comes out; of experts only those that
    it goes to. A bias is one more row of its matrix, which every token is multiplied with by 1.
    """
    d, h, bias = model.d_model, model.head_dim, int(model.attention_bias)
    narrow = h * model.n_kv_heads * (d + bias)
    return {
        "q": h * model.n_heads * (d + bias),
        "k": narrow,
        "v": narrow,
        "o": d * (h * model.n_heads + bias * model.output_bias),
        "gate and up": 2 * d * model.d_ff * (model.experts_per_token or 1),
        "down": d * model.d_ff * (model.experts_per_token or 1),
        "router": d * model.n_experts,
    }


def matmul_parameters(model: Sizes) -> tuple[int, int]:
    """(in all layers, in the head) that each token is multiplied with; of experts only those that it goes to."""
    return model.n_layers * sum(_layers_matrices(model).values()), model.d_model * model.vocab_size


def recomputed_parameters(model: Sizes, remat: str) -> int:
    """Of `matmul_parameters`, in all layers, those whose products the backward pass computes again.

    What comes out of a layer's last product, of the feed-forward's down, no gradient wants. Norms of queries and keys
    want what went into them, where `heads` keeps what came out. Experts' products are kept by `none` only: they come
    out of kernels.

    Args:
        remat: a name of `remat.REMATS`.
    """
    of = _layers_matrices(model)
    if remat == "none":
        again: set[str] = set()
    elif remat == "dots":
        again = {"gate and up"} if model.n_experts else set()
    else:
        again = of.keys() - {"down"}
        if remat == "heads":
            again -= {"v"} if model.qk_norm else {"q", "k", "v"}
    return model.n_layers * sum(of[name] for name in again)


def flops_per_token(model: Sizes, tokens: int) -> tuple[float, float]:
    """(forward and backward, the same with full rematerialisation) of one document of `tokens`, causal attention.

    A multiplication and an addition are 2. Forward 2 a weight, backward 4; attention forward 2 matmuls over on average
    T/2 keys, backward 4 (5 executed: flash attention computes the scores again). The head's logits are computed once.
    """
    layers, head = matmul_parameters(model)
    scores = model.n_layers * model.n_heads * model.head_dim * tokens  # of one matmul over T/2 keys, times 2
    useful = 6 * (layers + head) + 6 * scores
    executed = 6 * (layers + head) + 2 * recomputed_parameters(model, "full") + (2 + 2 + 5) * scores
    return float(useful), float(executed)


def decoding_bytes(model: Sizes, rows: int, length: float, stored: str = "none") -> float:
    """What a decoding step of a dense model reads: each weight once, and keys and values of `length` positions a row.

    Embeddings of the rows' tokens and norms are left out.

    Args:
        stored: how the layers' matrices are kept, a name of `matmuls.STORED`.
    """
    width = jnp.dtype(model.dtype).itemsize
    layers, head = matmul_parameters(model)
    # A matrix in 8 bits has a float32 for each output: of q, k, v and o, of gate, up and down.
    outputs = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim + 2 * model.d_ff + 2 * model.d_model
    matrices = width * layers if stored == "none" else layers + 4 * model.n_layers * outputs
    cached = 2 * model.n_layers * model.n_kv_heads * model.head_dim
    return matrices + width * (head + rows * length * cached)


def batch_flops(model: Sizes, segment_ids_bt: Any) -> float:
    """Forward and backward of a packed batch: each document by its own length, padding for nothing. One that goes on
    from another sees all of it with each token, as one that is as much longer at both ends does.

    Args:
        segment_ids_bt: NumPy, 0 is padding.
    """
    total = 0.0
    for row_t in np.asarray(segment_ids_bt):
        ids, lengths = np.unique(row_t[row_t > 0], return_counts=True)
        of = dict(zip(ids.tolist(), lengths.tolist(), strict=True))
        total += sum(n * flops_per_token(model, n + 2 * of.get(before(one), 0))[0] for one, n in of.items())
    return float(total)
