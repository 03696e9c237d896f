"""The models that benchmarks compare, with a tied embedding: Qwen3 in float32, and a Llama in bfloat16."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
    "0.6b": Shape(151_936, 1_024, 28, 16, 8, 128, 3_072),
}
"""`1m` is the quickstart's; `vocabulary` has Qwen3's own vocabulary; `0.6b` is Qwen3-0.6B, for accelerators."""

SMOLLM2 = Shape(49_280, 576, 30, 9, 3, 64, 1_536)
"""SmolLM2-135M's, a Llama, with rows for the tokens of tools."""


def is_llama(shape: dict[str, int]) -> bool:
    """Return whether a `Shape`, as a dictionary with possible other fields, is the Llama's, which computes in
    bfloat16."""
    sizes = asdict(SMOLLM2)
    return {name: shape[name] for name in sizes} == sizes


def dtype_of(shape: dict[str, int]) -> str:
    """Return the dtype in which all sides of a comparison multiply."""
    return "bfloat16" if is_llama(shape) else "float32"


def our_model(shape: dict[str, int]) -> Any:
    """As the project computes it; with float32 weights."""
    from astra_jax.models.llama.presets import LlamaConfig
    from astra_jax.models.qwen3.presets import Qwen3Config

    family = LlamaConfig if is_llama(shape) else Qwen3Config
    sizes = {name: shape[name] for name in asdict(SMOLLM2)}
    return family(**sizes, tie_embeddings=True, dtype=dtype_of(shape))


def hf_class(shape: dict[str, int]) -> str:
    """The name of transformers' configuration, for `hf_config`."""
    return "LlamaConfig" if is_llama(shape) else "Qwen3Config"


def hf_config(shape: dict[str, int]) -> dict[str, Any]:
    """The settings of transformers' configuration; `shape` is a `Shape` as a dictionary, and may say more."""
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
