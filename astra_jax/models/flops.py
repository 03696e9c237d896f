"""Flops of a model, and the bytes that it reads."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from astra_jax.attention.documents import before
from astra_jax.models.layers.sizes import Sizes


def _layers_matrices(model: Sizes) -> dict[str, int]:
    """Return the number of parameters of one layer's matrices by which each token is multiplied, by their outputs.

    Only a token's own experts count. A bias is one more row of its matrix, which every token multiplies by 1.
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
    """Return the number of parameters (in all layers, in the head) by which each token is multiplied.

    Only a token's own experts count.
    """
    return model.n_layers * sum(_layers_matrices(model).values()), model.d_model * model.vocab_size


def recomputed_parameters(model: Sizes, remat: str) -> int:
    """Return the `matmul_parameters`, in all layers, whose products the backward pass recomputes.

    No gradient needs the output of a layer's last product, the feed-forward's down. Norms of queries and keys need
    their inputs, while `heads` keeps their outputs. Only `none` keeps experts' products, since they come out of
    kernels.

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
    """Return flops per token (forward and backward, the same with full rematerialisation) of one document of `tokens`.

    A multiplication and an addition are 2. Forward 2 per weight, backward 4. Causal attention: forward 2 matmuls over
    on average T/2 keys, backward 4 (5 executed: flash attention recomputes the scores). The head's logits are computed
    once.
    """
    layers, head = matmul_parameters(model)
    scores = model.n_layers * model.n_heads * model.head_dim * tokens  # of one matmul over T/2 keys, times 2
    useful = 6 * (layers + head) + 6 * scores
    executed = 6 * (layers + head) + 2 * recomputed_parameters(model, "full") + (2 + 2 + 5) * scores
    return float(useful), float(executed)


def decoding_bytes(model: Sizes, rows: int, length: float, weight_quantization: str = "none") -> float:
    """Return the bytes that a decoding step of a dense model reads.

    Each weight is read once, and keys and values of `length` positions per row. Embeddings of the rows' tokens and
    norms are left out.

    Args:
        weight_quantization: the form in which the layers' matrices are kept, a name of `matmuls.WEIGHT_QUANTIZATIONS`.
    """
    width = jnp.dtype(model.dtype).itemsize
    layers, head = matmul_parameters(model)
    # A matrix in 8 bits has a float32 for each output: of q, k, v and o, of gate, up and down.
    outputs = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim + 2 * model.d_ff + 2 * model.d_model
    matrices = width * layers if weight_quantization == "none" else layers + 4 * model.n_layers * outputs
    cached = 2 * model.n_layers * model.n_kv_heads * model.head_dim
    return matrices + width * (head + rows * length * cached)


def batch_flops(model: Sizes, segment_ids_bt: Any) -> float:
    """Return flops of a packed batch, forward and backward: each document by its own length, padding not counted.

    Each token of a document that continues another sees all of that one. So its tokens count as in a document that is
    longer by twice the other's length.

    Args:
        segment_ids_bt: NumPy, 0 is padding.
    """
    total = 0.0
    for row_t in np.asarray(segment_ids_bt):
        ids, lengths = np.unique(row_t[row_t > 0], return_counts=True)
        of = dict(zip(ids.tolist(), lengths.tolist(), strict=True))
        total += sum(n * flops_per_token(model, n + 2 * of.get(before(one), 0))[0] for one, n in of.items())
    return float(total)
