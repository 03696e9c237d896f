"""The models that benchmarks compare: Qwen3 in float32 with a tied embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """As in `Qwen3Config`."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int


SHAPES = {
    "1m": Shape(1_024, 192, 2, 3, 3, 64, 512),
    "30m": Shape(8_192, 512, 8, 8, 4, 64, 1_536),
    "vocabulary": Shape(151_936, 256, 4, 4, 2, 64, 768),
}
"""`1m` is the quickstart's; `vocabulary` has Qwen3's own vocabulary."""


def hf_config(shape: dict[str, int]) -> dict[str, Any]:
    """The settings of transformers' `Qwen3Config`; `shape` is a `Shape` as a dictionary, and may say more."""
    return {
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["d_model"],
        "num_hidden_layers": shape["n_layers"],
        "num_attention_heads": shape["n_heads"],
        "num_key_value_heads": shape["n_kv_heads"],
        "head_dim": shape["head_dim"],
        "intermediate_size": shape["d_ff"],
        "tie_word_embeddings": True,
    }
